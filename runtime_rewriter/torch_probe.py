"""Times the collectives that plans use, on the real links, and fits alpha + beta * bytes to each.

Sizes are what `CollectiveFit.seconds` is later asked for: the whole tensor before the operation.  For
gather and scatter that is one rank's tensor, since a push sends all of it from every rank; for
reduce-scatter and all-gather the tensor that is cut into, or joined from, one shard per rank.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autotune.cluster import CollectiveFit
from autotune.profiling.link_fit import fit_alpha_beta
from autotune.strategy_space.plan import Primitive
from runtime_rewriter.torch_collectives import Device, Ranks, make_exchange

SIZES_BYTES = tuple(2**power for power in range(12, 25, 2))  # 4 KiB .. 16 MiB
MOST_REPEATS = 15
SHARE_PER_PROBE = 0.01
"""Of the deadline: repeats of one size stop there."""

Operation = Callable[[], None]


CPU_CLOCK_S = 1e-6
"""Resolution that the clock of CPU time is trusted with."""


@dataclass(frozen=True)
class _Series:
    """Probes of one primitive on one group; `ranks` is None on ranks that take no part."""

    primitive: str
    group_size: int
    ranks: Ranks | None


@dataclass(frozen=True)
class _Point:
    """One size: median over repeats of the slowest rank's time, and the mean CPU time of a rank."""

    size_bytes: int
    seconds: float
    cpu_s: float


def probe_links(process_group: dist.ProcessGroup | None = None, deadline_s: float = 30.0) -> tuple[CollectiveFit, ...]:
    """Collective over the group (None: the world). The same fits on every rank.

    Probes groups of 2 (the first and the last rank: of different hosts where there are several) and of all
    ranks, smallest sizes first.  Rank 0 decides for all what still fits into `deadline_s`.  A primitive of
    which fewer than two sizes were reached is left out.
    """
    world = Ranks.of(process_group, deadline_s + 60.0, deadline_s + 60.0)
    pair = _pair(world, deadline_s + 60.0)
    try:
        return _probe(world, pair, deadline_s)
    finally:
        world.destroy()
        if pair is not None:
            pair.destroy()
            dist.destroy_process_group(pair.base)


def _probe(world: Ranks, pair: Ranks | None, deadline_s: float) -> tuple[CollectiveFit, ...]:
    device = Device(_device_of(world.base))
    stop_s = time.perf_counter() + deadline_s
    found: dict[_Series, list[_Point]] = {series: [] for series in _series(world, pair)}
    for size_bytes in SIZES_BYTES:
        for series, points in found.items():
            repeats = _repeats(world, size_bytes, points, deadline_s, stop_s)
            if repeats:
                points.append(_measure(world, series, size_bytes, repeats, device))
    return tuple(_fit(series, points) for series, points in found.items() if len(points) >= 2)


def _series(world: Ranks, pair: Ranks | None) -> Iterator[_Series]:
    if world.size < 2:
        return
    for primitive in _OPERATIONS:
        if world.size > 2:
            yield _Series(primitive, 2, pair)
        yield _Series(primitive, world.size, world)


def _pair(world: Ranks, timeout_s: float) -> Ranks | None:
    """Groups of the first and the last rank; None on the others and where the world is no larger."""
    if world.size <= 2 or world.rank not in (0, world.size - 1):
        return None
    members = [dist.get_global_rank(world.base, rank) for rank in (0, world.size - 1)]
    backend = dist.get_backend_config(world.base)
    base: dist.ProcessGroup = dist.new_group(members, backend=backend, use_local_synchronization=True)
    return Ranks.of(base, timeout_s, timeout_s)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in str(dist.get_backend_config(group)) else torch.device("cpu")


def _repeats(world: Ranks, size_bytes: int, points: list[_Point], deadline_s: float, stop_s: float) -> int:
    """How often to time this probe, 0 to leave it out: rank 0's decision from the time of the size before."""
    decision = torch.zeros(1, dtype=torch.int64)
    if world.rank == 0:
        expected_s = points[-1].seconds * size_bytes / points[-1].size_bytes if points else 0.0  # an upper bound while alpha > 0
        left_s = stop_s - time.perf_counter()
        affordable = int(SHARE_PER_PROBE * deadline_s / expected_s) if expected_s else MOST_REPEATS
        decision[0] = 0 if left_s < 3 * expected_s or left_s <= 0 else min(max(affordable, 2), MOST_REPEATS)
    dist.broadcast(decision, group=world.control, group_src=0)
    return int(decision.item())


def _measure(world: Ranks, series: _Series, size_bytes: int, repeats: int, device: Device) -> _Point:
    """One repeat more runs first, untimed."""
    seconds = torch.zeros(repeats, dtype=torch.float64)
    cpu_s = torch.zeros(1, dtype=torch.float64)
    if series.ranks is not None:
        operation = _OPERATIONS[series.primitive](series.ranks, size_bytes, device)
        gate = torch.zeros(1, device=device.device)
        for repeat in range(-1, repeats):
            dist.all_reduce(gate, group=series.ranks.first)
            start_s, start_cpu_s = device.now_s(), time.process_time()
            operation()
            stop_s, stop_cpu_s = device.now_s(), time.process_time()
            if repeat >= 0:
                seconds[repeat] = stop_s - start_s
                cpu_s += (stop_cpu_s - start_cpu_s) / repeats
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=world.control)
    dist.all_reduce(cpu_s, group=world.control)
    return _Point(size_bytes, float(seconds.median()), float(cpu_s) / series.group_size)


def _fit(series: _Series, points: list[_Point]) -> CollectiveFit:
    sizes = [point.size_bytes for point in points]
    alpha_s, beta_s_per_byte, relative_error = fit_alpha_beta(sizes, [point.seconds for point in points])
    # The clock of CPU time may not tick within a small message.
    cpu_alpha_s, cpu_beta_s_per_byte, _ = fit_alpha_beta(sizes, [max(point.cpu_s, CPU_CLOCK_S) for point in points])
    return CollectiveFit(
        series.primitive,
        series.group_size,
        alpha_s,
        beta_s_per_byte,
        relative_error,
        min(sizes),
        max(sizes),
        cpu_alpha_s,
        cpu_beta_s_per_byte,
    )


def _exchange(primitive: Primitive) -> Callable[[Ranks, int, Device], Operation]:
    """What a plan's message does, both phases, so that the cost of combining at the owner is in it."""

    def prepare(ranks: Ranks, size_bytes: int, device: Device) -> Operation:
        exchange = make_exchange(primitive, torch.zeros(size_bytes // 4 // ranks.size * ranks.size, device=device.device), ranks, 0)

        def operation() -> None:
            exchange.start().wait()
            if exchange.two_phases:
                exchange.advance().wait()

        return operation

    return prepare


def _reduce_scatter(ranks: Ranks, size_bytes: int, device: Device) -> Operation:
    whole, shard = _whole_and_shard(ranks, size_bytes, device)
    return lambda: _none(dist.reduce_scatter_single(shard, whole, group=ranks.first))


def _all_gather(ranks: Ranks, size_bytes: int, device: Device) -> Operation:
    whole, shard = _whole_and_shard(ranks, size_bytes, device)
    return lambda: _none(dist.all_gather_single(whole, shard, group=ranks.first))


def _gather(ranks: Ranks, size_bytes: int, device: Device) -> Operation:
    tensor = torch.zeros(size_bytes // 4, device=device.device)
    parts = [torch.empty_like(tensor) for _ in range(ranks.size)] if ranks.rank == 0 else None
    return lambda: _none(dist.gather(tensor, parts, group=ranks.first, group_dst=0))


def _scatter(ranks: Ranks, size_bytes: int, device: Device) -> Operation:
    tensor = torch.zeros(size_bytes // 4, device=device.device)
    parts = [torch.zeros_like(tensor)] * ranks.size if ranks.rank == 0 else None
    return lambda: _none(dist.scatter(tensor, parts, group=ranks.first, group_src=0))


def _broadcast(ranks: Ranks, size_bytes: int, device: Device) -> Operation:
    tensor = torch.zeros(size_bytes // 4, device=device.device)
    return lambda: _none(dist.broadcast(tensor, group=ranks.first, group_src=0))


def _whole_and_shard(ranks: Ranks, size_bytes: int, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    elements = max(size_bytes // 4 // ranks.size, 1)
    return torch.zeros(elements * ranks.size, device=device.device), torch.zeros(elements, device=device.device)


def _none(_: object) -> None:
    """Drops the work handle of a blocking collective."""


_OPERATIONS: dict[str, Callable[[Ranks, int, Device], Operation]] = {
    "all_reduce": _exchange(Primitive.ALL_REDUCE),
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "broadcast": _broadcast,
    "reduce_scatter_all_gather": _exchange(Primitive.REDUCE_SCATTER_ALL_GATHER),
    "push_pull": _exchange(Primitive.PUSH_PULL),
}
