"""All-reduce that continues into the next forward pass, in the order that makes the step shortest.

In gradient-ready order this gains hardly anything, because the layers that the next forward pass
reads first have their gradients last. So `costs.issue_order` plans the order. A large variable is
sent alone: a variable merged with it would be ready as late and needed as early as the whole.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from autotune.cluster import Cluster
from autotune.costs.issue_order import CLOSE, NODES, MessageTimes
from autotune.strategy_space.builders.collectives import MIB, large_alone
from autotune.strategy_space.plan import plan, slices_of
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload

BUCKET_BYTES = (0, MIB // 16, MIB // 4, MIB, 4 * MIB, 16 * MIB)
"""Smaller variables are merged until a message holds this much."""
PIECE_BYTES = (None, 4 * MIB, MIB)
"""Larger variables are cut into pieces of at most this size, so urgent ones wait less."""
GLANCE = 10
"""Orders tried for each way of merging; the best way gets a full search."""


def cross_step_all_reduce(workload: Workload, cluster: Cluster) -> Strategy:
    """Merge and cut in the way with the shortest predicted period.

    Among nearly equal ways, the one with the fewest messages wins.
    """
    ways = []
    for bucket_bytes, piece_bytes in product(BUCKET_BYTES, PIECE_BYTES):
        strategy = large_alone(workload, bucket_bytes, piece_bytes)
        times = MessageTimes.of(plan(strategy, workload, cluster.world_size), workload, cluster)
        ways.append((times.ordered(GLANCE).period_s, len(times.cost_s), strategy))
    longest_s = min(period_s for period_s, _, _ in ways) * (1 + CLOSE)
    near = [(messages, strategy) for period_s, messages, strategy in ways if period_s <= longest_s]
    _, fewest = min(near, key=lambda way: way[0])
    return in_planned_order(fewest, workload, cluster)


def in_planned_order(
    strategy: Strategy, workload: Workload, cluster: Cluster, nodes: int = NODES
) -> Strategy:
    """Return `strategy` across steps, its messages in the planned order."""
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
        parts = zip(choice.shards, slices_of(variable, choice), strict=True)
        shards = tuple(replace(s, priority=turn[part.variable, part.start]) for s, part in parts)
        choices.append(replace(choice, shards=shards))
    return replace(strategy, variables=tuple(choices), cross_step=True)
