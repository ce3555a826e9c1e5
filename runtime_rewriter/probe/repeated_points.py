"""Repeats the exchanges of a probe, size by size, until their times are steady or time runs out.

The exchanges belong to a framework, behind `Exchanges`. All decisions follow from figures that they
return, so that clients that get the same figures decide the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Generic, Protocol, TypeVar

from autotune.cluster import Where
from autotune.recordings.probe import ProbePoint, ProbeSeries
from runtime_rewriter.probe.collectives import (
    BARRIERS,
    FEWEST_REPEATS,
    FEWEST_SIZES,
    MOST_WARM,
    REPAIR_ROUNDS,
    WARM_S,
    sizes_up_to,
)
from runtime_rewriter.probe.rounds import STEADY, larger_are_known, spread_of, suspect_sizes

PREPARATION_S = 0.1
"""A new exchange takes this long until it is measured."""

Report = Callable[[str], None]
Exchange = TypeVar("Exchange")


@dataclass(frozen=True)
class MeasuredSeries:
    """A primitive between all members of each of `groups` at once."""

    primitive: str
    where: Where
    groups: tuple[tuple[str, ...], ...]

    @property
    def members(self) -> int:
        return len(self.groups[0])


@dataclass
class Runs:
    """Repeats of one exchange: the slowest member's seconds, and CPU seconds of all together."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


class Exchanges(Protocol[Exchange]):
    """Exchanges of a framework between members. `now_s`: a clock that all clients share."""

    def now_s(self) -> float: ...

    def added(
        self, primitive: str | None, groups: tuple[tuple[str, ...], ...], size_bytes: int
    ) -> Exchange:
        """Prepare an exchange; None: the members only meet."""

    def run(self, exchange: Exchange, repeats: int) -> Runs: ...

    def mean_cpu(self, primitive: str, members: int) -> float:
        """The mean CPU time of a member by the one that `run` returns."""


def series_of(
    where: Where, groups: Iterable[Sequence[str]], primitives: Iterable[str]
) -> list[MeasuredSeries]:
    members = tuple(tuple(group) for group in groups)
    return [MeasuredSeries(primitive, where, members) for primitive in primitives]


def probed_sizes(largest_bytes: int) -> tuple[int, ...]:
    """Every second size of the probe down from the largest: each costs the time for a new graph."""
    sizes = sizes_up_to(largest_bytes)
    fewer = sizes[::-2][::-1]
    return fewer if len(fewer) >= FEWEST_SIZES else sizes


class RepeatedPoints(Generic[Exchange]):
    """The points of a probe of about `budget_s`."""

    def __init__(self, exchanges: Exchanges[Exchange], budget_s: float, report: Report) -> None:
        self._exchanges, self._report = exchanges, report
        self._start_s, self._budget_s = exchanges.now_s(), budget_s
        self._points: dict[MeasuredSeries, dict[int, ProbePoint]] = {}
        self._meeting_cpu_s: dict[tuple[tuple[str, ...], ...], float] = {}

    def run_pass(self, series: list[MeasuredSeries], sizes: tuple[int, ...], end: float) -> None:
        """Every size of every series for which there is time; smallest sizes first."""
        todo = [(one, size) for size in sizes for one in series]
        for number, (one, size) in enumerate(todo):
            if self._larger_are_known(one):
                continue
            expected_s = self._expected_s(one, size)
            share_s = self._share_s(expected_s, len(todo) - number, end)
            if share_s > 0:
                self._report(f"{one.primitive} on {one.members} ranks, {size} bytes")
                point = self._measure(one, size, expected_s, share_s)
                self._points.setdefault(one, {})[size] = point

    def repair(self, end: float) -> None:
        """Repeat disturbed points and keep the quicker result: disturbances only slow down."""
        for _ in range(REPAIR_ROUNDS):
            todo = [
                (one, size) for one in self._points for size in suspect_sizes(self._points[one])
            ]
            for number, (one, size) in enumerate(todo):
                before = self._points[one][size]
                share_s = self._share_s(before.seconds, len(todo) - number, end)
                if share_s > 0:
                    again = self._measure(one, size, before.seconds, share_s)
                    self._points[one][size] = min(before, again, key=lambda point: point.seconds)

    def measured(self) -> tuple[ProbeSeries, ...]:
        return tuple(
            ProbeSeries(
                one.primitive,
                one.members,
                one.where,
                False,
                tuple(points[size] for size in sorted(points)),
            )
            for one, points in self._points.items()
        )

    def _share_s(self, expected_s: float, open_points: int, end: float) -> float:
        """Seconds for a point, 0 to leave it out; the pass ends at this share of the time."""
        needed_s = FEWEST_REPEATS * expected_s + PREPARATION_S
        left_s = self._start_s + end * self._budget_s - self._exchanges.now_s()
        return max(left_s / open_points, needed_s) if left_s >= needed_s else 0.0

    def _measure(
        self, one: MeasuredSeries, size: int, expected_s: float, share_s: float
    ) -> ProbePoint:
        exchanges = self._exchanges
        if one.groups not in self._meeting_cpu_s:
            meeting = exchanges.run(exchanges.added(None, one.groups, 0), BARRIERS)
            self._meeting_cpu_s[one.groups] = meeting.cpu_s / BARRIERS
        exchange = exchanges.added(one.primitive, one.groups, size)
        warm = min(MOST_WARM, int(WARM_S / expected_s)) if expected_s > 0 else 1
        exchanges.run(exchange, max(warm, 1))  # the members of new groups find each other
        repeats, cpu_s = [], 0.0
        while True:
            runs = exchanges.run(exchange, FEWEST_REPEATS)
            repeats += runs.seconds
            cpu_s += runs.cpu_s
            more_s = sum(repeats) + FEWEST_REPEATS * fmean(repeats)
            steady = spread_of(repeats) <= STEADY
            if len(repeats) >= 2 * FEWEST_REPEATS or more_s > share_s or steady:
                break
        measured_s = cpu_s / len(repeats) - self._meeting_cpu_s[one.groups]
        mean_cpu_s = max(measured_s, 0.0) * exchanges.mean_cpu(one.primitive, one.members)
        return ProbePoint(size, median(repeats), spread_of(repeats), len(repeats), mean_cpu_s)

    def _larger_are_known(self, one: MeasuredSeries) -> bool:
        points = self._points.get(one, {})
        last = [points[size] for size in sorted(points)[-2:]]
        return len(last) == 2 and larger_are_known(
            [point.size_bytes for point in last],
            [point.seconds for point in last],
            [point.spread for point in last],
        )

    def _expected_s(self, one: MeasuredSeries, size: int) -> float:
        """In proportion to the next smaller size, which is an upper bound; 0: unknown."""
        known = self._points.get(one, {})
        smaller = max((other for other in known if other <= size), default=None)
        return 0.0 if smaller is None else known[smaller].seconds * size / smaller
