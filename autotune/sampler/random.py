"""Random strategies under both knowledge constraints (AutoSync, supplement sec. 6).

AutoSync draws a partial strategy, shard by shard and independently, and leaves two fields open: the
placement of server shards, which c_lb then sets, and the merge group of collective shards, which c_am sets. We keep
that and draw the odds first, anew for each strategy. With fixed odds the law of large numbers makes all
strategies of a model with hundreds of variables the same mixture, half partitioned, a third all-reduce and so on, while
the best strategies known are pure or nearly so (all-reduce only, servers only, whole variables only), and would
never be drawn. Likewise for the number of shards: drawn uniformly up to 40 it has hardly ever a strategy with
few messages, so each strategy has its own limit, log-uniform between 2 and 40.

Where synchronization may run into the next step, the issue order is mostly the one that is predicted to be fastest: random orders
of many messages are all alike.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.rng import generator
from autotune.sampler.draws import PLANNED, REORDERED, Context, Drawn, draw, draw_priorities
from autotune.sampler.garbage import collection_paused
from autotune.sampler.order import PlannedOrder
from autotune.sampler.writer import Writer
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload

MAX_REPEATS = 200  # draws in a row without a new strategy after which a space counts as exhausted


def sample(
    workload: Workload, cluster: Cluster, space: SearchSpace, rng: np.random.Generator
) -> Strategy:
    """One random strategy of `space`."""
    sampler = _Sampler(workload, cluster, space)
    return sampler.written(sampler.drawn(rng))


def sample_many(
    workload: Workload, cluster: Cluster, space: SearchSpace, count: int, seed: int
) -> list[Strategy]:
    """`count` different strategies; the same seed gives the same ones in any process, and fewer are a prefix of more.

    A space with fewer strategies than asked for yields fewer.
    """
    if count < 0:
        raise InvalidInput(f"the number of strategies to sample must be at least 0, but is {count}")
    sampler = _Sampler(workload, cluster, space)
    rng = generator(seed, "sample_many")
    found: dict[Hashable, Strategy] = {}
    repeats = 0
    with collection_paused():
        while len(found) < count and repeats < MAX_REPEATS:
            drawn = sampler.drawn(rng)
            identity = drawn.identity
            repeats = repeats + 1 if identity in found else 0
            if not repeats:
                found[identity] = sampler.written(drawn)
    return list(found.values())


class _Sampler:
    """Draws strategies of one workload, cluster and space."""

    def __init__(self, workload: Workload, cluster: Cluster, space: SearchSpace) -> None:
        self.context = Context.of(workload, cluster, space)
        self.planned = PlannedOrder(self.context)
        self.written = Writer(self.context).written

    def drawn(self, rng: np.random.Generator) -> Drawn:
        """A strategy's choices."""
        drawn = draw(self.context, rng)
        if drawn.cross_step and rng.random() < PLANNED:
            return replace(drawn, priority=self.planned.priorities(drawn))
        if rng.random() < REORDERED:
            return replace(drawn, priority=draw_priorities(drawn, rng))
        return drawn
