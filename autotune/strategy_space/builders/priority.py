"""Priority by layer: of the ready gradients, the next forward pass's first layers are sent first.

Sources: ByteScheduler (SOSP 2019, sec. 4), P3 (MLSys 2019). Both decide at run time. A plan has one
order, so it is simulated beforehand over a link of a given rate. Unmeasured gradients count as
ready at once.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.cluster import Cluster
from autotune.costs.issue_order import issue_order
from autotune.costs.timing import ready_times_s
from autotune.errors import InvalidInput
from autotune.strategy_space.builders.partitions import in_pieces
from autotune.strategy_space.strategy import (
    MOST_IN_FLIGHT,
    Shard,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Workload

BYTE_SCHEDULER_PARTITION_BYTES = 4 * 2**20
"""BYTESCHEDULER_PARTITION: 4 MB by default."""


def byte_scheduler_like(
    workload: Workload, cluster: Cluster, partition_bytes: int = BYTE_SCHEDULER_PARTITION_BYTES
) -> Strategy:
    """All-reduce of pieces of at most 4 MiB by priority, into the next forward pass.

    This is ByteScheduler's "crossing the global barrier". Its default credit is four partitions
    (BYTESCHEDULER_CREDIT); here as many messages are in flight as the runtime supports.
    """
    if partition_bytes < 1:
        raise InvalidInput(f"a partition needs at least 1 byte, but has {partition_bytes}")
    choices = []
    for variable in workload.variables:
        cut = in_pieces(variable, partition_bytes)
        shards = (Shard(Synchronizer.ALL_REDUCE),) * (len(cut.sizes) if cut else 1)
        choices.append(VariableStrategy(variable.name, shards, cut))
    ranks = cluster.world_size
    slowest = min(host.link_bytes_per_s for host in cluster.hosts)
    ring_share = max(1.0, 2 * (ranks - 1) / ranks)  # of a message's bytes that each link carries
    ordered = by_priority(Strategy(tuple(choices)), workload, slowest / ring_share)
    return replace(ordered, cross_step=True, in_flight=MOST_IN_FLIGHT)


def by_priority(strategy: Strategy, workload: Workload, bytes_per_s: float) -> Strategy:
    """Return `strategy` with its even shards, one message each, ordered by layer over this link."""
    pieces, ready_s, taken_s = [], [], []
    for position, at_s in enumerate(ready_times_s(workload).tolist()):
        variable = workload.variables[position]
        count = len(strategy.by_name[variable.name].shards)
        pieces += [(position, number) for number in range(count)]
        ready_s += [at_s] * count
        taken_s += [variable.grad_bytes / count / bytes_per_s] * count
    urgency = [-position for position, _ in pieces]  # the last one ready is the first one read
    turn = {pieces[number]: at for at, number in enumerate(issue_order(ready_s, taken_s, urgency))}
    choices = []
    for position, variable in enumerate(workload.variables):
        choice = strategy.by_name[variable.name]
        shards = tuple(
            replace(shard, priority=turn[position, number])
            for number, shard in enumerate(choice.shards)
        )
        choices.append(replace(choice, shards=shards))
    return replace(strategy, variables=tuple(choices))
