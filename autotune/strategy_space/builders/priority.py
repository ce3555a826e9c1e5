"""Priority by layer: of what is ready, what the next forward pass needs first goes first.

Sources: ByteScheduler (SOSP 2019, sec. 4), P3 (MLSys 2019). Both decide while they run; a plan has one order, so it is played through
beforehand, over a link of a given rate. Without measured times everything counts as ready at once.
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
"""ByteScheduler: BYTESCHEDULER_PARTITION is 4 MB where nothing tunes it."""


def byte_scheduler_like(
    workload: Workload, cluster: Cluster, partition_bytes: int = BYTE_SCHEDULER_PARTITION_BYTES
) -> Strategy:
    """All-reduce of pieces of at most 4 MiB by priority, into the next forward pass: ByteScheduler's "crossing the global barrier".

    Its credit is four partitions where nothing tunes it (BYTESCHEDULER_CREDIT); here as many are in flight as the runtime takes.
    """
    if partition_bytes < 1:
        raise InvalidInput(f"a partition needs at least 1 byte, but has {partition_bytes}")
    choices = []
    for variable in workload.variables:
        cut = in_pieces(variable, partition_bytes)
        choices.append(
            VariableStrategy(
                variable.name,
                (Shard(Synchronizer.ALL_REDUCE),) * (len(cut.sizes) if cut else 1),
                cut,
            )
        )
    ranks = cluster.world_size
    slowest = min(host.link_bytes_per_s for host in cluster.hosts)
    ring_share = max(1.0, 2 * (ranks - 1) / ranks)  # of a message's bytes that each link carries
    return replace(
        by_priority(Strategy(tuple(choices)), workload, slowest / ring_share),
        cross_step=True,
        in_flight=MOST_IN_FLIGHT,
    )


def by_priority(strategy: Strategy, workload: Workload, bytes_per_s: float) -> Strategy:
    """`strategy` with its shards, evenly cut and each a message, in the order of their priorities over a link of this rate."""
    pieces, ready_s, taken_s = [], [], []
    for position, (variable, at_s) in enumerate(
        zip(workload.variables, ready_times_s(workload).tolist(), strict=True)
    ):
        count = len(strategy.by_name[variable.name].shards)
        pieces += [(position, number) for number in range(count)]
        ready_s += [at_s] * count
        taken_s += [variable.grad_bytes / count / bytes_per_s] * count
    urgency = [
        -position for position, _ in pieces
    ]  # what is ready last was computed first, and is read first
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
