"""The compiled event loop of the replay. `replay.py` prepares its arrays; the rules are told in `docs/replay.md`.

| symbol | meaning |
|---|---|
| n, L, Q | ops, locks, queues |
| event | (time in seconds, code): the earliest first, of those at one time the lowest code |
| code | op o becomes ready: o; op o gives its lock back: n + o; lock l is given to one who waits: 2n + l; queue q chooses: 2n + L + q |
| clock | (Q,) when a queue is free again: the end of its last op and the gap behind it |
| late | a queue that must choose when it is free, because its order is by priority or because a channel is involved |

A FIFO queue without channels is not late: its ops run in the order in which they become ready, so an op's start is known as soon as it
is ready, and it costs one event. The loop is compiled twice: without `rules` for graphs in which no queue is late and no op takes a
lock, with `rules` for all others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.dfg.compiled import compiled
from autotune.dfg.graph import NONE, FloatArray, IntArray, OffsetArray

BROKEN = -2  # an op gave back a lock that nobody held

Bools = NDArray[np.bool_]


class Work(NamedTuple):
    """What has to be done; never written."""

    duration_s: FloatArray  # (n,)
    gap_s: FloatArray  # (n,)
    queue: IntArray  # (n,)
    child_start: OffsetArray  # (n + 1,)
    child: IntArray  # (E,)


class State(NamedTuple):
    """Where the loop is. A copy of all arrays is a snapshot from which it can go on."""

    start_s: FloatArray  # (n,) of an op that has not started: since when it waits
    end_s: FloatArray  # (n,) -1 before the end is known
    cause: IntArray  # (n,)
    parents_left: IntArray  # (n,)
    clock_s: FloatArray  # (Q,)
    last: IntArray  # (Q,) the op that set the clock
    heap_s: FloatArray
    heap_code: OffsetArray
    counts: OffsetArray  # events in the heap, ops whose end is known, the op that gave back a lock that nobody held
    now_s: FloatArray  # (1,) time of the last event


class Rules(NamedTuple):
    """What a FIFO queue alone does not need; never written."""

    channel: IntArray  # (n,)
    priority: IntArray  # (n,)
    acquires: IntArray  # (n,)
    releases: IntArray  # (n,)
    capacity: IntArray  # (L,)
    late: Bools  # (Q,)
    by_priority: Bools  # (Q,)


class Waiting(NamedTuple):
    """Who waits for whom. Sets that are ordered by priority are skew heaps over `left` and `right`; FIFO ones are lists over `left`."""

    left: IntArray  # (n,)
    right: IntArray  # (n,)
    first: IntArray  # (Q,) who waits in a queue: head of the list or root of the heap
    final: IntArray  # (Q,) the list's last
    head: IntArray  # (Q,) the op that a queue has chosen and that has not started
    blocked: IntArray  # (Q,) root of the chosen ops that wait for this queue or channel
    asked_s: FloatArray  # (Q,) the time for which an arrival has asked the queue to choose
    for_lock: IntArray  # (L,) root
    held: IntArray  # (L,)
    promised: Bools  # (L,) an event that gives the lock to somebody is under way
    releaser: IntArray  # (L,) who gave it back last


@compiled()
def _push(heap_s: FloatArray, heap_code: OffsetArray, size: int, time_s: float, code: int) -> int:
    """Returns the new size."""
    place = size
    while place > 0:
        above = (place - 1) >> 1
        if heap_s[above] < time_s or (heap_s[above] == time_s and heap_code[above] <= code):
            break
        heap_s[place] = heap_s[above]
        heap_code[place] = heap_code[above]
        place = above
    heap_s[place] = time_s
    heap_code[place] = code
    return size + 1


@compiled()
def _sink(heap_s: FloatArray, heap_code: OffsetArray, size: int, time_s: float, code: int) -> None:
    """Put an event in the place of the first one."""
    place = 0
    below = 1
    while below < size:
        other = below + 1
        if other < size and (heap_s[other] < heap_s[below] or (heap_s[other] == heap_s[below] and heap_code[other] < heap_code[below])):
            below = other
        if time_s < heap_s[below] or (time_s == heap_s[below] and code < heap_code[below]):
            break
        heap_s[place] = heap_s[below]
        heap_code[place] = heap_code[below]
        place = below
        below = 2 * place + 1
    heap_s[place] = time_s
    heap_code[place] = code


@compiled()
def _meld(one: int, two: int, waiting: Waiting, priority: IntArray, since_s: FloatArray) -> int:
    """Root of the union of two skew heaps. First: the lowest priority, then who waits longest, then the lowest index."""
    if one < 0:
        return two
    if two < 0:
        return one
    root = NONE
    above = NONE
    while one >= 0:
        if priority[two] < priority[one] or (
            priority[two] == priority[one] and (since_s[two] < since_s[one] or (since_s[two] == since_s[one] and two < one))
        ):
            one, two = two, one
        if above < 0:
            root = one
        else:
            waiting.left[above] = one
        rest = waiting.right[one]
        waiting.right[one] = waiting.left[one]
        above = one
        one = rest
    waiting.left[above] = two
    return root


@compiled()
def _take_first(root: int, waiting: Waiting, priority: IntArray, since_s: FloatArray) -> int:
    """Root of what is left when the first is taken away."""
    left, right = waiting.left[root], waiting.right[root]
    waiting.left[root] = NONE
    waiting.right[root] = NONE
    return _meld(left, right, waiting, priority, since_s)


@compiled()
def _grant(lock: int, now_s: float, size: int, state: State, rules: Rules, waiting: Waiting, code: int) -> tuple[int, int]:
    """(the op that gets the lock, or NONE; events in the heap)."""
    waiting.promised[lock] = False
    op = waiting.for_lock[lock]
    if op < 0 or waiting.held[lock] >= rules.capacity[lock]:
        return NONE, size
    waiting.for_lock[lock] = _take_first(op, waiting, rules.priority, state.start_s)
    waiting.held[lock] += 1
    if waiting.for_lock[lock] >= 0 and waiting.held[lock] < rules.capacity[lock]:
        waiting.promised[lock] = True
        size = _push(state.heap_s, state.heap_code, size, now_s, code)
    if now_s > state.start_s[op]:
        state.cause[op] = waiting.releaser[lock]
        state.start_s[op] = now_s
    return op, size


@compiled()
def _choose(queue: int, now_s: float, work: Work, state: State, rules: Rules, waiting: Waiting) -> int:
    """The op that a free queue starts now, or NONE. It may be another queue's, for which this one is the channel."""
    waiting.asked_s[queue] = -1.0
    if state.clock_s[queue] > now_s:
        return NONE
    op = waiting.first[queue]
    if op >= 0 and waiting.head[queue] < 0:
        if rules.by_priority[queue]:
            waiting.first[queue] = _take_first(op, waiting, rules.priority, state.start_s)
        else:
            waiting.first[queue] = waiting.left[op]
            waiting.left[op] = NONE
        waiting.head[queue] = op
        waiting.blocked[queue] = _meld(waiting.blocked[queue], op, waiting, rules.priority, state.start_s)
    while waiting.blocked[queue] >= 0:
        op = waiting.blocked[queue]
        waiting.blocked[queue] = _take_first(op, waiting, rules.priority, state.start_s)
        other = rules.channel[op] if work.queue[op] == queue else work.queue[op]
        if other >= 0 and state.clock_s[other] > now_s:
            waiting.blocked[other] = _meld(waiting.blocked[other], op, waiting, rules.priority, state.start_s)
            continue
        waiting.head[work.queue[op]] = NONE
        if now_s > state.start_s[op]:
            state.cause[op] = state.last[queue] if state.clock_s[queue] == now_s else state.last[other]
        return op
    return NONE


@compiled()
def _enter(op: int, now_s: float, size: int, work: Work, state: State, rules: Rules, waiting: Waiting, code: int) -> int:
    """Let an op wait in its late queue; events in the heap."""
    queue = work.queue[op]
    if rules.by_priority[queue]:
        waiting.first[queue] = _meld(waiting.first[queue], op, waiting, rules.priority, state.start_s)
    elif waiting.first[queue] < 0:
        waiting.first[queue] = op
        waiting.final[queue] = op
    else:
        waiting.left[waiting.final[queue]] = op
        waiting.final[queue] = op
    if state.clock_s[queue] <= now_s and waiting.head[queue] < 0 and waiting.asked_s[queue] != now_s:
        waiting.asked_s[queue] = now_s
        size = _push(state.heap_s, state.heap_code, size, now_s, code + queue)
    return size


@compiled()
def _lock_event(code: int, now_s: float, size: int, work: Work, state: State, rules: Rules, waiting: Waiting) -> tuple[int, int]:
    """An op asks for a lock, gives one back, or one is given away: (the op that goes on to its queue, NONE or BROKEN; events)."""
    ops = len(work.queue)
    if code >= 2 * ops:
        return _grant(code - 2 * ops, now_s, size, state, rules, waiting, code)
    if code >= ops:
        lock = rules.releases[code - ops]
        waiting.releaser[lock] = code - ops
        waiting.held[lock] -= 1
        if waiting.held[lock] < 0:
            state.counts[2] = code - ops
            return BROKEN, size
    else:
        lock = rules.acquires[code]
        waiting.for_lock[lock] = _meld(waiting.for_lock[lock], code, waiting, rules.priority, state.start_s)
    if waiting.for_lock[lock] >= 0 and waiting.held[lock] < rules.capacity[lock] and not waiting.promised[lock]:
        waiting.promised[lock] = True
        size = _push(state.heap_s, state.heap_code, size, now_s, 2 * ops + lock)
    return NONE, size


@compiled()
def _settle(code: int, now_s: float, size: int, work: Work, state: State, rules: Rules, waiting: Waiting) -> tuple[int, int]:
    """One event under `rules`: (the op that can be given its start, NONE or BROKEN; events in the heap)."""
    choosing = 2 * len(work.queue) + len(rules.capacity)
    if code >= choosing:
        return _choose(code - choosing, now_s, work, state, rules, waiting), size
    op = code
    if code >= len(work.queue) or rules.acquires[code] >= 0:
        op, size = _lock_event(code, now_s, size, work, state, rules, waiting)
    if op >= 0 and work.queue[op] >= 0 and rules.late[work.queue[op]]:
        size = _enter(op, now_s, size, work, state, rules, waiting, choosing)
        op = NONE
    return op, size


@compiled()
def _announce(op: int, size: int, end_s: float, work: Work, state: State, rules: Rules) -> int:
    """The events that the end of an op brings beside its children: its queue and channel choose, its lock is free. Events in the heap."""
    queue, channel = work.queue[op], rules.channel[op]
    choosing = 2 * len(work.queue) + len(rules.capacity)
    if channel >= 0:
        state.clock_s[channel] = end_s
        state.last[channel] = op
        size = _push(state.heap_s, state.heap_code, size, end_s, choosing + channel)
    if queue >= 0 and rules.late[queue]:
        size = _push(state.heap_s, state.heap_code, size, state.clock_s[queue], choosing + queue)
    if rules.releases[op] >= 0:
        size = _push(state.heap_s, state.heap_code, size, end_s, len(work.queue) + op)
    return size


@compiled()
def run(work: Work, state: State, rules: Rules | None, waiting: Waiting | None, until: int) -> None:
    """Go on until the ends of `until` ops are known or nothing is left to do."""
    heap_s, heap_code, counts = state.heap_s, state.heap_code, state.counts
    size, known, now_s = counts[0], counts[1], state.now_s[0]
    while size > 0 and known < until:
        now_s = heap_s[0]
        code = heap_code[0]
        size -= 1
        _sink(heap_s, heap_code, size, heap_s[size], heap_code[size])
        op = code
        if rules is not None:
            op, size = _settle(code, now_s, size, work, state, rules, waiting)
            if op == NONE:
                continue
            if op == BROKEN:
                break
        start_s = now_s
        queue = work.queue[op]
        if queue >= 0:
            if state.clock_s[queue] > now_s:
                start_s = state.clock_s[queue]
                state.cause[op] = state.last[queue]
            end_s = start_s + work.duration_s[op]
            state.clock_s[queue] = end_s + work.gap_s[op]
            state.last[queue] = op
        else:
            end_s = start_s + work.duration_s[op]
        if rules is not None:
            size = _announce(op, size, end_s, work, state, rules)
        state.start_s[op] = start_s
        state.end_s[op] = end_s
        known += 1
        for edge in range(work.child_start[op], work.child_start[op + 1]):
            child = work.child[edge]
            if end_s > state.start_s[child]:
                state.start_s[child] = end_s
                state.cause[child] = op
            state.parents_left[child] -= 1
            if state.parents_left[child] == 0:
                size = _push(heap_s, heap_code, size, state.start_s[child], child)
    counts[0], counts[1] = size, known
    state.now_s[0] = now_s
