"""The graph transformations that what-ifs consist of (Daydream, sec. 4.3).

All return a new base and leave the given one as it is. Ops are chosen by a mask, shape (N,).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from autotune.arrays import BoolArray, FloatArray, Int32Array, IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base


def select(
    base: Base,
    *,
    name: str = "",
    layer: str = "",
    kinds: Collection[Kind] = (),
    on_device: bool | None = None,
) -> BoolArray:
    """(N,) the ops that meet every stated condition; `name` and `layer` are regular expressions.

    They may match anywhere, as in `re.search`. Raises `InvalidInput` for an invalid expression.
    """
    mask = np.ones(base.ops, dtype=np.bool_)
    if name:
        mask &= _matches(base.names.ops, name)
    if layer:
        matching = _matches(base.names.layers, layer)
        mask &= np.append(matching, False)[base.layer]  # NONE is the last one
    if kinds:
        mask &= np.isin(base.kind, [int(kind) for kind in kinds])
    if on_device is not None:
        mask &= base.on_device == on_device
    return mask


def _matches(names: Sequence[str], expression: str) -> BoolArray:
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise InvalidInput(
            f"a selection needs a regular expression, but {expression!r} is none: {error}"
        ) from None
    known = {name: bool(compiled.search(name)) for name in set(names)}
    return np.array([known[name] for name in names], dtype=np.bool_)


def scale(base: Base, ops: BoolArray, factor: float) -> Base:
    """Multiply the durations of `ops`; 0.5 makes them twice as fast.

    Raises `InvalidInput` for a factor that is negative or no number.
    """
    if not 0 <= factor < np.inf:
        raise InvalidInput(f"durations need a factor of at least 0, but it is {factor}")
    return replace(base, duration_s=np.where(ops, factor, 1.0) * base.duration_s)


def remove(base: Base, ops: BoolArray, *, launches: bool = True) -> Base:
    """Remove `ops` and, by default, the calls that launch those on a device.

    A call that launches several, such as a captured graph, stays as long as one of them does.
    What waited for a removed op waits for what that op waited for. Its gap goes with it.
    """
    gone = ops.copy()
    if launches:
        calls = base.launch[ops]
        calls = calls[calls != NONE]
        staying = base.launch[base.launched[~ops[base.launched]]]
        gone[calls[~np.isin(calls, staying)]] = True
    into = gone[base.child]
    launched = base.launched[~gone[base.launched]]
    return replace(
        base,
        duration_s=np.where(gone, 0.0, base.duration_s),
        gap_s=np.where(gone, 0.0, base.gap_s),
        unknown_gap_s=np.where(gone, 0.0, base.unknown_gap_s),
        size_bytes=np.where(gone, 0.0, base.size_bytes),
        queue=np.where(gone, NONE, base.queue).astype(np.int32),
        kind=np.where(gone, Kind.VIRTUAL, base.kind).astype(np.int32),
        delay_s=np.where(into, 0.0, base.delay_s),
        unknown_delay_s=np.where(into, 0.0, base.unknown_delay_s),
        launched=launched,
    )


def insert(
    base: Base, after: IntArray, duration_s: FloatArray, names: Sequence[str], kind: Kind
) -> Base:
    """Insert a device op behind each device op of `after`, shape (K,), on its stream.

    Each is launched by a call of its own behind the call that launches the op before it. The calls
    and their latencies are the median ones of the base. New ops have the numbers N to N + K - 1,
    and the new calls follow. Raises `InvalidInput` for an op that nothing launches or that is named
    twice.
    """
    count = len(after)
    if len(np.unique(after)) < count:
        raise InvalidInput("ops are inserted behind different ops, but one is named twice")
    calls_before = base.launch[after]
    if np.any(calls_before == NONE):
        at = int(after[np.argmax(calls_before == NONE)])
        raise InvalidInput(
            "a device op can be inserted behind one that a call launches, but "
            f"{base.names.ops[at]!r} has no launch"
        )
    kernels = base.ops + np.arange(count)
    calls = kernels + count
    call_s, latency_s = usual_launch(base)
    before = np.concatenate([after, calls_before.astype(np.int64)])
    grown = _behind(base, before, np.concatenate([kernels, calls]))
    none = np.full(2 * count, NONE, dtype=np.int32)
    order = _launched_after(base, after, kernels)
    return replace(
        grown,
        duration_s=np.concatenate([base.duration_s, duration_s, np.full(count, call_s)]),
        gap_s=np.concatenate([base.gap_s, np.zeros(2 * count)]),
        unknown_gap_s=np.concatenate([base.unknown_gap_s, np.zeros(2 * count)]),
        size_bytes=np.concatenate([base.size_bytes, np.zeros(2 * count)]),
        queue=np.concatenate([base.queue, base.queue[after], base.queue[calls_before]]),
        kind=np.concatenate([base.kind, np.full(count, kind), np.full(count, Kind.LAUNCH)]).astype(
            np.int32
        ),
        layer=np.concatenate([base.layer, base.layer[after], base.layer[calls_before]]),
        on_device=np.concatenate([base.on_device, np.arange(2 * count) < count]),
        launch=np.concatenate([base.launch, calls.astype(np.int32), none[:count]]),
        operator=np.concatenate([base.operator, base.operator[after], none[:count]]),
        launched=order,
        event=np.concatenate([base.event, np.full(2 * count, NONE)]),
        parent=np.concatenate([grown.parent, calls]),
        child=np.concatenate([grown.child, kernels]),
        delay_s=np.concatenate([grown.delay_s, np.full(count, latency_s)]),
        unknown_delay_s=np.concatenate([grown.unknown_delay_s, np.zeros(count)]),
        later=np.concatenate([grown.later, np.zeros(count, dtype=np.int64)]),
        priority=np.concatenate([base.priority, np.zeros(2 * count, dtype=np.int32)]),
        names=replace(
            base.names, ops=(*base.names.ops, *names, *(f"launch {name}" for name in names))
        ),
    )


def add(
    base: Base,
    queue: str,
    duration_s: FloatArray,
    names: Sequence[str],
    kind: Kind,
    *,
    size_bytes: FloatArray | None = None,
    on_device: bool = False,
) -> tuple[Base, IntArray]:
    """Add ops to the queue of this name, such as a link; their numbers, shape (K,).

    Ops of the queue "" are virtual: they take no queue. Without edges (`connect`) ops begin with
    the step. A new queue takes what is ready first. Ops that a recorded queue does in order need
    edges to and from their neighbours as well.
    """
    count = len(duration_s)
    known = not queue or queue in base.names.queues
    queues = base.names.queues if known else (*base.names.queues, queue)
    number = queues.index(queue) if queue else NONE

    def more(old: IntArray | Int32Array, value: int) -> Int32Array:
        return np.concatenate([old, np.full(count, value)]).astype(np.int32)

    zeros = np.zeros(count)
    grown = replace(
        base,
        duration_s=np.concatenate([base.duration_s, duration_s]),
        gap_s=np.concatenate([base.gap_s, zeros]),
        unknown_gap_s=np.concatenate([base.unknown_gap_s, zeros]),
        size_bytes=np.concatenate([base.size_bytes, zeros if size_bytes is None else size_bytes]),
        queue=more(base.queue, number),
        kind=more(base.kind, kind),
        layer=more(base.layer, NONE),
        launch=more(base.launch, NONE),
        operator=more(base.operator, NONE),
        event=np.concatenate([base.event, np.full(count, NONE)]),
        priority=more(base.priority, 0),
        on_device=np.concatenate([base.on_device, np.full(count, on_device)]),
        by_priority=base.by_priority if known else np.append(base.by_priority, False),
        names=replace(base.names, ops=(*base.names.ops, *names), queues=queues),
    )
    return grown, base.ops + np.arange(count)


def connect(
    base: Base, parents: ArrayLike, children: ArrayLike, *, later: int = 0, delay_s: float = 0.0
) -> Base:
    """Let each child wait for its parent, and for `delay_s` after its end; one side may be one op.

    `later`: by how many steps the child's step is later. Raises `InvalidInput` for a negative
    number of steps or delay. A cycle is found by the replay.
    """
    if later < 0 or not 0 <= delay_s < np.inf:
        raise InvalidInput(
            "an edge needs a delay of at least 0 and leads to the same step or a later one, but "
            f"it has a delay of {delay_s} s and leads {later} steps on"
        )
    parent, child = (
        side.ravel()
        for side in np.broadcast_arrays(
            np.asarray(parents, dtype=np.int64), np.asarray(children, dtype=np.int64)
        )
    )
    return replace(
        base,
        parent=np.concatenate([base.parent, parent]),
        child=np.concatenate([base.child, child]),
        delay_s=np.concatenate([base.delay_s, np.full(len(parent), delay_s)]),
        unknown_delay_s=np.concatenate([base.unknown_delay_s, np.zeros(len(parent))]),
        later=np.concatenate([base.later, np.full(len(parent), later, dtype=np.int64)]),
    )


def insert_calls(
    base: Base,
    after: IntArray,
    duration_s: FloatArray,
    names: Sequence[str],
    kind: Kind = Kind.LAUNCH,
) -> tuple[Base, IntArray]:
    """Insert a call of the host behind each op of `after`, shape (K,), on its thread.

    Their numbers, shape (K,). Raises `InvalidInput` for an op of no thread or that is named twice.
    """
    if len(np.unique(after)) < len(after):
        raise InvalidInput("calls are inserted behind different ops, but one is named twice")
    if np.any(base.on_device[after] | (base.queue[after] == NONE)):
        raise InvalidInput("a call can be inserted behind an op of a host thread only")
    calls = np.zeros(len(after), dtype=np.int64)
    for queue in np.unique(base.queue[after]):
        here = np.flatnonzero(base.queue[after] == queue)
        name = base.names.queues[queue]
        base, calls[here] = add(
            base, name, duration_s[here], [names[one] for one in here.tolist()], kind
        )
    return _behind(base, after, calls), calls


def disconnect(base: Base, edges: BoolArray) -> Base:
    """Remove the edges of a mask, shape (E,)."""
    kept = ~edges
    return replace(
        base,
        parent=base.parent[kept],
        child=base.child[kept],
        delay_s=base.delay_s[kept],
        unknown_delay_s=base.unknown_delay_s[kept],
        later=base.later[kept],
    )


def schedule(base: Base, ops: BoolArray, priority: ArrayLike) -> Base:
    """Override the schedule of every queue that `ops` are on (Daydream, sec. 4.3).

    `priority`: one for each of `ops`, or one for all. Such a queue takes the ready op of lowest
    priority; other ops of it have 0. The order that the trace shows on it no longer holds within
    a step, but its steps still follow each other.
    Raises `InvalidInput` if no op is on a queue.
    """
    queues = np.unique(base.queue[ops])
    queues = queues[queues != NONE]
    if not len(queues):
        raise InvalidInput("a schedule is of ops that a queue executes, but none is selected")
    priorities, by_priority = base.priority.copy(), base.by_priority.copy()
    priorities[ops] = priority
    by_priority[queues] = True
    same = base.queue[base.parent] == base.queue[base.child]
    order = same & np.isin(base.queue[base.parent], queues)
    free = replace(disconnect(base, order), priority=priorities, by_priority=by_priority)
    for queue in np.unique(base.queue[base.parent[order]]):
        free = _step_after_step(free, np.flatnonzero(base.queue == queue))
    return free


def _step_after_step(base: Base, ops: IntArray) -> Base:
    """Let `ops` of a step begin after all of them in the step before, by way of a virtual op."""
    grown, (end,) = add(base, "", np.zeros(1), ["end of the step"], Kind.VIRTUAL)
    return connect(connect(grown, ops, end), end, ops, later=1)


def usual_launch(base: Base) -> tuple[float, float]:
    """Median duration of the calls that launch, and median delay from a call to its op."""
    if not len(base.launched):
        return 0.0, 0.0
    call_s = float(np.median(base.duration_s[base.launch[base.launched]]))
    is_launch = base.launch[base.child] == base.parent
    return call_s, float(np.median(base.delay_s[is_launch])) if is_launch.any() else 0.0


def _behind(base: Base, before: IntArray, new: IntArray) -> Base:
    """The edges of a base in which op `new[i]` follows `before[i]` on its queue.

    What followed on that queue now follows the new op.
    """
    number = np.full(base.ops, NONE)
    number[before] = new
    follows = base.queue[base.parent] == base.queue[base.child]
    moved = follows & (number[base.parent] != NONE)
    parent = np.where(moved, number[base.parent], base.parent)
    return replace(
        base,
        parent=np.concatenate([parent, before]),
        child=np.concatenate([base.child, new]),
        delay_s=np.concatenate([base.delay_s, np.zeros(len(new))]),
        unknown_delay_s=np.concatenate([base.unknown_delay_s, np.zeros(len(new))]),
        later=np.concatenate([base.later, np.zeros(len(new), dtype=np.int64)]),
    )


def _launched_after(base: Base, after: IntArray, kernels: IntArray) -> IntArray:
    """The order of launches with each new kernel behind the one before it."""
    behind = dict(zip(after.tolist(), kernels.tolist(), strict=True))
    order: list[int] = []
    for op in base.launched.tolist():
        order.append(op)
        if op in behind:
            order.append(behind[op])
    return np.array(order, dtype=np.int64)
