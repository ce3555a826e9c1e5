"""Hand-made strategies with parameter servers: AutoDist's PS builders, Parallax, BytePS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.strategy_space.builders.collectives import (
    AUTODIST_CHUNK,
    all_reduce_positions,
    large_alone,
)
from autotune.strategy_space.builders.partitions import (
    MAX_SHARDS,
    by_smallest_non_divisor,
    even_partition,
    in_pieces,
)
from autotune.strategy_space.builders.priority import by_priority
from autotune.strategy_space.constraints import server_ranks, servers_of
from autotune.strategy_space.plan import plan, slices_of
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    MOST_IN_FLIGHT,
    Partition,
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

BYTEPS_PARTITION_BYTES = 4_096_000  # BytePS: BYTEPS_PARTITION_BYTES


def parameter_server(workload: Workload, cluster: Cluster) -> Strategy:
    """All variables on one server: the first rank with the largest share."""
    servers = servers_of(cluster)
    shard = Shard(
        Synchronizer.PARAMETER_SERVER,
        placement=servers.ranks[servers.shares.index(max(servers.shares))],
    )
    return Strategy(
        tuple(VariableStrategy(variable.name, (shard,)) for variable in workload.variables)
    )


def ps_round_robin(workload: Workload, cluster: Cluster) -> Strategy:
    """Whole variables on all ranks in turn, in forward order.

    This is the default of TensorFlow's `replica_device_setter`.
    """
    ranks = server_ranks(cluster)
    forward = reversed(workload.variables)
    shards = [Shard(Synchronizer.PARAMETER_SERVER, placement=rank) for rank in ranks]
    return Strategy(
        tuple(
            VariableStrategy(variable.name, (shards[turn % len(ranks)],))
            for turn, variable in enumerate(forward)
        )
    )


def ps_load_balanced(workload: Workload, cluster: Cluster) -> Strategy:
    """Whole variables, the largest first, each on the server that would finish it first."""
    return _served(workload, cluster, [None] * len(workload.variables))


def partitioned_ps(
    workload: Workload,
    cluster: Cluster,
    min_partition_bytes: int = 100_000,
    max_shards: int = MAX_SHARDS,
) -> Strategy:
    """Parameter servers; large variables are cut evenly along axis 0, one shard per server.

    The bounds are AutoSync's (see `SearchSpace`).
    """
    bounds = SearchSpace(
        (Synchronizer.PARAMETER_SERVER,),
        min_partition_bytes=min_partition_bytes,
        max_shards=max_shards,
    )
    servers = len(servers_of(cluster).ranks)

    def cut(variable: Variable) -> Partition | None:
        if 0 not in bounds.axes_for(variable):
            return None
        shards = min(servers, max_shards, variable.shape[0])
        return even_partition(variable, 0, shards) if shards > 1 else None

    return _served(workload, cluster, [cut(variable) for variable in workload.variables])


def uneven_partitioned_ps(workload: Workload, cluster: Cluster) -> Strategy:
    """Unequal shards along axis 0 on servers (AutoDist's UnevenPartitionedPS)."""
    cuts = [
        by_smallest_non_divisor(variable, 0) if variable.elements > 1 else None
        for variable in workload.variables
    ]
    return _served(workload, cluster, cuts)


def parallax(
    workload: Workload, cluster: Cluster, variables_per_group: int = AUTODIST_CHUNK
) -> Strategy:
    """Dense gradients by all-reduce, sparse ones by servers (Parallax, EuroSys 2019, sec. 3)."""
    dense = {
        number: group
        for group, positions in enumerate(all_reduce_positions(workload, variables_per_group))
        for number in positions
    }
    served = ps_load_balanced(workload, cluster).by_name
    choices = []
    for position, variable in enumerate(workload.variables):
        if variable.sparse:
            choices.append(replace(served[variable.name], sparse=SparseHandling.GATHER_SCATTER))
        else:
            shard = Shard(Synchronizer.ALL_REDUCE, group=dense[position])
            choices.append(VariableStrategy(variable.name, (shard,)))
    return Strategy(tuple(choices))


def served_in_pieces(workload: Workload, cluster: Cluster, piece_bytes: int) -> Strategy:
    """Pieces of at most `piece_bytes`, at most `MAX_SHARDS` per variable, on balanced servers.

    Pushes and pulls of different pieces overlap.
    """
    if piece_bytes < 1:
        raise InvalidInput(f"a piece needs at least 1 byte, but has {piece_bytes}")
    cuts = [in_pieces(variable, piece_bytes, MAX_SHARDS) for variable in workload.variables]
    return _served(workload, cluster, cuts)


def served_in_buckets(workload: Workload, cluster: Cluster, bucket_bytes: int) -> Strategy:
    """Messages of about `bucket_bytes` on balanced servers: small variables merged, large ones cut.

    In order, each message goes to the server that would finish it first.
    """
    if bucket_bytes < 1:
        raise InvalidInput(f"a bucket needs at least 1 byte, but has {bucket_bytes}")
    buckets = large_alone(workload, bucket_bytes, bucket_bytes)
    servers = servers_of(cluster)
    shares = np.array(servers.shares)
    loads = np.zeros(len(shares), dtype=np.int64)
    shards: dict[tuple[str, int], Shard] = {}
    for number, message in enumerate(plan(buckets, workload, cluster.world_size).messages):
        server = least_loaded(loads, shares, message.grad_bytes)
        loads[server] += message.grad_bytes
        group = number if len(message.slices) > 1 else None
        shard = Shard(Synchronizer.PARAMETER_SERVER, placement=servers.ranks[server], group=group)
        shards.update({(part.variable, part.start): shard for part in message.slices})
    choices = []
    for variable in workload.variables:
        choice = buckets.by_name[variable.name]
        parts = slices_of(variable, choice)
        placed = tuple(shards[part.variable, part.start] for part in parts)
        choices.append(replace(choice, shards=placed))
    return Strategy(tuple(choices))


def byteps_like(
    workload: Workload, cluster: Cluster, partition_bytes: int = BYTEPS_PARTITION_BYTES
) -> Strategy:
    """Pieces of at most 4 MB on balanced servers, ordered by layer over the slowest server's link.

    Source: BytePS, OSDI 2020. Within the step, like its DistributedOptimizer.
    """
    if partition_bytes < 1:
        raise InvalidInput(f"a partition needs at least 1 byte, but has {partition_bytes}")
    cuts = [in_pieces(variable, partition_bytes) for variable in workload.variables]
    links = [cluster.own_bandwidth_bytes_per_s(rank) for rank in servers_of(cluster).ranks]
    return by_priority(_served(workload, cluster, cuts), workload, min(links))


def byteps_across_steps(workload: Workload, cluster: Cluster) -> Strategy:
    """`byteps_like` into the next forward pass: BytePS's CrossBarrier optimizer.

    As many messages are in flight as the runtime supports. BytePS bounds them only by
    BYTEPS_SCHEDULING_CREDIT, which is off by default.
    """
    return replace(byteps_like(workload, cluster), cross_step=True, in_flight=MOST_IN_FLIGHT)


def least_loaded(loads_bytes: ArrayLike, shares: ArrayLike, shard_bytes: int) -> int:
    """Index of the server that would finish this shard first, at a rate like its share."""
    done = (np.asarray(loads_bytes) + shard_bytes) / np.asarray(shares)
    return int(done.argmin())


def _served(
    workload: Workload, cluster: Cluster, partitions: Sequence[Partition | None]
) -> Strategy:
    """Place all shards on servers, the largest first, each where it would be finished first."""
    servers = servers_of(cluster)
    sizes: list[tuple[int, int, int]] = []
    for position, (variable, partition) in enumerate(
        zip(workload.variables, partitions, strict=True)
    ):
        extents = partition.sizes if partition else (1,)
        row_bytes = variable.grad_bytes // (variable.shape[partition.axis] if partition else 1)
        sizes.extend(
            (extent * row_bytes, position, number) for number, extent in enumerate(extents)
        )
    shares = np.array(servers.shares)
    loads = np.zeros(len(shares), dtype=np.int64)
    placed: list[dict[int, Shard]] = [{} for _ in workload.variables]
    for shard_bytes, position, number in sorted(sizes, key=lambda entry: -entry[0]):
        server = least_loaded(loads, shares, shard_bytes)
        loads[server] += shard_bytes
        shard = Shard(Synchronizer.PARAMETER_SERVER, placement=servers.ranks[server])
        placed[position][number] = shard
    choices = []
    for variable, partition, shards in zip(workload.variables, partitions, placed, strict=True):
        in_order = tuple(shards[number] for number in range(len(shards)))
        choices.append(VariableStrategy(variable.name, in_order, partition))
    return Strategy(tuple(choices))
