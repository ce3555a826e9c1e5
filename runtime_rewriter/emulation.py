"""Timetables of emulated accelerators, and waits that record their lateness; without a framework.

| symbol | meaning | unit |
|---|---|---|
| forward_s | start of the module's forward pass until the first gradient of its output | s |
| needed_s[i] | start of the module's forward pass until it first reads variable i | s |
| script_reads_s[i] | end of the synchronization until the script itself reads variable i | s |
| ready_s[i] | start of the backward pass until the gradient of variable i is final | s |
| backward_s | start of the backward pass until its end | s |
| update_s | end of the synchronization until the next step begins | s |
| k | byte scale: 1/k of every message's elements travel, over links of 1/k of their rate | - |
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autotune.costs.timing import close_groups, forward_read_times_s
from autotune.errors import InvalidInput
from autotune.workload import Workload


@dataclass(frozen=True)
class Timetable:
    """One step of the profile: (variable name, its time), the earliest first.

    `script_reads`: only of variables that the script reads between two steps. Close times
    (`close_groups`) all become the last one, so that the rank wakes up once.
    """

    forward_s: float
    needed: tuple[tuple[str, float], ...]
    ready: tuple[tuple[str, float], ...]
    backward_s: float
    update_s: float
    script_reads: tuple[tuple[str, float], ...] = ()

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


def timetable_of(workload: Workload) -> Timetable:
    """The timetable of `workload`; raises `InvalidInput` for missing or contradictory times."""
    untimed = [variable.name for variable in workload.variables if variable.ready_s is None]
    if untimed:
        more = f" and {len(untimed) - 1} more" if len(untimed) > 1 else ""
        raise InvalidInput(
            "emulated accelerators need ready_s of every variable, but the profile of "
            f"{workload.model!r} has none for {untimed[0]!r}{more}; leave --profile out to "
            "measure it"
        )
    ready = tuple((variable.name, variable.ready_s or 0.0) for variable in workload.variables)
    for name, value in (
        ("forward_s", workload.forward_s),
        ("update_s", workload.update_s),
        ("ready_s of the first variable", ready[0][1]),
    ):
        if not 0 <= value < math.inf:
            raise InvalidInput(
                f"a profile's times must be finite and at least 0, but {name} is {value}"
            )
    if not 0 < workload.backward_s < math.inf:
        raise InvalidInput(
            f"backward_s of a profile must be finite and above 0, but is {workload.backward_s}"
        )
    end = ("the end of the backward pass", workload.backward_s)
    for (before, earlier_s), (after, later_s) in pairwise((*ready, end)):
        if not earlier_s <= later_s:
            raise InvalidInput(
                "a profile's variables must be in the order in which they become ready, none after "
                f"backward_s, but {before!r} is ready after {earlier_s:g} s and {after!r} after "
                f"{later_s:g} s"
            )
    names = (variable.name for variable in workload.variables)
    needed = zip(names, forward_read_times_s(workload).tolist(), strict=True)
    script_reads = (
        (variable.name, variable.script_read_s)
        for variable in workload.variables
        if variable.script_read_s is not None
    )
    return Timetable(
        forward_s=workload.forward_s,
        needed=_together(sorted(needed, key=_at_s)),
        ready=_together(ready),
        backward_s=workload.backward_s,
        update_s=workload.update_s,
        script_reads=_together(sorted(script_reads, key=_at_s)),
    )


def _at_s(timed: tuple[str, float]) -> float:
    return timed[1]


def _together(timed: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """The variables of every group at the time of its last."""
    groups = close_groups([at_s for _, at_s in timed])
    return tuple(
        (timed[position][0], timed[group[-1]][1]) for group in groups for position in group
    )


class Waiter:
    """Waits until absolute times, and records late calls: real work took longer than the profile.

    The kernel's own lateness in waking up does not count, and does not add up over a pass.
    """

    def __init__(self) -> None:
        self.late_s = 0.0
        """The largest lateness since `restart`, in seconds."""

    def restart(self) -> None:
        self.late_s = 0.0

    def until(self, deadline_s: float) -> float:
        """Wait; return `deadline_s`, or the time of the call if that was later."""
        now_s = time.perf_counter()
        if now_s >= deadline_s:
            self.late_s = max(self.late_s, now_s - deadline_s)
            return now_s
        time.sleep(deadline_s - now_s)  # gives the interpreter to other threads
        return deadline_s


def travelling(elements: int, byte_scale: float, multiple: int = 1) -> int:
    """Elements that travel: ceil(elements / k), rounded up to a multiple, at most all."""
    return min(elements, -(-math.ceil(elements / byte_scale) // multiple) * multiple)
