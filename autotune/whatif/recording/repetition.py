"""Repeats a part of the step right behind itself, as an accumulation of gradients does.

symbol   meaning
S        the ops that are repeated; whatever lies on a way between two of them is one of them
'        a copy
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from autotune.arrays import BoolArray, IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base

_COLUMNS = (
    "duration_s",
    "gap_s",
    "unknown_gap_s",
    "size_bytes",
    "queue",
    "kind",
    "layer",
    "on_device",
    "operator",
    "priority",
)
"""Columns of shape (N,) that a copy has from its original."""


def passes(base: Base) -> BoolArray:
    """(N,) the forward and the backward pass on all queues.

    Their device ops, the calls that launch them, and everything between: what waits for one of them
    and is waited for by another one. Raises `InvalidInput` if the trace does not state which device
    ops are of a pass.
    """
    ops = base.on_device & np.isin(base.kind, (Kind.FORWARD, Kind.BACKWARD)) & (base.queue != NONE)
    if not ops.any():
        raise InvalidInput(
            "a change of the passes needs to know their kernels, but the trace does not tell those "
            "of the forward and the backward pass from others; record the operators of the host"
        )
    calls = base.launch[ops]
    ops[calls[calls != NONE]] = True
    return _convex(base, ops)


def _convex(base: Base, ops: BoolArray) -> BoolArray:
    """(N,) `ops` and everything on a way from one of them to another within a step."""
    place = np.empty(base.ops, dtype=np.int64)
    place[base.order] = np.arange(base.ops)
    within = np.flatnonzero(base.later == 0)
    parent, child = base.parent[within], base.child[within]
    after, before = ops.tolist(), ops.tolist()
    for edge in np.argsort(place[parent], kind="stable").tolist():
        if after[parent[edge]]:
            after[child[edge]] = True
    for edge in np.argsort(-place[child], kind="stable").tolist():
        if before[child[edge]]:
            before[parent[edge]] = True
    between: BoolArray = np.array(after) & np.array(before)
    return between


def repeat(base: Base, ops: BoolArray) -> tuple[Base, IntArray]:
    """Do `ops` twice in each step; also returns the number of each one's copy, NONE for others.

    Whatever lies on a way from one of `ops` to another must be one of them, as in `passes`.

    On each of their queues the copies follow the originals. They wait for each other as the
    originals do, and what waits for the originals waits for the copies.
    """
    chosen = np.flatnonzero(ops)
    copy = np.full(base.ops, NONE, dtype=np.int64)
    copy[chosen] = base.ops + np.arange(len(chosen))
    from_inside, to_inside = ops[base.parent], ops[base.child]
    inner, leaving = from_inside & to_inside, from_inside & ~to_inside
    again, round_trip = inner & (base.later == 0), inner & (base.later > 0)
    moved = leaving | round_trip
    parent = np.where(moved, copy[base.parent], base.parent)
    edges = [
        (parent, base.child, base.delay_s, base.unknown_delay_s, base.later),
        _edges(base, again, copy[base.parent], copy[base.child], 0),
        _edges(base, round_trip, base.parent, copy[base.child], -1),
        *_between(base, ops, copy),
    ]
    columns = [np.concatenate(column) for column in zip(*edges, strict=True)]
    twice: dict[str, Any] = {
        name: np.concatenate([getattr(base, name), getattr(base, name)[chosen]])
        for name in _COLUMNS
    }
    launch = base.launch[chosen].astype(np.int64)
    inside = (launch != NONE) & (copy[launch] != NONE)
    copies_launch = np.where(inside, copy[launch], NONE).astype(np.int32)
    return replace(
        base,
        **twice,
        launch=np.concatenate([base.launch, copies_launch]),
        launched=_launched(base, ops, copy),
        event=np.concatenate([base.event, np.full(len(chosen), NONE)]),
        parent=columns[0],
        child=columns[1],
        delay_s=columns[2],
        unknown_delay_s=columns[3],
        later=columns[4],
        last=int(copy[base.last]) if ops[base.last] else base.last,
        names=replace(
            base.names, ops=base.names.ops + tuple(base.names.ops[op] for op in chosen.tolist())
        ),
    ), copy


_Edges = tuple[IntArray, IntArray, np.ndarray, np.ndarray, IntArray]


def _edges(base: Base, which: BoolArray, parent: IntArray, child: IntArray, more: int) -> _Edges:
    return (
        parent[which],
        child[which],
        base.delay_s[which],
        base.unknown_delay_s[which],
        base.later[which] + more,
    )


def _between(base: Base, ops: BoolArray, copy: IntArray) -> list[_Edges]:
    """The edges from originals to copies.

    - On each queue the first copy waits for the last original.
    - If the next op of a queue waits for originals on others, so does the first copy on it.
    """
    pairs: list[tuple[int, int]] = []
    first: dict[int, int] = {}
    for queue in np.unique(base.queue[ops & (base.queue != NONE)]).tolist():
        order = base.queue_order(queue)
        inside = order[ops[order]]
        first[queue] = int(inside[0])
        pairs.append((int(inside[-1]), int(copy[first[queue]])))
    leaving = (base.later == 0) & ops[base.parent] & ~ops[base.child]
    for edge in np.flatnonzero(leaving).tolist():
        queue = int(base.queue[base.child[edge]])
        if queue in first:
            pairs.append((int(base.parent[edge]), int(copy[first[queue]])))
    ends = np.array(sorted(set(pairs)), dtype=np.int64).reshape(-1, 2)
    zeros = np.zeros(len(ends))
    return [(ends[:, 0], ends[:, 1], zeros, zeros, np.zeros(len(ends), dtype=np.int64))]


def _launched(base: Base, ops: BoolArray, copy: IntArray) -> IntArray:
    again = base.launched[ops[base.launched]]
    if not len(again):
        return base.launched
    at = int(np.flatnonzero(ops[base.launched])[-1]) + 1
    return np.insert(base.launched, at, copy[again])
