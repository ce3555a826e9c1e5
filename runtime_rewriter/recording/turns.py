"""Chooses the ordinary steps between two recorded ones, so that profiling costs little.

Torch's profiler takes time for every event. A recorded step is therefore longer than an ordinary
one, by a tenth where a step is nothing but small operators. Recorded steps stay whole: only a whole
step has all dependencies. Ordinary steps between them lower the cost of the stretch of training.

| symbol | meaning | unit |
|---|---|---|
| c | what recording adds to a step, relative to the step | - |
| n | recorded steps of the stretch | - |
| b | ordinary steps after each recorded one but the last | - |

The stretch has n + b (n - 1) steps and costs n c / (n + b (n - 1)) of its time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

MOST_COST = 0.03
"""Aim: the most that profiling may add to the time of the profiled stretch of training."""
EVENT_S = 2e-6
"""Assumed CPU time per event, with our own log: 0.7 to 1.9 us in the examples' training steps
(`python -m benchmarks.profile_overhead`, docs/results/overhead.md)."""
MOST_BETWEEN = 15
"""More ordinary steps than this would make a recording of small steps wait too long."""


def estimated_cost(events: int, step_s: float) -> float:
    """Return c for a step of `events` events that takes `step_s` seconds without a recording."""
    return events * EVENT_S / step_s if step_s > 0 else 0.0


def ordinary_steps(cost: float, recorded: int) -> int:
    """Return the smallest b that keeps a stretch of `recorded` steps of cost c at `MOST_COST`."""
    if recorded < 2 or cost <= MOST_COST:
        return 0
    between = (cost / MOST_COST - 1) * recorded / (recorded - 1)
    return min(math.ceil(between - 1e-9), MOST_BETWEEN)


@dataclass
class Turns:
    """The turns of recorded and ordinary steps.

    - `between`: ordinary steps between two recorded ones; `left`: those before the next one.
    - `recorded`, `ordinary`: the kind of the open step, both false outside of the recording.
    - `fastest_s`: the fastest step before the recording, without the time that other processes had
      the core; `ordinary_s`: the ordinary ones within it, with that time.
    """

    between: int = 0
    left: int = 0
    recorded: bool = False
    ordinary: bool = False
    fastest_s: float = math.inf
    ordinary_s: list[float] = field(default_factory=list)
    _began_ns: int | None = None
    _queued_ns: int = 0

    def begin(self, recording: bool) -> None:
        """Begin a step. `recording`: it lies between the first and the last recorded step."""
        self.ordinary = recording and self.left > 0
        self.recorded = recording and not self.ordinary
        self._queued_ns = 0 if recording else _queued_ns()
        self._began_ns = time.perf_counter_ns()

    def end(self, undisturbed: bool) -> None:
        """End the open step. `undisturbed`: nothing measures this step before the recording."""
        if self._began_ns is None:
            return
        took_s = (time.perf_counter_ns() - self._began_ns) / 1e9
        if self.recorded:
            self.left = self.between
        elif self.ordinary:
            self.ordinary_s.append(took_s)
            self.left -= 1
        elif undisturbed:
            queued_s = (_queued_ns() - self._queued_ns) / 1e9
            self.fastest_s = min(self.fastest_s, max(took_s - queued_s, 0.0))
        self.recorded = self.ordinary = False
        self._began_ns = None


def _queued_ns() -> int:
    """For how long this thread was ready and waited for a core; 0 where the kernel does not tell.

    Linux: Documentation/scheduler/sched-stats.rst, `/proc/<pid>/schedstat`.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
