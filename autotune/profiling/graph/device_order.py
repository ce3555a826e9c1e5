"""Finds what makes devices wait for the host, streams for each other, and the host for devices.

- A kernel follows the driver call with its correlation id.
- A synchronization event names the record of the stream that a wait is for. Most older traces lack
  it. Then the wait is inferred: a collective's kernel waits for the last launches on the other
  streams. Another kernel after a `StreamWaitEvent` waits for such an op if that op's end explains
  its start. The number of inferred edges is reported.
- A blocking call (synchronization, copy to or from pageable memory) ends after the device work that
  it waits for; only the rest is its own duration.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field

import numpy as np

from autotune.profiling.formats.rank_trace import DEVICE_WORK, MISSING, Category, RankTrace

EXPLAINS_S = 30e-6
"""An op waited for another one if it starts within this after that one's end, and would have been
free to start before."""
ROUNDING_S = 2e-6
"""Older traces hold whole microseconds, so ends and starts may each be off by one."""

_SYNC_CALL = re.compile(r"(?:cuda|hip)(Stream|Device|Event)Synchronize")
_COPY_CALL = re.compile(r"(?:cuda|hip)Memcpy")
_WAIT_CALL = re.compile(r"(?:cuda|hip)StreamWaitEvent|cuStreamWaitEvent")

WITHIN_DEVICE = "DtoD"
"""In the name of a copy that the host never waits for (CUDA Runtime API, sec. 2)."""


@dataclass
class DeviceOrder:
    """Numbers are events.

    `launch`: device op -> call. `waits`: (device op, device op after it). `blocks`: (device op,
    call). `inferred`: edges that the trace does not state. `orphans`: device ops without a launch.
    `wait_calls`: calls that make a stream wait for another one.
    """

    launch: dict[int, int] = field(default_factory=dict)
    waits: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[tuple[int, int]] = field(default_factory=list)
    inferred: int = 0
    orphans: int = 0
    wait_calls: int = 0


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
    """`device_ops` and `calls` (driver calls): ascending events of one step or of several."""
    return _OrderFinder(trace, device_ops, calls).order


class _OrderFinder:
    def __init__(self, trace: RankTrace, device_ops: list[int], calls: list[int]) -> None:
        self.trace, self.calls = trace, calls
        self.starts, self.ends = trace.start_s, trace.end_s
        self.order = DeviceOrder()
        self.streams: dict[int, _Stream] = {}
        self._fill_streams(device_ops)
        self.syncs = {
            int(trace.correlation[e]): trace.syncs[trace.sync[e]]
            for e in np.flatnonzero(trace.category == Category.DEVICE_SYNC).tolist()
        }
        self.record_s: dict[int, float] = {}  # correlation id -> start of its first call
        for call in calls:
            self.record_s.setdefault(int(trace.correlation[call]), float(self.starts[call]))
        self._find_blocking()
        self._find_waits()

    def _fill_streams(self, device_ops: list[int]) -> None:
        trace, known = self.trace, set(self.calls)
        launched = []
        for op in device_ops:
            call = int(trace.launch[op])
            if call in known:
                self.order.launch[op] = call
            else:
                self.order.orphans += 1
            launched_s = float(self.starts[call if call in known else op])
            launched.append((launched_s, float(self.starts[op]), op))
        for launched_s, _, op in sorted(launched):
            stream = self.streams.setdefault(int(trace.lane[op]), _Stream())
            stream.launched_s.append(launched_s)
            stream.ops.append(op)

    def _lane_of(self, stream: str, device: str) -> int:
        """The lane of a device's stream; of any device if none that works is stated."""
        lanes = self.trace.lanes
        named = (lane for lane in self._lanes_on(device) if lanes[lane].thread == stream)
        return next(named, MISSING)

    def _lanes_on(self, device: str) -> list[int]:
        if device not in self.trace.working_devices:
            return list(self.streams)
        lanes = self.trace.lanes
        return [lane for lane in self.streams if lanes[lane].process == device]

    def _streams_named(self, stream: str, device: str) -> list[_Stream]:
        lane = self._lane_of(stream, device)
        return [self.streams[lane]] if lane != MISSING else []

    def _find_blocking(self) -> None:
        op_of = {call: op for op, call in self.order.launch.items()}
        for call in self.calls:
            name = self.trace.name_of(call)
            if match := _SYNC_CALL.match(name):
                ops = self._waited_for(call, match.group(1))
                self.order.blocks += [(op, call) for op in ops]
            elif _COPY_CALL.match(name) and call in op_of:
                op = op_of[call]
                on_device = WITHIN_DEVICE in self.trace.name_of(op)
                if not on_device and self.ends[op] <= self.ends[call] + ROUNDING_S:
                    self.order.blocks.append((op, call))

    def _waited_for(self, call: int, what: str) -> list[int]:
        """The device ops that a synchronization waits for."""
        at_s, until_s = float(self.starts[call]), float(self.ends[call]) + ROUNDING_S
        sync = self.syncs.get(int(self.trace.correlation[call]))
        streams = list(self.streams.values())
        if sync is not None and what == "Event":
            record_s = self.record_s.get(sync.record_correlation)
            awaited = self._streams_named(sync.wait_on_stream, sync.device)
            streams = [] if record_s is None else awaited
            at_s = at_s if record_s is None else record_s
        elif sync is not None and what == "Stream":
            streams = self._streams_named(sync.stream, sync.device)
        elif sync is not None:
            streams = [self.streams[lane] for lane in self._lanes_on(sync.device)]
        last = [stream.before(at_s) for stream in streams]
        last = [op for op in last if op != MISSING and self.ends[op] <= until_s]
        if sync is None and what != "Device" and last:
            last = [max(last, key=lambda op: self.ends[op])]
            self.order.inferred += self.ends[last[0]] > at_s
        return last

    def _find_waits(self) -> None:
        unstated = []
        for call in self.calls:
            if not _WAIT_CALL.match(self.trace.name_of(call)):
                continue
            self.order.wait_calls += 1
            sync = self.syncs.get(int(self.trace.correlation[call]))
            if sync is None:
                unstated.append(call)
                continue
            record_s = self.record_s.get(sync.record_correlation)
            before = self._lane_of(sync.wait_on_stream, sync.device)
            after = self._lane_of(sync.stream, sync.device)
            if record_s is None or MISSING in (before, after):
                continue
            first = self.streams[before].before(record_s)
            second = self.streams[after].after(float(self.starts[call]))
            if MISSING not in (first, second) and first != second:
                self._add_wait(first, second)
        if len(self.streams) > 1:
            self._infer_waits(unstated)

    def _add_wait(self, first: int, second: int) -> bool:
        """Add the wait unless the trace contradicts it: ops that overlap did not wait."""
        if self.ends[first] > self.starts[second] + ROUNDING_S:
            return False
        self.order.waits.append((first, second))
        return True

    def _infer_waits(self, calls: list[int]) -> None:
        waits_s: dict[int, list[float]] = {}
        for call in calls:
            waits_s.setdefault(int(self.trace.lane[call]), []).append(float(self.starts[call]))
        for lane, stream in self.streams.items():
            others = [other for key, other in self.streams.items() if key != lane]
            previous_s, previous_end_s = -np.inf, -np.inf
            for launched_s, op in zip(stream.launched_s, stream.ops, strict=True):
                launch = self.order.launch.get(op, MISSING)
                thread = int(self.trace.lane[launch]) if launch != MISSING else MISSING
                thread_waits_s = waits_s.get(thread, [])
                place = bisect.bisect_left(thread_waits_s, launched_s) - 1
                waited = place >= 0 and thread_waits_s[place] > previous_s
                collective = self.trace.comm[op] != MISSING
                if collective or waited:
                    at_s = launched_s if collective else thread_waits_s[place]
                    free_s = max(previous_end_s, launched_s)
                    for other in others:
                        self._infer_wait(other.before(at_s), op, bool(collective), free_s)
                previous_s, previous_end_s = launched_s, self.ends[op]

    def _infer_wait(self, first: int, second: int, collective: bool, free_s: float) -> None:
        if first == MISSING:
            return
        late_s = self.starts[second] - self.ends[first]
        explains = self.ends[first] > free_s and late_s <= EXPLAINS_S
        if explains or (collective and self.trace.comm[first] == MISSING):
            self.order.inferred += self._add_wait(first, second)


def without_launch(trace: RankTrace) -> np.ndarray:
    """(N,) whether an event is device work whose launch is not in the trace.

    Such work belongs to a captured graph, or was launched before the trace.
    """
    calls = trace.correlation[(trace.category == Category.RUNTIME) & (trace.correlation >= 0)]
    missing: np.ndarray = np.isin(trace.category, DEVICE_WORK) & ~np.isin(trace.correlation, calls)
    return missing


def launched_before_trace(trace: RankTrace) -> np.ndarray:
    """(N,) whether an event is device work launched before the trace: correlation ids grow."""
    calls = trace.correlation[(trace.category == Category.RUNTIME) & (trace.correlation >= 0)]
    first = calls.min() if len(calls) else 0
    earlier = (trace.correlation >= 0) & (trace.correlation < first)
    before: np.ndarray = without_launch(trace) & earlier
    return before
