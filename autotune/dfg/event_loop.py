"""The compiled event loop of the replay; `replay.py` prepares its arrays (docs/prediction.md).

| symbol | meaning |
|---|---|
| n, L, Q | ops, locks, queues |
| event | (time in seconds, code): earliest first, then the lowest code |
| code | op o becomes ready: o; op o gives its lock back: n + o; lock l is granted: 2n + l; queue q
  chooses an op: 2n + L + q; the first of the chosen ops starts: 2n + L + Q |
| clock | (Q,) when a queue is free again: the end of its last op and the gap behind it |
| late | a queue that chooses when it is free, since it is by priority or a channel is involved |
| shared | a queue that serves all its ops at once, each at 1/k of its speed while there are k |

A FIFO queue without channels is not late: its ops run in the order in which they become ready. The
start of such an op is known when the op is ready, so the op costs one event. The loop is compiled
twice: without `rules` for plain graphs (no late or shared queue, lock or gap), and with `rules` for
others.

A shared queue counts the seconds of service that each op has had since the queue was last empty. An
op ends when this count has grown by its duration, so the ops end in an order that later arrivals do
not change. The event "queue q chooses" asks whether the first op has ended.
"""

from __future__ import annotations

from typing import NamedTuple

from autotune.arrays import BoolArray, FloatArray, Int32Array, IntArray
from autotune.dfg.compiled import compiled, inner
from autotune.dfg.graph import NONE

BROKEN = -2  # an op gave back a lock that nobody held


class Work(NamedTuple):
    """The input; never written."""

    duration_s: FloatArray  # (n,)
    queue: Int32Array  # (n,)
    child_start: IntArray  # (n + 1,)
    child: Int32Array  # (E,)


class State(NamedTuple):
    """The state of the loop. From a copy of all arrays, the loop can continue."""

    start_s: FloatArray  # (n,) since when it waits, before the op has started
    end_s: FloatArray  # (n,) -1 before the end is known
    cause: Int32Array  # (n,)
    parents_left: Int32Array  # (n,)
    clock_s: FloatArray  # (Q,)
    last: Int32Array  # (Q,) the op that set the clock
    heap_s: FloatArray
    heap_code: IntArray
    counts: IntArray  # (3,) events in the heap, ops with known ends, op that broke a lock's rule
    now_s: FloatArray  # (1,) time of the last event


class Rules(NamedTuple):
    """Input that a FIFO queue alone does not need; never written."""

    gap_s: FloatArray  # (n,)
    channel: Int32Array  # (n,)
    priority: Int32Array  # (n,)
    acquires: Int32Array  # (n,)
    releases: Int32Array  # (n,)
    capacity: Int32Array  # (L,)
    late: BoolArray  # (Q,)
    by_priority: BoolArray  # (Q,)
    shared: BoolArray  # (Q,)


class Waiting(NamedTuple):
    """Waiting ops: by priority in skew heaps over `left` and `right`, FIFO in lists over `left`."""

    left: Int32Array  # (n,)
    right: Int32Array  # (n,)
    first: Int32Array  # (Q,) ops that wait in a queue: head of the list or root of the heap;
    # ops in a shared queue: root of the heap by `Sharing.due_s`
    final: Int32Array  # (Q,) the list's last op
    head: Int32Array  # (Q,) the op that a queue has chosen and that has not started
    blocked: Int32Array  # (Q,) root of the chosen ops that wait for this queue or channel
    able: Int32Array  # (2,) root of the chosen ops that may start now; 1 if an event will start one
    asked_s: FloatArray  # (Q,) the time of the event by which the queue was asked to choose
    for_lock: Int32Array  # (L,) root of the ops that wait for the lock
    held: Int32Array  # (L,)
    promised: BoolArray  # (L,) an event that grants the lock is in the heap
    releaser: Int32Array  # (L,) the op that gave it back last


class Sharing(NamedTuple):
    """The state of shared queues that `Waiting` lacks."""

    due_s: FloatArray  # (n,) the service with which an op ends
    served_s: FloatArray  # (Q,) service of each op since the queue was last empty
    first_end_s: FloatArray  # (Q,) when the first op ends
    ops: Int32Array  # (Q,) how many are in the queue
    priority: Int32Array  # (n,) zeros: no op has any


@inner
def _push(heap_s: FloatArray, heap_code: IntArray, size: int, time_s: float, code: int) -> int:
    """Add an event; the new size."""
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


@inner
def _sink(heap_s: FloatArray, heap_code: IntArray, size: int, time_s: float, code: int) -> None:
    """Replace the first event. The hole sinks to the bottom, then the event rises.

    This avoids a branch that is hard to predict.
    """
    place = 0
    below = 2
    while below < size:
        one, two = heap_s[below - 1], heap_s[below]
        below -= int((one < two) | ((one == two) & (heap_code[below - 1] < heap_code[below])))
        heap_s[place] = heap_s[below]
        heap_code[place] = heap_code[below]
        place = below
        below = 2 * place + 2
    if below == size:
        heap_s[place] = heap_s[below - 1]
        heap_code[place] = heap_code[below - 1]
        place = below - 1
    _push(heap_s, heap_code, place, time_s, code)


@inner
def _meld(one: int, two: int, waiting: Waiting, priority: Int32Array, since_s: FloatArray) -> int:
    """Root of the union of two skew heaps: lowest priority, longest wait, lowest index first."""
    if one < 0:
        return two
    if two < 0:
        return one
    root = NONE
    above = NONE
    while one >= 0:
        if priority[two] < priority[one] or (
            priority[two] == priority[one]
            and (since_s[two] < since_s[one] or (since_s[two] == since_s[one] and two < one))
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


@inner
def _take_first(root: int, waiting: Waiting, priority: Int32Array, since_s: FloatArray) -> int:
    """Root of the heap without its first op."""
    left, right = waiting.left[root], waiting.right[root]
    waiting.left[root] = NONE
    waiting.right[root] = NONE
    return _meld(left, right, waiting, priority, since_s)


@inner
def _grant(
    lock: int, now_s: float, size: int, state: State, rules: Rules, waiting: Waiting, code: int
) -> tuple[int, int]:
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


@inner
def _candidate(queue: int, state: State, rules: Rules, waiting: Waiting) -> None:
    """The first op that waits for this free queue or channel may start now."""
    op = waiting.blocked[queue]
    if op >= 0:
        waiting.blocked[queue] = _take_first(op, waiting, rules.priority, state.start_s)
        waiting.able[0] = _meld(waiting.able[0], op, waiting, rules.priority, state.start_s)


@inner
def _choose(
    queue: int, now_s: float, size: int, state: State, rules: Rules, waiting: Waiting, code: int
) -> int:
    """A free queue chooses its next op and, as a channel, serves ops; events in the heap."""
    waiting.asked_s[queue] = -1.0
    if state.clock_s[queue] > now_s:
        return size
    op = waiting.first[queue]
    if op >= 0 and waiting.head[queue] < 0:
        if rules.by_priority[queue]:
            waiting.first[queue] = _take_first(op, waiting, rules.priority, state.start_s)
        else:
            waiting.first[queue] = waiting.left[op]
            waiting.left[op] = NONE
        waiting.head[queue] = op
        waiting.blocked[queue] = _meld(
            waiting.blocked[queue], op, waiting, rules.priority, state.start_s
        )
    _candidate(queue, state, rules, waiting)
    if waiting.able[0] >= 0 and waiting.able[1] == 0:
        waiting.able[1] = 1
        size = _push(state.heap_s, state.heap_code, size, now_s, code)
    return size


@inner
def _begin(
    now_s: float, size: int, work: Work, state: State, rules: Rules, waiting: Waiting, code: int
) -> tuple[int, int]:
    """(the first op that may start with queue and channel free, or NONE; events in the heap)."""
    waiting.able[1] = 0
    while waiting.able[0] >= 0:
        op = waiting.able[0]
        waiting.able[0] = _take_first(op, waiting, rules.priority, state.start_s)
        queue, channel = work.queue[op], rules.channel[op]
        if state.clock_s[queue] > now_s:
            waiting.blocked[queue] = _meld(
                waiting.blocked[queue], op, waiting, rules.priority, state.start_s
            )
            if channel >= 0 and state.clock_s[channel] <= now_s:
                _candidate(channel, state, rules, waiting)
        elif channel >= 0 and state.clock_s[channel] > now_s:
            waiting.blocked[channel] = _meld(
                waiting.blocked[channel], op, waiting, rules.priority, state.start_s
            )
            _candidate(queue, state, rules, waiting)
        else:
            waiting.head[queue] = NONE
            if now_s > state.start_s[op]:
                state.cause[op] = (
                    state.last[queue] if state.clock_s[queue] == now_s else state.last[channel]
                )
            if waiting.able[0] >= 0:
                waiting.able[1] = 1
                size = _push(state.heap_s, state.heap_code, size, now_s, code)
            return op, size
    return NONE, size


@inner
def _serve(queue: int, now_s: float, state: State, sharing: Sharing) -> None:
    """Count what the ops of a shared queue have been served until now."""
    if sharing.ops[queue] > 0:
        passed_s = now_s - state.clock_s[queue]
        sharing.served_s[queue] += passed_s / sharing.ops[queue]
    else:
        sharing.served_s[queue] = 0.0
    state.clock_s[queue] = now_s


@inner
def _await_end(
    queue: int, now_s: float, size: int, state: State, waiting: Waiting, sharing: Sharing, code: int
) -> int:
    """Find when the first op of a shared queue ends, and add its event; events in the heap.

    An earlier event of the queue, if there is one, will add it.
    """
    op = waiting.first[queue]
    left_s = max(sharing.due_s[op] - sharing.served_s[queue], 0.0)
    end_s = now_s + left_s * sharing.ops[queue]
    sharing.first_end_s[queue] = end_s
    if waiting.asked_s[queue] < 0.0 or end_s < waiting.asked_s[queue]:
        waiting.asked_s[queue] = end_s
        size = _push(state.heap_s, state.heap_code, size, end_s, code)
    return size


@inner
def _share(
    op: int,
    now_s: float,
    size: int,
    work: Work,
    state: State,
    waiting: Waiting,
    sharing: Sharing,
    code: int,
) -> int:
    """Start an op in its shared queue; events in the heap."""
    queue = work.queue[op]
    _serve(queue, now_s, state, sharing)
    sharing.due_s[op] = sharing.served_s[queue] + work.duration_s[op]
    sharing.ops[queue] += 1
    waiting.first[queue] = _meld(waiting.first[queue], op, waiting, sharing.priority, sharing.due_s)
    return _await_end(queue, now_s, size, state, waiting, sharing, code)


@inner
def _leave(
    queue: int, now_s: float, size: int, state: State, waiting: Waiting, sharing: Sharing, code: int
) -> tuple[int, int]:
    """(the op that ends in a shared queue, NONE if there is none yet; events in the heap)."""
    if waiting.asked_s[queue] != now_s:
        return NONE, size
    waiting.asked_s[queue] = -1.0
    if sharing.first_end_s[queue] > now_s:
        waiting.asked_s[queue] = sharing.first_end_s[queue]
        return NONE, _push(state.heap_s, state.heap_code, size, waiting.asked_s[queue], code)
    _serve(queue, now_s, state, sharing)
    op = waiting.first[queue]
    sharing.served_s[queue] = sharing.due_s[op]
    waiting.first[queue] = _take_first(op, waiting, sharing.priority, sharing.due_s)
    sharing.ops[queue] -= 1
    if sharing.ops[queue] > 0:
        size = _await_end(queue, now_s, size, state, waiting, sharing, code)
    return op, size


@inner
def _enter(
    op: int,
    now_s: float,
    size: int,
    work: Work,
    state: State,
    rules: Rules,
    waiting: Waiting,
    code: int,
) -> int:
    """Let an op wait in its late queue; events in the heap."""
    queue = work.queue[op]
    if rules.by_priority[queue]:
        waiting.first[queue] = _meld(
            waiting.first[queue], op, waiting, rules.priority, state.start_s
        )
    elif waiting.first[queue] < 0:
        waiting.first[queue] = op
        waiting.final[queue] = op
    else:
        waiting.left[waiting.final[queue]] = op
        waiting.final[queue] = op
    if (
        state.clock_s[queue] <= now_s
        and waiting.head[queue] < 0
        and waiting.asked_s[queue] != now_s
    ):
        waiting.asked_s[queue] = now_s
        size = _push(state.heap_s, state.heap_code, size, now_s, code + queue)
    return size


@inner
def _lock_event(
    code: int, now_s: float, size: int, work: Work, state: State, rules: Rules, waiting: Waiting
) -> tuple[int, int]:
    """An op asks for a lock or gives it back, or a lock is granted.

    (the op that continues to its queue, NONE or BROKEN; events in the heap).
    """
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
        waiting.for_lock[lock] = _meld(
            waiting.for_lock[lock], code, waiting, rules.priority, state.start_s
        )
    if (
        waiting.for_lock[lock] >= 0
        and waiting.held[lock] < rules.capacity[lock]
        and not waiting.promised[lock]
    ):
        waiting.promised[lock] = True
        size = _push(state.heap_s, state.heap_code, size, now_s, 2 * ops + lock)
    return NONE, size


@inner
def _dispatch(
    code: int,
    now_s: float,
    size: int,
    work: Work,
    state: State,
    rules: Rules,
    waiting: Waiting,
    sharing: Sharing,
) -> tuple[int, int]:
    """One event under `rules`: (the op that starts, NONE or BROKEN; events in the heap)."""
    choosing = 2 * len(work.queue) + len(rules.capacity)
    starting = choosing + len(state.clock_s)
    if code == starting:
        return _begin(now_s, size, work, state, rules, waiting, code)
    if code >= choosing:
        if rules.shared[code - choosing]:
            return _leave(code - choosing, now_s, size, state, waiting, sharing, code)
        return NONE, _choose(code - choosing, now_s, size, state, rules, waiting, starting)
    op = code
    if code >= len(work.queue) or rules.acquires[code] >= 0:
        op, size = _lock_event(code, now_s, size, work, state, rules, waiting)
    queue = work.queue[op] if op >= 0 else NONE
    if queue >= 0 and rules.shared[queue]:
        size = _share(op, now_s, size, work, state, waiting, sharing, choosing + queue)
        op = NONE
    elif queue >= 0 and rules.late[queue]:
        size = _enter(op, now_s, size, work, state, rules, waiting, choosing)
        op = NONE
    return op, size


@inner
def _announce(op: int, size: int, end_s: float, work: Work, state: State, rules: Rules) -> int:
    """Add the events at an op's end, except its children's; events in the heap.

    Its queue and channel choose, and its lock is free.
    """
    queue, channel = work.queue[op], rules.channel[op]
    if queue >= 0 and not rules.shared[queue]:
        state.clock_s[queue] += rules.gap_s[op]
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


@compiled(allocates=False)
def run(  # noqa: C901 half of it is compiled away
    work: Work,
    state: State,
    rules: Rules | None,
    waiting: Waiting | None,
    sharing: Sharing | None,
    until: int,
) -> None:
    """Continue until the ends of `until` ops are known; for all ops, until no event is left."""
    heap_s, heap_code, counts = state.heap_s, state.heap_code, state.counts
    size, known, now_s = counts[0], counts[1], state.now_s[0]
    while size > 0 and (known < until or until == len(work.queue)):
        now_s = heap_s[0]
        code = heap_code[0]
        op = code
        if rules is not None:
            assert waiting is not None
            assert sharing is not None
            size -= 1
            _sink(heap_s, heap_code, size, heap_s[size], heap_code[size])
            op, size = _dispatch(code, now_s, size, work, state, rules, waiting, sharing)
            if op == NONE:
                continue
            if op == BROKEN:
                break
        hole = rules is None  # the event is still the heap's first, and a child may take its place
        start_s = now_s
        queue = work.queue[op]
        if queue >= 0 and rules is not None and rules.shared[queue]:
            start_s, end_s = state.start_s[op], now_s
        elif queue >= 0:
            if state.clock_s[queue] > now_s:
                start_s = state.clock_s[queue]
                state.cause[op] = state.last[queue]
            end_s = start_s + work.duration_s[op]
            state.clock_s[queue] = end_s
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
            elif end_s == state.start_s[child] and op < state.cause[child]:
                state.cause[child] = op
            state.parents_left[child] -= 1
            if state.parents_left[child] == 0:
                if hole:
                    hole = False
                    _sink(heap_s, heap_code, size, state.start_s[child], child)
                else:
                    size = _push(heap_s, heap_code, size, state.start_s[child], child)
        if hole:
            size -= 1
            _sink(heap_s, heap_code, size, heap_s[size], heap_code[size])
    counts[0], counts[1] = size, known
    state.now_s[0] = now_s
