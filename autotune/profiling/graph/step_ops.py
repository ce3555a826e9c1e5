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
from itertools import pairwise

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
    ROUNDING_S,
    DeviceOrder,
    device_order,
    launched_before_trace,
    without_launch,
)
from autotune.profiling.graph.device_waits import WAKE_S, explain_starts
from autotune.profiling.graph.host_segments import (
    MXNET_BACKWARD,
    NO_SCOPE,
    HostSegment,
    Scope,
    host_segments,
)
from autotune.profiling.graph.rank_ops import RankOps, TracedOp
from autotune.profiling.graph.step_draft import StepDraft, without_cycles
from autotune.profiling.traces.collectives import TracedCollective

IDLE_S = 20e-6
WAKE_SHARE = 0.1
_ISSUING_CALL = re.compile(r"c10d::(?!wait)")
_POLLING_CALL = re.compile(r"(?:cuda|hip)(?:EventQuery|ThreadExchangeStreamCaptureMode)$")
_COPY_WAYS = ("HtoD", "DtoH", "H2D", "D2H", "HostToDevice", "DeviceToHost", "PU2")


def step_ops(
    trace: RankTrace, start_s: float, end_s: float, collectives: Sequence[TracedCollective]
) -> RankOps:
    """The ops of the host in [start_s, end_s), and those that it launches on the device.

    The latter may run later.
    """
    inside = (trace.start_s >= start_s) & (trace.start_s < end_s)
    host = np.isin(trace.category, HOST_WORK) & inside & ~_polls(trace)
    calls = np.flatnonzero((trace.category == Category.RUNTIME) & inside).tolist()
    orphan = without_launch(trace) & ~launched_before_trace(trace) & inside
    launched = (trace.launch != MISSING) & inside[trace.launch]
    device = np.flatnonzero(np.isin(trace.category, DEVICE_WORK) & (launched | orphan)).tolist()
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
        self.draft = StepDraft(trace, order, device, self.out)
        self.by_lane = self.draft.by_lane
        self.scope: dict[int, Scope] = {}  # device event -> scope of its launch
        self.waiter: dict[int, int] = {}  # blocking call -> the op that ends it

    def build(self) -> RankOps:
        launched_by: dict[int, list[int]] = {}
        for event, call in self.order.launch.items():
            launched_by.setdefault(call, []).append(event)
        blockers: dict[int, list[int]] = {}
        for event, call in self.order.blocks:
            blockers.setdefault(call, []).append(event)
        for segments in self.segments.values():
            for segment in segments:
                own = segment.event if segment.first else MISSING
                self._host_ops(segment, launched_by.get(own, []), blockers.get(own, []))
        self._host_order()
        self._device_ops()
        self._flows()
        without_cycles(self.out)
        self._forward_before_backward()
        return self.out

    def _host_ops(self, segment: HostSegment, launched: list[int], blockers: list[int]) -> None:
        """Add one op, or two where a device op that the call launches splits it.

        A captured graph is launched by one call for many device ops.
        """
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
        if launched:
            # a call that blocks until its copy is done also waits for the stream: none of its own
            # time comes before the launch
            if not blockers:
                called_s = min(max(float(trace.start_s[launched].min()), begin_s), end_s)
            first = replace(op, end_s=called_s)
            number = self.draft.add(first)
            for device_op in launched:
                self.draft.launcher[device_op] = number
                self.scope[device_op] = segment.scope
            if called_s >= end_s and not blockers:
                return
        op.start_s = called_s
        if collective != MISSING:
            op.collective = collective
            op.size_bytes = self.collectives[collective].comm.size_bytes
        number = self.draft.add(op)
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
                    self.draft.edge(previous, number)
                    ops[previous].gap_s = max(called_s - idle_from_s, 0.0)
                if issuer != MISSING:
                    self.draft.edge(issuer, number)
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
            self.draft.edge(cause, number)
        end_s, binding = causes[-1]
        self.draft.edge(binding, number, at_s - end_s)
        self.out.inferred += binding != issuer
        if previous != MISSING:
            ops[previous].gap_s = 0.0

    def _issuers(self) -> dict[int, int]:
        """Collective op of a backend's thread -> the op that issued it.

        Both are first come, first served. Where the trace does not state when collectives were
        issued, they count in the order in which they began. Where their number is not that of the
        issuing calls, the last op that ended before on a thread without collectives issues.
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
            return self._ended_last([run for _, run in runs])
        pairs = [(call, run) for (_, call), (_, run) in zip(calls, runs, strict=True)]
        if any(ops[call].start_s > ops[run].start_s for call, run in pairs):
            return {}
        return {run: self._ended_before(call, ops[run].start_s) for call, run in pairs}

    def _ended_last(self, runs: Sequence[int]) -> dict[int, int]:
        """Op -> the last op before its start of a host thread that runs no collective, if any.

        The threads of a backend are idle until something is issued to them.
        """
        ops = self.out.ops
        backend = {ops[run].lane for run in runs}
        issuing = sorted(
            (ops[number].end_s, number)
            for lane, numbers in self.by_lane.items()
            if lane not in backend and not self.trace.lanes[lane].device
            for number in numbers
        )
        ends_s = [end_s for end_s, _ in issuing]
        places = {run: bisect.bisect_right(ends_s, ops[run].start_s) - 1 for run in runs}
        return {run: issuing[place][1] for run, place in places.items() if place >= 0}

    def _ended_before(self, call: int, at_s: float) -> int:
        """The issuing call, or the op before it if the collective begins while the call runs."""
        numbers = self.by_lane[self.out.ops[call].lane]
        place = bisect.bisect_left(numbers, call)
        while place >= 0 and self.out.ops[numbers[place]].end_s > at_s:
            place -= 1
        return numbers[place] if place >= 0 else MISSING

    def _device_ops(self) -> None:
        trace = self.trace
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
            self.draft.op_of[event] = self.draft.add(op)
        explain_starts(self.draft)
        for event, call in self.order.blocks:
            if call in self.waiter:
                self.draft.edge(self.draft.op_of[event], self.waiter[call])

    def _device_kind(self, event: int, scope: Scope, collective: int) -> Kind:
        if collective != MISSING:
            return Kind.COLLECTIVE
        if self.trace.category[event] == Category.MEMCPY:
            name = self.trace.name_of(event)
            if any(way in name for way in _COPY_WAYS):
                return Kind.COPY
        if scope is NO_SCOPE and MXNET_BACKWARD.match(self.trace.name_of(event)):
            return Kind.BACKWARD  # an operator on a device, without a launch
        return scope.kind if scope.kind not in (Kind.LOAD, Kind.COLLECTIVE) else Kind.OTHER

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
                self.draft.edge(first, second)

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
