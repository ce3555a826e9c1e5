"""Hand-made strategies: the defaults of the field, as baselines and as the tuner's first proposals.

Every builder is a pure function of the workload and the cluster. "In order" means gradient-ready order, the
order of `Workload.variables`. Merge groups are numbered in the order in which they are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.strategy_space.constraints import server_bandwidths, server_ranks
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Partition, Shard, Strategy, Synchronizer, VariableStrategy
from autotune.workload import Variable, Workload

MIB = 2**20

DDP_BUCKET_BYTES = 25 * MIB  # torch.nn.parallel.DistributedDataParallel: bucket_cap_mb=25
DDP_FIRST_BUCKET_BYTES = MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES

Builder = Callable[[Workload, Cluster], Strategy]


def single_bucket(workload: Workload, synchronizer: Synchronizer = Synchronizer.ALL_REDUCE) -> Strategy:
    """One message per dtype with all gradients: no overlap, least overhead."""
    return _grouped(workload, all_reduce_positions(workload, len(workload.variables)), synchronizer)


def per_variable(workload: Workload, synchronizer: Synchronizer = Synchronizer.ALL_REDUCE) -> Strategy:
    """Every gradient is a message of its own: most overlap, most overhead."""
    return Strategy(tuple(VariableStrategy(v.name, (Shard(synchronizer),)) for v in workload.variables))


def all_reduce_chunks(workload: Workload, variables_per_group: int) -> Strategy:
    """All-reduce of every n consecutive variables (AutoDist's AllReduce builder with chunk_size n)."""
    return _grouped(workload, all_reduce_positions(workload, variables_per_group), Synchronizer.ALL_REDUCE)


def ddp_default(workload: Workload, bucket_bytes: int = DDP_BUCKET_BYTES, first_bucket_bytes: int = DDP_FIRST_BUCKET_BYTES) -> Strategy:
    """The buckets that DistributedDataParallel uses from its second step on (before, it only guesses the order)."""
    return _grouped(workload, ddp_buckets(workload, bucket_bytes, first_bucket_bytes), Synchronizer.ALL_REDUCE)


def reduce_scatter_all_gather(
    workload: Workload, bucket_bytes: int = DDP_BUCKET_BYTES, first_bucket_bytes: int = DDP_FIRST_BUCKET_BYTES
) -> Strategy:
    """DDP's buckets, each synchronized by a reduce-scatter and an all-gather, as ZeRO-2 does."""
    return _grouped(workload, ddp_buckets(workload, bucket_bytes, first_bucket_bytes), Synchronizer.REDUCE_SCATTER_ALL_GATHER)


def horovod_like(workload: Workload, threshold_bytes: int, cycle_time_s: float) -> Strategy:
    """Tensor fusion: what becomes ready within one cycle is fused, per dtype, up to the threshold.

    Source: Horovod, docs/tensor-fusion.rst. A threshold of 0 disables fusion; a gradient above the threshold
    travels alone. Where a gradient has no measured `ready_s`, all are taken to become ready evenly over `backward_s`
    (within one cycle, if that is unknown too).
    """
    if threshold_bytes < 0:
        raise InvalidInput(f"the fusion threshold must be at least 0 bytes, but is {threshold_bytes}")
    if not cycle_time_s > 0:
        raise InvalidInput(f"the cycle time must be above 0 s, but is {cycle_time_s}")
    filled: dict[tuple[int, str], tuple[list[int], int]] = {}
    closed: list[list[int]] = []
    for position, (variable, ready_s) in enumerate(zip(workload.variables, _ready_s(workload), strict=True)):
        key = (int(ready_s // cycle_time_s), variable.dtype)
        members, size = filled.get(key, ([], 0))
        if members and size + variable.grad_bytes > threshold_bytes:
            closed.append(members)
            members, size = [], 0
        members.append(position)
        filled[key] = (members, size + variable.grad_bytes)
    return _grouped(workload, closed + [members for members, _ in filled.values()], Synchronizer.ALL_REDUCE)


def parameter_server(workload: Workload, cluster: Cluster) -> Strategy:
    """All variables on one server: the first rank of those with the highest bandwidth."""
    ranks = server_ranks(cluster)
    bandwidths = server_bandwidths(cluster, ranks)
    shard = Shard(Synchronizer.PARAMETER_SERVER, placement=ranks[int(bandwidths.argmax())])
    return Strategy(tuple(VariableStrategy(variable.name, (shard,)) for variable in workload.variables))


def ps_load_balanced(workload: Workload, cluster: Cluster) -> Strategy:
    """Whole variables on all ranks, the largest first, each on the server that would be done with it first."""
    return _served(workload, cluster, [None] * len(workload.variables))


def partitioned_ps(workload: Workload, cluster: Cluster, min_partition_bytes: int = 100_000, max_shards: int = 40) -> Strategy:
    """Parameter servers with large variables cut evenly along axis 0 into a shard per server, at most `max_shards`.

    The bounds are AutoSync's (see `SearchSpace`).
    """
    bounds = SearchSpace((Synchronizer.PARAMETER_SERVER,), min_partition_bytes=min_partition_bytes, max_shards=max_shards)
    servers = len(server_ranks(cluster))

    def cut(variable: Variable) -> Partition | None:
        shards = min(servers, max_shards, variable.shape[0]) if 0 in bounds.axes_for(variable) else 1
        return even_partition(variable, 0, shards) if shards > 1 else None

    return _served(workload, cluster, [cut(variable) for variable in workload.variables])


def even_partition(variable: Variable, axis: int, shards: int) -> Partition:
    """Shards whose extents differ by at most one row, the longer ones first."""
    rows, longer = divmod(variable.shape[axis], shards)
    return Partition(axis, (rows + 1,) * longer + (rows,) * (shards - longer))


def all_reduce_positions(workload: Workload, variables_per_group: int) -> list[list[int]]:
    """Positions of every n consecutive variables, split by dtype: a message has one."""
    if variables_per_group < 1:
        raise InvalidInput(f"a chunk needs at least 1 variable, but has {variables_per_group}")
    groups: dict[tuple[int, str], list[int]] = {}
    for position, variable in enumerate(workload.variables):
        groups.setdefault((position // variables_per_group, variable.dtype), []).append(position)
    return list(groups.values())


def ddp_buckets(workload: Workload, bucket_bytes: int, first_bucket_bytes: int) -> list[list[int]]:
    """Positions of DDP's buckets, by the rule of torch's `_compute_bucket_assignment_by_size`.

    Per dtype, gradients are added in order, and a bucket is closed once it holds its limit or more: the first of a
    dtype `first_bucket_bytes`, the others `bucket_bytes`. A sparse gradient is a bucket of its own.
    """
    if bucket_bytes < 0 or first_bucket_bytes < 0:
        raise InvalidInput(f"bucket sizes must be at least 0 bytes, but are {first_bucket_bytes} and {bucket_bytes}")
    buckets: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    size: dict[str, int] = {}
    limit: dict[str, int] = {}
    for position, variable in enumerate(workload.variables):
        dtype = variable.dtype
        if variable.sparse:
            buckets.append([position])
            continue
        filling.setdefault(dtype, []).append(position)
        size[dtype] = size.get(dtype, 0) + variable.grad_bytes
        if size[dtype] >= limit.setdefault(dtype, first_bucket_bytes):
            buckets.append(filling.pop(dtype))
            size[dtype], limit[dtype] = 0, bucket_bytes
    return buckets + list(filling.values())


def least_loaded(loads_bytes: Sequence[float], bandwidths_bytes_per_s: Sequence[float], shard_bytes: int) -> int:
    """Index of the server that would be done first if it took this shard too; the lowest of several."""
    finish_s = [(load + shard_bytes) / bandwidth for load, bandwidth in zip(loads_bytes, bandwidths_bytes_per_s, strict=True)]
    return finish_s.index(min(finish_s))


BUILDERS: MappingProxyType[str, Builder] = MappingProxyType(
    {
        "ddp_25mib": lambda workload, _: ddp_default(workload),
        "ddp_1mib": lambda workload, _: ddp_default(workload, bucket_bytes=MIB),
        "ddp_5mib": lambda workload, _: ddp_default(workload, bucket_bytes=5 * MIB),
        "ddp_100mib": lambda workload, _: ddp_default(workload, bucket_bytes=100 * MIB),
        "single_bucket": lambda workload, _: single_bucket(workload),
        "per_variable": lambda workload, _: per_variable(workload),
        "all_reduce_chunks_8": lambda workload, _: all_reduce_chunks(workload, 8),
        "all_reduce_chunks_32": lambda workload, _: all_reduce_chunks(workload, 32),
        "horovod_64mib_5ms": lambda workload, _: horovod_like(workload, 64 * MIB, 5e-3),  # its defaults up to 0.20
        "horovod_128mib_1ms": lambda workload, _: horovod_like(workload, 128 * MIB, 1e-3),  # its defaults from 0.21 on
        "reduce_scatter_all_gather_25mib": lambda workload, _: reduce_scatter_all_gather(workload),
        "parameter_server": parameter_server,
        "ps_load_balanced": ps_load_balanced,
        "partitioned_ps": partitioned_ps,
    }
)
"""Name -> builder with its usual parameters."""


def seed_strategies(workload: Workload, cluster: Cluster, space: SearchSpace) -> list[tuple[str, Strategy]]:
    """The hand-made strategies that lie inside `space`, each once, under the first name that yields it."""
    seeds: dict[Strategy, str] = {}
    for name, build in BUILDERS.items():
        strategy = build(workload, cluster)
        if space.contains(strategy, workload, cluster):
            seeds.setdefault(strategy, name)
    return [(name, strategy) for strategy, name in seeds.items()]


def _grouped(workload: Workload, groups: Iterable[list[int]], synchronizer: Synchronizer) -> Strategy:
    """Each list of positions is one merge group of whole variables; a group of one needs no number."""
    complete = sorted(groups, key=lambda positions: positions[-1])
    choices: list[VariableStrategy] = []
    for number, positions in enumerate(complete):
        shard = Shard(synchronizer, group=number if len(positions) > 1 else None)
        choices.extend(VariableStrategy(workload.variables[position].name, (shard,)) for position in positions)
    return Strategy(tuple(choices))


def _served(workload: Workload, cluster: Cluster, partitions: Sequence[Partition | None]) -> Strategy:
    """Parameter servers for all shards, the largest shard first, each on the server that would be done with it first."""
    ranks = server_ranks(cluster)
    bandwidths = server_bandwidths(cluster, ranks).tolist()
    sizes: list[tuple[int, int, int]] = []
    for position, (variable, partition) in enumerate(zip(workload.variables, partitions, strict=True)):
        extents = partition.sizes if partition else (1,)
        row_bytes = variable.grad_bytes // (variable.shape[partition.axis] if partition else 1)
        sizes.extend((extent * row_bytes, position, number) for number, extent in enumerate(extents))
    loads = [0] * len(ranks)
    placement: dict[tuple[int, int], int] = {}
    for shard_bytes, position, number in sorted(sizes, key=lambda entry: -entry[0]):
        server = least_loaded(loads, bandwidths, shard_bytes)
        loads[server] += shard_bytes
        placement[position, number] = ranks[server]
    choices: list[VariableStrategy] = []
    for position, (variable, partition) in enumerate(zip(workload.variables, partitions, strict=True)):
        count = len(partition.sizes) if partition else 1
        shards = tuple(Shard(Synchronizer.PARAMETER_SERVER, placement=placement[position, number]) for number in range(count))
        choices.append(VariableStrategy(variable.name, shards, partition))
    return Strategy(tuple(choices))


def _ready_s(workload: Workload) -> list[float]:
    """When each gradient is final, in seconds from the start of the backward pass, shape (V,)."""
    measured = [variable.ready_s for variable in workload.variables if variable.ready_s is not None]
    count = len(workload.variables)
    if len(measured) == count:
        return measured
    return [workload.backward_s * (position + 1) / count for position in range(count)]
