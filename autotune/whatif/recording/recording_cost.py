"""Removes what a profiler added to the times of a recording (Daydream, sec. 7.1 names the effect).

The profiler takes time on the host for every operator that it records and for every call into the
driver. Where the host was not the bottleneck this changes nothing; where it was, or becomes it
after a change, the recorded step is up to twice as long as an unrecorded one. A recorder may also
wait for the device at the end of each step. Then no step can overlap with the next one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import BoolArray, FloatArray
from autotune.dfg.graph import NONE
from autotune.whatif.base import Base
from autotune.whatif.primitives import disconnect
from autotune.whatif.question import Factor, Reading

LEFT_SHARE = 0.2
"""Share of a host op's time that is never taken for the profiler's."""
_DRIVER_CALL = re.compile(r"(?:cuda|cu|hip)[A-Z]")
_SYNCHRONIZE = re.compile(r"(?:cuda|hip|cu)\w*Synchronize$")


@dataclass(frozen=True)
class RecordingCost:
    """Seconds that a profiler takes on the host, per recorded operator and per driver call."""

    operator_s: Factor
    call_s: Factor


def recorded_events(base: Base) -> tuple[BoolArray, BoolArray]:
    """(N,) host ops that begin an operator, and those that are calls into the driver.

    The operator that the cut between steps divides begins twice.
    """
    begins, calls = np.zeros((2, base.ops), dtype=np.bool_)
    seen: set[int] = set()
    for queue in np.unique(base.queue[~base.on_device]):
        for op in base.queue_order(int(queue)).tolist() if queue != NONE else []:
            call = int(base.operator[op])
            if call != NONE and call not in seen:
                seen.add(call)
                begins[op] = True
            calls[op] = bool(_DRIVER_CALL.match(base.names.ops[op]))
    return begins, calls


def without_recording(base: Base, cost: RecordingCost, reading: Reading = Reading.EXPECTED) -> Base:
    """The base as if nobody had recorded it, and without a wait at the step's end.

    What an op cannot give, because it is shorter than its cost, the next ones of its thread give.
    """
    begins, calls = recorded_events(base)
    cost_s = begins * _at(cost.operator_s, reading) + calls * _at(cost.call_s, reading)
    duration_s, gap_s = base.duration_s.copy(), base.gap_s.copy()
    for queue in np.unique(base.queue[~base.on_device & (base.queue != NONE)]):
        _take(duration_s, gap_s, cost_s, base.queue_order(int(queue)).tolist())
    faster = replace(
        base,
        duration_s=duration_s,
        gap_s=gap_s,
        unknown_gap_s=np.minimum(base.unknown_gap_s, gap_s),
    )
    return without_end_wait(faster)


def _at(factor: Factor, reading: Reading) -> float:
    """Much recording cost makes the rest fast, so the optimistic reading is the largest one."""
    return {
        Reading.OPTIMISTIC: factor.pessimistic,
        Reading.EXPECTED: factor.expected,
        Reading.PESSIMISTIC: factor.optimistic,
    }[reading]


def _take(duration_s: FloatArray, gap_s: FloatArray, cost_s: FloatArray, order: list[int]) -> None:
    """Take the costs of a thread's ops; the first ops give what the last ones of a step owe."""
    left_s = [LEFT_SHARE * duration_s, LEFT_SHARE * gap_s]
    owed_s = 0.0
    for own_s in (cost_s, np.zeros_like(cost_s)):
        for op in order:
            owed_s += float(own_s[op])
            for times_s, least_s in zip((duration_s, gap_s), left_s, strict=True):
                given_s = min(owed_s, float(times_s[op] - least_s[op]))
                times_s[op] -= given_s
                owed_s -= given_s


def without_end_wait(base: Base) -> Base:
    """The base whose host does not wait for the device after the last launch of a step."""
    waits = np.array([bool(_SYNCHRONIZE.match(name)) for name in base.names.ops])
    waits &= ~base.on_device & (base.operator == NONE)
    calls = base.launch[base.launched]
    ends = np.zeros(base.ops, dtype=np.bool_)
    for queue in np.unique(base.queue[waits]):
        order = base.queue_order(int(queue))
        launching = np.flatnonzero(np.isin(order, calls))
        if len(launching):
            behind = order[: launching[0]], order[launching[-1] + 1 :]
            for stretch in behind:
                ends[stretch[waits[stretch]]] = True
    edges = ends[base.child] & base.on_device[base.parent]
    freed = disconnect(base, edges)
    return replace(
        freed,
        duration_s=np.where(ends, 0.0, base.duration_s),
        gap_s=np.where(ends, 0.0, base.gap_s),
        unknown_gap_s=np.where(ends, 0.0, base.unknown_gap_s),
    )
