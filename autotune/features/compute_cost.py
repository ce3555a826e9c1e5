"""One training step, predicted without running it: T_comp, the paper's T, and the overlap of both queues.

`paper_step_s`   T = max(T_comp, T_sync): AutoSync, supplement Eq. 1.
`overlap_step_s` one compute queue and one communication channel: a message starts when the channel is free and
                 its last gradient is ready. This is the analytic ranker of the product.

| symbol | meaning | unit |
|---|---|---|
| ready | time from the start of the backward pass until a gradient is final, shape (V,) | s |
| cost | time a message holds the channel, shape (M,) | s |
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autotune.features.flat import FlatPlan
from autotune.features.sync_cost import MessageCosts
from autotune.workload import Workload

FloatArray = NDArray[np.float64]


def ready_times_s(workload: Workload) -> FloatArray:
    """When each gradient is ready after the backward pass began; unmeasured ones by position, shape (V,)."""
    count = len(workload.variables)
    measured = [variable.ready_s for variable in workload.variables]
    by_position = workload.backward_s * np.arange(1, count + 1) / count
    return np.array([fallback if ready is None else ready for ready, fallback in zip(measured, by_position.tolist(), strict=True)])


def paper_step_s(workload: Workload, costs: MessageCosts) -> float:
    """Eq. 1: the larger of computation and synchronization."""
    return max(workload.compute_s, costs.paper_sync_s)


def channel_ends_s(ready_s: FloatArray, cost_s: FloatArray) -> FloatArray:
    """End of every message on one channel in issue order: end_i = max(end_(i-1), ready_i) + cost_i.

    Both inputs and the result have shape (M,). Unrolled, end_i = C_i + max over j <= i of (ready_j - C_(j-1))
    with C the running sum of the costs, which needs no loop.
    """
    total = np.cumsum(cost_s)
    ends: FloatArray = total + np.maximum.accumulate(ready_s - (total - cost_s))
    return ends


def overlap_step_s(flat: FlatPlan, cost_s: FloatArray, workload: Workload, cross_step: bool = False) -> float:
    """Predicted step time with computation and communication overlapped.

    Within the step, the update follows the last message. With `cross_step` the next forward pass starts at once
    and each variable (an equal share of `forward_s`, in reverse backward order) waits for its own messages; the
    result is the period of the steady state. All messages are in before the next backward pass starts.
    """
    ready_s = np.maximum.reduceat(ready_times_s(workload)[flat.variable], flat.first)
    ends_s = channel_ends_s(ready_s, cost_s)
    if not cross_step:
        return workload.forward_s + max(workload.backward_s, float(ends_s[-1])) + workload.update_s
    arrival_s = np.zeros(len(workload.variables))
    np.maximum.at(arrival_s, flat.variable, ends_s[flat.message])
    share_s = np.full(len(arrival_s), workload.forward_s / len(arrival_s))
    start_s = workload.backward_s + workload.update_s
    return float(channel_ends_s(np.maximum(arrival_s[::-1], start_s), share_s)[-1])
