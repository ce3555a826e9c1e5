"""Random strategies under both knowledge constraints (AutoSync, supplement sec. 6).

AutoSync draws a partial strategy, shard by shard and independently. Then c_lb sets the placement of
server shards, and c_am the merge groups of collective shards. We do the same, but first draw the
odds, anew for each strategy. With fixed odds, the law of large numbers makes all strategies of a
model with hundreds of variables the same mixture. The best known strategies are pure or nearly so
(only all-reduce, only servers, only whole variables) and would never be drawn. The same holds for
the number of shards: uniform up to 40 hardly ever gives few messages, so each strategy has its own
limit, log-uniform between 2 and 40.

If synchronization may cross the step, the issue order is mostly the one predicted to be fastest:
random orders of many messages are equally slow.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.garbage import collection_paused
from autotune.rng import generator
from autotune.sampler.draws import PLANNED, REORDERED, Context, Drawn, draw, draw_priorities
from autotune.sampler.order import PlannedOrder
from autotune.sampler.writer import Writer
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload

MAX_REPEATS = 200  # draws without a new strategy after which a space counts as exhausted


def sample(
    workload: Workload, cluster: Cluster, space: SearchSpace, rng: np.random.Generator
) -> Strategy:
    """Draw one random strategy of `space`."""
    sampler = _Sampler(workload, cluster, space)
    return sampler.written(sampler.drawn(rng))


def sample_many(
    workload: Workload, cluster: Cluster, space: SearchSpace, count: int, seed: int
) -> list[Strategy]:
    """Draw the first `count` strategies of `samples`, or fewer from a space that has fewer."""
    if count < 0:
        raise InvalidInput(f"the number of strategies to sample must be at least 0, but is {count}")
    with collection_paused():
        return list(islice(samples(workload, cluster, space, seed), count))


def samples(
    workload: Workload, cluster: Cluster, space: SearchSpace, seed: int
) -> Iterator[Strategy]:
    """Draw distinct strategies until the space counts as exhausted.

    The same seed gives the same ones in any process.
    """
    sampler = _Sampler(workload, cluster, space)
    rng = generator(seed, "sample_many")
    known: set[Hashable] = set()
    repeats = 0
    while repeats < MAX_REPEATS:
        drawn = sampler.drawn(rng)
        identity = drawn.identity
        repeats = repeats + 1 if identity in known else 0
        if not repeats:
            known.add(identity)
            yield sampler.written(drawn)


class _Sampler:
    """Draws strategies of one workload, cluster and space."""

    def __init__(self, workload: Workload, cluster: Cluster, space: SearchSpace) -> None:
        self.context = Context.of(workload, cluster, space)
        self.planned = PlannedOrder(self.context)
        self.written = Writer(self.context).written

    def drawn(self, rng: np.random.Generator) -> Drawn:
        """Draw a strategy's choices."""
        drawn = draw(self.context, rng)
        if drawn.cross_step and rng.random() < PLANNED:
            return replace(drawn, priority=self.planned.priorities(drawn))
        if rng.random() < REORDERED:
            return replace(drawn, priority=draw_priorities(drawn, rng))
        return drawn
