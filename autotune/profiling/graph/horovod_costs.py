"""Fits Horovod's costs to one recording: rank 0's timeline, and the calls that each rank logged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from autotune.arrays import FloatArray
from autotune.cluster import Cluster, CollectiveFit
from autotune.costs.timing import TOGETHER_S
from autotune.errors import InvalidInput
from autotune.lowering.horovod import HorovodCosts, HostTimes, ring_s_per_byte
from autotune.profiling.fits.link_fit import fit_curve, uncertainty_of
from autotune.profiling.formats.horovod import FusedBatch, HorovodTimeline
from autotune.recordings.horovod_calls import HorovodCall
from autotune.workload import Workload

ALLREDUCE = "allreduce."
"""Prefix that Horovod gives to names without one of their own."""
PROBE, LATENCY = "probe", "latency"
FEWEST_SIZES = 2
"""Sizes of transfers that a line needs."""


def fit_horovod(
    timeline: HorovodTimeline,
    calls: Sequence[Sequence[HorovodCall]],
    cluster: Cluster,
    cycle_s: float,
) -> HorovodCosts:
    """Fit the costs of a run whose cycle time was `cycle_s`.

    `calls` of each rank contain probes: all-reduces `probe.<bytes>.<i>` of several sizes, enqueued
    at once and never fused, and single ones `latency.<i>`. The timeline gives the copies only:
    while it is written, all ranks wait for rank 0's writer. Raises `InvalidInput` without probes.
    """
    fit = _transfer_fit(calls, cluster.world_size)
    copy_s, copy_s_per_byte = _copy_costs(timeline)
    return HorovodCosts(
        all_reduce=fit,
        link_s_per_byte=ring_s_per_byte(cluster),
        negotiate_s=_negotiate_s(calls, fit, cycle_s),
        copy_s=copy_s,
        copy_s_per_byte=copy_s_per_byte,
        synchronize_s=_synchronize_s(calls),
    )


def _transfer_fit(calls: Sequence[Sequence[HorovodCall]], ranks: int) -> CollectiveFit:
    """A curve through the times of each size, from one completion to the next one.

    Other work on the machine only lengthens them, so the lower quartile counts.
    """
    by_size: dict[int, list[float]] = defaultdict(list)
    for of_rank in calls:
        probes = [call for call in of_rank if call.name.startswith(f"{PROBE}.")]
        for before, after in pairwise(probes):
            if before.size_bytes == after.size_bytes and before.complete_s and after.complete_s:
                by_size[after.size_bytes].append(after.complete_s - before.complete_s)
    if len(by_size) < FEWEST_SIZES:
        raise InvalidInput(
            f"a recording of Horovod must probe {FEWEST_SIZES} sizes or more, but has "
            f"{len(by_size)}; all-reduce tensors named {PROBE}.<bytes>.<number> in the recorded run"
        )
    sizes = sorted(by_size)
    times_s = [float(np.quantile(by_size[size], 0.25)) for size in sizes]
    spreads = [float(np.std(by_size[size]) / np.median(by_size[size])) for size in sizes]
    doubts = [
        uncertainty_of(spread, max(1, len(by_size[size]) // len(calls)))  # ranks may have died
        for size, spread in zip(sizes, spreads, strict=True)
    ]
    curve = fit_curve(sizes, times_s, doubts)
    return CollectiveFit(
        primitive="all_reduce",
        group_size=ranks,
        alpha_s=curve.alpha_s,
        beta_s_per_byte=curve.beta_s_per_byte,
        relative_error=curve.relative_error,
        smallest_bytes=sizes[0],
        largest_bytes=sizes[-1],
        bends=curve.bends,
        large_error=curve.large_error,
        spread=_median(spreads),
        sizes=len(sizes),
    )


def _negotiate_s(
    calls: Sequence[Sequence[HorovodCall]], fit: CollectiveFit, cycle_s: float
) -> float:
    """Lower quartile of the latencies of single tensors, less their transfer and half a cycle."""
    latencies_s = [
        call.complete_s - call.called_s
        for of_rank in calls
        for call in of_rank
        if call.name.startswith(f"{LATENCY}.") and call.complete_s is not None
    ]
    latency_s = float(np.quantile(latencies_s, 0.25)) if latencies_s else 0.0
    return max(latency_s - fit.alpha_s - cycle_s / 2, 0.0)


def _copy_costs(timeline: HorovodTimeline) -> tuple[float, float]:
    """(per tensor, per byte) of copies into and out of the fusion buffer.

    A tensor that is sent where it is has the division of the average around its transfer, too.
    """
    fused = [batch for batch in timeline.batches if len(batch.operations) > 1]
    alone = [batch for batch in timeline.batches if len(batch.operations) == 1]
    if not fused:
        return 0.0, 0.0
    rows = np.array([[len(batch.operations), batch.size_bytes] for batch in fused])
    copied_s = np.array([_around_transfer_s(batch) for batch in fused])
    (copy_s, copy_s_per_byte), _ = nnls(rows, copied_s)
    alone_bytes = sum(batch.size_bytes for batch in alone)
    divided_s = sum(map(_around_transfer_s, alone)) / alone_bytes if alone_bytes > 0 else 0.0
    return float(copy_s), max(float(copy_s_per_byte) - divided_s, 0.0)


def _around_transfer_s(batch: FusedBatch) -> float:
    return batch.end_s - batch.start_s - (batch.transfer_s[1] - batch.transfer_s[0])


def measured_times(
    calls: Sequence[Sequence[HorovodCall]],
    backward_ended_s: Sequence[Sequence[float]],
    workload: Workload,
    aligned: bool = True,
) -> HostTimes:
    """Medians over the logged steps; a step starts when every rank has enqueued the first tensor.

    `calls` of each rank, and when its backward pass ended in each step, on one clock. Without
    `aligned` clocks, ranks are compared as if each had begun its step at the same time, and the
    time between two steps is that of the slowest rank on its own clock. Raises `InvalidInput` if a
    variable of the workload was not enqueued.
    """
    steps = min(len(ended_s) for ended_s in backward_ended_s)
    enqueued_s = np.array([_enqueued_s(of_rank, workload, steps) for of_rank in calls])
    completed_s = np.array([_completed_s(of_rank, steps) for of_rank in calls])
    ended_s = np.array([of_rank[:steps] for of_rank in backward_ended_s])
    if not aligned:
        origin_s = enqueued_s.min(axis=2)
        rests_s = origin_s[:, 1:] - completed_s[:, :-1]
        enqueued_s = enqueued_s - origin_s[:, :, None]
        ended_s = ended_s - origin_s
        relative_s = np.median(enqueued_s.max(axis=0), axis=0)
        return HostTimes(
            relative_s - relative_s.min(),
            float(np.median(ended_s.max(axis=0))),
            float(np.median(rests_s.max(axis=0))),
        )
    everywhere_s = enqueued_s.max(axis=0)  # (steps, V)
    first_s = everywhere_s.min(axis=1)
    rests_s = first_s[1:] - completed_s.min(axis=0)[:-1]
    return HostTimes(
        np.median(everywhere_s - first_s[:, None], axis=0),
        float(np.median(ended_s.max(axis=0) - first_s)),
        float(np.median(rests_s)),
    )


def _enqueued_s(of_rank: Sequence[HorovodCall], workload: Workload, steps: int) -> FloatArray:
    """When the rank had enqueued each variable in each step, (steps, V)."""
    at_s = np.full((steps, len(workload.variables)), np.nan)
    for call in of_rank:
        variable = workload.index.get(call.name.rpartition(ALLREDUCE)[2])
        if variable is not None and 0 <= call.step < steps:
            at_s[call.step, variable] = call.returned_s
    missing = np.flatnonzero(np.isnan(at_s).any(axis=0))
    if len(missing):
        raise InvalidInput(
            "every variable must be enqueued by its name in each recorded step, but "
            f"{workload.variables[int(missing[0])].name!r} is not; pass named_parameters to "
            "hvd.DistributedOptimizer and record without groups"
        )
    return at_s


def _completed_s(of_rank: Sequence[HorovodCall], steps: int) -> FloatArray:
    """When the last call of each step was complete, (steps,)."""
    last_s = np.full(steps, -np.inf)
    for call in of_rank:
        if 0 <= call.step < steps and call.complete_s is not None:
            last_s[call.step] = max(last_s[call.step], call.complete_s)
    return last_s


def _synchronize_s(calls: Sequence[Sequence[HorovodCall]]) -> float:
    """Median time from one completed handle to the next one."""
    spaces = [
        after.awaited_s - before.awaited_s
        for of_rank in calls
        for before, after in pairwise(of_rank)
        if before.awaited_s is not None
        and after.awaited_s is not None
        and 0 < after.awaited_s - before.awaited_s < TOGETHER_S
    ]
    return _median(spaces)


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else 0.0
