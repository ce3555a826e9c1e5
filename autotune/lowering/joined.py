"""The shapes of all kinds of messages of a graph, joined into arrays.

| symbol | meaning |
|---|---|
| S | kinds of messages in the graph, each with a shape |
| T | parts (ops, edges, threads) of one message of each kind, one kind after the other |
| M | messages, in issue order |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import BoolArray, IntArray
from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.kept import Kept
from autotune.lowering.messages import Batch
from autotune.lowering.scenes import Scene, Surroundings
from autotune.lowering.shapes import Lock, Queue, Shape, shape_of
from autotune.lowering.traffic import Ports

KEPT, KEPT_OPS = 1024, 2**18
"""Shapes that are kept, and their ops: 40 MB, if each has 60 B, two or three edges of 16 B each
and a name."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of one message of each kind: those of kind s are rows `starts[s]` to + `counts[s]`."""

    starts: IntArray
    counts: IntArray

    @staticmethod
    def of(counts: Sequence[int]) -> Parts:
        each = np.array(counts, dtype=np.int64)
        return Parts(np.cumsum(each) - each, each)

    def rows(self, kinds: IntArray) -> tuple[IntArray, IntArray]:
        """(row, number of its message) of all parts of messages of these `kinds` (M,)."""
        counts = self.counts[kinds]
        message = np.repeat(np.arange(len(kinds)), counts)
        first = self.starts[kinds] - (np.cumsum(counts) - counts)
        return first[message] + np.arange(len(message)), message


@dataclass(frozen=True, eq=False)
class Lane:
    """The ops of a lane's thread, all (T, W).

    `ends`: with which its step ends. `holds`: of rows, the ops after which a message of another
    kind may start behind them; of other messages, `ends`.
    """

    parts: Parts
    threads: IntArray
    ends: IntArray
    holds: IntArray


@dataclass(frozen=True, eq=False)
class Connections:
    """Connections (G,) of messages of the same kinds: `used` (S,).

    `first`, `last` (G, S): the ops of each message; 0 where no connection is used.
    """

    used: BoolArray
    first: IntArray
    last: IntArray


@dataclass(frozen=True, eq=False)
class JoinedShapes:
    """`columns` (6, T) and `slots` (2, T) as in `Shape`, `edges` (2, T), `first` (T,).

    `rows` (S,): kinds of messages of rows. Resources are numbered by their first use: `queues`,
    `locks`.
    """

    shapes: tuple[Shape, ...]
    ops: Parts
    columns: IntArray
    slots: IntArray
    edge_parts: Parts
    edges: IntArray
    first_parts: Parts
    first: IntArray
    lanes: tuple[Lane, ...]
    rows: BoolArray
    connections: tuple[Connections, ...]
    queues: tuple[Queue, ...]
    locks: tuple[Lock, ...]

    def in_builder(self, to: DfgBuilder) -> IntArray:
        """The columns with the builder's queues and locks, which are added on first use."""
        queues = np.array([*(to.queue(name, kind) for name, kind in self.queues), NONE])
        locks = np.array([*(to.lock(capacity, key) for capacity, key in self.locks), NONE])
        columns = self.columns.copy()
        _renumber(columns, queues, locks)
        return columns


class ShapeCache:
    """Finds the shapes of the batches of a graph, and keeps the last used.

    A search lowers hundreds of plans that differ in few messages.
    """

    def __init__(self, ports: Ports, costs: RuntimeCosts) -> None:
        self._ports = ports
        self._costs = costs
        self.port_names = frozenset(ports.names)
        self._shapes: Kept[Shape] = Kept(KEPT, KEPT_OPS)
        self._retimed: Kept[Shape] = Kept(KEPT, KEPT_OPS)
        self._joined: Kept[JoinedShapes] = Kept(KEPT, KEPT_OPS)

    def joined(self, batches: Sequence[Batch], around: Surroundings) -> JoinedShapes:
        key = around, tuple([batch.kind for batch in batches])
        joined = self._joined.get(key)
        if joined is None:
            scene = Scene.of(batches, around, self._ports, self._costs)
            joined = join(
                [self._shape(batch, scene) for batch in batches], [batch.rows for batch in batches]
            )
            self._joined.put(key, joined.columns.shape[1], joined)
        return joined

    def _shape(self, batch: Batch, scene: Scene) -> Shape:
        if not batch.direct:
            scene = replace(scene, owners=())  # which only direct exchanges have
        key = scene, batch.kind
        shape = self._shapes.get(key)
        if shape is None:
            shape = shape_of(batch, scene, self._ports, self._costs, self._retimed)
            self._shapes.put(key, shape.ops, shape)
        return shape


def join(shapes: Sequence[Shape], rows: Sequence[bool]) -> JoinedShapes:
    """Join the shapes of all kinds; `rows` (S,): those of messages of rows."""
    queues: dict[Queue, int] = {}
    locks: dict[Lock, int] = {}
    columns = np.concatenate([shape.columns for shape in shapes], axis=1)
    ops = Parts.of([shape.ops for shape in shapes])
    for shape, start in zip(shapes, ops.starts.tolist(), strict=True):
        of_queues = np.array([*(queues.setdefault(q, len(queues)) for q in shape.queues), NONE])
        of_locks = np.array([*(locks.setdefault(k, len(locks)) for k in shape.locks), NONE])
        _renumber(columns[:, start : start + shape.ops], of_queues, of_locks)
    lanes = max(len(shape.threads) for shape in shapes)
    return JoinedShapes(
        shapes=tuple(shapes),
        ops=ops,
        columns=columns,
        slots=np.concatenate([shape.slots for shape in shapes], axis=1),
        edge_parts=Parts.of([shape.edges.shape[1] for shape in shapes]),
        edges=np.concatenate([shape.edges for shape in shapes], axis=1),
        first_parts=Parts.of([len(shape.first) for shape in shapes]),
        first=np.concatenate([shape.first for shape in shapes]),
        lanes=tuple(
            _lane([_of_lane(*kind, lane) for kind in zip(shapes, rows, strict=True)])
            for lane in range(lanes)
        ),
        rows=np.array(rows, dtype=np.bool_),
        connections=_connections(shapes),
        queues=tuple(queues),
        locks=tuple(locks),
    )


def _renumber(columns: IntArray, queues: IntArray, locks: IntArray) -> None:
    """Replace the numbers of queues and locks in `columns`; the last of each is NONE."""
    for column, numbers in ((0, queues), (1, queues), (4, locks), (5, locks)):
        columns[column] = numbers[columns[column]]


_LaneOps = tuple[IntArray, IntArray, IntArray]


def _of_lane(shape: Shape, rows: bool, lane: int) -> _LaneOps | None:
    """(threads, ends, holds) of a lane; None without threads.

    Rows hold the first lane until they have arrived, behind which they are only added.
    """
    if lane < len(shape.threads) and len(shape.threads[lane]):
        ends = shape.ends[lane]
        return shape.threads[lane], ends, shape.ends[-2] if rows and lane == 0 else ends
    return None


def _lane(of_shapes: Sequence[_LaneOps | None]) -> Lane:
    parts = Parts.of([0 if each is None else len(each[0]) for each in of_shapes])
    tables = [each for each in of_shapes if each is not None]
    if not tables:
        none = np.zeros((0, 1), dtype=np.int64)
        return Lane(parts, none, none, none)
    return Lane(parts, *(np.concatenate([table[side] for table in tables]) for side in range(3)))


def _connections(shapes: Sequence[Shape]) -> tuple[Connections, ...]:
    """The connections by the kinds that use them; equal ones once."""
    users: dict[object, dict[int, tuple[int, int]]] = {}
    for number, shape in enumerate(shapes):
        for connection, ends in shape.connections.items():
            users.setdefault(connection, {})[number] = ends
    groups: dict[tuple[int, ...], set[tuple[tuple[int, int], ...]]] = {}
    for each in users.values():
        groups.setdefault(tuple(each), set()).add(tuple(each.values()))
    connections = []
    for numbers, distinct in groups.items():
        table = np.zeros((2, len(distinct), len(shapes)), dtype=np.int64)
        table[:, :, list(numbers)] = np.array(sorted(distinct)).transpose(2, 0, 1)
        used = np.zeros(len(shapes), dtype=np.bool_)
        used[list(numbers)] = True
        connections.append(Connections(used, table[0], table[1]))
    return tuple(connections)
