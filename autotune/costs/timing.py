"""When gradients are ready and variables are read, with fallbacks where nothing was measured.

Both have shape (V,), in backward order, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.arrays import FloatArray
from autotune.workload import Workload

TOGETHER_S = 0.001
"""An emulated accelerator wakes up once for all that is due within this time.

Each wake-up costs the processor `RuntimeCosts.wake_s`, which no real accelerator takes.
"""


def ready_times_s(workload: Workload) -> FloatArray:
    """When each gradient is ready after the backward pass began; by position if unmeasured."""
    count = len(workload.variables)
    by_position = (workload.backward_s * np.arange(1, count + 1) / count).tolist()
    measured = [variable.ready_s for variable in workload.variables]
    return _or_else(measured, by_position)


def close_groups(times_s: Sequence[float], within_s: float = TOGETHER_S) -> list[range]:
    """Group consecutive positions whose ascending times lie within `within_s` of their group's
    first.
    """
    groups: list[range] = []
    first = 0
    for position, at_s in enumerate(times_s):
        if at_s - times_s[first] > within_s:
            groups.append(range(first, position))
            first = position
    return [*groups, range(first, len(times_s))] if len(times_s) else []


def forward_read_times_s(workload: Workload) -> FloatArray:
    """When the forward pass first reads each variable after its beginning, in [0, `forward_s`].

    Unmeasured ones are read in reverse backward order, each for an equal share of the pass.
    """
    count = len(workload.variables)
    by_position = (workload.forward_s * np.arange(count - 1, -1, -1) / count).tolist()
    measured = [variable.needed_s for variable in workload.variables]
    clipped: FloatArray = np.clip(_or_else(measured, by_position), 0.0, workload.forward_s)
    return clipped


def needed_times_s(workload: Workload) -> FloatArray:
    """When each variable is first read after the forward pass began, in [-`update_s`, `forward_s`].

    Before the forward pass, the script itself reads it, between two steps.
    """
    update_s = workload.update_s
    between_s = [
        None if variable.script_read_s is None else min(variable.script_read_s, update_s) - update_s
        for variable in workload.variables
    ]
    return _or_else(between_s, forward_read_times_s(workload).tolist())


def _or_else(measured: Sequence[float | None], fallback: Sequence[float]) -> FloatArray:
    pairs = zip(measured, fallback, strict=True)
    return np.array([other if at_s is None else at_s for at_s, other in pairs])
