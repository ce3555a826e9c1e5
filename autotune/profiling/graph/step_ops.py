"""Builds one rank's step as ops and edges whose replay gives the trace's times again.

The dependency that ended last explains an op's start. The time between that end and the start is a
cost of the way from one to the other: Python code, launch latency, waking a thread. It becomes

- the first op's `gap_s` between two ops of a host thread or of a stream: it delays no other queue;
- a delay on the edge from host to device, or from one thread to another.

A host thread that idles until another thread is done was waiting for it. The trace does not state
this. It is inferred where the other thread idles at that moment and its last end lies less than
`WAKE_S`, or `WAKE_SHARE` of the idle time, earlier.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from autotune.arrays import BoolArray
from autotune.dfg.graph import Kind
from autotune.profiling.formats.rank_trace import (
    DEVICE_WORK,
    HOST_WORK,
    MISSING,
    Category,
    RankTrace,
)
from autotune.profiling.graph.device_order import (
    EXPLAINS_S,
    ROUNDING_S,
    DeviceOrder,
    device_order,
    launched_before_trace,
    without_launch,
)
from autotune.profiling.graph.host_segments import NO_SCOPE, HostSegment, Scope, host_segments
from autotune.profiling.graph.rank_ops import Cause, DeviceWait, RankOps, TracedOp
from autotune.profiling.traces.collectives import TracedCollective

IDLE_S = 20e-6
WAKE_S = 50e-6
WAKE_SHARE = 0.1
TAIL_S = 20e-6
"""A kernel begins at most this long before the end of one that filled the device."""
FULL_SHARE = 0.8
"""Share of a wait for which other streams work if they are its cause."""
TYPICAL_GAP_S = 10e-6
"""Streams start the next kernel within this; a longer pause has another cause."""
_ISSUING_CALL = re.compile(r"c10d::(?!wait)")
_POLLING_CALL = re.compile(r"(?:cuda|hip)(?:EventQuery|ThreadExchangeStreamCaptureMode)$")
_COPY_WAYS = ("HtoD", "DtoH", "H2D", "D2H", "HostToDevice", "DeviceToHost")


def step_ops(
    trace: RankTrace, start_s: float, end_s: float, collectives: Sequence[TracedCollective]
) -> RankOps:
    """The ops of the host in [start_s, end_s), and those that it launches on the device.

    The latter may run later.
    """
    inside = (trace.start_s >= start_s) & (trace.start_s < end_s)
    host = np.isin(trace.category, HOST_WORK) & inside & ~_polls(trace)
    calls = np.flatnonzero((trace.category == Category.RUNTIME) & inside).tolist()
    launched = set(trace.correlation[calls].tolist()) - {MISSING}
    orphan = without_launch(trace) & ~launched_before_trace(trace) & inside
    device = [
        event
        for event in np.flatnonzero(np.isin(trace.category, DEVICE_WORK)).tolist()
        if int(trace.correlation[event]) in launched or orphan[event]
    ]
    order = device_order(trace, device, calls)
    segments = host_segments(trace, np.flatnonzero(host).tolist())
    return _StepBuilder(trace, order, segments, device, collectives).build()


def _polls(trace: RankTrace) -> BoolArray:
    """(N,) whether an event is of a thread that only asks whether device work is done.

    Such a watchdog wakes up by a clock of its own. It is no part of the step.
    """
    names = np.array([bool(_POLLING_CALL.match(name)) for name in trace.names])
    working = np.isin(trace.category, HOST_WORK) & ~names[trace.name]
    polls: BoolArray = ~np.isin(trace.lane, np.unique(trace.lane[working]))
    return polls


class _StepBuilder:
    def __init__(
        self,
        trace: RankTrace,
        order: DeviceOrder,
        segments: dict[int, list[HostSegment]],
        device: list[int],
        collectives: Sequence[TracedCollective],
    ) -> None:
        self.trace, self.order, self.segments, self.device = trace, order, segments, device
        self.collectives = collectives
        self.collective_of = {one.event: number for number, one in enumerate(collectives)}
        self.out = RankOps(inferred=order.inferred, orphans=order.orphans)
        self.by_lane: dict[int, list[int]] = {}
        self.launcher: dict[int, int] = {}  # device event -> op that launches it
        self.scope: dict[int, Scope] = {}  # device event -> scope of its launch
        self.waiter: dict[int, int] = {}  # blocking call -> the op that ends it
        self.op_of: dict[int, int] = {}  # device event -> its op
        self.crowded: set[int] = set()  # device events that waited for other streams' work

    def build(self) -> RankOps:
        launched_by = {call: event for event, call in self.order.launch.items()}
        blockers: dict[int, list[int]] = {}
        for event, call in self.order.blocks:
            blockers.setdefault(call, []).append(event)
        for segments in self.segments.values():
            for segment in segments:
                first = segment.first
                launched = launched_by.get(segment.event) if first else None
                self._host_ops(segment, launched, blockers.get(segment.event, []) if first else [])
        self._host_order()
        self._device_ops()
        self._flows()
        self._forward_before_backward()
        return self.out

    def _add(self, op: TracedOp) -> int:
        number = len(self.out.ops)
        self.out.ops.append(op)
        self.by_lane.setdefault(op.lane, []).append(number)
        return number

    def _edge(self, parent: int, child: int, delay_s: float = 0.0) -> None:
        if parent != child:
            known_s = self.out.edges.get((parent, child), 0.0)
            self.out.edges[parent, child] = max(known_s, delay_s)

    def _host_ops(self, segment: HostSegment, launched: int | None, blockers: list[int]) -> None:
        """Add one op, or two where a device op that the call launches splits it."""
        trace, event = self.trace, segment.event
        collective = self.collective_of.get(event, MISSING)
        begin_s, end_s = segment.start_s, segment.end_s
        op = TracedOp(
            name=trace.name_of(event),
            lane=segment.lane,
            kind=self._host_kind(segment, collective),
            start_s=begin_s,
            end_s=end_s,
            layer=segment.scope.layer,
            event=event,
        )
        called_s = begin_s
        if launched is not None:
            # a call that blocks until its copy is done also waits for the stream: none of its own
            # time comes before the launch
            if not blockers:
                called_s = min(max(float(trace.start_s[launched]), begin_s), end_s)
            first = replace(op, end_s=called_s)
            self.launcher[launched] = self._add(first)
            self.scope[launched] = segment.scope
            if called_s >= end_s and not blockers:
                return
        op.start_s = called_s
        if collective != MISSING:
            op.collective = collective
            op.size_bytes = self.collectives[collective].comm.size_bytes
        number = self._add(op)
        if blockers:
            done_s = float((trace.start_s[blockers] + trace.duration_s[blockers]).max())
            op.start_s = min(max(called_s, done_s), end_s)
            op.waited_s = max(op.start_s - called_s, 0.0)
            self.waiter[event] = number

    def _host_kind(self, segment: HostSegment, collective: int) -> Kind:
        if collective != MISSING:
            return Kind.COLLECTIVE
        if self.device and segment.scope.kind != Kind.LOAD:
            return Kind.LAUNCH
        return Kind.OTHER if segment.scope.kind == Kind.COLLECTIVE else segment.scope.kind

    def _host_order(self) -> None:
        """Add the order within threads, and the edges between threads."""
        ops = self.out.ops
        threads = {
            lane: _Thread(
                [ops[n].called_s for n in numbers], [ops[n].end_s for n in numbers], numbers
            )
            for lane, numbers in self.by_lane.items()
        }
        issuers = self._issuers()
        for lane, numbers in self.by_lane.items():
            others = [thread for other, thread in threads.items() if other != lane]
            for previous, number in pairwise([MISSING, *numbers]):
                called_s = ops[number].called_s
                issuer = issuers.get(number, MISSING)
                idle_from_s = -np.inf
                if previous != MISSING:
                    idle_from_s = ops[previous].end_s
                    self._edge(previous, number)
                    ops[previous].gap_s = max(called_s - idle_from_s, 0.0)
                if issuer != MISSING:
                    self._edge(issuer, number)
                if called_s - idle_from_s > IDLE_S:
                    self._release(others, number, previous, idle_from_s, issuer)

    def _release(
        self, others: list[_Thread], number: int, previous: int, idle_from_s: float, issuer: int
    ) -> None:
        """Add edges from the other threads that let this one go on; the last one explains when."""
        ops = self.out.ops
        at_s = ops[number].called_s
        wake_s = max(WAKE_S, WAKE_SHARE * (at_s - idle_from_s))
        alone = previous == MISSING and issuer == MISSING
        causes = []
        for thread in others:
            if (last := thread.last_end(at_s)) == MISSING:
                continue
            cause = thread.numbers[last]
            if ops[cause].start_s >= at_s or ops[cause].end_s <= idle_from_s:
                continue
            woke = thread.idle(last, at_s) and at_s - ops[cause].end_s <= wake_s
            if woke or alone:
                causes.append((ops[cause].end_s, cause))
        if issuer != MISSING and ops[issuer].end_s <= at_s:
            causes.append((ops[issuer].end_s, issuer))
        if not causes:
            return
        causes.sort()
        for _, cause in causes[:-1]:
            self._edge(cause, number)
        end_s, binding = causes[-1]
        self._edge(binding, number, at_s - end_s)
        self.out.inferred += binding != issuer
        if previous != MISSING:
            ops[previous].gap_s = 0.0

    def _issuers(self) -> dict[int, int]:
        """Collective op of a backend's thread -> the op that issued it.

        Both are first come, first served. Where the trace does not state when collectives were
        issued, they count in the order in which they began.
        """
        ops = self.out.ops
        segments = [segment for of_lane in self.segments.values() for segment in of_lane]
        first_starts_s = {segment.start_s for segment in segments if segment.first}
        calls, runs = [], []
        for lane, numbers in self.by_lane.items():
            for number in numbers:
                op = ops[number]
                if op.collective != MISSING and not self.trace.lanes[lane].device:
                    runs.append((self.collectives[op.collective].issued_s, number))
                elif op.start_s in first_starts_s and _ISSUING_CALL.match(op.name):
                    calls.append((op.start_s, number))  # later segments of a call issue nothing
        calls.sort()
        runs.sort()
        if len(calls) != len(runs):
            return {}
        pairs = [(call, run) for (_, call), (_, run) in zip(calls, runs, strict=True)]
        if any(ops[call].start_s > ops[run].start_s for call, run in pairs):
            return {}
        return {run: self._ended_before(call, ops[run].start_s) for call, run in pairs}

    def _ended_before(self, call: int, at_s: float) -> int:
        """The issuing call, or the op before it if the collective begins while the call runs."""
        numbers = self.by_lane[self.out.ops[call].lane]
        place = numbers.index(call)
        while place >= 0 and self.out.ops[numbers[place]].end_s > at_s:
            place -= 1
        return numbers[place] if place >= 0 else MISSING

    def _device_ops(self) -> None:
        trace, ops = self.trace, self.out.ops
        streams: dict[int, list[int]] = {}
        for event in self.device:
            scope = self.scope.get(event, NO_SCOPE)
            collective = self.collective_of.get(event, MISSING)
            size_bytes = float(trace.size_bytes[event])
            if collective != MISSING:
                size_bytes = self.collectives[collective].comm.size_bytes
            op = TracedOp(
                name=trace.name_of(event),
                lane=int(trace.lane[event]),
                kind=self._device_kind(event, scope, collective),
                start_s=float(trace.start_s[event]),
                end_s=float(trace.start_s[event] + trace.duration_s[event]),
                layer=scope.layer,
                size_bytes=size_bytes,
                collective=collective,
                event=event,
            )
            self.op_of[event] = self._add(op)
            streams.setdefault(op.lane, []).append(event)
        for events in streams.values():
            for event, after in pairwise(events):
                op, next_op = ops[self.op_of[event]], ops[self.op_of[after]]
                op.end_s = max(op.start_s, min(op.end_s, next_op.start_s))
        waits: dict[int, list[int]] = {}
        for first, second in self.order.waits:
            if trace.start_s[first] < trace.start_s[second]:
                waits.setdefault(second, []).append(self.op_of[first])
        self._resource_waits(streams, waits)
        latency_s, gap_s = self._typical()
        for events in streams.values():
            previous = MISSING
            for event in events:
                self._explain(event, previous, waits.get(event, []), latency_s, gap_s)
                previous = self.op_of[event]
        for event, call in self.order.blocks:
            if call in self.waiter:
                self._edge(self.op_of[event], self.waiter[call])

    def _resource_waits(self, streams: dict[int, list[int]], waits: dict[int, list[int]]) -> None:
        """Explain long waits by the ops of other streams that ended before the waiting op began.

        Either a wait between streams is not in the trace, or kernels of other streams filled the
        device. In the latter case the next kernel begins while the last blocks of another one still
        run. A tail of at most `TAIL_S` is cut off; what a longer one delays is a wait of its own.
        Streams of a program that never lets one wait for another are not tied.
        """
        if not self.order.wait_calls:
            return
        ops, found = self.out.ops, []
        for device in self._devices(streams):
            ends_s = [ops[self.op_of[event]].end_s for event in device]
            for event in device:
                op, free_s = ops[self.op_of[event]], self._free_s(event, waits)
                if op.start_s - free_s <= WAKE_S:
                    continue
                first = bisect.bisect_right(ends_s, free_s)
                last = bisect.bisect_right(ends_s, op.start_s + TAIL_S)
                others = [self.op_of[other] for other in device[first:last]]
                others = [other for other in others if ops[other].lane != op.lane]
                others = [other for other in others if ops[other].start_s < op.start_s]
                if not others:
                    continue
                cause = min(others, key=lambda other: abs(ops[other].end_s - op.start_s))
                late_s = op.start_s - ops[cause].end_s
                if late_s > EXPLAINS_S and not self._is_full(device, op, ops[cause].end_s):
                    continue
                found.append((cause, event))
        for cause, event in found:
            ops[cause].end_s = min(ops[cause].end_s, ops[self.op_of[event]].start_s)
            waits.setdefault(event, []).append(cause)
            self.crowded.add(event)
        self.out.inferred += len(found)

    def _devices(self, streams: dict[int, list[int]]) -> list[list[int]]:
        """The events of each device with several streams, by their ends."""
        devices: dict[str, list[list[int]]] = {}
        for lane, events in streams.items():
            devices.setdefault(self.trace.lanes[lane].process, []).append(events)
        return [
            sorted(chain(*lanes), key=lambda event: self.out.ops[self.op_of[event]].end_s)
            for lanes in devices.values()
            if len(lanes) > 1
        ]

    def _is_full(self, device: list[int], waiting: TracedOp, from_s: float) -> bool:
        """Whether other streams work for most of the time from `from_s` to the op's start."""
        busy_s, until_s = 0.0, waiting.start_s
        for event in device:
            op = self.out.ops[self.op_of[event]]
            if op.lane != waiting.lane and op.end_s > from_s and op.start_s < until_s:
                busy_s += min(op.end_s, until_s) - max(op.start_s, from_s)
        return busy_s >= FULL_SHARE * (until_s - from_s)

    def _free_s(self, event: int, waits: dict[int, list[int]]) -> float:
        """When everything that the trace states about a device op's start had happened."""
        number = self.op_of[event]
        numbers = self.by_lane[self.out.ops[number].lane]
        place = bisect.bisect_left(numbers, number)
        known = [*waits.get(event, []), *numbers[max(place - 1, 0) : place]]
        if event in self.launcher:
            known.append(self.launcher[event])
        return max((self.out.ops[one].end_s for one in known), default=np.inf)

    def _device_kind(self, event: int, scope: Scope, collective: int) -> Kind:
        if collective != MISSING:
            return Kind.COLLECTIVE
        if self.trace.category[event] == Category.MEMCPY:
            name = self.trace.name_of(event)
            if any(way in name for way in _COPY_WAYS):
                return Kind.COPY
        return scope.kind if scope.kind not in (Kind.LOAD, Kind.COLLECTIVE) else Kind.OTHER

    def _typical(self) -> tuple[float, float]:
        """Median launch latency, and median pause between two ops of a stream.

        Both without other causes of delay: a stream also pauses where the next launch comes late.
        """
        ops = self.out.ops
        late_s = [
            ops[self.op_of[event]].start_s - ops[launch].end_s
            for event, launch in self.launcher.items()
        ]
        launch_of = {self.op_of[event]: launch for event, launch in self.launcher.items()}
        gaps_s = [
            ops[after].start_s - ops[before].end_s
            for lane, numbers in self.by_lane.items()
            if self.trace.lanes[lane].device
            for before, after in pairwise(numbers)
            if after not in launch_of or ops[launch_of[after]].end_s <= ops[before].end_s
        ]
        latency_s, gap_s = (
            [value for value in values if 0 <= value <= TYPICAL_GAP_S]
            for values in (late_s, gaps_s)
        )
        return (
            float(np.median(latency_s)) if latency_s else 0.0,
            float(np.median(gap_s)) if gap_s else 0.0,
        )

    def _explain(
        self, event: int, previous: int, waits: list[int], latency_s: float, gap_s: float
    ) -> None:
        """Add the edges into a device op.

        The part of the start that its last parent does not explain becomes that parent's delay.
        """
        ops, number = self.out.ops, self.op_of[event]
        start_s = ops[number].start_s
        launch = self.launcher.get(event, MISSING)
        parents = [*waits, *(op for op in (launch, previous) if op != MISSING)]
        if not parents:
            return
        binding = max(parents, key=lambda parent: ops[parent].end_s)
        left_s = max(start_s - ops[binding].end_s, 0.0)
        if left_s > WAKE_S:
            cause = Cause.DEVICE_FULL if event in self.crowded else Cause.UNKNOWN
            usual_s = {launch: latency_s, previous: gap_s}.get(binding, 0.0)
            from_s = ops[binding].end_s + usual_s
            self.out.waits.append(DeviceWait(number, from_s, left_s - usual_s, cause))
        for parent in parents:
            slack_s = max(start_s - ops[parent].end_s, 0.0)
            if parent == previous:
                ops[parent].gap_s = left_s if parent == binding else min(gap_s, slack_s)
                self._edge(parent, number)
            elif parent == binding:
                self._edge(parent, number, left_s)
            else:
                self._edge(parent, number, min(slack_s, latency_s) if parent == launch else 0.0)

    def _flows(self) -> None:
        """Add edges from forward ops to their backward ops, where the profiler drew an arrow."""
        ops = self.out.ops
        starts_s = {
            lane: [ops[n].start_s for n in numbers] for lane, numbers in self.by_lane.items()
        }

        def op_at(lane: int, at_s: float) -> int:
            place = bisect.bisect_right(starts_s.get(lane, []), at_s + 1e-9) - 1
            return self.by_lane[lane][place] if place >= 0 else MISSING

        for flow in self.trace.flows:
            first, second = op_at(flow.from_lane, flow.from_s), op_at(flow.to_lane, flow.to_s)
            if MISSING not in (first, second) and ops[first].end_s <= ops[second].start_s:
                self._edge(first, second)

    def _forward_before_backward(self) -> None:
        """Where nothing states what is forward: ops before the first backward op are."""
        kinds = {op.kind for op in self.out.ops}
        if Kind.BACKWARD not in kinds or Kind.FORWARD in kinds:
            return
        turn_s = min(op.start_s for op in self.out.ops if op.kind == Kind.BACKWARD)
        for op in self.out.ops:
            if op.kind == Kind.OTHER and op.start_s < turn_s:
                op.kind = Kind.FORWARD


@dataclass
class _Thread:
    """Calls and ends of a thread's ops, both ascending."""

    called_s: list[float]
    ends_s: list[float]
    numbers: list[int]

    def last_end(self, at_s: float) -> int:
        """Place of the last op that ended by then."""
        return bisect.bisect_right(self.ends_s, at_s) - 1

    def idle(self, place: int, at_s: float) -> bool:
        """Whether the thread begins nothing between that op and `at_s`."""
        return place + 1 >= len(self.called_s) or self.called_s[place + 1] >= at_s - ROUNDING_S
