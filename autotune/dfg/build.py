"""Writing a data-flow graph down op by op, or many ops of one shape at a time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from autotune.arrays import Int32Array
from autotune.dfg.graph import NONE, Dfg, Discipline, Kind, Names
from autotune.errors import InvalidInput

_PER_OP = (
    "duration_s",
    "queue",
    "kind",
    "gap_s",
    "channel",
    "priority",
    "size_bytes",
    "layer",
    "worker",
    "acquires",
    "releases",
)


class DfgBuilder:
    """Ops, queues, locks and layers are numbered in the order in which they are added."""

    def __init__(self) -> None:
        self._columns: dict[str, list[float]] = {name: [] for name in _PER_OP}
        self._op_names: list[str] = []
        self._queues: list[tuple[str, Discipline]] = []
        self._locks: list[int] = []
        self._layers: dict[str, int] = {}
        self._parents: list[int] = []
        self._children: list[int] = []

    def queue(self, name: str, discipline: Discipline = Discipline.FIFO) -> int:
        self._queues.append((name, discipline))
        return len(self._queues) - 1

    def lock(self, capacity: int = 1) -> int:
        self._locks.append(capacity)
        return len(self._locks) - 1

    def layer(self, name: str) -> int:
        """The number of the layer of that name, a new one where it was not named before."""
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
        """Add an op behind those of `after`; its number."""
        number = len(self._op_names)
        self._op_names.append(name)
        values = (
            duration_s,
            queue,
            kind,
            gap_s,
            channel,
            priority,
            size_bytes,
            layer,
            worker,
            acquires,
            releases,
        )
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        for parent in after:
            self._parents.append(parent)
            self._children.append(number)
        return number

    def edge(self, parent: int, child: int) -> None:
        self._parents.append(parent)
        self._children.append(child)

    def build(self) -> Dfg:
        """Raises `InvalidInput` where the graph is wrong."""
        start, child = csr(len(self._op_names), self._parents, self._children)
        columns = {name: np.array(values) for name, values in self._columns.items()}
        names = Names(
            tuple(self._op_names), tuple(name for name, _ in self._queues), tuple(self._layers)
        )
        discipline = np.array([kind for _, kind in self._queues], dtype=np.int8)
        return Dfg(
            child_start=start,
            child=child,
            discipline=discipline,
            lock_capacity=np.array(self._locks, dtype=np.int32),
            names=names,
            **columns,
        )


def csr(ops: int, parents: ArrayLike, children: ArrayLike) -> tuple[np.ndarray, Int32Array]:
    """(child_start (ops + 1,), child (E,)) of the edges parent -> child; an edge that is named twice counts once.

    Raises `InvalidInput` where an edge names an op that is not there.
    """
    ends = np.asarray(parents, dtype=np.int64), np.asarray(children, dtype=np.int64)
    for numbers in ends:
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= ops):
            raise InvalidInput(
                f"an edge must join ops 0 to {ops - 1}, but one names op {numbers.min() if numbers.min() < 0 else numbers.max()}"
            )
    keys = np.sort(
        ends[0] * ops + ends[1]
    )  # np.unique goes through a hash table, which takes several times as long here
    keys = keys[np.diff(keys, prepend=-1) > 0]
    counts = np.bincount(keys // max(ops, 1), minlength=ops)
    return np.concatenate([[0], np.cumsum(counts)]), (keys % max(ops, 1)).astype(np.int32)
