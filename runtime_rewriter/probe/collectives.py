"""Times the collectives that plans use, on the real links, and fits a cost to each: alone, and while every rank computes.

| symbol | meaning |
|---|---|
| series | one primitive on one group of ranks, alone or under load |
| point | one size of a series: the median over repeats of the slowest rank's time |
| share | seconds that a point may take: what its pass has left, over the points that are still open |

Rank 0 decides for all what still fits into the time; what follows from measured times every rank derives from
the same (reduced) figures. A point is repeated until its spread is small or its share is spent, and once more at the
end where it looks disturbed.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TypeVar

import torch
import torch.distributed as dist

from autotune.cluster import CollectiveFit
from autotune.profiling.fits.link_fit import (
    fit_alpha_beta,
    fit_curve,
    spread_of,
    suspects,
    uncertainty_of,
)
from runtime_rewriter.probe.groups import ProbeGroup, ProbeGroups, layout
from runtime_rewriter.probe.link import ProbedLink
from runtime_rewriter.probe.load import Load, LostTime
from runtime_rewriter.probe.operations import (
    COLLECTED,
    EVERYWHERE,
    ON_THE_WORLD,
    OPERATIONS,
    UNDER_LOAD,
)
from runtime_rewriter.probe.pairs import PairProbe
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.ranks import Ranks

SIZES_BYTES = tuple(2**power for power in range(12, 25, 2))  # 4 KiB .. 16 MiB
BETWEEN_BYTES = (*(2**power for power in range(13, 25, 2)), 2**25, 2**26)
"""What a long probe adds: the sizes between, and up to 64 MiB."""
LOADED_BYTES = tuple(2**power for power in (16, 18, 20, 22))
FEWEST_SIZES, FEWEST_LOADED_SIZES = 2, 3
"""Under load a line through two points says more about the scheduler than about the link."""
FEWEST_REPEATS = 3
BATCH_REPEATS = 5
MOST_REPEATS = 40
STEADY = 0.03
"""A relative interquartile range that needs no more repeats."""
WARM_S, MOST_WARM = 0.3, 4
"""Untimed messages before each point: so many, or as many as fit into that time. TCP's windows have to grow to the new size first, as
they have in training: the first messages of 1 MiB through a slow host took 20 % longer than later ones."""
MOST_COLLECTED_BYTES = 2**30
"""On the one rank that a gather or a push ends on."""
LOADED_SLOWDOWN = 2.0
"""How much longer a message is expected to take under load, until it was seen."""
REPAIR_ROUNDS = 2
TIMEOUT_MARGIN_S = 60.0
CPU_CLOCK_S = 1e-6
"""Resolution that the clock of CPU time is trusted with."""
REST_S, BARRIERS = 0.001, 12
"""After a message its threads go on: they move what sockets hold, and go to sleep. So much later it is over, unless the message is large
and its cost one per byte. What the barriers before messages cost with such a rest is measured on so many of them, and taken off."""

Found = TypeVar("Found")
Said = Callable[[str], None]
"""Hears what is probed next; called on every rank."""


@dataclass(frozen=True)
class ProbeResult:
    """The same on every rank."""

    fits: tuple[CollectiveFit, ...]
    links: tuple[ProbedLink, ...]


@dataclass(frozen=True)
class _Series:
    primitive: str
    group: ProbeGroup
    loaded: bool = False

    @property
    def name(self) -> str:
        return f"{self.primitive} on {self.group.size} ranks" + (
            " while they compute" if self.loaded else ""
        )


@dataclass(frozen=True)
class _Point:
    """`cpu_s`: mean over the ranks of the CPU time of one message; of a point under load, of the computation lost to it."""

    seconds: float
    spread: float
    repeats: int
    cpu_s: float


def probe_links(
    process_group: dist.ProcessGroup | None = None,
    deadline_s: float = 30.0,
    devices: tuple[int, ...] = (),
    byte_scale: float = 1.0,
) -> tuple[CollectiveFit, ...]:
    """The short probe. Collective over the group (None: the world); the same fits on every rank.

    `devices`: ranks per host, in rank order. Smallest sizes first; a primitive of which fewer than two sizes were reached
    is left out. With a `byte_scale` of k a message of S bytes is sent as S/k, on links that have 1/k of their rate.
    """

    def measure(prober: _Prober) -> tuple[CollectiveFit, ...]:
        prober.run_pass(prober.series(EVERYWHERE, prober.groups[:1]), SIZES_BYTES, 0.55)
        prober.run_pass(prober.series(EVERYWHERE, prober.groups[1:]), SIZES_BYTES, 0.85)
        prober.repair(1.0)
        return prober.fits()

    return _probing(process_group, deadline_s, devices, byte_scale, lambda _: None, measure, ())


def probe_cluster(
    process_group: dist.ProcessGroup | None,
    budget_s: float,
    devices: tuple[int, ...],
    said: Said,
    byte_scale: float = 1.0,
    computing: bool = True,
) -> ProbeResult:
    """The long probe: hosts' own links, every primitive at more sizes, and with `computing` messages while every rank computes."""

    def measure(prober: _Prober) -> ProbeResult:
        links = PairProbe(prober.world, prober.device, prober.grant, byte_scale).probe(
            layout(prober.world.size, devices), 0.15, said
        )
        world, others = prober.groups[:1], prober.groups[1:]
        first = prober.series(EVERYWHERE, world)
        prober.run_pass(first, SIZES_BYTES, 0.4)
        prober.run_pass(
            prober.series(EVERYWHERE, others) + prober.series(ON_THE_WORLD, world), SIZES_BYTES, 0.6
        )
        if computing:
            with Load(prober.device.device) as load:
                prober.run_pass(
                    prober.series(UNDER_LOAD, world, loaded=True), LOADED_BYTES, 0.78, load
                )
        prober.run_pass(first + prober.series(EVERYWHERE, others), BETWEEN_BYTES, 0.9)
        prober.repair(1.0)
        return ProbeResult(prober.fits(), links)

    return _probing(
        process_group, budget_s, devices, byte_scale, said, measure, ProbeResult((), ())
    )


def _probing(
    process_group: dist.ProcessGroup | None,
    budget_s: float,
    devices: tuple[int, ...],
    byte_scale: float,
    said: Said,
    measure: Callable[[_Prober], Found],
    nothing: Found,
) -> Found:
    """Groups for the time of one probe; a single rank has nothing to probe."""
    timeout_s = budget_s + TIMEOUT_MARGIN_S
    world = Ranks.of(process_group, timeout_s, timeout_s)
    try:
        made = ProbeGroups(world, devices, timeout_s)
        try:
            return (
                measure(_Prober(world, made.groups, budget_s, byte_scale, said))
                if made.groups
                else nothing
            )
        finally:
            made.destroy()
    finally:
        world.destroy()


class _Prober:
    def __init__(
        self, world: Ranks, groups: list[ProbeGroup], budget_s: float, byte_scale: float, said: Said
    ) -> None:
        self.world, self.groups = world, groups
        self.device = Device(_device_of(world.base))
        self._queued = self.device.queues(world.base)
        self._byte_scale, self._said = byte_scale, said
        self._start_s, self._budget_s = time.perf_counter(), budget_s
        self._points: dict[_Series, dict[int, _Point]] = {}
        self._barrier_cpu_s: dict[int, float] = {}  # of the group of this number

    def series(
        self, primitives: Iterable[str], groups: list[ProbeGroup], loaded: bool = False
    ) -> list[_Series]:
        """Every primitive on every group, group by group."""
        return [_Series(primitive, group, loaded) for group in groups for primitive in primitives]

    def grant(self, needed_s: float, open_points: int, end: float) -> float:
        """Rank 0's decision for all: seconds for a point that needs at least `needed_s`, 0 to leave it out. Collective.

        `end`: the share of the budget at which this pass is over.
        """
        decision = torch.zeros(1, dtype=torch.float64)
        if self.world.rank == 0:
            left_s = self._start_s + end * self._budget_s - time.perf_counter()
            decision[0] = (
                0.0 if left_s <= 0 or left_s < needed_s else max(left_s / open_points, needed_s)
            )
        dist.broadcast(decision, group=self.world.control, group_src=0)
        return float(decision.item())

    def run_pass(
        self, series: list[_Series], sizes: tuple[int, ...], end: float, load: Load | None = None
    ) -> None:
        """Every size of every series, as far as the time goes; smallest sizes first."""
        todo = [(one, size) for size in sizes for one in series if self._fits_memory(one, size)]
        for number, (one, size) in enumerate(todo):
            expected_s = self._expected_s(one, size)
            share_s = self.grant(FEWEST_REPEATS * expected_s, len(todo) - number, end)
            if share_s > 0:
                self._said(f"{one.name}, {size} bytes")
                self._points.setdefault(one, {})[size] = self._measure(
                    one, size, expected_s, share_s, load
                )

    def repair(self, end: float) -> None:
        """Probe again what looks disturbed; the quicker of both is kept, since a disturbance never makes a message quicker."""
        for _ in range(REPAIR_ROUNDS):
            todo = [
                (one, size)
                for one in self._points
                if not one.loaded
                for size in self._suspects(one)
            ]
            for number, (one, size) in enumerate(todo):
                before = self._points[one][size]
                share_s = self.grant(FEWEST_REPEATS * before.seconds, len(todo) - number, end)
                if share_s > 0:
                    self._said(f"{one.name}, {size} bytes again")
                    again = self._measure(one, size, before.seconds, share_s, None)
                    self._points[one][size] = min(before, again, key=lambda point: point.seconds)

    def fits(self) -> tuple[CollectiveFit, ...]:
        found = self._points.items()
        return tuple(
            _fit(one, points)
            for one, points in found
            if len(points) >= (FEWEST_LOADED_SIZES if one.loaded else FEWEST_SIZES)
        )

    def _suspects(self, one: _Series) -> list[int]:
        sizes = sorted(self._points[one])
        points = [self._points[one][size] for size in sizes]
        return [
            sizes[i]
            for i in suspects(
                sizes, [point.seconds for point in points], [point.spread for point in points]
            )
        ]

    def _fits_memory(self, one: _Series, size: int) -> bool:
        return (
            one.primitive not in COLLECTED
            or size / self._byte_scale * one.group.size <= MOST_COLLECTED_BYTES
        )

    def _expected_s(self, one: _Series, size: int) -> float:
        """From the next smaller size, in proportion: an upper bound while a message has a cost of its own. 0: not known."""
        known, factor = self._points.get(one, {}), 1.0
        if one.loaded and not any(smaller <= size for smaller in known):
            known, factor = self._points.get(replace(one, loaded=False), {}), LOADED_SLOWDOWN
        smaller = max((other for other in known if other <= size), default=None)
        return 0.0 if smaller is None else factor * known[smaller].seconds * size / smaller

    def _measure(
        self, one: _Series, size: int, expected_s: float, share_s: float, load: Load | None
    ) -> _Point:
        ranks = one.group.ranks
        operation = (
            OPERATIONS[one.primitive](ranks, int(size / self._byte_scale), self.device)
            if ranks is not None
            else None
        )
        lost = LostTime(load, self.device) if load is not None else None
        warm = min(MOST_WARM, int(WARM_S / expected_s)) if expected_s > 0 else 1
        if operation is not None and ranks is not None and warm > 0:
            self._repeat(operation, ranks, warm, None, None)
        if ranks is not None and load is None:
            self._time_barriers(self.groups.index(one.group), ranks)
        repeats: list[float] = []
        cpu_s = 0.0
        batch = FEWEST_REPEATS if expected_s * BATCH_REPEATS > share_s else BATCH_REPEATS
        while True:
            seconds = torch.zeros(batch, dtype=torch.float64)
            if operation is not None and ranks is not None:
                own_s, own_cpu_s = self._repeat(operation, ranks, batch, load, lost)
                seconds, cpu_s = torch.tensor(own_s, dtype=torch.float64), cpu_s + own_cpu_s
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.world.control)
            repeats += seconds.tolist()
            more_s = sum(repeats) + batch * fmean(repeats)
            if (
                len(repeats) + batch > MOST_REPEATS
                or more_s > share_s
                or (len(repeats) > batch and spread_of(repeats) <= STEADY)
            ):
                break
        if lost is not None and operation is not None:
            taken_s = lost.per_message_s(len(repeats))
        elif self._queued:
            taken_s = 0.0  # the processor only waits for the device, and looks again and again
        else:
            taken_s = max(
                cpu_s / len(repeats) - self._barrier_cpu_s.get(self.groups.index(one.group), 0.0),
                0.0,
            )
        return _Point(
            median(repeats), spread_of(repeats), len(repeats), self._mean_of_members(one, taken_s)
        )

    def _repeat(
        self,
        operation: Callable[[], None],
        ranks: Ranks,
        repeats: int,
        load: Load | None,
        lost: LostTime | None,
    ) -> tuple[list[float], float]:
        """(seconds of every repeat on this rank, CPU time of all of them with their barriers). All ranks start together."""
        seconds, start_cpu_s = [], time.process_time()
        for _ in range(repeats):
            # Not an all-reduce of one element: gloo's ring lets some ranks through it while others still finish the last message.
            dist.barrier(group=ranks.first)
            units = load.units if load is not None else 0
            start_s = self.device.now_s()
            operation()
            seconds.append(self.device.now_s() - start_s)
            if load is not None and lost is not None:
                lost.add(seconds[-1], load.units - units)
            time.sleep(REST_S)
        return seconds, time.process_time() - start_cpu_s

    def _time_barriers(self, number: int, ranks: Ranks) -> None:
        """Once per group, by its members."""
        if number not in self._barrier_cpu_s:
            self._barrier_cpu_s[number] = 0.0
            _, cpu_s = self._repeat(lambda: None, ranks, BARRIERS, None, None)
            self._barrier_cpu_s[number] = cpu_s / BARRIERS

    def _mean_of_members(self, one: _Series, value: float) -> float:
        total = torch.tensor(
            [value, 1.0] if one.group.ranks is not None else [0.0, 0.0], dtype=torch.float64
        )
        dist.all_reduce(total, group=self.world.control)
        return float(total[0] / total[1])


def _device_of(group: dist.ProcessGroup) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if "nccl" in str(dist.get_backend_config(group))
        else torch.device("cpu")
    )


def _fit(one: _Series, points: dict[int, _Point]) -> CollectiveFit:
    sizes = sorted(points)
    found = [points[size] for size in sizes]
    curve = fit_curve(
        sizes,
        [point.seconds for point in found],
        [uncertainty_of(point.spread, point.repeats) for point in found],
    )
    # The clock of CPU time may not tick within a small message.
    cpu_alpha_s, cpu_beta_s_per_byte, _ = fit_alpha_beta(
        sizes, [max(point.cpu_s, CPU_CLOCK_S) for point in found]
    )
    return CollectiveFit(
        one.primitive,
        one.group.size,
        curve.alpha_s,
        curve.beta_s_per_byte,
        curve.relative_error,
        min(sizes),
        max(sizes),
        cpu_alpha_s,
        cpu_beta_s_per_byte,
        where=one.group.where,
        loaded=one.loaded,
        bends=curve.bends,
        large_error=curve.large_error,
        spread=median(point.spread for point in found),
        sizes=len(sizes),
    )
