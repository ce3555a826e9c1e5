"""Replay a data-flow graph with an event loop over queues, channels and locks (dPRO, sec. 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray, Int32Array
from autotune.dfg.event_loop import Rules, Sharing, State, Waiting, Work, run
from autotune.dfg.graph import NONE, Dfg, Discipline
from autotune.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class Timeline:
    """When every op of `dfg` ran, from time 0, in seconds; all arrays have shape (N,).

    `cause`: the op whose end, with the gap behind it, let this op start; NONE for a start at 0. It
    is a parent, the previous op on the queue or channel, or the op that gave the lock back. If
    several apply, a parent is named, and the lowest index of several parents. Followed from the
    last op, the causes are the critical path of the execution graph.
    """

    dfg: Dfg
    duration_s: FloatArray
    start_s: FloatArray
    end_s: FloatArray
    cause: Int32Array

    @property
    def makespan_s(self) -> float:
        return float(self.end_s.max(initial=0.0))


def replay(dfg: Dfg, duration_s: FloatArray | None = None) -> Timeline:
    """Run the graph, with other durations of shape (N,) if given.

    Raises `InvalidInput` if ops wait for each other's locks forever.
    """
    work = work_of(dfg, duration_s)
    rules = rules_of(dfg)
    state = first_state(dfg, rules)
    waiting, sharing = (None, None) if rules is None else (first_waiting(dfg), no_sharing(dfg))
    run(work, state, rules, waiting, sharing, dfg.ops)
    return finished(dfg, work, state)


def work_of(dfg: Dfg, duration_s: FloatArray | None = None) -> Work:
    durations_s = dfg.duration_s
    if duration_s is not None:
        durations_s = checked_durations(duration_s, (dfg.ops,))
    return Work(durations_s, dfg.queue, dfg.child_start, dfg.child)


def checked_durations(duration_s: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """The durations as read-only float64. Raises `InvalidInput` for a wrong shape or value."""
    durations: FloatArray = np.ascontiguousarray(duration_s, dtype=np.float64)
    if durations.shape != shape:
        raise InvalidInput(f"durations must have shape {shape}, but have {durations.shape}")
    if durations.size and not (durations.min() >= 0 and durations.max() < np.inf):
        raise InvalidInput(
            "durations must be finite and at least 0, "
            f"but go from {durations.min()} to {durations.max()}"
        )
    durations = durations.view()
    durations.flags.writeable = False  # like a graph's own: the loop is compiled for one type only
    return durations


def rules_of(dfg: Dfg) -> Rules | None:
    """None for a plain graph."""
    if dfg.is_plain:
        return None
    return Rules(
        gap_s=dfg.gap_s,
        channel=dfg.channel,
        priority=dfg.priority,
        acquires=dfg.acquires,
        releases=dfg.releases,
        capacity=dfg.lock_capacity,
        late=dfg.late_queues,
        by_priority=dfg.discipline == Discipline.PRIORITY,
        shared=dfg.discipline == Discipline.SHARED,
    )


def first_state(dfg: Dfg, rules: Rules | None) -> State:
    """The state before the first event."""
    ops = dfg.ops
    roots = np.flatnonzero(dfg.parents_left == 0)
    # At any time an op has at most one event as it becomes ready, one as it gives its lock back and
    # one for each queue that it frees. Each queue and lock may be asked once.
    room = max(ops if rules is None else 4 * ops + dfg.queues + dfg.locks + 1, 1)
    heap_code = np.empty(room, dtype=np.int64)
    heap_code[: len(roots)] = roots  # ascending, hence a heap
    return State(
        start_s=np.zeros(ops),
        end_s=np.full(ops, -1.0),
        cause=_nones(ops),
        parents_left=dfg.parents_left.copy(),
        clock_s=np.zeros(dfg.queues),
        last=_nones(dfg.queues),
        heap_s=np.zeros(room),
        heap_code=heap_code,
        counts=np.array([len(roots), 0, NONE], dtype=np.int64),
        now_s=np.zeros(1),
    )


def first_waiting(dfg: Dfg) -> Waiting:
    """No op waits."""
    return Waiting(
        left=_nones(dfg.ops),
        right=_nones(dfg.ops),
        first=_nones(dfg.queues),
        final=_nones(dfg.queues),
        head=_nones(dfg.queues),
        blocked=_nones(dfg.queues),
        able=np.array([NONE, 0], dtype=np.int32),
        asked_s=np.full(dfg.queues, -1.0),
        for_lock=_nones(dfg.locks),
        held=np.zeros(dfg.locks, dtype=np.int32),
        promised=np.zeros(dfg.locks, dtype=np.bool_),
        releaser=_nones(dfg.locks),
    )


def no_sharing(dfg: Dfg) -> Sharing:
    """No op is in a shared queue."""
    return Sharing(
        due_s=np.zeros(dfg.ops),
        served_s=np.zeros(dfg.queues),
        first_end_s=np.zeros(dfg.queues),
        ops=np.zeros(dfg.queues, dtype=np.int32),
        priority=np.zeros(dfg.ops, dtype=np.int32),
    )


def _nones(count: int) -> Int32Array:
    return np.full(count, NONE, dtype=np.int32)


def finished(dfg: Dfg, work: Work, state: State) -> Timeline:
    """The timeline of a loop that has ended. Raises `InvalidInput` if ops are left."""
    names = dfg.names.ops
    broken = int(state.counts[2])
    if broken != NONE:
        lock = int(dfg.releases[broken])
        raise InvalidInput(
            "an op may give back a lock that is held, "
            f"but {names[broken]!r} gives back lock {lock} and nobody holds it"
        )
    if state.counts[1] < dfg.ops:
        stuck = np.flatnonzero((state.end_s < 0) & (state.parents_left == 0))
        listed = ", ".join(f"{names[op]!r} for lock {dfg.acquires[op]}" for op in stuck[:3])
        raise InvalidInput(
            "every lock must be given back to those who wait for it, "
            f"but {len(stuck)} ops wait forever: {listed}"
        )
    for array in (state.start_s, state.end_s, state.cause):
        array.flags.writeable = False
    return Timeline(dfg, work.duration_s, state.start_s, state.end_s, state.cause)
