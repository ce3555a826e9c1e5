"""The one replay: an event loop over queues, channels and locks (dPRO, sec. 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray, Int32Array
from autotune.dfg.event_loop import Rules, State, Waiting, Work, run
from autotune.dfg.graph import NONE, Dfg, Discipline
from autotune.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class Timeline:
    """When every op of `dfg` ran, from time 0, seconds; all arrays have shape (N,).

    `cause`: the op whose end (and the gap behind it) let this one start: a parent, the op before it on its queue or channel, or the one
    that gave its lock back; NONE where it started at 0. Where several did, a parent goes
    before the others, and of the parents the lowest index. Following it
    from the last op gives the critical path of the execution graph.
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
    """Run the graph, with other durations of shape (N,) if given. Raises `InvalidInput` where ops wait for each other's locks forever."""
    work = work_of(dfg, duration_s)
    rules = rules_of(dfg)
    state = first_state(dfg, rules)
    run(work, state, rules, None if rules is None else first_waiting(dfg), dfg.ops)
    return finished(dfg, work, state)


def work_of(dfg: Dfg, duration_s: FloatArray | None = None) -> Work:
    durations_s = (
        dfg.duration_s if duration_s is None else checked_durations(duration_s, (dfg.ops,))
    )
    return Work(durations_s, dfg.queue, dfg.child_start, dfg.child)


def checked_durations(duration_s: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """The durations as an array of float64. Raises `InvalidInput` where the shape or a value is wrong."""
    durations: FloatArray = np.ascontiguousarray(duration_s, dtype=np.float64)
    if durations.shape != shape:
        raise InvalidInput(f"durations must have shape {shape}, but have {durations.shape}")
    if durations.size and not (durations.min() >= 0 and durations.max() < np.inf):
        raise InvalidInput(
            f"durations must be finite and at least 0, but go from {durations.min()} to {durations.max()}"
        )
    durations = durations.view()
    durations.flags.writeable = (
        False  # as the graph's own, so that the loop is compiled for one kind of array only
    )
    return durations


def rules_of(dfg: Dfg) -> Rules | None:
    """None for a plain graph."""
    if dfg.is_plain:
        return None
    by_priority = dfg.discipline == Discipline.PRIORITY
    return Rules(
        dfg.gap_s,
        dfg.channel,
        dfg.priority,
        dfg.acquires,
        dfg.releases,
        dfg.lock_capacity,
        dfg.late_queues,
        by_priority,
    )


def first_state(dfg: Dfg, rules: Rules | None) -> State:
    """Before the first event."""
    ops, queues = dfg.ops, dfg.queues
    roots = np.flatnonzero(dfg.parents_left == 0)
    # At any time every op has at most one event as it becomes ready, one as it gives its lock back and one for each queue that it sets
    # free; and each queue and lock may be asked once.
    room = max(ops if rules is None else 4 * ops + queues + dfg.locks + 1, 1)
    heap_s = np.zeros(room)
    heap_code = np.empty(room, dtype=np.int64)
    heap_code[: len(roots)] = roots  # ascending, hence a heap
    return State(
        np.zeros(ops),
        np.full(ops, -1.0),
        np.full(ops, NONE, dtype=np.int32),
        dfg.parents_left.copy(),
        np.zeros(queues),
        np.full(queues, NONE, dtype=np.int32),
        heap_s,
        heap_code,
        np.array([len(roots), 0, NONE], dtype=np.int64),
        np.zeros(1),
    )


def first_waiting(dfg: Dfg) -> Waiting:
    def nobody(count: int) -> Int32Array:
        return np.full(count, NONE, dtype=np.int32)

    ops, queues, locks = dfg.ops, dfg.queues, dfg.locks
    return Waiting(
        nobody(ops),
        nobody(ops),
        nobody(queues),
        nobody(queues),
        nobody(queues),
        nobody(queues),
        np.array([NONE, 0], dtype=np.int32),
        np.full(queues, -1.0),
        nobody(locks),
        np.zeros(locks, dtype=np.int32),
        np.zeros(locks, dtype=np.bool_),
        nobody(locks),
    )


def finished(dfg: Dfg, work: Work, state: State) -> Timeline:
    """The timeline of a loop that has come to its end. Raises `InvalidInput` where ops are left."""
    broken = int(state.counts[2])
    if broken != NONE:
        lock = int(dfg.releases[broken])
        raise InvalidInput(
            f"an op may give back a lock that is held, but {dfg.names.ops[broken]!r} gives back lock {lock} and nobody holds it"
        )
    if state.counts[1] < dfg.ops:
        stuck = np.flatnonzero((state.end_s < 0) & (state.parents_left == 0))
        told = ", ".join(f"{dfg.names.ops[op]!r} for lock {dfg.acquires[op]}" for op in stuck[:3])
        raise InvalidInput(
            f"every lock must be given back to those who wait for it, but {len(stuck)} ops wait forever: {told}"
        )
    for array in (state.start_s, state.end_s, state.cause):
        array.flags.writeable = False
    return Timeline(dfg, work.duration_s, state.start_s, state.end_s, state.cause)
