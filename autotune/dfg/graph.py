"""The data-flow graph: its columns, ops with durations, their resources and their order.

One kind of graph serves all sources: the kernels of one device (Daydream), a fused module (DisCo),
and the global graph of n workers (dPRO, sec. 4.1). An op is ready when all its parents have ended.
It then waits for its lock, its queue and its channel, in this order (docs/prediction.md).

| symbol | meaning |
|---|---|
| N, E | ops, edges |
| Q | queues: devices that compute, links or threads that send; channels are queues, too |
| L | locks |
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
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
    """The kind of an op. The values are stored in files: never renumber."""

    VIRTUAL = 0  # an In or Out op, a barrier: takes no queue
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3
    OTHER = 4  # any other computation
    PACK = 5  # copies, casts and compression before a message
    UNPACK = 6
    SEND = 7
    RECV = 8
    COLLECTIVE = 9  # a whole collective, not divided into chunks
    SERVER = 10  # computation of a parameter server
    LAUNCH = 11  # a host thread that starts kernels
    LOAD = 12  # input pipeline
    COPY = 13  # between host and device


COMPUTATION = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE, Kind.OTHER})
COMMUNICATION = frozenset(
    {Kind.SEND, Kind.RECV, Kind.COLLECTIVE, Kind.SERVER, Kind.PACK, Kind.UNPACK}
)


class Discipline(IntEnum):
    """The op that a free queue takes next, among those that are ready.

    A shared queue takes each op at once. While it has k ops, each runs at 1/k of its speed.
    """

    FIFO = 0  # the first that became ready; among simultaneous ones the lowest index
    PRIORITY = 1  # the lowest priority; among equal ones as FIFO
    SHARED = 2  # all of them, evenly


@dataclass(frozen=True)
class Column:
    """`default`: the value of an op that states none. `numbers`: what the values number, if any.

    Columns that number nothing and hold floats are amounts: finite and at least 0.
    """

    dtype: type[np.generic]
    default: float = 0
    numbers: str = ""

    @property
    def is_amount(self) -> bool:
        return self.dtype is np.float64


OP_COLUMNS = {
    "duration_s": Column(np.float64),
    "queue": Column(np.int32, NONE, "queues"),
    "kind": Column(np.int8, Kind.VIRTUAL),
    "gap_s": Column(np.float64),
    "channel": Column(np.int32, NONE, "queues"),
    "priority": Column(np.int32),
    "size_bytes": Column(np.float64),
    "layer": Column(np.int32, NONE, "layers"),
    "worker": Column(np.int32, NONE),
    "acquires": Column(np.int32, NONE, "locks"),
    "releases": Column(np.int32, NONE, "locks"),
}
"""Columns of shape (N,), one value for each op; `Dfg` documents each."""
OTHER_COLUMNS = {
    "child_start": Column(np.int64),
    "child": Column(np.int32),
    "discipline": Column(np.int8),
    "lock_capacity": Column(np.int32),
}
"""Columns for edges, queues and locks."""


@dataclass(frozen=True)
class Names:
    """Names of the N ops, the Q queues and the layers. Those of the ops may be a lazy sequence."""

    ops: Sequence[str]
    queues: Sequence[str]
    layers: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Dfg:
    """A checked graph of read-only arrays. Durations and gaps in seconds, sizes in bytes.

    - `queue` (N,): the queue that executes the op; NONE for a virtual op, which starts when ready.
    - `channel` (N,): a second queue that the op occupies at the same time, such as the receiver's
      link; NONE for none. At the head of its queue the op waits for the channel and takes both.
    - `gap_s` (N,): idle time of the op's queue behind it (Daydream). It delays no other queue.
    - `acquires` (N,): a lock that the op takes before it enters its queue; `releases` (N,): a lock
      that it gives back at its end. Two ops may share a lock: one takes it and a later one gives it
      back, as a communication thread does that serves a whole message.
    - `lock_capacity` (L,): how many ops may hold a lock at once.
    - `priority` (N,): lower goes first on a queue of discipline PRIORITY, for a lock and a channel.
    - `layer` (N,): number of the layer or variable. `worker` (N,): the rank. NONE for none.
    - `child_start` (N + 1,), `child` (E,): CSR edges.

    Raises `InvalidInput` for a wrong shape, index or amount, and for a cycle.
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
        for name, column in (OP_COLUMNS | OTHER_COLUMNS).items():
            given = getattr(self, name)
            array = np.ascontiguousarray(given, dtype=column.dtype)
            if array.ndim != 1:
                raise InvalidInput(
                    f"a data-flow graph needs flat arrays, but {name} has {array.ndim} dimensions"
                )
            if array.flags.writeable:
                array = array.copy() if array is given else array
                array.flags.writeable = False
            object.__setattr__(self, name, array)
        self._check_shapes()
        self._check_values()
        assert self.topological_order is not None  # raises for a cycle

    def _check_shapes(self) -> None:
        count = self.ops
        if count > MAX_OPS:
            raise InvalidInput(f"a data-flow graph may have at most {MAX_OPS} ops, but has {count}")
        for name in OP_COLUMNS:
            length = len(getattr(self, name))
            if length != count:
                raise InvalidInput(f"{name} must have one value per op, {count}, but has {length}")
        if len(self.names.ops) != count or len(self.names.queues) != self.queues:
            raise InvalidInput(f"names must be given to {count} ops and {self.queues} queues")
        start = self.child_start
        if len(start) != count + 1 or start[0] != 0 or start[-1] != len(self.child):
            raise InvalidInput(
                "child_start must begin at 0, end at the number of edges "
                "and have one value more than there are ops"
            )
        if np.any(np.diff(start) < 0):
            raise InvalidInput("child_start must not fall")
        if len(self.child) and (self.child.min() < 0 or self.child.max() >= count):
            raise InvalidInput(f"child must hold numbers of ops, 0 to {count - 1}")

    def _check_values(self) -> None:
        limits = {"queues": self.queues, "locks": self.locks, "layers": len(self.names.layers)}
        for name, column in OP_COLUMNS.items():
            values = getattr(self, name)
            limit = limits.get(column.numbers)
            if limit is not None and len(values) and not -1 <= values.min() <= values.max() < limit:
                raise InvalidInput(
                    f"{name} must hold {NONE} or numbers below {limit}, "
                    f"but has {int(values.min())} to {int(values.max())}"
                )
            if column.is_amount:
                self._check_amounts(name)
        if np.any((self.channel >= 0) & ((self.queue < 0) | (self.channel == self.queue))):
            raise InvalidInput("an op with a channel needs a queue that is another one")
        shared = np.append(self.discipline == Discipline.SHARED, False)  # NONE is the last
        gaps_or_channels = (self.gap_s > 0) | (self.channel >= 0)
        if np.any(shared[self.channel] | (shared[self.queue] & gaps_or_channels)):
            raise InvalidInput("an op of a shared queue has neither gap nor channel, nor is it one")
        if np.any(self.lock_capacity < 1):
            raise InvalidInput("a lock needs a capacity of at least 1")

    def _check_amounts(self, name: str) -> None:
        values = getattr(self, name)
        invalid = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if len(invalid):
            op = int(invalid[0])
            raise InvalidInput(
                f"{name} must be finite and at least 0, "
                f"but that of op {self.names.ops[op]!r} is {values[op]}"
            )

    def with_durations(self, duration_s: FloatArray) -> Dfg:
        """The same graph with other durations (N,), which alone are checked again."""
        durations: FloatArray = np.array(duration_s, dtype=np.float64)
        if durations.shape != self.duration_s.shape:
            raise InvalidInput(f"durations must have shape ({self.ops},), not {durations.shape}")
        durations.flags.writeable = False
        other = copy(self)  # with its cached properties: none depends on durations
        object.__setattr__(other, "duration_s", durations)
        other._check_amounts("duration_s")
        return other

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
    def late_queues(self) -> BoolArray:
        """Queues that choose an op only when they are free, shape (Q,).

        They serve by priority, or a channel is involved.
        """
        late: BoolArray = self.discipline == Discipline.PRIORITY
        with_channel = self.channel >= 0
        late[self.channel[with_channel]] = True
        late[self.queue[with_channel]] = True
        return late

    @cached_property
    def apart(self) -> BoolArray:
        """Ops on queues that serve one at a time, shape (N,): on each, none overlaps another."""
        shared = np.append(self.discipline == Discipline.SHARED, True)  # NONE is the last
        apart: BoolArray = ~shared[self.queue]
        return apart

    @cached_property
    def is_plain(self) -> bool:
        """Whether all queues are FIFO, without any gap, channel or lock."""
        has_locks = (self.acquires >= 0).any() or (self.releases >= 0).any()
        in_order = not self.late_queues.any() and (self.discipline == Discipline.FIFO).all()
        return bool(in_order and not self.gap_s.any() and not has_locks)

    @cached_property
    def topological_order(self) -> Int32Array:
        """Every op behind its parents, shape (N,). Raises `InvalidInput`, naming ops of a cycle."""
        in_order = np.arange(self.ops, dtype=np.int32)
        if np.all(np.repeat(in_order, np.diff(self.child_start)) < self.child):
            return in_order
        from autotune.dfg.order import topological  # numba is loaded only if it is needed

        order = topological(self.child_start, self.child, self.parents_left)
        if len(order) < self.ops:
            left = np.ones(self.ops, dtype=np.bool_)
            left[order] = False
            names = ", ".join(self.names.ops[op] for op in np.flatnonzero(left)[:3])
            raise InvalidInput(
                f"a data-flow graph must have no cycle, but there is one among or before {names}"
            )
        return order
