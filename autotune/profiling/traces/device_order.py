"""What makes the device wait for the host, streams for each other, and the host for the device.

- A kernel follows the driver call with its correlation id.
- A synchronization event tells which record of which stream a wait is for. Where a trace has none (most older ones), the wait is inferred:
  a collective's kernel waits for what was launched last on the other streams, and another kernel behind a `StreamWaitEvent` waits for such
  an op where that op's end explains its start. How many edges were inferred is reported.
- A blocking call (synchronization, copy to or from pageable memory) ends behind the device work that it waits for; only the rest of
  it is its own duration.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field

import numpy as np

from autotune.profiling.traces.collectives import launch_events
from autotune.profiling.traces.rank_trace import DEVICE_WORK, MISSING, Category, RankTrace

EXPLAINS_S = 30e-6
"""An op that starts within this after another one's end, and would have been free to start before, was waiting for it."""
ROUNDING_S = 2e-6
"""Older traces hold whole microseconds, so ends and starts may be off by one each."""

_SYNC_CALL = re.compile(r"(?:cuda|hip)(Stream|Device|Event)Synchronize")
_COPY_CALL = re.compile(r"(?:cuda|hip)Memcpy")
_WAIT_CALL = re.compile(r"(?:cuda|hip)StreamWaitEvent|cuStreamWaitEvent")


@dataclass
class DeviceOrder:
    """All numbers are events. `launch`: device op -> call. `waits`: (device op, device op behind it). `blocks`: (device op, call)."""

    launch: dict[int, int] = field(default_factory=dict)
    waits: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[tuple[int, int]] = field(default_factory=list)
    inferred: int = 0
    orphans: int = 0


@dataclass
class _Stream:
    """Device ops of a stream in launch order, and when they were launched."""

    launched_s: list[float] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)

    def before(self, at_s: float) -> int:
        number = bisect.bisect_left(self.launched_s, at_s) - 1
        return self.ops[number] if number >= 0 else MISSING

    def after(self, at_s: float) -> int:
        number = bisect.bisect_right(self.launched_s, at_s)
        return self.ops[number] if number < len(self.ops) else MISSING


def device_order(trace: RankTrace, device_ops: list[int], calls: list[int]) -> DeviceOrder:
    """`device_ops` and `calls` (driver calls): the events of one step or of several, ascending."""
    return _Finder(trace, device_ops, calls).found


class _Finder:
    def __init__(self, trace: RankTrace, device_ops: list[int], calls: list[int]) -> None:
        self.trace, self.calls = trace, calls
        self.found = DeviceOrder()
        by_correlation = launch_events(trace)
        known = set(calls)
        self.streams: dict[int, _Stream] = {}
        launched = []
        for op in device_ops:
            call = by_correlation.get(int(trace.correlation[op]), MISSING)
            if call in known:
                self.found.launch[op] = call
            else:
                self.found.orphans += 1
            launched.append(
                (float(trace.start_s[call if call in known else op]), float(trace.start_s[op]), op)
            )
        for launched_s, _, op in sorted(launched):
            stream = self.streams.setdefault(int(trace.lane[op]), _Stream())
            stream.launched_s.append(launched_s)
            stream.ops.append(op)
        self.syncs = {
            int(trace.correlation[e]): trace.syncs[trace.sync[e]]
            for e in np.flatnonzero(trace.category == Category.DEVICE_SYNC).tolist()
        }
        self.starts, self.ends = trace.start_s, trace.end_s
        self._find_blocking()
        self._find_waits()

    def _lane_of(self, stream: str) -> int:
        for lane in self.streams:
            if self.trace.lanes[lane].thread == stream:
                return lane
        return MISSING

    def _find_blocking(self) -> None:
        own = {call: op for op, call in self.found.launch.items()}
        for call in self.calls:
            name = self.trace.name_of(call)
            if match := _SYNC_CALL.match(name):
                self.found.blocks += [(op, call) for op in self._waited_for(call, match.group(1))]
            elif (
                _COPY_CALL.match(name)
                and call in own
                and self.ends[own[call]] <= self.ends[call] + ROUNDING_S
            ):
                self.found.blocks.append((own[call], call))

    def _waited_for(self, call: int, what: str) -> list[int]:
        """The device ops that a synchronization waits for."""
        at_s, until_s = float(self.starts[call]), float(self.ends[call]) + ROUNDING_S
        sync = self.syncs.get(int(self.trace.correlation[call]))
        if sync is not None and what == "Event":
            record_s, lane = (
                self._record_s(sync.record_correlation),
                self._lane_of(sync.wait_on_stream),
            )
            streams = [self.streams[lane]] if lane != MISSING and record_s is not None else []
            at_s = record_s if record_s is not None else at_s
        elif sync is not None and what == "Stream":
            lane = self._lane_of(sync.stream)
            streams = [self.streams[lane]] if lane != MISSING else []
        else:
            streams = list(self.streams.values())
        last = [
            op
            for stream in streams
            if (op := stream.before(at_s)) != MISSING and self.ends[op] <= until_s
        ]
        if sync is None and what != "Device" and last:
            last = [max(last, key=lambda op: self.ends[op])]
            self.found.inferred += self.ends[last[0]] > at_s
        return last

    def _record_s(self, correlation: int) -> float | None:
        for call in self._by_correlation.get(correlation, ()):
            return float(self.starts[call])
        return None

    @property
    def _by_correlation(self) -> dict[int, list[int]]:
        if not hasattr(self, "_calls_by_correlation"):
            table: dict[int, list[int]] = {}
            for call in self.calls:
                table.setdefault(int(self.trace.correlation[call]), []).append(call)
            self._calls_by_correlation = table
        return self._calls_by_correlation

    def _find_waits(self) -> None:
        told = [call for call in self.calls if _WAIT_CALL.match(self.trace.name_of(call))]
        for call in told:
            sync = self.syncs.get(int(self.trace.correlation[call]))
            if sync is not None:
                self._told_wait(call, sync.stream, sync.wait_on_stream, sync.record_correlation)
        if len(self.streams) > 1:
            unknown = [call for call in told if int(self.trace.correlation[call]) not in self.syncs]
            self._inferred_waits(unknown)

    def _told_wait(self, call: int, stream: str, wait_on: str, record: int) -> None:
        record_s = self._record_s(record)
        behind, before = self._lane_of(stream), self._lane_of(wait_on)
        if record_s is None or MISSING in (behind, before):
            return
        first, second = (
            self.streams[before].before(record_s),
            self.streams[behind].after(float(self.starts[call])),
        )
        if MISSING not in (first, second) and first != second:
            self._add_wait(first, second)

    def _add_wait(self, first: int, second: int) -> bool:
        """Only where the trace agrees: what ran at the same time did not wait."""
        if self.ends[first] > self.starts[second] + ROUNDING_S:
            return False
        self.found.waits.append((first, second))
        return True

    def _inferred_waits(self, calls: list[int]) -> None:
        waits_s: dict[int, list[float]] = {}
        for call in calls:
            waits_s.setdefault(int(self.trace.lane[call]), []).append(float(self.starts[call]))
        for lane, stream in self.streams.items():
            for number, (launched_s, op) in enumerate(
                zip(stream.launched_s, stream.ops, strict=True)
            ):
                previous_s = stream.launched_s[number - 1] if number else -np.inf
                collective = self.trace.comm[op] != MISSING
                own_calls = (
                    waits_s.get(int(self.trace.lane[self.found.launch[op]]), [])
                    if op in self.found.launch
                    else []
                )
                place = bisect.bisect_left(own_calls, launched_s) - 1
                waited = place >= 0 and own_calls[place] > previous_s
                if not (collective or waited):
                    continue
                at_s = launched_s if collective else own_calls[place]
                free_s = max(self.ends[stream.ops[number - 1]] if number else -np.inf, launched_s)
                for other, other_stream in self.streams.items():
                    if other != lane and (first := other_stream.before(at_s)) != MISSING:
                        self._infer(first, op, collective, free_s)

    def _infer(self, first: int, second: int, collective: bool, free_s: float) -> None:
        late_s = self.starts[second] - self.ends[first]
        explains = self.ends[first] > free_s and late_s <= EXPLAINS_S
        if explains or (collective and self.trace.comm[first] == MISSING):
            self.found.inferred += self._add_wait(first, second)


def device_events(trace: RankTrace) -> np.ndarray:
    """Numbers of kernels, copies and sets."""
    return np.flatnonzero(np.isin(trace.category, DEVICE_WORK))


def without_launch(trace: RankTrace) -> np.ndarray:
    """(N,) whether an event is device work whose launch is not in the trace: of a captured graph, or from before the trace."""
    calls = trace.correlation[(trace.category == Category.RUNTIME) & (trace.correlation >= 0)]
    missing: np.ndarray = np.isin(trace.category, DEVICE_WORK) & ~np.isin(trace.correlation, calls)
    return missing


def launched_before_trace(trace: RankTrace) -> np.ndarray:
    """(N,) whether an event is device work that was launched before the trace began: correlation ids grow."""
    calls = trace.correlation[(trace.category == Category.RUNTIME) & (trace.correlation >= 0)]
    first = calls.min() if len(calls) else 0
    before: np.ndarray = (
        without_launch(trace) & (trace.correlation >= 0) & (trace.correlation < first)
    )
    return before
