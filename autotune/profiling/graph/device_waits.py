"""Explains when device ops begin: their launch, their stream, and waits between streams.

A wait that nothing in the trace explains is reported with its length. If other streams worked
throughout, their kernels filled the device.
"""

from __future__ import annotations

import bisect
from itertools import chain, pairwise

import numpy as np

from autotune.profiling.formats.rank_trace import MISSING
from autotune.profiling.graph.device_order import EXPLAINS_S
from autotune.profiling.graph.rank_ops import Cause, DeviceWait, TracedOp
from autotune.profiling.graph.step_draft import StepDraft

WAKE_S = 50e-6
"""An idle queue wakes up within this after the end of what it waited for."""
TAIL_S = 20e-6
"""A kernel begins at most this long before the end of one that filled the device."""
FULL_SHARE = 0.8
"""Share of a wait for which other streams work if they are its cause."""
TYPICAL_GAP_S = 10e-6
"""Streams start the next kernel within this; a longer pause has another cause."""


def explain_starts(draft: StepDraft) -> None:
    """Add the edges into the device ops of a draft, and its unexplained waits."""
    _DeviceWaits(draft).run()


class _DeviceWaits:
    def __init__(self, draft: StepDraft) -> None:
        self.draft, self.out = draft, draft.out
        self.ops, self.op_of = draft.out.ops, draft.op_of
        self.streams: dict[int, list[int]] = {}
        for event in draft.device:
            self.streams.setdefault(self.ops[self.op_of[event]].lane, []).append(event)
        self.crowded: set[int] = set()  # device events that waited for other streams' work

    def run(self) -> None:
        for events in self.streams.values():
            for event, after in pairwise(events):
                op, next_op = self.ops[self.op_of[event]], self.ops[self.op_of[after]]
                op.end_s = max(op.start_s, min(op.end_s, next_op.start_s))
        waits: dict[int, list[int]] = {}
        starts_s = self.draft.trace.start_s
        for first, second in self.draft.order.waits:
            if starts_s[first] < starts_s[second]:
                waits.setdefault(second, []).append(self.op_of[first])
        self._find_crowded(waits)
        latency_s, gap_s = self._typical()
        for events in self.streams.values():
            previous = MISSING
            for event in events:
                self._explain(event, previous, waits.get(event, []), latency_s, gap_s)
                previous = self.op_of[event]

    def _find_crowded(self, waits: dict[int, list[int]]) -> None:
        """Explain long waits by the ops of other streams that ended before the waiting op began.

        Either a wait between streams is not in the trace, or kernels of other streams filled the
        device. In the latter case the next kernel begins while the last blocks of another one still
        run. A tail of at most `TAIL_S` is cut off; what a longer one delays is a wait of its own.
        Streams of a program that never lets one wait for another are not tied.
        """
        if not self.draft.order.wait_calls:
            return
        ops, found = self.ops, []
        for lanes in self._devices():
            device = sorted(chain(*lanes), key=lambda event: ops[self.op_of[event]].end_s)
            ends_s = [ops[self.op_of[event]].end_s for event in device]
            others_of = _Streams([[ops[self.op_of[event]] for event in lane] for lane in lanes])
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
                ended_s = ops[cause].end_s
                if op.start_s - ended_s > EXPLAINS_S and not others_of.fill(op, ended_s):
                    continue
                found.append((cause, event))
        for cause, event in found:
            ops[cause].end_s = min(ops[cause].end_s, ops[self.op_of[event]].start_s)
            waits.setdefault(event, []).append(cause)
            self.crowded.add(event)
        self.out.inferred += len(found)

    def _devices(self) -> list[list[list[int]]]:
        """The events of each stream, of each device with several streams."""
        devices: dict[str, list[list[int]]] = {}
        for lane, events in self.streams.items():
            devices.setdefault(self.draft.trace.lanes[lane].process, []).append(events)
        return [lanes for lanes in devices.values() if len(lanes) > 1]

    def _free_s(self, event: int, waits: dict[int, list[int]]) -> float:
        """When everything that the trace states about a device op's start had happened."""
        number = self.op_of[event]
        numbers = self.draft.by_lane[self.ops[number].lane]
        place = bisect.bisect_left(numbers, number)
        known = [*waits.get(event, []), *numbers[max(place - 1, 0) : place]]
        if event in self.draft.launcher:
            known.append(self.draft.launcher[event])
        return max((self.ops[one].end_s for one in known), default=np.inf)

    def _typical(self) -> tuple[float, float]:
        """Median launch latency, and median pause between two ops of a stream.

        Both without other causes of delay: a stream also pauses where the next launch comes late.
        """
        ops = self.ops
        late_s = [
            ops[self.op_of[event]].start_s - ops[launch].end_s
            for event, launch in self.draft.launcher.items()
        ]
        launcher = self.draft.launcher
        gaps_s = [
            ops[self.op_of[after]].start_s - ops[self.op_of[before]].end_s
            for events in self.streams.values()
            for before, after in pairwise(events)
            if after not in launcher or ops[launcher[after]].end_s <= ops[self.op_of[before]].end_s
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
        ops, number = self.ops, self.op_of[event]
        start_s = ops[number].start_s
        launch = self.draft.launcher.get(event, MISSING)
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
                self.draft.edge(parent, number)
            elif parent == binding:
                self.draft.edge(parent, number, left_s)
            else:
                delay_s = min(slack_s, latency_s) if parent == launch else 0.0
                self.draft.edge(parent, number, delay_s)


class _Streams:
    """The streams of a device, each with its ops in order."""

    def __init__(self, lanes: list[list[TracedOp]]) -> None:
        self.lanes = lanes
        self.ends_s = [[op.end_s for op in lane] for lane in lanes]

    def fill(self, waiting: TracedOp, from_s: float) -> bool:
        """Whether other streams work for most of the time from `from_s` to the op's start."""
        busy_s, until_s = 0.0, waiting.start_s
        for ops, ends_s in zip(self.lanes, self.ends_s, strict=True):
            if ops[0].lane == waiting.lane:
                continue
            for place in range(bisect.bisect_right(ends_s, from_s), len(ops)):
                op = ops[place]
                if op.start_s >= until_s:
                    break
                busy_s += min(op.end_s, until_s) - max(op.start_s, from_s)
        return busy_s >= FULL_SHARE * (until_s - from_s)
