"""The critical path of a replay and its composition (dPRO, sec. 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray, Int32Array
from autotune.dfg.graph import COMMUNICATION, COMPUTATION, NONE, Kind
from autotune.dfg.replay import Timeline


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """The ops that follow each other without slack up to the end of the timeline, in order of time.

    `wait_s` (P,): time between the end of the previous op, or 0, and the start of each op of `ops`
    (P,): the gap of a queue. Durations and waits add up to the makespan. `by_kind`, `by_layer`:
    seconds of the ops; ops without a layer are under "".
    """

    timeline: Timeline
    ops: Int32Array
    wait_s: FloatArray
    by_kind: dict[Kind, float]
    by_layer: dict[str, float]

    @property
    def computation_s(self) -> float:
        return sum(self.by_kind.get(kind, 0.0) for kind in Kind if kind in COMPUTATION)

    @property
    def communication_s(self) -> float:
        return sum(self.by_kind.get(kind, 0.0) for kind in Kind if kind in COMMUNICATION)

    @property
    def other_s(self) -> float:
        """Launches, loads, copies and virtual ops that take time."""
        known = COMPUTATION | COMMUNICATION
        return sum(self.by_kind.get(kind, 0.0) for kind in Kind if kind not in known)

    @property
    def total_wait_s(self) -> float:
        return float(self.wait_s.sum())


def critical_path(timeline: Timeline, last: int | None = None) -> CriticalPath:
    """The path to op `last` (None: the one that ends last); empty for an empty graph."""
    dfg = timeline.dfg
    ops = critical_ops(timeline, last)
    previous_end_s = np.concatenate([[0.0], timeline.end_s[ops[:-1]]])[: len(ops)]
    wait_s = timeline.start_s[ops] - previous_end_s
    spent_s = timeline.end_s[ops] - timeline.start_s[ops]  # longer than alone on a shared queue
    kind_s = np.bincount(dfg.kind[ops], weights=spent_s, minlength=len(Kind))
    layer_s = np.bincount(dfg.layer[ops] + 1, weights=spent_s, minlength=1)
    layers = ("", *dfg.names.layers)
    by_kind = {kind: float(kind_s[kind]) for kind in Kind if kind_s[kind]}
    by_layer = {layers[number]: float(layer_s[number]) for number in np.flatnonzero(layer_s)}
    return CriticalPath(timeline, ops, wait_s, by_kind, by_layer)


def critical_ops(timeline: Timeline, last: int | None = None) -> Int32Array:
    """Ops along `Timeline.cause` to `last`, or to the op that ends last (the first of several)."""
    path: list[int] = []
    if timeline.dfg.ops:
        op = int(np.argmax(timeline.end_s)) if last is None else last
        cause = timeline.cause.tolist()
        while op != NONE:
            path.append(op)
            op = cause[op]
    return np.array(path[::-1], dtype=np.int32)
