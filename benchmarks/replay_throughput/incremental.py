"""Replay after a local change: continue the event loop from a snapshot before the change matters.

The duration of an op is read when its end becomes known. So a snapshot in which the ends of all
changed ops are unknown is also a snapshot of the changed replay. Continuing from it gives exactly
the result of a full replay.

| symbol | meaning |
|---|---|
| N | ops |
| S | snapshots; snapshot s is taken when s N / S ends are known, snapshot 0 at the start |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.arrays import FloatArray
from autotune.dfg.event_loop import State, Waiting, run
from autotune.dfg.graph import Dfg, Discipline
from autotune.dfg.replay import (
    Timeline,
    checked_durations,
    finished,
    first_state,
    first_waiting,
    no_sharing,
    rules_of,
    work_of,
)
from autotune.errors import InvalidInput

Numbers = NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Resumed:
    """A timeline, and the number of its ops that the loop replayed; the snapshot had the others."""

    timeline: Timeline
    replayed_ops: int


class IncrementalReplay:
    """The replay of one graph with `snapshots` of about 30 bytes per op."""

    def __init__(self, dfg: Dfg, duration_s: FloatArray | None = None, snapshots: int = 32) -> None:
        """Raises `InvalidInput` as `replay` does, and for less than one snapshot."""
        if snapshots < 1:
            raise InvalidInput(
                f"an incremental replay needs at least 1 snapshot, but {snapshots} were asked for"
            )
        if (dfg.discipline == Discipline.SHARED).any():
            raise InvalidInput("an incremental replay needs queues that serve one op at a time")
        self._dfg = dfg
        self._rules = rules_of(dfg)
        self._sharing = None if self._rules is None else no_sharing(dfg)
        work = work_of(dfg, duration_s)
        state = first_state(dfg, self._rules)
        waiting = None if self._rules is None else first_waiting(dfg)
        self._snapshots: list[tuple[State, Waiting | None]] = []
        self._known_from = np.full(
            dfg.ops, snapshots, dtype=np.int32
        )  # the first snapshot in which the end of an op is known
        for number in range(snapshots):
            run(work, state, self._rules, waiting, self._sharing, number * dfg.ops // snapshots)
            self._snapshots.append(_copy(state, waiting))
            self._known_from[(state.end_s >= 0) & (self._known_from == snapshots)] = number
        run(work, state, self._rules, waiting, self._sharing, dfg.ops)
        self.timeline = finished(dfg, work, state)

    def replay(self, duration_s: FloatArray) -> Resumed:
        """The timeline with durations of shape (N,); later changes need less work.

        Raises `InvalidInput` as `replay` does.
        """
        changed = np.flatnonzero(
            checked_durations(duration_s, (self._dfg.ops,)) != self.timeline.duration_s
        )
        return self._resume(duration_s, changed)

    def replay_changed(self, ops: Numbers, duration_s: FloatArray) -> Resumed:
        """The same with changed durations of some `ops`, both of shape (C,).

        Raises `InvalidInput` also for ops that do not exist.
        """
        if len(ops) and not (np.min(ops) >= 0 and np.max(ops) < self._dfg.ops):
            raise InvalidInput(
                f"changed ops must be 0 to {self._dfg.ops - 1}, "
                f"but are {np.min(ops)} to {np.max(ops)}"
            )
        changed_s = self.timeline.duration_s.copy()
        changed_s[ops] = checked_durations(duration_s, np.shape(ops))
        return self._resume(changed_s, ops)

    def _resume(self, duration_s: FloatArray, changed: Numbers) -> Resumed:
        if not len(changed):
            return Resumed(self.timeline, 0)
        work = work_of(self._dfg, duration_s)
        state, waiting = _copy(*self._snapshots[int(self._known_from[changed].min()) - 1])
        known = int(state.counts[1])
        run(work, state, self._rules, waiting, self._sharing, self._dfg.ops)
        return Resumed(finished(self._dfg, work, state), self._dfg.ops - known)


def _copy(state: State, waiting: Waiting | None) -> tuple[State, Waiting | None]:
    """Copy the arrays; of the heap only the events."""
    events = int(state.counts[0])
    heap_s, heap_code = np.empty_like(state.heap_s), np.empty_like(state.heap_code)
    heap_s[:events], heap_code[:events] = state.heap_s[:events], state.heap_code[:events]
    arrays = {
        name: array.copy() for name, array in state._asdict().items() if not name.startswith("heap")
    }
    copy = state._replace(**arrays, heap_s=heap_s, heap_code=heap_code)
    return copy, None if waiting is None else waiting._replace(
        **{name: array.copy() for name, array in waiting._asdict().items()}
    )
