"""Busy queues, exposed communication and the summary of an iteration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autotune.arrays import BoolArray, FloatArray
from autotune.dfg.critical_path import CriticalPath, critical_path
from autotune.dfg.graph import COMMUNICATION, COMPUTATION, NONE, Kind
from autotune.dfg.replay import Timeline


@dataclass(frozen=True, eq=False)
class IterationSummary:
    """Seconds of one replayed iteration.

    All but `iteration_s` and the critical path are the time in which ops of one kind run: ops of
    `worker`, the last to end (NONE if ops have no worker), and ops without a worker.
    `computation_s`: forward, backward, update and other computation. `exposed_communication_s`:
    communication without computation. `idle_s`: neither. These three add up to `iteration_s`.
    `bottleneck_queue`: the queue or channel with the largest busy share, "" for none.
    """

    iteration_s: float
    worker: int
    computation_s: float
    forward_s: float
    backward_s: float
    update_s: float
    communication_s: float
    exposed_communication_s: float
    idle_s: float
    bottleneck_queue: str
    bottleneck_share: float
    critical_path: CriticalPath


def covered_s(start_s: FloatArray, end_s: FloatArray) -> float:
    """Length of the union of the intervals [start, end], both of shape (M,)."""
    if not len(start_s):
        return 0.0
    order = np.argsort(start_s)
    start_s, end_s = start_s[order], end_s[order]
    reached_s = np.maximum.accumulate(end_s)
    before_s = np.concatenate([[-np.inf], reached_s[:-1]])
    return float(np.maximum(reached_s - np.maximum(start_s, before_s), 0.0).sum())


def covered_within_s(
    start_s: FloatArray, end_s: FloatArray, from_s: FloatArray, to_s: FloatArray
) -> FloatArray:
    """Length of the union of the intervals [start, end] within each window [from, to], (K,).

    `start_s`, `end_s` (M,), at least one; `from_s`, `to_s` (K,).
    """
    order = np.argsort(start_s, kind="stable")
    starts_s, ends_s = start_s[order], np.maximum.accumulate(end_s[order])
    # A gap lies between an interval and the latest end of all earlier ones.
    gaps_s = np.maximum(starts_s[1:] - ends_s[:-1], 0.0)
    gaps_until_s = np.concatenate([[0.0], np.cumsum(gaps_s)])

    def covered_until_s(at_s: FloatArray) -> FloatArray:
        place = np.maximum(np.searchsorted(starts_s, at_s, side="right") - 1, 0)
        since_s: FloatArray = np.minimum(at_s, ends_s[place]) - starts_s[0] - gaps_until_s[place]
        return np.maximum(since_s, 0.0)

    return covered_until_s(to_s) - covered_until_s(from_s)


def busy_share(timeline: Timeline) -> FloatArray:
    """Share of the makespan in which each queue or channel is busy, without gaps; shape (Q,)."""
    dfg = timeline.dfg
    busy_s = np.zeros(dfg.queues)
    for takes in (dfg.queue, dfg.channel):
        busy_s += np.bincount(
            takes[takes >= 0], weights=timeline.duration_s[takes >= 0], minlength=dfg.queues
        )
    return busy_s / timeline.makespan_s if timeline.makespan_s > 0 else busy_s


def exposed_communication_s(timeline: Timeline, worker: int | None = None) -> float:
    """The time with communication and without computation, of one worker or of all ops."""
    ops = _of_worker(timeline, worker)
    computes = ops & _of_kinds(timeline, COMPUTATION)
    either = computes | (ops & _of_kinds(timeline, COMMUNICATION))
    return _time_of(timeline, either) - _time_of(timeline, computes)


def iteration_summary(timeline: Timeline) -> IterationSummary:
    """The summary of a timeline of one iteration, for its last worker.

    A parameter server is none: if any worker has a backward pass, one that has none does not count.
    """
    dfg = timeline.dfg
    training = dfg.worker[_of_kinds(timeline, {Kind.BACKWARD}) & (dfg.worker != NONE)]
    counts = np.isin(dfg.worker, training) if len(training) else dfg.worker != NONE
    ranked = np.flatnonzero(counts)
    worker = int(dfg.worker[ranked[np.argmax(timeline.end_s[ranked])]]) if len(ranked) else NONE
    ops = _of_worker(timeline, worker)
    share = busy_share(timeline)
    busiest = int(np.argmax(share)) if len(share) else NONE

    def seconds(kinds: Iterable[Kind]) -> float:
        return _time_of(timeline, ops & _of_kinds(timeline, kinds))

    computation_s = seconds(COMPUTATION)
    exposed_s = exposed_communication_s(timeline, worker)
    return IterationSummary(
        iteration_s=timeline.makespan_s,
        worker=worker,
        computation_s=computation_s,
        forward_s=seconds({Kind.FORWARD}),
        backward_s=seconds({Kind.BACKWARD}),
        update_s=seconds({Kind.UPDATE}),
        communication_s=seconds(COMMUNICATION),
        exposed_communication_s=exposed_s,
        idle_s=max(timeline.makespan_s - computation_s - exposed_s, 0.0),
        bottleneck_queue=dfg.names.queues[busiest] if busiest != NONE else "",
        bottleneck_share=float(share[busiest]) if busiest != NONE else 0.0,
        critical_path=critical_path(timeline),
    )


def _of_kinds(timeline: Timeline, kinds: Iterable[Kind]) -> BoolArray:
    return np.isin(timeline.dfg.kind, [int(kind) for kind in kinds])


def _of_worker(timeline: Timeline, worker: int | None) -> BoolArray:
    """Ops of the worker, and ops without a worker, such as transfers on a link."""
    if worker is None:
        return np.ones(timeline.dfg.ops, dtype=np.bool_)
    of_worker: BoolArray = (timeline.dfg.worker == worker) | (timeline.dfg.worker == NONE)
    return of_worker


def _time_of(timeline: Timeline, ops: BoolArray) -> float:
    return covered_s(timeline.start_s[ops], timeline.end_s[ops])
