"""All-reduce that runs into the next forward pass, in the order that makes the step shortest.

In gradient-ready order it gains hardly anything: the gradients of the layers that the next forward pass reads first are ready last.
So the order is planned (`strategy_space.cross_step`), and messages are made such that it can be: a large variable travels alone, since
whatever is merged with it is ready as late and needed as early as the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from autotune.cluster import Cluster
from autotune.costs.issue_order import CLOSE, NODES, MessageTimes
from autotune.strategy_space.builders.collectives import MIB, large_alone
from autotune.strategy_space.plan import plan, slices_of
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload

BUCKET_BYTES = (0, MIB // 16, MIB // 4, MIB, 4 * MIB, 16 * MIB)
"""Smaller variables are merged until a message holds so much."""
PIECE_BYTES = (None, 4 * MIB, MIB)
"""Larger variables are cut into pieces of at most so much: what is urgent then need not wait for all of them."""
GLANCE = 10
"""Orders tried for each way of merging; the best way gets a full search."""


def cross_step_all_reduce(workload: Workload, cluster: Cluster) -> Strategy:
    """Of some ways to merge and cut, the one with the shortest predicted period; of nearly equal ones that with the fewest messages."""
    found = []
    for bucket_bytes, piece_bytes in product(BUCKET_BYTES, PIECE_BYTES):
        strategy = large_alone(workload, bucket_bytes, piece_bytes)
        times = MessageTimes.of(plan(strategy, workload, cluster.world_size), workload, cluster)
        found.append((times.ordered(GLANCE).period_s, len(times.cost_s), strategy))
    shortest_s = min(period_s for period_s, _, _ in found)
    near = [
        (messages, number)
        for number, (period_s, messages, _) in enumerate(found)
        if period_s <= shortest_s * (1 + CLOSE)
    ]
    return in_planned_order(found[min(near)[1]][2], workload, cluster)


def in_planned_order(
    strategy: Strategy, workload: Workload, cluster: Cluster, nodes: int = NODES
) -> Strategy:
    """`strategy` across steps, its messages in the planned order."""
    planned = plan(strategy, workload, cluster.world_size)
    order = MessageTimes.of(planned, workload, cluster).ordered(nodes).order
    turn = {
        (part.variable, part.start): place
        for place, number in enumerate(order)
        for part in planned.messages[number].slices
    }
    choices = []
    for variable in workload.variables:
        choice = strategy.by_name[variable.name]
        turns: Iterator[int] = (
            turn[part.variable, part.start] for part in slices_of(variable, choice)
        )
        choices.append(
            replace(
                choice,
                shards=tuple(
                    replace(s, priority=at) for s, at in zip(choice.shards, turns, strict=True)
                ),
            )
        )
    return replace(strategy, variables=tuple(choices), cross_step=True)
