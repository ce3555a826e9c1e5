"""Hand-made strategies of collectives: DDP, Horovod, ZeRO-2 and AutoDist's all-reduce builders.

Merge groups are numbered in the order in which they are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.costs.timing import ready_times_s
from autotune.errors import InvalidInput
from autotune.rng import generator
from autotune.strategy_space.builders.partitions import MAX_SHARDS, by_smallest_divisor, in_pieces
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer, VariableStrategy
from autotune.workload import Workload

MIB = 2**20

DDP_BUCKET_BYTES = 25 * MIB  # torch.nn.parallel.DistributedDataParallel: bucket_cap_mb=25
DDP_FIRST_BUCKET_BYTES = MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
ZERO2_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed: zero_optimization.reduce_bucket_size
AUTODIST_CHUNK = 128  # AutoDist: chunk_size of its all-reduce builders


def single_bucket(
    workload: Workload, synchronizer: Synchronizer = Synchronizer.ALL_REDUCE
) -> Strategy:
    """One message per dtype with all gradients: no overlap, least overhead."""
    return _grouped(workload, all_reduce_positions(workload, len(workload.variables)), synchronizer)


def per_variable(
    workload: Workload, synchronizer: Synchronizer = Synchronizer.ALL_REDUCE
) -> Strategy:
    """One message per gradient: most overlap, most overhead."""
    return Strategy(
        tuple(VariableStrategy(v.name, (Shard(synchronizer),)) for v in workload.variables)
    )


def all_reduce_chunks(workload: Workload, variables_per_group: int) -> Strategy:
    """All-reduce of every n consecutive variables (AutoDist's AllReduce, chunk_size n)."""
    return _grouped(
        workload, all_reduce_positions(workload, variables_per_group), Synchronizer.ALL_REDUCE
    )


def ddp_default(
    workload: Workload,
    bucket_bytes: int = DDP_BUCKET_BYTES,
    first_bucket_bytes: int = DDP_FIRST_BUCKET_BYTES,
) -> Strategy:
    """DistributedDataParallel's buckets from its second step on.

    In the first step it only guesses the order.
    """
    return _grouped(
        workload, ddp_buckets(workload, bucket_bytes, first_bucket_bytes), Synchronizer.ALL_REDUCE
    )


def ddp_capped(workload: Workload, caps_bytes: Sequence[int]) -> Strategy:
    """DDP's buckets with `bucket_cap_mb_list` (torch 2.13): a cap per bucket, the last one repeats.

    Caps hold in gradient-ready order.
    """
    variables = workload.variables
    keys = [None if variable.sparse else variable.dtype for variable in variables]
    sizes_bytes = [variable.grad_bytes for variable in variables]
    buckets = closed_by_limits(sizes_bytes, keys, caps_bytes)
    return _grouped(workload, buckets, Synchronizer.ALL_REDUCE)


def bucketed(workload: Workload, buckets: Sequence[Sequence[str]]) -> Strategy:
    """All-reduce of the variables of each bucket together, in the order of the buckets."""
    choices: dict[str, VariableStrategy] = {}
    for number, names in enumerate(buckets):
        group = number if len(names) > 1 else None
        shard = Shard(Synchronizer.ALL_REDUCE, group=group, priority=number)
        choices |= {name: VariableStrategy(name, (shard,)) for name in names}
    return Strategy(tuple(choices[variable.name] for variable in workload.variables))


def reduce_scatter_all_gather(
    workload: Workload,
    bucket_bytes: int = DDP_BUCKET_BYTES,
    first_bucket_bytes: int = DDP_FIRST_BUCKET_BYTES,
) -> Strategy:
    """DDP's buckets, each sent by a reduce-scatter and an all-gather."""
    buckets = ddp_buckets(workload, bucket_bytes, first_bucket_bytes)
    return _grouped(workload, buckets, Synchronizer.REDUCE_SCATTER_ALL_GATHER)


def zero2_like(workload: Workload, bucket_elements: int = ZERO2_BUCKET_ELEMENTS) -> Strategy:
    """ZeRO-2's traffic (SC 2020, sec. 5.2): a reduce-scatter and an all-gather of large buckets.

    DeepSpeed gathers updated parameters, and this gathers reduced gradients. The bytes are the
    same, but the optimizer's state is not sharded.
    """
    if bucket_elements < 1:
        raise InvalidInput(f"a bucket needs at least 1 element, but has {bucket_elements}")
    closed: list[list[int]] = []
    filling: dict[str, tuple[list[int], int]] = {}
    for position, variable in enumerate(workload.variables):
        members, held = filling.get(variable.dtype, ([], 0))
        if members and held + variable.elements > bucket_elements:
            closed.append(members)
            members, held = [], 0
        filling[variable.dtype] = ([*members, position], held + variable.elements)
    return _grouped(
        workload,
        closed + [members for members, _ in filling.values()],
        Synchronizer.REDUCE_SCATTER_ALL_GATHER,
    )


def partitioned_all_reduce(workload: Workload, shards_per_group: int = AUTODIST_CHUNK) -> Strategy:
    """Variables cut along axis 0 by their smallest divisor, all-reduced n shards at a time.

    Source: AutoDist's PartitionedAR.
    """
    return _cut_and_chunked(workload, [0] * len(workload.variables), shards_per_group)


def random_axis_partitioned_all_reduce(
    workload: Workload, seed: int = 0, shards_per_group: int = AUTODIST_CHUNK
) -> Strategy:
    """The same along a random axis per variable, axis 0 for sparse ones.

    Source: AutoDist's RandomAxisPartitionAR.
    """
    rng = generator(seed, "random_axis_partitioned_all_reduce")
    axes = []
    for variable in workload.variables:
        candidates = [axis for axis, extent in enumerate(variable.shape) if extent > 1]
        drawn = candidates[int(rng.integers(len(candidates)))] if candidates else 0
        axes.append(0 if variable.sparse else drawn)
    return _cut_and_chunked(workload, axes, shards_per_group)


def horovod_like(workload: Workload, threshold_bytes: int, cycle_time_s: float) -> Strategy:
    """Tensor fusion: gradients ready within one cycle are fused, per dtype, up to the threshold.

    Source: Horovod, docs/tensor-fusion.rst. A threshold of 0 disables fusion; a larger gradient is
    sent alone. Unmeasured gradients become ready evenly over `backward_s`, or, if that is unknown
    too, within one cycle.
    """
    if threshold_bytes < 0:
        raise InvalidInput(
            f"the fusion threshold must be at least 0 bytes, but is {threshold_bytes}"
        )
    if not cycle_time_s > 0:
        raise InvalidInput(f"the cycle time must be above 0 s, but is {cycle_time_s}")
    filling: dict[tuple[int, str], tuple[list[int], int]] = {}
    closed: list[list[int]] = []
    for position, ready_s in enumerate(ready_times_s(workload).tolist()):
        variable = workload.variables[position]
        key = (int(ready_s // cycle_time_s), variable.dtype)
        members, size = filling.get(key, ([], 0))
        if members and size + variable.grad_bytes > threshold_bytes:
            closed.append(members)
            members, size = [], 0
        filling[key] = ([*members, position], size + variable.grad_bytes)
    groups = closed + [members for members, _ in filling.values()]
    return _grouped(workload, groups, Synchronizer.ALL_REDUCE)


def all_reduce_positions(workload: Workload, variables_per_group: int) -> list[list[int]]:
    """Positions of every n consecutive variables, split by dtype: a message has one dtype."""
    if variables_per_group < 1:
        raise InvalidInput(f"a chunk needs at least 1 variable, but has {variables_per_group}")
    groups: dict[tuple[int, str], list[int]] = {}
    for position, variable in enumerate(workload.variables):
        groups.setdefault((position // variables_per_group, variable.dtype), []).append(position)
    return list(groups.values())


def ddp_buckets(workload: Workload, bucket_bytes: int, first_bucket_bytes: int) -> list[list[int]]:
    """Positions of DDP's buckets (`closed_buckets`). A sparse gradient is a bucket of its own."""
    variables = workload.variables
    keys = [None if variable.sparse else variable.dtype for variable in variables]
    sizes_bytes = [variable.grad_bytes for variable in variables]
    return closed_buckets(sizes_bytes, keys, bucket_bytes, first_bucket_bytes)


def closed_buckets(
    sizes_bytes: Sequence[float],
    keys: Sequence[str | None],
    bucket_bytes: int,
    first_bucket_bytes: int,
) -> list[list[int]]:
    """Positions of buckets: a key's first holds `first_bucket_bytes`, others `bucket_bytes`."""
    return closed_by_limits(sizes_bytes, keys, (first_bucket_bytes, bucket_bytes))


def closed_by_limits(
    sizes_bytes: Sequence[float], keys: Sequence[str | None], limits_bytes: Sequence[int]
) -> list[list[int]]:
    """Positions of buckets, by the rule of torch's `_compute_bucket_assignment_by_size`.

    Gradients are added in order, per key (their dtype); one without a key is a bucket of its own. A
    bucket is closed once it holds its limit: the first of a key the first of `limits_bytes`, and so
    on; the last limit repeats.
    """
    if not limits_bytes or min(limits_bytes) < 0:
        raise InvalidInput(
            "bucket sizes must be one or more, each at least 0 bytes, "
            f"but are {', '.join(map(str, limits_bytes)) or 'none'}"
        )
    buckets: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    size: dict[str, float] = {}
    turn: dict[str, int] = {}
    for position, (size_bytes, key) in enumerate(zip(sizes_bytes, keys, strict=True)):
        if key is None:
            buckets.append([position])
            continue
        filling.setdefault(key, []).append(position)
        size[key] = size.get(key, 0) + size_bytes
        if size[key] >= limits_bytes[turn.setdefault(key, 0)]:
            buckets.append(filling.pop(key))
            size[key] = 0
            turn[key] = min(turn[key] + 1, len(limits_bytes) - 1)
    return buckets + list(filling.values())


def _cut_and_chunked(workload: Workload, axes: Sequence[int], shards_per_group: int) -> Strategy:
    if shards_per_group < 1:
        raise InvalidInput(f"a chunk needs at least 1 shard, but has {shards_per_group}")
    choices: list[VariableStrategy] = []
    number = 0
    for variable, axis in zip(workload.variables, axes, strict=True):
        partition = by_smallest_divisor(variable, axis) if variable.elements > 1 else None
        count = len(partition.sizes) if partition else 1
        groups = [(number + shard) // shards_per_group for shard in range(count)]
        number += count
        shards = tuple(Shard(Synchronizer.ALL_REDUCE, group=group) for group in groups)
        choices.append(VariableStrategy(variable.name, shards, partition))
    return Strategy(tuple(choices))


def _grouped(
    workload: Workload, groups: Iterable[list[int]], synchronizer: Synchronizer
) -> Strategy:
    """One merge group per list of positions; a group of one variable needs no number."""
    complete = sorted(groups, key=lambda positions: positions[-1])
    choices: list[VariableStrategy] = []
    for number, positions in enumerate(complete):
        shard = Shard(synchronizer, group=number if len(positions) > 1 else None)
        names = [workload.variables[position].name for position in positions]
        choices.extend(VariableStrategy(name, (shard,)) for name in names)
    return Strategy(tuple(choices))


def large_alone(workload: Workload, bucket_bytes: int, piece_bytes: int | None = None) -> Strategy:
    """All-reduce with small variables merged per dtype, in order, into messages of `bucket_bytes`.

    Variables of at least that size are sent alone; with `piece_bytes` they are cut into even pieces
    of about that size, at most `MAX_SHARDS`.
    """
    group: dict[int, int] = {}
    groups = 0
    filling: dict[str, tuple[int, int]] = {}
    for position, variable in enumerate(workload.variables):
        if variable.sparse or variable.grad_bytes >= bucket_bytes:
            continue
        number, held_bytes = filling.get(variable.dtype, (groups, 0))
        groups = max(groups, number + 1)
        group[position] = number
        filling[variable.dtype] = number, held_bytes + variable.grad_bytes
        if held_bytes + variable.grad_bytes >= bucket_bytes:
            del filling[variable.dtype]
    choices = []
    for position, variable in enumerate(workload.variables):
        cut = None
        if piece_bytes is not None and position not in group:
            cut = in_pieces(variable, piece_bytes, MAX_SHARDS)
        shard = Shard(Synchronizer.ALL_REDUCE, group=group.get(position))
        shards = (shard,) * (len(cut.sizes) if cut else 1)
        choices.append(VariableStrategy(variable.name, shards, cut))
    return Strategy(tuple(choices))
