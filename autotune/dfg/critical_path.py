"""The critical path of a replay and what it is made of (dPRO, sec. 4.3: "the critical path on the execution graph")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray, Int32Array
from autotune.dfg.graph import COMMUNICATION, COMPUTATION, NONE, Kind
from autotune.dfg.replay import Timeline


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """The ops that end one after the other without slack, in the order of time, up to the end of the timeline.

    `ops` (P,); `wait_s` (P,): between the end of the op before (or 0) and the start of this one, the gap of a queue. The durations and
    the waits add up to the makespan. `by_kind` and `by_layer` hold the seconds of the ops; ops without a layer are under "".
    """

    timeline: Timeline
    ops: Int32Array
    wait_s: FloatArray
    by_kind: dict[Kind, float]
    by_layer: dict[str, float]

    @property
    def computation_s(self) -> float:
        return sum(seconds for kind, seconds in self.by_kind.items() if kind in COMPUTATION)

    @property
    def communication_s(self) -> float:
        return sum(seconds for kind, seconds in self.by_kind.items() if kind in COMMUNICATION)

    @property
    def other_s(self) -> float:
        """Launches, loads, copies and virtual ops that take time."""
        return sum(
            seconds
            for kind, seconds in self.by_kind.items()
            if kind not in COMPUTATION | COMMUNICATION
        )

    @property
    def total_wait_s(self) -> float:
        return float(self.wait_s.sum())


def critical_path(timeline: Timeline) -> CriticalPath:
    """From the op that ends last (of several the lowest index) back along `Timeline.cause`; empty for an empty graph."""
    dfg = timeline.dfg
    ops = _backwards(timeline)
    before_s = np.concatenate([[0.0], timeline.end_s[ops[:-1]]])[: len(ops)]
    spent_s = timeline.duration_s[ops]
    kinds = (
        np.bincount(dfg.kind[ops], weights=spent_s, minlength=len(Kind))
        if len(ops)
        else np.zeros(len(Kind))
    )
    layers = (
        np.bincount(dfg.layer[ops] + 1, weights=spent_s, minlength=1) if len(ops) else np.zeros(1)
    )
    by_layer = {
        ("", *dfg.names.layers)[number]: float(layers[number]) for number in np.flatnonzero(layers)
    }
    by_kind = {kind: float(kinds[kind]) for kind in Kind if kinds[kind]}
    return CriticalPath(timeline, ops, timeline.start_s[ops] - before_s, by_kind, by_layer)


def _backwards(timeline: Timeline) -> Int32Array:
    path: list[int] = []
    if timeline.dfg.ops:
        op = int(np.argmax(timeline.end_s))
        cause = timeline.cause.tolist()
        while op != NONE:
            path.append(op)
            op = cause[op]
    return np.array(path[::-1], dtype=np.int32)
