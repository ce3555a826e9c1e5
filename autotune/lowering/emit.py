"""Writing a data-flow graph down in blocks: many ops of one kind at a time, as arrays.

Ops are numbered in the order in which they are added, and every edge leads from a lower number to a higher one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotune.arrays import IntArray
from autotune.dfg.build import csr
from autotune.dfg.graph import NONE, Dfg, Discipline, Kind, Names

Named = Callable[[int], str]
"""Name of the op of that number within its block."""

_COLUMNS: dict[str, tuple[type[np.generic], float]] = {
    "duration_s": (np.float64, 0.0),
    "queue": (np.int32, NONE),
    "channel": (np.int32, NONE),
    "kind": (np.int8, Kind.VIRTUAL),
    "priority": (np.int32, 0),
    "size_bytes": (np.float64, 0.0),
    "layer": (np.int32, NONE),
    "worker": (np.int32, NONE),
    "acquires": (np.int32, NONE),
    "releases": (np.int32, NONE),
}


class BlockNames(Sequence[str]):
    """Made when somebody reads them: a search looks at thousands of graphs and at the names of none."""

    def __init__(self, starts: Sequence[int], named: Sequence[Named], count: int) -> None:
        self._starts, self._named, self._count = np.array(starts, dtype=np.int64), named, count

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
        return self._named[block](number - int(self._starts[block]))


class Emitter:
    """Collects blocks of ops, queues, locks and edges."""

    def __init__(self) -> None:
        self.count = 0
        self._blocks: list[tuple[int, dict[str, ArrayLike]]] = []
        self._starts: list[int] = []
        self._named: list[Named] = []
        self._edges: list[tuple[IntArray, IntArray]] = []
        self._queues: dict[str, tuple[int, Discipline]] = {}
        self._locks: dict[object, tuple[int, int]] = {}

    def queue(self, name: str, discipline: Discipline = Discipline.FIFO) -> int:
        """The number of the queue of that name."""
        return self._queues.setdefault(name, (len(self._queues), discipline))[0]

    def lock(self, key: object, capacity: int) -> int:
        return self._locks.setdefault(key, (len(self._locks), capacity))[0]

    def add(self, count: int, named: Named, **columns: ArrayLike) -> int:
        """A block of ops; a column is one value for all of them, or an array of shape (count,). The number of the first."""
        first = self.count
        if count:
            self._blocks.append((count, columns))
            self._starts.append(first)
            self._named.append(named)
            self.count += count
        return first

    def edges(self, parents: ArrayLike, children: ArrayLike) -> None:
        """Each parent to its child; one of them may be a single op. Negative numbers stand for no op."""
        ends = np.broadcast_arrays(
            np.asarray(parents, dtype=np.int64), np.asarray(children, dtype=np.int64)
        )
        self._edges.append((ends[0].ravel(), ends[1].ravel()))

    def build(self, layers: Sequence[str]) -> Dfg:
        columns: dict[str, Any] = {name: self._column(name) for name in _COLUMNS}
        parents = (
            np.concatenate([edge[0] for edge in self._edges])
            if self._edges
            else np.zeros(0, dtype=np.int64)
        )
        children = (
            np.concatenate([edge[1] for edge in self._edges])
            if self._edges
            else np.zeros(0, dtype=np.int64)
        )
        there = (parents >= 0) & (children >= 0)
        start, child = csr(self.count, parents[there], children[there])
        return Dfg(
            **columns,
            gap_s=np.zeros(self.count),
            child_start=start,
            child=child,
            discipline=np.array(
                [discipline for _, discipline in self._queues.values()], dtype=np.int8
            ),
            lock_capacity=np.array(
                [capacity for _, capacity in self._locks.values()], dtype=np.int32
            ),
            names=Names(
                BlockNames(self._starts, self._named, self.count), tuple(self._queues), layers
            ),
        )

    def _column(self, name: str) -> NDArray[np.generic]:
        dtype, missing = _COLUMNS[name]
        column = np.empty(self.count, dtype=dtype)
        at = 0
        for count, columns in self._blocks:
            column[at : at + count] = columns.get(name, missing)
            at += count
        return column
