"""The limits of a step: host, device, both, and the critical path (Daydream, Fig. 6).

All figures are of one period of the steady replay: from one execution of `Base.last` to the next.
The host is busy with its ops and with the gaps behind them, which are code that no event shows.

symbol   meaning
N        ops of the base; op i of copy c is op c * N + i of the timeline, delays follow
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autotune.arrays import BoolArray
from autotune.dfg.chrome_trace import Section
from autotune.dfg.graph import COMMUNICATION, NONE, Kind
from autotune.dfg.replay import Timeline, replay
from autotune.dfg.utilisation import covered_s
from autotune.whatif.base import Base, Steady, steady

STEPS_BEHIND = 2
"""Steps that follow a drawn one: the host may already work for them."""
COMMUNICATION_PART, HOST_PART, GAP_PART, DELAY_PART = (
    "communication",
    "host",
    "host, unrecorded code",
    "delays",
)
"""Parts of a critical path that no kind of device op names. Delays: launch latencies and waits."""


@dataclass(frozen=True)
class Limits:
    """Seconds of one step of `step_s`.

    - `host_only_s`, `device_only_s`, `both_s`, `communication_only_s` and `idle_s` add up to it:
      only the host computes, only devices do, both do, only communication runs, nothing runs.
    - `exposed_communication_s`: communication while no device computes; without devices, while no
      host does.
    - `path_s`: parts of the critical path in seconds, the longest first. They add up to `step_s`.
    """

    step_s: float
    host_only_s: float
    device_only_s: float
    both_s: float
    communication_only_s: float
    idle_s: float
    exposed_communication_s: float
    path_s: dict[str, float]


def limits(base: Base, replayed: Steady) -> Limits:
    """The limits of the replayed base."""
    last, before = period_ops(base, replayed.copies)
    begin_s, end_s = (float(replayed.timeline.end_s[op]) for op in (before, last))
    links = np.isin(base.kind, [int(kind) for kind in COMMUNICATION]) & (base.queue != NONE)
    computes = (base.queue != NONE) & ~links
    host, device = computes & ~base.on_device, computes & base.on_device
    busy = _Busy(base, replayed, begin_s, end_s - begin_s)
    host_s, device_s, either_s = (
        busy.seconds(host),
        busy.seconds(device),
        busy.seconds(host | device),
    )
    all_s = busy.seconds(host | device | links)
    computing = device if base.on_device.any() else host
    return Limits(
        step_s=end_s - begin_s,
        host_only_s=either_s - device_s,
        device_only_s=either_s - host_s,
        both_s=host_s + device_s - either_s,
        communication_only_s=all_s - either_s,
        idle_s=max(end_s - begin_s - all_s, 0.0),
        exposed_communication_s=busy.seconds(computing | links) - busy.seconds(computing),
        path_s=_path_s(base, replayed, last, begin_s),
    )


def period_ops(base: Base, copies: int) -> tuple[int, int]:
    """The last two executions of `Base.last`: of the last copy, and of the one before it."""
    last = base.last + base.ops * (copies - 1)
    return last, last - base.ops


def surrounded_step(base: Base) -> tuple[Timeline, Section]:
    """A replay in which other steps follow the steady one, and the section that is this step."""
    copies = steady(base).copies
    timeline = replay(base.dfg(copies + STEPS_BEHIND))
    last, before = period_ops(base, copies)
    return timeline, Section(float(timeline.end_s[before]), float(timeline.end_s[last]), last)


class _Busy:
    """When ops run in a period, which repeats: an op outside of it is that of another step."""

    def __init__(self, base: Base, replayed: Steady, begin_s: float, period_s: float) -> None:
        first, timeline = base.ops * (replayed.copies - 1), replayed.timeline
        own = slice(first, first + base.ops)
        self.period_s = period_s
        self.start_s = timeline.start_s[own] - begin_s
        self.end_s = timeline.end_s[own] - begin_s + np.where(base.on_device, 0.0, base.gap_s)

    def seconds(self, ops: BoolArray) -> float:
        """How long at least one of `ops`, shape (N,), runs."""
        if not ops.any() or self.period_s <= 0:
            return 0.0
        start_s, end_s = self.start_s[ops], self.end_s[ops]
        steps = range(
            math.floor(start_s.min() / self.period_s), math.floor(end_s.max() / self.period_s) + 1
        )
        shifted = [
            (
                np.clip(start_s - step * self.period_s, 0.0, self.period_s),
                np.clip(end_s - step * self.period_s, 0.0, self.period_s),
            )
            for step in steps
        ]
        starts_s, ends_s = (np.concatenate(times) for times in zip(*shifted, strict=True))
        return covered_s(starts_s, ends_s)


def _path_s(base: Base, replayed: Steady, last: int, begin_s: float) -> dict[str, float]:
    parts: dict[str, float] = {}
    timeline, copies = replayed.timeline, replayed.copies
    op = last
    while op != NONE and timeline.end_s[op] > begin_s:
        cause = int(timeline.cause[op])
        start_s, ready_s = float(timeline.start_s[op]), begin_s
        if cause != NONE:
            ready_s = max(float(timeline.end_s[cause]), begin_s)
        _add(
            parts,
            _part(base, timeline, copies, op),
            float(timeline.end_s[op]) - max(start_s, begin_s),
        )
        waited = DELAY_PART
        if (
            cause != NONE
            and timeline.dfg.queue[cause] != NONE
            and not _is_device(base, copies, cause)
        ):
            waited = GAP_PART
        _add(parts, waited, start_s - ready_s)
        op = cause
    return dict(sorted(parts.items(), key=lambda part: (-part[1], part[0])))


def _add(parts: dict[str, float], part: str, seconds: float) -> None:
    if seconds > 0:
        parts[part] = parts.get(part, 0.0) + seconds


def _is_device(base: Base, copies: int, op: int) -> bool:
    return op < base.ops * copies and bool(base.on_device[op % base.ops])


def _part(base: Base, timeline: Timeline, copies: int, op: int) -> str:
    kind = Kind(int(timeline.dfg.kind[op]))
    if kind in COMMUNICATION:
        return COMMUNICATION_PART
    if timeline.dfg.queue[op] == NONE:
        return DELAY_PART
    if _is_device(base, copies, op):
        return f"device {kind.name.lower()}"
    if base.on_device.any():
        return HOST_PART
    return f"{HOST_PART} {kind.name.lower()}"
