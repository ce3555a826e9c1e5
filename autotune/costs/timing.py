"""When gradients are ready and when variables are read again, with fallbacks where nothing was measured.

Both have shape (V,), in backward order, seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.arrays import FloatArray
from autotune.workload import Workload

TOGETHER_S = 0.001
"""Emulated accelerators wake up once for what is due within so long: each time costs the processor `RuntimeCosts.wake_s`, which no
accelerator would take from it."""


def ready_times_s(workload: Workload) -> FloatArray:
    """When each gradient is ready after the backward pass began; unmeasured ones by their position."""
    count = len(workload.variables)
    by_position = (workload.backward_s * np.arange(1, count + 1) / count).tolist()
    measured = [variable.ready_s for variable in workload.variables]
    return np.array(
        [
            fallback if ready is None else ready
            for ready, fallback in zip(measured, by_position, strict=True)
        ]
    )


def close_groups(times_s: Sequence[float], within_s: float = TOGETHER_S) -> list[range]:
    """Positions that follow each other and whose times, in ascending order, lie at most `within_s` behind that of their group's first."""
    groups: list[range] = []
    first = 0
    for position, at_s in enumerate(times_s):
        if at_s - times_s[first] > within_s:
            groups.append(range(first, position))
            first = position
    return [*groups, range(first, len(times_s))] if len(times_s) else []


def needed_times_s(workload: Workload) -> FloatArray:
    """When each variable is first read after the forward pass began, within [0, `forward_s`].

    Unmeasured ones are read one after the other in reverse backward order, each for an equal share of the pass.
    """
    count = len(workload.variables)
    by_position = (workload.forward_s * np.arange(count - 1, -1, -1) / count).tolist()
    measured = [variable.needed_s for variable in workload.variables]
    needed = [
        fallback if at_s is None else at_s
        for at_s, fallback in zip(measured, by_position, strict=True)
    ]
    clipped: FloatArray = np.clip(np.array(needed), 0.0, workload.forward_s)
    return clipped
