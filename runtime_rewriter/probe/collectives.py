"""Times the collectives that plans use on the real links: alone, and while every rank computes.

| symbol | meaning |
|---|---|
| series | one primitive on one group of ranks, alone or under load |
| point | one size of a series: the median over repeats of the slowest rank's time |
| share | seconds that a point may take: the pass's remaining time over its remaining points |

Rank 0 decides for all ranks which points still fit into the time. All other decisions follow from
figures that every rank has, since they were reduced over the ranks. A point is repeated until its
spread is small or its share is spent, and once more at the end if it looks disturbed.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch
import torch.distributed as dist

from autotune.recordings.probe import ProbedLinks, ProbePoint, ProbeSeries
from runtime_rewriter.probe.groups import ProbeGroup, ProbeGroups, devices_per_host
from runtime_rewriter.probe.load import Load, LostTime
from runtime_rewriter.probe.operations import (
    COLLECTED,
    EVERYWHERE,
    ON_THE_WORLD,
    OPERATIONS,
    UNDER_LOAD,
)
from runtime_rewriter.probe.pairs import PairProbe, Report
from runtime_rewriter.probe.peers import PeerProbe
from runtime_rewriter.probe.rounds import STEADY, larger_are_known, spread_of, suspect_sizes
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.ranks import SynchronizerGroups

SIZES_BYTES = tuple(2**power for power in range(12, 25, 2))  # 4 KiB .. 16 MiB
BETWEEN_BYTES = (*(2**power for power in range(13, 25, 2)), 2**25, 2**26)
"""Added by a long probe: the sizes between, and up to 64 MiB."""
FEWEST_SIZES = 3
"""Two tell latency and bandwidth, a third one the error of their line."""
LOADED_BYTES = tuple(2**power for power in (16, 18, 20, 22))
FEWEST_REPEATS = 3
BATCH_REPEATS = 5
MOST_REPEATS = 40
WARM_S = 0.3
MOST_WARM = 4
"""Untimed messages before each point, as far as they fit into `WARM_S`. TCP's windows grow to the
new size first, as in training: the first messages of 1 MiB through a slow host took 20 % longer
than later ones."""
MOST_COLLECTED_BYTES = 2**30
"""On the one rank on which a gather or a push ends."""
LOADED_SLOWDOWN = 2.0
"""Expected slowdown of a message under load, until it is measured."""
REPAIR_ROUNDS = 2
TIMEOUT_MARGIN_S = 60.0
REST_S = 0.001
BARRIERS = 12
"""After a message, its threads still move the data in sockets and go to sleep; a rest lets them.
The CPU time of a barrier with such a rest is measured on `BARRIERS` of them and subtracted."""


@dataclass(frozen=True)
class ProbeResult:
    """The same on every rank."""

    series: tuple[ProbeSeries, ...]
    links: ProbedLinks


@dataclass(frozen=True)
class _Series:
    primitive: str
    group: ProbeGroup
    loaded: bool = False

    @property
    def name(self) -> str:
        load = " while they compute" if self.loaded else ""
        return f"{self.primitive} on {self.group.size} ranks{load}"


def probe_links(
    process_group: dist.ProcessGroup | None = None,
    deadline_s: float = 30.0,
    devices: tuple[int, ...] = (),
    byte_scale: float = 1.0,
    largest_bytes: int = SIZES_BYTES[-1],
) -> tuple[ProbeSeries, ...]:
    """The short probe. Collective over the group (None: the world); the same series on every rank.

    It repeats a point three times, and as often again if these differ: the fit counts no more
    repeats that follow one another (`link_fit.INDEPENDENT_REPEATS`). It leaves out sizes whose time
    the last two tell. No message of a plan is larger than `largest_bytes`. `devices`: ranks per
    host, in rank order. With a `byte_scale` of k a message of S bytes is sent as S/k, on links that
    have 1/k of their rate.
    """
    sizes = sizes_up_to(largest_bytes)
    with _prober(
        process_group, deadline_s, devices, byte_scale, lambda _: None, short=True
    ) as prober:
        prober.run_pass(prober.series_on(prober.groups[:1], EVERYWHERE), sizes, 0.55)
        prober.run_pass(prober.series_on(prober.groups[1:], EVERYWHERE), sizes, 0.85)
        prober.repair(1.0)
        return prober.measured()


def sizes_up_to(largest_bytes: int) -> tuple[int, ...]:
    """The probe's sizes up to `largest_bytes`, which replaces those above its half.

    At least `FEWEST_SIZES`, which a fit needs, however small the largest message is.
    """
    smaller = tuple(size for size in SIZES_BYTES if 2 * size <= largest_bytes)
    sizes = (*smaller, largest_bytes) if largest_bytes < SIZES_BYTES[-1] else SIZES_BYTES
    return sizes if len(sizes) >= FEWEST_SIZES else SIZES_BYTES[:FEWEST_SIZES]


def probe_cluster(
    process_group: dist.ProcessGroup | None,
    budget_s: float,
    devices: tuple[int, ...],
    report: Report,
    byte_scale: float = 1.0,
    computing: bool = True,
) -> ProbeResult:
    """The long probe: hosts' own links, their peers at once, and every primitive at more sizes.

    With `computing`, also messages while every rank computes. Every rank calls `report` with a
    description of each measurement.
    """
    with _prober(process_group, budget_s, devices, byte_scale, report, short=False) as prober:
        world, others = prober.groups[:1], prober.groups[1:]
        links = ProbedLinks()
        if world:
            pairs = PairProbe(prober.world, prober.device, prober.grant, byte_scale, report)
            of_hosts = devices_per_host(prober.world.size, devices)
            links = pairs.probe(of_hosts, 0.15)
            several = PeerProbe(prober.world, prober.device, prober.grant, byte_scale, report)
            links = replace(links, peers=several.probe(of_hosts, dict(links.between), 0.22))
        on_world = prober.series_on(world, EVERYWHERE)
        on_others = prober.series_on(others, EVERYWHERE)
        prober.run_pass(on_world, SIZES_BYTES, 0.4)
        prober.run_pass(on_others + prober.series_on(world, ON_THE_WORLD), SIZES_BYTES, 0.6)
        if computing and world:
            loaded = prober.series_on(world, UNDER_LOAD, loaded=True)
            with Load(prober.device.device) as load:
                prober.run_pass(loaded, LOADED_BYTES, 0.78, load)
        prober.run_pass(on_world + on_others, BETWEEN_BYTES, 0.9)
        prober.repair(1.0)
        return ProbeResult(prober.measured(), links)


@contextmanager
def _prober(
    process_group: dist.ProcessGroup | None,
    budget_s: float,
    devices: tuple[int, ...],
    byte_scale: float,
    report: Report,
    short: bool,
) -> Iterator[_Prober]:
    """A prober whose groups last for one probe; without groups for a single rank."""
    timeout_s = budget_s + TIMEOUT_MARGIN_S
    world = SynchronizerGroups.of(process_group, timeout_s, timeout_s)
    try:
        probe_groups = ProbeGroups(world, devices, timeout_s)
        try:
            yield _Prober(world, probe_groups.groups, budget_s, byte_scale, report, short)
        finally:
            probe_groups.destroy()
    finally:
        world.destroy()


class _Prober:
    def __init__(
        self,
        world: SynchronizerGroups,
        groups: list[ProbeGroup],
        budget_s: float,
        byte_scale: float,
        report: Report,
        short: bool,
    ) -> None:
        self.world = world
        self.groups = groups
        self.device = Device(_device_of(world.base))
        self._queued = self.device.queues(world.base)
        self._byte_scale = byte_scale
        self._report = report
        self._short = short
        self._most_repeats = 2 * FEWEST_REPEATS if short else MOST_REPEATS
        self._start_s = time.perf_counter()
        self._budget_s = budget_s
        self._points: dict[_Series, dict[int, ProbePoint]] = {}
        self._barrier_cpu_s: dict[int, float] = {}  # by the number of the group

    def series_on(
        self, groups: list[ProbeGroup], primitives: Iterable[str], loaded: bool = False
    ) -> list[_Series]:
        """Every primitive on every group, group by group."""
        return [_Series(primitive, group, loaded) for group in groups for primitive in primitives]

    def grant(self, needed_s: float, open_points: int, end: float) -> float:
        """Rank 0's decision for all: seconds for a point, 0 to leave it out. Collective.

        The point needs at least `needed_s`; the pass ends at the share `end` of the budget.
        """
        decision = torch.zeros(1, dtype=torch.float64)
        if self.world.rank == 0:
            left_s = self._start_s + end * self._budget_s - time.perf_counter()
            if left_s > 0 and left_s >= needed_s:
                decision[0] = max(left_s / open_points, needed_s)
        dist.broadcast(decision, group=self.world.control, group_src=0)
        return float(decision.item())

    def run_pass(
        self, series: list[_Series], sizes: tuple[int, ...], end: float, load: Load | None = None
    ) -> None:
        """Every size of every series for which there is time; smallest sizes first."""
        todo = [(one, size) for size in sizes for one in series if self._fits_memory(one, size)]
        for number, (one, size) in enumerate(todo):
            if self._short and self._larger_are_known(one):
                continue
            expected_s = self._expected_s(one, size)
            share_s = self.grant(FEWEST_REPEATS * expected_s, len(todo) - number, end)
            if share_s > 0:
                self._report(f"{one.name}, {size} bytes")
                point = self._measure(one, size, expected_s, share_s, load)
                self._points.setdefault(one, {})[size] = point

    def repair(self, end: float) -> None:
        """Repeat disturbed points and keep the quicker result: disturbances only slow down."""
        for _ in range(REPAIR_ROUNDS):
            alone = [one for one in self._points if not one.loaded]
            todo = [(one, size) for one in alone for size in suspect_sizes(self._points[one])]
            for number, (one, size) in enumerate(todo):
                before = self._points[one][size]
                share_s = self.grant(FEWEST_REPEATS * before.seconds, len(todo) - number, end)
                if share_s > 0:
                    self._report(f"{one.name}, {size} bytes again")
                    again = self._measure(one, size, before.seconds, share_s, None)
                    self._points[one][size] = min(before, again, key=lambda point: point.seconds)

    def measured(self) -> tuple[ProbeSeries, ...]:
        return tuple(
            ProbeSeries(
                one.primitive,
                one.group.size,
                one.group.where,
                one.loaded,
                tuple(points[size] for size in sorted(points)),
            )
            for one, points in self._points.items()
        )

    def _fits_memory(self, one: _Series, size: int) -> bool:
        collected_bytes = size / self._byte_scale * one.group.size
        return one.primitive not in COLLECTED or collected_bytes <= MOST_COLLECTED_BYTES

    def _larger_are_known(self, one: _Series) -> bool:
        """Whether the last two points tell the times of larger messages."""
        points = self._points.get(one, {})
        last = [points[size] for size in sorted(points)[-2:]]
        return len(last) == 2 and larger_are_known(
            [point.size_bytes / self._byte_scale for point in last],
            [point.seconds for point in last],
            [point.spread for point in last],
        )

    def _expected_s(self, one: _Series, size: int) -> float:
        """In proportion to the next smaller size, which is an upper bound; 0: unknown."""
        known, factor = self._points.get(one, {}), 1.0
        if one.loaded and not any(smaller <= size for smaller in known):
            known, factor = self._points.get(replace(one, loaded=False), {}), LOADED_SLOWDOWN
        smaller = max((other for other in known if other <= size), default=None)
        return 0.0 if smaller is None else factor * known[smaller].seconds * size / smaller

    def _measure(
        self, one: _Series, size: int, expected_s: float, share_s: float, load: Load | None
    ) -> ProbePoint:
        ranks, group_number = one.group.ranks, self.groups.index(one.group)
        operation = None
        if ranks is not None:
            prepare = OPERATIONS[one.primitive]
            operation = prepare(ranks, int(size / self._byte_scale), self.device)
        lost = LostTime(load, self.device) if load is not None else None
        warm = min(MOST_WARM, int(WARM_S / expected_s)) if expected_s > 0 else 1
        if operation is not None and ranks is not None and warm > 0:
            self._repeat(operation, ranks, warm, None, None)
        if ranks is not None and load is None:
            self._time_barriers(group_number, ranks)
        repeats: list[float] = []
        cpu_s = 0.0
        few = self._short or expected_s * BATCH_REPEATS > share_s
        batch = FEWEST_REPEATS if few else BATCH_REPEATS
        while True:
            seconds = torch.zeros(batch, dtype=torch.float64)
            if operation is not None and ranks is not None:
                batch_s, batch_cpu_s = self._repeat(operation, ranks, batch, load, lost)
                seconds = torch.tensor(batch_s, dtype=torch.float64)
                cpu_s += batch_cpu_s
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.world.control)
            repeats += seconds.tolist()
            more_s = sum(repeats) + batch * fmean(repeats)
            steady = (self._short or len(repeats) > batch) and spread_of(repeats) <= STEADY
            if len(repeats) + batch > self._most_repeats or more_s > share_s or steady:
                break
        if lost is not None and operation is not None:
            taken_s = lost.per_message_s(len(repeats))
        elif self._queued:
            taken_s = 0.0  # the processor only polls the device
        else:
            barrier_cpu_s = self._barrier_cpu_s.get(group_number, 0.0)
            taken_s = max(cpu_s / len(repeats) - barrier_cpu_s, 0.0)
        mean_cpu_s = self._mean_of_members(one, taken_s)
        return ProbePoint(size, median(repeats), spread_of(repeats), len(repeats), mean_cpu_s)

    def _repeat(
        self,
        operation: Callable[[], None],
        ranks: SynchronizerGroups,
        repeats: int,
        load: Load | None,
        lost: LostTime | None,
    ) -> tuple[list[float], float]:
        """(seconds of every repeat on this rank, CPU time of all of them with their barriers).

        All ranks start together.
        """
        seconds, start_cpu_s = [], time.process_time()
        for _ in range(repeats):
            # Not an all-reduce of one element: gloo's ring lets some ranks through while others
            # still finish the last message.
            dist.barrier(group=ranks.first)
            units = load.units if load is not None else 0
            start_s = self.device.now_s()
            operation()
            seconds.append(self.device.now_s() - start_s)
            if load is not None and lost is not None:
                lost.add(seconds[-1], load.units - units)
            time.sleep(REST_S)
        return seconds, time.process_time() - start_cpu_s

    def _time_barriers(self, group_number: int, ranks: SynchronizerGroups) -> None:
        """Once per group, by its members."""
        if group_number not in self._barrier_cpu_s:
            _, cpu_s = self._repeat(lambda: None, ranks, BARRIERS, None, None)
            self._barrier_cpu_s[group_number] = cpu_s / BARRIERS

    def _mean_of_members(self, one: _Series, value: float) -> float:
        member = one.group.ranks is not None
        total = torch.tensor([value, 1.0] if member else [0.0, 0.0], dtype=torch.float64)
        dist.all_reduce(total, group=self.world.control)
        return float(total[0] / total[1])


def _device_of(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in str(dist.get_backend_config(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
