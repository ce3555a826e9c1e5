"""Build a data-flow graph op by op, or in blocks of ops as arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotune.arrays import Int32Array, IntArray
from autotune.dfg.graph import NONE, OP_COLUMNS, Dfg, Discipline, Kind, Names
from autotune.errors import InvalidInput

LONG_RUN = 64
"""Mean length of ascending runs from which merging is faster than sorting (timsort, numpy 2.4)."""
BlockName = Callable[[int], str]
"""Name of an op from its number within its block."""


class DfgBuilder:
    """Collects ops, edges, queues, locks and layers, each numbered in the order of addition.

    Ops that are added one by one are collected into blocks. An op takes the default of `OP_COLUMNS`
    for every column that it does not state.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[int, int, dict[str, ArrayLike]]] = []  # (first, count, columns)
        self._block_names: list[BlockName] = []
        self._rows: list[tuple[float, ...]] = []  # single ops that are in no block yet
        self._row_names: list[str] = []
        self._blocked_ops = 0
        self._single_edges: tuple[list[int], list[int]] = ([], [])
        self._edges: list[tuple[IntArray, IntArray]] = []
        self._queues: dict[Hashable, tuple[int, str, Discipline]] = {}
        self._locks: dict[Hashable, tuple[int, int]] = {}
        self._layers: dict[str, int] = {}

    @property
    def ops(self) -> int:
        return self._blocked_ops + len(self._rows)

    def queue(
        self, name: str, discipline: Discipline = Discipline.FIFO, key: Hashable = None
    ) -> int:
        """The queue of this key, by default its name; it is added on first use."""
        entry = (len(self._queues), name, discipline)
        return self._queues.setdefault(name if key is None else key, entry)[0]

    def lock(self, capacity: int = 1, key: Hashable = None) -> int:
        """The lock of this key, added on first use; without a key, a new lock."""
        number = len(self._locks)
        return self._locks.setdefault(("", number) if key is None else key, (number, capacity))[0]

    def layer(self, name: str) -> int:
        """The layer of this name, added on first use."""
        return self._layers.setdefault(name, len(self._layers))

    def op(
        self,
        name: str,
        queue: int,
        duration_s: float,
        kind: Kind,
        after: Iterable[int] = (),
        *,
        gap_s: float = 0.0,
        channel: int = NONE,
        priority: int = 0,
        size_bytes: float = 0.0,
        layer: int = NONE,
        worker: int = NONE,
        acquires: int = NONE,
        releases: int = NONE,
    ) -> int:
        """Add one op behind those of `after`, NONE for none; its number."""
        number = self.ops
        self._row_names.append(name)
        self._rows.append(
            (
                duration_s,
                queue,
                int(kind),  # numpy examines members of enumerations one by one
                gap_s,
                channel,
                priority,
                size_bytes,
                layer,
                worker,
                acquires,
                releases,
            )
        )
        for parent in after:
            self.edge(parent, number)
        return number

    def block(self, count: int, name: BlockName, **columns: ArrayLike) -> int:
        """Add `count` ops; a column is one value or of shape (count,). The number of the first."""
        self._close_rows()
        first = self._blocked_ops
        if count:
            self._blocks.append((first, count, columns))
            self._block_names.append(name)
            self._blocked_ops += count
        return first

    def edge(self, parent: int, child: int) -> None:
        """An edge from or to NONE is none."""
        self._single_edges[0].append(parent)
        self._single_edges[1].append(child)

    def edges(self, parents: ArrayLike, children: ArrayLike) -> None:
        """Edges from each parent to its child; either side may be a single op."""
        broadcast = np.broadcast_arrays(
            np.asarray(parents, dtype=np.int64), np.asarray(children, dtype=np.int64)
        )
        self._edges.append((broadcast[0].ravel(), broadcast[1].ravel()))

    def build(self, layers: Sequence[str] = ()) -> Dfg:
        """The graph; `layers` names them unless `layer` did. Raises `InvalidInput`."""
        op_names: Sequence[str] = tuple(self._row_names)
        if self._blocks:
            self._close_rows()
            starts = [first for first, _, _ in self._blocks]
            op_names = BlockNames(starts, self._block_names, self.ops)
        self._close_rows()
        single = [np.array(side, dtype=np.int64) for side in self._single_edges]
        parents, children = (
            np.concatenate([single[side], *(edges[side] for edges in self._edges)])
            for side in (0, 1)
        )
        exists = (parents != NONE) & (children != NONE)
        start, child = csr(self.ops, parents[exists], children[exists])
        names = Names(
            op_names,
            tuple(name for _, name, _ in self._queues.values()),
            tuple(self._layers) or tuple(layers),
        )
        columns: dict[str, Any] = {name: self._column(name) for name in OP_COLUMNS}
        return Dfg(
            child_start=start,
            child=child,
            discipline=np.array([kind for _, _, kind in self._queues.values()], dtype=np.int8),
            lock_capacity=np.array([size for _, size in self._locks.values()], dtype=np.int32),
            names=names,
            **columns,
        )

    def _close_rows(self) -> None:
        """Collect the single ops into a block."""
        if self._rows:
            values = zip(*self._rows, strict=True)
            columns: dict[str, ArrayLike] = dict(zip(OP_COLUMNS, values, strict=True))
            self._blocks.append((self._blocked_ops, len(self._rows), columns))
            self._block_names.append(self._row_names.__getitem__)
            self._blocked_ops += len(self._rows)
            self._rows = []
            self._row_names = []

    def _column(self, name: str) -> NDArray[np.generic]:
        table = OP_COLUMNS[name]
        column = np.full(self.ops, table.default, dtype=table.dtype)
        for first, count, columns in self._blocks:
            if name in columns:
                column[first : first + count] = columns[name]
        column.flags.writeable = False
        return column


class BlockNames(Sequence[str]):
    """Names that are built when they are read: a search reads none of thousands of graphs."""

    def __init__(self, starts: Sequence[int], names: Sequence[BlockName], count: int) -> None:
        self._starts = np.array(starts, dtype=np.int64)
        self._names = names
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        number = index + self._count if index < 0 else index
        if not 0 <= number < self._count:
            raise IndexError(f"op {index} of {self._count}")
        block = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._names[block](number - int(self._starts[block]))


def csr(ops: int, parents: ArrayLike, children: ArrayLike) -> tuple[IntArray, Int32Array]:
    """(child_start (ops + 1,), child (E,)) of the edges parent -> child; repeated edges count once.

    Raises `InvalidInput` if an edge names an op that does not exist.
    """
    parent = np.asarray(parents, dtype=np.int64)
    child = np.asarray(children, dtype=np.int64)
    for numbers in (parent, child):
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= ops):
            invalid = numbers.min() if numbers.min() < 0 else numbers.max()
            raise InvalidInput(f"an edge must join ops 0 to {ops - 1}, but one names op {invalid}")
    bits = ops.bit_length()  # shifts are several times faster than divisions
    keys = _sorted((parent << bits) | child)  # np.unique, by hashing, is several times slower here
    new = np.ones(len(keys), dtype=np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    keys = keys[new]
    counts = np.bincount(keys >> bits, minlength=ops)
    return np.concatenate([[0], np.cumsum(counts)]), (keys & ((1 << bits) - 1)).astype(np.int32)


def _sorted(keys: IntArray) -> IntArray:
    """Ascending. Few ascending runs, as in lowered graphs, are merged instead of sorted."""
    runs = int(np.count_nonzero(keys[1:] < keys[:-1]))
    return np.sort(keys, kind="stable" if runs * LONG_RUN < len(keys) else None)
