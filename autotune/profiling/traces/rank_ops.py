"""One rank's step as ops and the edges between them, such that running them in that order gives the trace's times again.

Every start is explained by what ended last of all that the op depends on; what remains between that end and the start is a cost of
the step from one to the other (Python code, launch latency, waking a thread). It is put where it belongs:

- between two ops of a host thread, and between two ops of a stream, as `gap_s` of the first: it delays no other queue;
- on the way from the host to the device or from one thread to another, as a delay on that edge.

A host thread that idles until another thread is done was waiting for it. The trace does not say so; it is inferred where the other
thread idles at that moment and its last end lies within `WAKE_S`, or `WAKE_SHARE` of the time idled, before.

| symbol | meaning |
|---|---|
| N | ops of the step |
| start | when the op began to make progress, s from the rank's origin: for a blocking call, when what it waits for had ended |
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from autotune.dfg.graph import Kind
from autotune.profiling.traces.collectives import Collective
from autotune.profiling.traces.device_order import (
    ROUNDING_S,
    DeviceOrder,
    device_events,
    device_order,
    launched_before_trace,
    without_launch,
)
from autotune.profiling.traces.host_segments import NO_SCOPE, Scope, Segment, host_segments
from autotune.profiling.traces.rank_trace import MISSING, Category, RankTrace

IDLE_S = 20e-6
WAKE_S = 50e-6
WAKE_SHARE = 0.1
TYPICAL_GAP_S = 10e-6
"""Streams start the next kernel within this; a longer pause has another cause."""


@dataclass
class Op:
    """`lane` is the queue. `collective`: index in the rank's list of collectives, MISSING for none.

    `waited_s`: how long before `start_s` the thread had come to the op and was blocked.
    """

    name: str
    lane: int
    kind: Kind
    start_s: float
    end_s: float
    layer: str = ""
    size_bytes: float = 0.0
    collective: int = MISSING
    gap_s: float = 0.0
    waited_s: float = 0.0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass
class RankOps:
    """`edges` (parent, child) -> delay in seconds. `begin_s` and `end_s`: first start and last end of all ops.

    `inferred`: edges that the trace does not state; `orphans`: device ops without a launch; `unexplained`: (from when, how long) a
    stream idled above `WAKE_S` although all that its next op is known to wait for had ended.
    """

    ops: list[Op] = field(default_factory=list)
    edges: dict[tuple[int, int], float] = field(default_factory=dict)
    inferred: int = 0
    orphans: int = 0
    unexplained: list[tuple[float, float]] = field(default_factory=list)

    @property
    def unexplained_s(self) -> float:
        """Time for which the device waited for something that the trace does not show."""
        return sum(length_s for _, length_s in self.unexplained)

    @property
    def begin_s(self) -> float:
        return min((op.start_s for op in self.ops), default=0.0)

    @property
    def end_s(self) -> float:
        return max((op.end_s for op in self.ops), default=0.0)


def step_ops(
    trace: RankTrace, start_s: float, end_s: float, collectives: list[Collective]
) -> RankOps:
    """The ops of what the host does in [start_s, end_s), and of what it launches on the device, also if that runs later."""
    inside = (trace.start_s >= start_s) & (trace.start_s < end_s)
    host = (
        np.isin(
            trace.category,
            (Category.HOST_OP, Category.RUNTIME, Category.HOST_MARK, Category.MODULE),
        )
        & inside
    )
    calls = np.flatnonzero((trace.category == Category.RUNTIME) & inside).tolist()
    launched = set(trace.correlation[calls].tolist()) - {MISSING}
    orphan = without_launch(trace) & ~launched_before_trace(trace)
    device = [
        event
        for event in device_events(trace).tolist()
        if int(trace.correlation[event]) in launched or (inside[event] and orphan[event])
    ]
    order = device_order(trace, device, calls)
    segments = host_segments(trace, np.flatnonzero(host).tolist())
    return _Builder(
        trace,
        order,
        segments,
        device,
        {one.event: n for n, one in enumerate(collectives)},
        collectives,
    ).build()


def hidden_before(ops: RankOps, floor_s: float) -> RankOps:
    """The same ops and edges, with what happened before `floor_s` taking no time.

    A step whose host runs while the device still works for the step before adds only what lies behind that work's end.
    """
    if floor_s <= ops.begin_s:
        return ops

    def left_s(start_s: float, length_s: float) -> float:
        return max(start_s + length_s, floor_s) - max(start_s, floor_s)

    def cut(op: Op) -> Op:
        start_s, end_s = max(op.start_s, floor_s), max(op.end_s, floor_s)
        return replace(
            op,
            start_s=start_s,
            end_s=end_s,
            gap_s=left_s(op.end_s, op.gap_s),
            waited_s=left_s(op.start_s - op.waited_s, op.waited_s),
        )

    edges = {
        (parent, child): left_s(ops.ops[parent].end_s, delay_s)
        for (parent, child), delay_s in ops.edges.items()
    }
    unexplained = [
        (max(at_s, floor_s), left_s(at_s, length_s)) for at_s, length_s in ops.unexplained
    ]
    return replace(ops, ops=[cut(op) for op in ops.ops], edges=edges, unexplained=unexplained)


class _Builder:
    def __init__(
        self,
        trace: RankTrace,
        order: DeviceOrder,
        segments: dict[int, list[Segment]],
        device: list[int],
        collective_of: dict[int, int],
        collectives: list[Collective],
    ) -> None:
        self.trace, self.order, self.segments, self.device = trace, order, segments, device
        self.collective_of, self.collectives = collective_of, collectives
        self.out = RankOps(inferred=order.inferred, orphans=order.orphans)
        self.by_lane: dict[int, list[int]] = {}
        self.launcher: dict[int, int] = {}  # device event -> op that launches it
        self.scope: dict[int, Scope] = {}  # device event -> scope of its launch
        self.waiter: dict[int, int] = {}  # blocking call -> the op that ends it
        self.of_event: dict[int, int] = {}  # device event -> its op
        self.has_device = bool(device)

    def build(self) -> RankOps:
        launched_by = {call: op for op, call in self.order.launch.items()}
        blocked: dict[int, list[int]] = {}
        for op, call in self.order.blocks:
            blocked.setdefault(call, []).append(op)
        for segments in self.segments.values():
            for segment in segments:
                self._host_ops(segment, launched_by, blocked)
        self._host_order()
        self._device_ops()
        self._flows()
        self._name_kinds()
        return self.out

    def _add(self, op: Op, ordered: bool = True) -> int:
        number = len(self.out.ops)
        self.out.ops.append(op)
        if ordered:
            self.by_lane.setdefault(op.lane, []).append(number)
        return number

    def _edge(self, parent: int, child: int, delay_s: float = 0.0) -> None:
        if parent != child:
            known = self.out.edges.get((parent, child), 0.0)
            self.out.edges[parent, child] = max(known, delay_s)

    def _host_ops(
        self, segment: Segment, launched_by: dict[int, int], blocked: dict[int, list[int]]
    ) -> None:
        """One op, or two where the device op that a call launches begins or ends within it."""
        trace, event = self.trace, segment.event
        name, collective = trace.name_of(event), self.collective_of.get(event, MISSING)
        kind = self._host_kind(segment, collective)
        layer = segment.scope.layer
        size = self.collectives[collective].comm.size_bytes if collective != MISSING else 0.0
        begin_s, end_s = segment.start_s, segment.end_s
        launched = launched_by.get(event) if segment.first else None
        if launched is not None:
            # a call that blocks until its copy is done waits for the stream too: nothing of it comes before the launch
            split_s = (
                begin_s
                if event in blocked
                else min(max(float(trace.start_s[launched]), begin_s), end_s)
            )
            self.launcher[launched] = self._add(
                Op(name, segment.lane, kind, begin_s, split_s, layer)
            )
            self.scope[launched] = segment.scope
            begin_s = split_s
            if begin_s >= end_s and event not in blocked:
                return
        if event in blocked and segment.first:
            done_s = max(float(trace.end_s[op]) for op in blocked[event])
            begin_s = min(max(begin_s, done_s), end_s)
        number = self._add(Op(name, segment.lane, kind, begin_s, end_s, layer, size, collective))
        if event in blocked and segment.first:
            self.waiter[event] = number
            called_s = (
                segment.start_s if launched is None else self.out.ops[self.launcher[launched]].end_s
            )
            self.out.ops[number].waited_s = max(begin_s - called_s, 0.0)

    def _host_kind(self, segment: Segment, collective: int) -> Kind:
        if collective != MISSING:
            return Kind.COLLECTIVE
        if self.has_device and segment.scope.kind != Kind.LOAD:
            return Kind.LAUNCH
        return Kind.OTHER if segment.scope.kind == Kind.COLLECTIVE else segment.scope.kind

    def _host_order(self) -> None:
        """Thread order, and who waits for whom between threads."""
        ops = self.out.ops
        threads = {
            lane: _Thread(
                [ops[n].start_s - ops[n].waited_s for n in numbers],
                [ops[n].end_s for n in numbers],
                numbers,
            )
            for lane, numbers in self.by_lane.items()
        }
        issued = self._issued()
        for lane, numbers in self.by_lane.items():
            for place, number in enumerate(numbers):
                previous = numbers[place - 1] if place else MISSING
                idle_from_s = ops[previous].end_s if previous != MISSING else -np.inf
                called_s = ops[number].start_s - ops[number].waited_s
                if previous != MISSING:
                    self._edge(previous, number)
                    ops[previous].gap_s = max(called_s - idle_from_s, 0.0)
                if issued.get(number, MISSING) != MISSING:
                    self._edge(issued[number], number)
                if previous == MISSING or called_s - idle_from_s > IDLE_S:
                    self._released(
                        threads,
                        lane,
                        number,
                        previous,
                        called_s,
                        idle_from_s,
                        issued.get(number, MISSING),
                    )

    def _released(
        self,
        threads: dict[int, _Thread],
        lane: int,
        number: int,
        previous: int,
        at_s: float,
        idle_from_s: float,
        issuer: int,
    ) -> None:
        """Edges from the other threads that let this one go on; the last of them explains when."""
        ops = self.out.ops
        found = []
        for other, thread in threads.items():
            if other == lane or (last := thread.last_end(at_s)) == MISSING:
                continue
            op, idle = thread.numbers[last], thread.idle(last, at_s)
            if ops[op].start_s >= at_s or ops[op].end_s <= idle_from_s:
                continue
            late_s = at_s - ops[op].end_s
            if (idle and late_s <= max(WAKE_S, WAKE_SHARE * (at_s - idle_from_s))) or (
                previous == MISSING and issuer == MISSING
            ):
                found.append((ops[op].end_s, op))
        if issuer != MISSING and ops[issuer].end_s <= at_s:
            found.append((ops[issuer].end_s, issuer))
        if not found:
            return
        found.sort()
        for _, op in found[:-1]:
            self._edge(op, number)
        end_s, binding = found[-1]
        self._edge(binding, number, at_s - end_s)
        self.out.inferred += binding != issuer
        if previous != MISSING:
            ops[previous].gap_s = 0.0

    def _issued(self) -> dict[int, int]:
        """Collective op of a backend's thread -> the op that issued it: both are first come, first served.

        Where the trace does not tell when they were issued, the order in which they began stands for it.
        """
        ops, trace = self.out.ops, self.trace
        calls, runs = [], []
        for lane, numbers in self.by_lane.items():
            for number in numbers:
                if ops[number].collective != MISSING and not trace.lanes[lane].device:
                    runs.append((self.collectives[ops[number].collective].issued_s, number))
                elif ops[number].name.startswith("c10d::") and not ops[number].name.startswith(
                    "c10d::wait"
                ):
                    calls.append((ops[number].start_s, number))
        calls = _first_of_each(sorted(calls), self.segments)
        runs.sort()
        if len(calls) != len(runs) or any(
            call[0] > ops[run[1]].start_s for call, run in zip(calls, runs, strict=True)
        ):
            return {}
        return {
            run: self._ended_before(call, ops[run].start_s)
            for (_, call), (_, run) in zip(calls, runs, strict=True)
        }

    def _ended_before(self, call: int, at_s: float) -> int:
        """The issuing call, or what its thread did before where the collective begins while the call still runs."""
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
            size = (
                self.collectives[collective].comm.size_bytes
                if collective != MISSING
                else float(trace.size_bytes[event])
            )
            start_s = float(trace.start_s[event])
            op = Op(
                trace.name_of(event),
                int(trace.lane[event]),
                self._device_kind(event, scope, collective),
                start_s,
                0.0,
                scope.layer,
                size,
            )
            op.end_s, op.collective = float(trace.end_s[event]), collective
            self.of_event[event] = self._add(op)
            streams.setdefault(op.lane, []).append(self.of_event[event])
        for numbers in streams.values():
            for first, second in pairwise(numbers):
                ops[first].end_s = max(
                    ops[first].start_s, min(ops[first].end_s, ops[second].start_s)
                )
        waits: dict[int, list[int]] = {}
        for first, second in self.order.waits:
            if trace.start_s[first] < trace.start_s[second]:
                waits.setdefault(second, []).append(self.of_event[first])
        latency_s, gap_s = self._typical()
        for numbers in streams.values():
            for place, number in enumerate(numbers):
                self._explain(
                    number, numbers[place - 1] if place else MISSING, waits, latency_s, gap_s
                )
        for event, call in self.order.blocks:
            if call in self.waiter:
                self._edge(self.of_event[event], self.waiter[call])

    def _device_kind(self, event: int, scope: Scope, collective: int) -> Kind:
        if collective != MISSING:
            return Kind.COLLECTIVE
        name = self.trace.name_of(event)
        if self.trace.category[event] == Category.MEMCPY and any(
            way in name for way in ("HtoD", "DtoH", "H2D", "D2H", "HostToDevice", "DeviceToHost")
        ):
            return Kind.COPY
        return scope.kind if scope.kind not in (Kind.LOAD, Kind.COLLECTIVE) else Kind.OTHER

    def _typical(self) -> tuple[float, float]:
        """Medians of launch latency and of the pause between two ops of a stream, where nothing else delays them."""
        ops = self.out.ops
        late = [
            ops[self.of_event[event]].start_s - ops[op].end_s for event, op in self.launcher.items()
        ]
        late = [value for value in late if 0 <= value <= TYPICAL_GAP_S]
        gaps = []
        for lane, numbers in self.by_lane.items():
            if self.trace.lanes[lane].device:
                pauses = [ops[b].start_s - ops[a].end_s for a, b in pairwise(numbers)]
                gaps += [value for value in pauses if 0 <= value <= TYPICAL_GAP_S]
        return (float(np.median(late)) if late else 0.0), (float(np.median(gaps)) if gaps else 0.0)

    def _explain(
        self,
        number: int,
        previous: int,
        waits: dict[int, list[int]],
        latency_s: float,
        gap_s: float,
    ) -> None:
        """Edges into a device op; what the last of its parents does not explain is that parent's delay."""
        ops, event = self.out.ops, self._event_of[number]
        start_s = ops[number].start_s
        parents = list(waits.get(event, []))
        launch = self.launcher.get(event, MISSING)
        if launch != MISSING:
            parents.append(launch)
        if previous != MISSING:
            parents.append(previous)
        if not parents:
            return
        binding = max(parents, key=lambda parent: ops[parent].end_s)
        left_s = max(start_s - ops[binding].end_s, 0.0)
        if left_s > WAKE_S:
            self.out.unexplained.append((ops[binding].end_s, left_s))
        for parent in parents:
            slack_s = max(start_s - ops[parent].end_s, 0.0)
            own_s = (
                left_s
                if parent == binding
                else min(slack_s, latency_s if parent == launch else 0.0)
            )
            self._edge(parent, number, own_s if parent != previous else 0.0)
        if previous != MISSING:
            ops[previous].gap_s = (
                left_s
                if previous == binding
                else min(gap_s, max(start_s - ops[previous].end_s, 0.0))
            )

    @property
    def _event_of(self) -> dict[int, int]:
        if not hasattr(self, "_events_by_op"):
            self._events_by_op = {op: event for event, op in self.of_event.items()}
        return self._events_by_op

    def _flows(self) -> None:
        """Forward op -> its backward op, where the profiler drew an arrow."""
        ops = self.out.ops
        starts = {lane: [ops[n].start_s for n in numbers] for lane, numbers in self.by_lane.items()}
        for flow in self.trace.flows:
            ends = []
            for lane, at_s in ((flow.from_lane, flow.from_s), (flow.to_lane, flow.to_s)):
                place = bisect.bisect_right(starts.get(lane, []), at_s + 1e-9) - 1
                ends.append(self.by_lane[lane][place] if place >= 0 else MISSING)
            first, second = ends
            if MISSING not in ends and ops[first].end_s <= ops[second].start_s and first != second:
                self._edge(first, second)

    def _name_kinds(self) -> None:
        """Where nothing tells what is forward: it is what runs before the first backward op."""
        kinds = {op.kind for op in self.out.ops}
        if Kind.BACKWARD not in kinds or Kind.FORWARD in kinds:
            return
        turn_s = min(op.start_s for op in self.out.ops if op.kind == Kind.BACKWARD)
        for op in self.out.ops:
            if op.kind == Kind.OTHER and op.start_s < turn_s:
                op.kind = Kind.FORWARD


@dataclass
class _Thread:
    """Starts and ends of a thread's ops, both ascending."""

    starts_s: list[float]
    ends_s: list[float]
    numbers: list[int]

    def last_end(self, at_s: float) -> int:
        """Place of the last op that ended by then."""
        return bisect.bisect_right(self.ends_s, at_s) - 1

    def idle(self, place: int, at_s: float) -> bool:
        """Whether the thread has begun nothing since that op and does not before `at_s`."""
        return place + 1 >= len(self.starts_s) or self.starts_s[place + 1] >= at_s - ROUNDING_S


def _first_of_each(
    calls: list[tuple[float, int]], segments: dict[int, list[Segment]]
) -> list[tuple[float, int]]:
    """Calls have several segments, and ops are numbered as segments lie: only first segments are calls."""
    firsts = {
        (segment.lane, segment.start_s)
        for own in segments.values()
        for segment in own
        if segment.first
    }
    starts = {start_s for _, start_s in firsts}
    return [call for call in calls if call[0] in starts]
