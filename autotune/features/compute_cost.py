"""The predicted step time: T_comp, the paper's T, and the overlap of computation and messages.

`paper_step_s`: T = max(T_comp, T_sync), AutoSync, supplement Eq. 1.

`overlap_step_s`: one compute queue and one communication channel. A message starts when the channel
is free and its last gradient is ready. On a CPU, sending takes cores from computation. This is the
analytic ranker.

| symbol | meaning | unit |
|---|---|---|
| ready | time from the start of the backward pass until a gradient is final, shape (V,) | s |
| cost | time a message holds the channel, shape (M,) | s |
| cpu | CPU time that sending a message costs a rank, shape (M,) | s |
| share | part of cpu that is taken from computation, 0 to 1 | - |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.arrays import FloatArray
from autotune.cluster import Cluster
from autotune.costs.issue_order import channel_ends_s, cross_step_period_s, half_crossing_period_s
from autotune.costs.sync_cost import MessageCosts
from autotune.costs.timing import needed_times_s, ready_times_s
from autotune.features.flat import FlatPlan
from autotune.workload import Workload


def paper_step_s(workload: Workload, costs: MessageCosts) -> float:
    """Eq. 1: the larger of computation and synchronization."""
    return max(workload.compute_s, costs.paper_sync_s)


def taken_share(workload: Workload, cluster: Cluster) -> float:
    """Share of the CPU time of sending that is taken from computation.

    It is the share of a host's cores that compute: the probability that a communication thread
    shares a computing core. It is 0 on accelerators, and if cores or threads are unknown.
    """
    if workload.device != "cpu" or workload.threads == 0:
        return 0.0
    shares = [
        min(1.0, host.devices * workload.threads / host.cores)
        for host in cluster.hosts
        if host.cores > 0
    ]
    return max(shares, default=0.0)


def slowed_ready_s(
    ready_s: FloatArray, taken_s: FloatArray, end_s: float
) -> tuple[FloatArray, float]:
    """(ready times, end of the backward pass) if message j delays what follows it by taken_s[j].

    A message delays the computation after its gradients are ready: delay(t) = sum of taken_j over
    ready_j < t. Inputs are undisturbed times, shape (M,). Messages of the last gradient delay
    nothing.
    """
    order = np.argsort(ready_s, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(taken_s[order])])
    sorted_ready_s = ready_s[order]
    slowed: FloatArray = ready_s + before[np.searchsorted(sorted_ready_s, ready_s, side="left")]
    return slowed, end_s + float(before[np.searchsorted(sorted_ready_s, end_s, side="left")])


def overlap_step_s(
    flat: FlatPlan,
    cost_s: FloatArray,
    workload: Workload,
    cross_step: bool = False,
    taken_s: FloatArray | None = None,
    results: Sequence[int] | None = None,
) -> float:
    """Predicted step time with computation and communication overlapped.

    Within the step, the update follows the last message. With `cross_step` the next forward pass
    starts at once and waits for messages where it reads their variables (`costs.issue_order`); the
    result is the period of the steady state. `taken_s` (M,): CPU time that each message takes from
    the backward pass. `results`: as in `Plan`.
    """
    ready_s = np.maximum.reduceat(ready_times_s(workload)[flat.variable], flat.first)
    backward_s = workload.backward_s
    if taken_s is not None:
        ready_s, backward_s = slowed_ready_s(ready_s, taken_s, backward_s)
    if not cross_step:
        sent_s = float(channel_ends_s(ready_s, cost_s)[-1])
        return workload.forward_s + max(backward_s, sent_s) + workload.update_s
    needed_s = np.minimum.reduceat(needed_times_s(workload)[flat.variable], flat.first)
    if results is not None:
        parts_s = (backward_s, workload.update_s, workload.forward_s)
        return half_crossing_period_s(ready_s, cost_s, needed_s, parts_s, results)
    start_s = backward_s + workload.update_s
    return cross_step_period_s(ready_s, cost_s, needed_s, start_s, workload.forward_s)
