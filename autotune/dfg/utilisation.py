"""How busy the queues of a timeline are, which communication no computation hides, and the few numbers that sum up an iteration."""

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

    All but `iteration_s` and the critical path are of `worker`, the one that ends last (NONE where ops have no worker), and of ops that
    have no worker: the time in which at least one such op of that kind runs. `computation_s`: forward, backward, update and other
    computation; `exposed_communication_s`: the part of `communication_s` in which none of its computation runs; `idle_s`: neither runs.
    These three add up to `iteration_s`. `bottleneck_queue`: name of the queue or channel that is busy for the largest share of the
    iteration, "" for none.
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


def busy_share(timeline: Timeline) -> FloatArray:
    """The share of the makespan in which a queue or channel is taken, shape (Q,); gaps do not count."""
    dfg = timeline.dfg
    busy_s = np.zeros(dfg.queues)
    for takes in (dfg.queue, dfg.channel):
        busy_s += np.bincount(
            takes[takes >= 0], weights=timeline.duration_s[takes >= 0], minlength=dfg.queues
        )
    return busy_s / timeline.makespan_s if timeline.makespan_s > 0 else busy_s


def exposed_communication_s(timeline: Timeline, worker: int | None = None) -> float:
    """The time in which communication runs and no computation does: of one worker, or None for all ops together."""
    mine = _of_worker(timeline, worker)
    computes = mine & _of_kinds(timeline, COMPUTATION)
    either = computes | (mine & _of_kinds(timeline, COMMUNICATION))
    return _time_of(timeline, either) - _time_of(timeline, computes)


def iteration_summary(timeline: Timeline) -> IterationSummary:
    """Of a timeline that holds one iteration."""
    dfg = timeline.dfg
    ranked = np.flatnonzero(dfg.worker != NONE)
    worker = int(dfg.worker[ranked[np.argmax(timeline.end_s[ranked])]]) if len(ranked) else NONE
    mine = _of_worker(timeline, worker)
    share = busy_share(timeline)
    busiest = int(np.argmax(share)) if len(share) else NONE
    computation_s, exposed_s = (
        _time_of(timeline, mine & _of_kinds(timeline, COMPUTATION)),
        exposed_communication_s(timeline, worker),
    )
    return IterationSummary(
        iteration_s=timeline.makespan_s,
        worker=worker,
        computation_s=computation_s,
        forward_s=_time_of(timeline, mine & _of_kinds(timeline, {Kind.FORWARD})),
        backward_s=_time_of(timeline, mine & _of_kinds(timeline, {Kind.BACKWARD})),
        update_s=_time_of(timeline, mine & _of_kinds(timeline, {Kind.UPDATE})),
        communication_s=_time_of(timeline, mine & _of_kinds(timeline, COMMUNICATION)),
        exposed_communication_s=exposed_s,
        idle_s=max(timeline.makespan_s - computation_s - exposed_s, 0.0),
        bottleneck_queue=dfg.names.queues[busiest] if busiest != NONE else "",
        bottleneck_share=float(share[busiest]) if busiest != NONE else 0.0,
        critical_path=critical_path(timeline),
    )


def _of_kinds(timeline: Timeline, kinds: Iterable[Kind]) -> BoolArray:
    return np.isin(timeline.dfg.kind, [int(kind) for kind in kinds])


def _of_worker(timeline: Timeline, worker: int | None) -> BoolArray:
    """Its ops and those of nobody in particular, such as transfers on a link that stands for all of its kind."""
    if worker is None:
        return np.ones(timeline.dfg.ops, dtype=np.bool_)
    mine: BoolArray = (timeline.dfg.worker == worker) | (timeline.dfg.worker == NONE)
    return mine


def _time_of(timeline: Timeline, ops: BoolArray) -> float:
    return covered_s(timeline.start_s[ops], timeline.end_s[ops])
