"""Times TensorFlow's exchanges on the real links before a job's first trial.

The client of rank 0 measures for all ranks: servers note the times within the graph. It repeats an
exchange until its share of the time is spent, and those once more that look disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import tensorflow as tf

from autotune.cluster import Where
from autotune.recordings.probe import ProbePoint, ProbeSeries
from runtime_rewriter.probe.collectives import (
    BARRIERS,
    FEWEST_REPEATS,
    FEWEST_SIZES,
    MOST_WARM,
    REPAIR_ROUNDS,
    REST_S,
    WARM_S,
    sizes_up_to,
)
from runtime_rewriter.probe.groups import members_of
from runtime_rewriter.probe.rounds import STEADY, larger_are_known, spread_of, suspects
from runtime_rewriter.probe.tensorflow_exchanges import (
    ON_OTHER_GROUPS,
    TENSORFLOW_OPERATIONS,
    TimedExchange,
    mean_by_root,
    timed_exchange,
)
from runtime_rewriter.tensorflow.collectives import Keys
from runtime_rewriter.tensorflow.running import RunningGraph, translated_errors

v1 = tf.compat.v1

PREPARATION_S = 0.1
"""Servers take this long to get the graph of a new exchange, until it is measured."""
MARGIN_S = 60.0
"""A probe that takes so much longer than its time is stuck."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class _Series:
    primitive: str
    where: Where
    groups: tuple[tuple[str, ...], ...]

    @property
    def members(self) -> int:
        return len(self.groups[0])


@dataclass
class _Runs:
    """Repeats of one exchange: the slowest member's seconds, and CPU time of this process."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


def probe_tensorflow(
    running: RunningGraph,
    budget_s: float,
    devices_per_host: tuple[int, ...],
    largest_bytes: int,
    report: Report = lambda description: None,
) -> tuple[ProbeSeries, ...]:
    """Time each exchange at sizes up to `largest_bytes`, for about `budget_s`.

    It leaves out sizes whose time the last two tell. `devices_per_host`: ranks per host, in rank
    order. Raises `SynchronizationError` if an exchange does not end.
    """
    devices = running.servers.devices
    everyone = _series(Where.WORLD, [devices], TENSORFLOW_OPERATIONS)
    others = [
        one
        for (where, _), groups in members_of(len(devices), devices_per_host).items()
        for one in _series(
            where, [[devices[rank] for rank in group] for group in groups], ON_OTHER_GROUPS
        )
    ]
    sizes = tensorflow_sizes(largest_bytes)
    with _prober(running, budget_s, report) as prober:
        prober.run_pass(everyone, sizes, 0.75)
        prober.run_pass(others, sizes, 0.9)
        prober.repair(1.0)
        return prober.measured()


def tensorflow_sizes(largest_bytes: int) -> tuple[int, ...]:
    """Every second size of the probe down from the largest: each costs the time for a new graph."""
    sizes = sizes_up_to(largest_bytes)
    fewer = sizes[::-2][::-1]
    return fewer if len(fewer) >= FEWEST_SIZES else sizes


def _series(where: Where, groups: list[Any], primitives: Iterable[str]) -> list[_Series]:
    members = tuple(tuple(group) for group in groups)
    return [_Series(primitive, where, members) for primitive in primitives]


@contextmanager
def _prober(running: RunningGraph, budget_s: float, report: Report) -> Iterator[_Prober]:
    with running.further_keys() as keys, tf.Graph().as_default() as graph:
        session = v1.Session(running.servers.target, graph=graph, config=running.servers.config)
        with session, translated_errors():
            yield _Prober(session, graph, keys, budget_s, report)


class _Prober:
    def __init__(
        self, session: Any, graph: Any, keys: Keys, budget_s: float, report: Report
    ) -> None:
        self._session, self._graph, self._keys, self._report = session, graph, keys, report
        self._start_s, self._budget_s = time.perf_counter(), budget_s
        self._options = v1.RunOptions(timeout_in_ms=int(1e3 * (budget_s + MARGIN_S)))
        self._points: dict[_Series, dict[int, ProbePoint]] = {}
        self._meeting_cpu_s: dict[tuple[tuple[str, ...], ...], float] = {}
        self._exchanges = 0

    def run_pass(self, series: list[_Series], sizes: tuple[int, ...], end: float) -> None:
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
            todo = [(one, size) for one in self._points for size in self._suspects(one)]
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
        left_s = self._start_s + end * self._budget_s - time.perf_counter()
        return max(left_s / open_points, needed_s) if left_s >= needed_s else 0.0

    def _measure(self, one: _Series, size: int, expected_s: float, share_s: float) -> ProbePoint:
        if one.groups not in self._meeting_cpu_s:
            meeting = self._run(self._added(None, one.groups, 0), BARRIERS)
            self._meeting_cpu_s[one.groups] = meeting.cpu_s / BARRIERS
        exchange = self._added(one.primitive, one.groups, size)
        warm = min(MOST_WARM, int(WARM_S / expected_s)) if expected_s > 0 else 1
        self._run(exchange, max(warm, 1))  # the members of new groups find each other
        repeats, cpu_s = [], 0.0
        while True:
            runs = self._run(exchange, FEWEST_REPEATS)
            repeats += runs.seconds
            cpu_s += runs.cpu_s
            more_s = sum(repeats) + FEWEST_REPEATS * fmean(repeats)
            steady = spread_of(repeats) <= STEADY
            if len(repeats) >= 2 * FEWEST_REPEATS or more_s > share_s or steady:
                break
        of_root_s = cpu_s / len(repeats) - self._meeting_cpu_s[one.groups]
        mean_cpu_s = max(of_root_s, 0.0) * mean_by_root(one.primitive, one.members)
        return ProbePoint(size, median(repeats), spread_of(repeats), len(repeats), mean_cpu_s)

    def _added(
        self, primitive: str | None, groups: tuple[tuple[str, ...], ...], size: int
    ) -> TimedExchange:
        self._exchanges += 1
        scope = f"exchange_{self._exchanges}"
        exchange = timed_exchange(scope, primitive, groups, size, self._keys.next_key)
        self._keys.next_key = exchange.next_key
        with self._graph.as_default():
            tf.graph_util.import_graph_def(exchange.graph_def, name="")
        return exchange

    def _run(self, exchange: TimedExchange, repeats: int) -> _Runs:
        runs = _Runs()
        for _ in range(repeats):
            before_s = time.process_time()
            spans = self._session.run(list(exchange.spans), options=self._options)
            time.sleep(REST_S)
            runs.cpu_s += time.process_time() - before_s
            runs.seconds.append(max(float(end_s - start_s) for start_s, end_s in spans))
        return runs

    def _suspects(self, one: _Series) -> list[int]:
        sizes = sorted(self._points[one])
        points = [self._points[one][size] for size in sizes]
        seconds = [point.seconds for point in points]
        spreads = [point.spread for point in points]
        return [sizes[index] for index in suspects(sizes, seconds, spreads)]

    def _larger_are_known(self, one: _Series) -> bool:
        points = self._points.get(one, {})
        last = [points[size] for size in sorted(points)[-2:]]
        return len(last) == 2 and larger_are_known(
            [point.size_bytes for point in last],
            [point.seconds for point in last],
            [point.spread for point in last],
        )

    def _expected_s(self, one: _Series, size: int) -> float:
        """In proportion to the next smaller size, which is an upper bound; 0: unknown."""
        known = self._points.get(one, {})
        smaller = max((other for other in known if other <= size), default=None)
        return 0.0 if smaller is None else known[smaller].seconds * size / smaller
