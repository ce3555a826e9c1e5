"""The data-flow graph: what runs where, for how long, after what.

One kind of graph for all sources: the kernels of one device (Daydream), a fused module (DisCo), the global graph of n workers (dPRO,
sec. 4.1). An op is ready when all its parents have ended; it then waits for its lock, for its queue and for its channel, in this order.
The rules in full: `docs/prediction.md`.

| symbol | meaning |
|---|---|
| N, E | ops, edges |
| Q | queues: the devices that compute and the links or threads that send; also the channels |
| L | locks |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autotune.arrays import BoolArray, FloatArray, Int32Array, IntArray
from autotune.errors import InvalidInput

NONE = -1
MAX_OPS = 2**31 - 2


class Kind(IntEnum):
    """What an op is. The values are stored in files: never renumber."""

    VIRTUAL = 0  # an In or Out op, a barrier: takes no queue
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3
    OTHER = 4  # computation that is none of these
    PACK = 5  # copies, casts and compression before a message
    UNPACK = 6
    SEND = 7
    RECV = 8
    COLLECTIVE = 9  # a whole collective that is not cut into chunks
    SERVER = 10  # what a parameter server computes
    LAUNCH = 11  # a host thread that starts kernels
    LOAD = 12  # input pipeline
    COPY = 13  # between host and device


COMPUTATION = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE, Kind.OTHER})
COMMUNICATION = frozenset(
    {Kind.SEND, Kind.RECV, Kind.COLLECTIVE, Kind.SERVER, Kind.PACK, Kind.UNPACK}
)


class Discipline(IntEnum):
    """Which of the ops that are ready a free queue takes next."""

    FIFO = 0  # ready first; of those ready at once the lowest index
    PRIORITY = 1  # lowest priority; of equal ones as FIFO


@dataclass(frozen=True)
class Names:
    """What people read, apart from what is computed: N, Q and any number of names. The ops' may be a lazy sequence."""

    ops: Sequence[str]
    queues: Sequence[str]
    layers: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Dfg:
    """Every array is checked and made read-only. Durations and gaps in seconds, sizes in bytes.

    - `queue` (N,): the queue that executes the op; NONE for a virtual op, which takes its duration from when it is ready.
    - `channel` (N,): a second queue that the op occupies at the same time, such as the receiver's link; NONE for none. An op at the
      head of its queue waits there until its channel is free too, and takes both at once.
    - `gap_s` (N,): after the op its queue stays idle so long before its next one. Delays no other queue (REFERENCES, Daydream).
    - `acquires` (N,): a lock that the op takes before it enters its queue; `releases` (N,): one that it gives back at its end. NONE for
      none. A lock that is taken by an op and given back by a later one holds, say, a communication thread for a whole message.
    - `lock_capacity` (L,): how many may hold a lock at once.
    - `priority` (N,): lower first on a queue of discipline PRIORITY, and among those who wait for one lock or channel.
    - `layer` (N,): number of the layer or variable, NONE for none. `worker` (N,): the rank, NONE for none.
    - `child_start` (N + 1,), `child` (E,): CSR edges.

    Raises `InvalidInput` where a shape, an index, a duration or the graph's order is wrong.
    """

    duration_s: FloatArray
    queue: Int32Array
    child_start: IntArray
    child: Int32Array
    discipline: NDArray[np.int8]
    kind: NDArray[np.int8]
    gap_s: FloatArray
    channel: Int32Array
    priority: Int32Array
    size_bytes: FloatArray
    layer: Int32Array
    worker: Int32Array
    acquires: Int32Array
    releases: Int32Array
    lock_capacity: Int32Array
    names: Names

    def __post_init__(self) -> None:
        for name, kind in _DTYPES.items():
            array = np.ascontiguousarray(getattr(self, name), dtype=kind)
            if array.ndim != 1:
                raise InvalidInput(
                    f"a data-flow graph needs flat arrays, but {name} has {array.ndim} dimensions"
                )
            if array.flags.writeable:
                array = array.copy() if array is getattr(self, name) else array
                array.flags.writeable = False
            object.__setattr__(self, name, array)
        self._check_shapes()
        for name, limit in (
            ("queue", self.queues),
            ("channel", self.queues),
            ("acquires", self.locks),
            ("releases", self.locks),
        ):
            _check_range(name, getattr(self, name), limit)
        _check_range("layer", self.layer, len(self.names.layers))
        for name in ("duration_s", "gap_s", "size_bytes"):
            values = getattr(self, name)
            wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
            if len(wrong):
                op = int(wrong[0])
                raise InvalidInput(
                    f"{name} must be finite and at least 0, but that of op {self.names.ops[op]!r} is {values[op]}"
                )
        if np.any((self.channel >= 0) & ((self.queue < 0) | (self.channel == self.queue))):
            raise InvalidInput("an op with a channel needs a queue that is another one")
        if np.any(self.lock_capacity < 1):
            raise InvalidInput("a lock needs a capacity of at least 1")
        assert self.topological_order is not None  # raises where there is a cycle

    def _check_shapes(self) -> None:
        count = self.ops
        if count > MAX_OPS:
            raise InvalidInput(f"a data-flow graph may have at most {MAX_OPS} ops, but has {count}")
        for name in _PER_OP:
            if len(getattr(self, name)) != count:
                raise InvalidInput(
                    f"{name} must have one value per op, {count}, but has {len(getattr(self, name))}"
                )
        if len(self.names.ops) != count or len(self.names.queues) != self.queues:
            raise InvalidInput(f"names must be given to {count} ops and {self.queues} queues")
        if (
            len(self.child_start) != count + 1
            or self.child_start[0] != 0
            or self.child_start[-1] != len(self.child)
        ):
            raise InvalidInput(
                "child_start must begin at 0, end at the number of edges and have one value more than there are ops"
            )
        if np.any(np.diff(self.child_start) < 0):
            raise InvalidInput("child_start must not fall")
        if len(self.child) and (self.child.min() < 0 or self.child.max() >= count):
            raise InvalidInput(f"child must hold numbers of ops, 0 to {count - 1}")

    @property
    def ops(self) -> int:
        return len(self.duration_s)

    @property
    def edges(self) -> int:
        return len(self.child)

    @property
    def queues(self) -> int:
        return len(self.discipline)

    @property
    def locks(self) -> int:
        return len(self.lock_capacity)

    @cached_property
    def parents_left(self) -> Int32Array:
        """Number of parents of every op, shape (N,)."""
        counts: Int32Array = np.bincount(self.child, minlength=self.ops).astype(np.int32)
        return counts

    @cached_property
    def parent_csr(self) -> tuple[IntArray, Int32Array]:
        """(parent_start (N + 1,), parent (E,)): the edges from the other end; the parents of an op in ascending order."""
        from autotune.dfg.order import (
            reversed_csr,  # compiled code loads when the first graph is made, not when this is imported
        )

        return reversed_csr(self.child_start, self.child)

    @cached_property
    def late_queues(self) -> BoolArray:
        """The queues that must choose when they are free, shape (Q,): by priority, or because a channel is involved."""
        late: BoolArray = self.discipline == Discipline.PRIORITY
        through = self.channel >= 0
        late[self.channel[through]] = True
        late[self.queue[through]] = True
        return late

    @cached_property
    def is_plain(self) -> bool:
        """Whether all queues are FIFO and there is no gap, channel or lock."""
        return not (
            self.late_queues.any()
            or self.gap_s.any()
            or (self.acquires >= 0).any()
            or (self.releases >= 0).any()
        )

    @cached_property
    def topological_order(self) -> Int32Array:
        """Every op behind its parents, shape (N,). Raises `InvalidInput`, naming an op of a cycle, where there is none."""
        if np.all(
            np.repeat(np.arange(self.ops, dtype=np.int32), np.diff(self.child_start)) < self.child
        ):
            return np.arange(
                self.ops, dtype=np.int32
            )  # who writes a graph down front to back need not be sorted
        from autotune.dfg.order import topological

        order = topological(self.child_start, self.child, self.parents_left)
        if len(order) < self.ops:
            left = np.ones(self.ops, dtype=np.bool_)
            left[order] = False
            names = [self.names.ops[op] for op in np.flatnonzero(left)[:3]]
            raise InvalidInput(
                f"a data-flow graph must have no cycle, but there is one among or before {', '.join(names)}"
            )
        return order


_DTYPES: dict[str, type[np.generic]] = {
    "duration_s": np.float64,
    "queue": np.int32,
    "child_start": np.int64,
    "child": np.int32,
    "discipline": np.int8,
    "kind": np.int8,
    "gap_s": np.float64,
    "channel": np.int32,
    "priority": np.int32,
    "size_bytes": np.float64,
    "layer": np.int32,
    "worker": np.int32,
    "acquires": np.int32,
    "releases": np.int32,
    "lock_capacity": np.int32,
}
_PER_OP = (
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


def _check_range(name: str, numbers: Int32Array, limit: int) -> None:
    if len(numbers) and (numbers.min() < NONE or numbers.max() >= limit):
        raise InvalidInput(
            f"{name} must hold {NONE} or numbers below {limit}, but has {int(numbers.min())} to {int(numbers.max())}"
        )
