"""The messages of a graph: their ops on ports, with the locks and threads they need.

| symbol | meaning |
|---|---|
| M | messages, in issue order |
| K | messages of one kind |
| N | ops of all messages |
| W | workers in the graph, 1 if the graph is symmetric |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.dfg.build import BlockName, DfgBuilder
from autotune.dfg.graph import NONE, Discipline
from autotune.lowering.joined import ShapeCache
from autotune.lowering.messages import Batch
from autotune.lowering.scenes import Surroundings
from autotune.lowering.shapes import to_all_hosts

UNLIMITED = 2**30
"""Messages in flight on a lane where the library decides."""


@dataclass(frozen=True, eq=False)
class MessageOps:
    """`starts`, `ends` (M,): the first op and the Out op of every message.

    A message whose results wait for norms has two ranges of ops: from `starts` to `sums`, and from
    `results` to `ends`. Otherwise `sums` and `ends`, and `starts` and `results`, are equal.
    """

    starts: IntArray
    sums: IntArray
    results: IntArray
    ends: IntArray

    @staticmethod
    def whole(starts: IntArray, ends: IntArray) -> MessageOps:
        """Messages of one range each."""
        return MessageOps(starts, ends, starts, ends)

    def followed_by(self, results: MessageOps, sent: IntArray) -> MessageOps:
        """These messages, with the second ranges of those numbered `sent`, in this order."""
        starts, ends = self.starts.copy(), self.ends.copy()
        starts[sent], ends[sent] = results.starts, results.ends
        return MessageOps(self.starts, self.sums, starts, ends)

    @property
    def ranges(self) -> tuple[tuple[IntArray, IntArray], ...]:
        """The first and last ops of both ranges, which may be equal."""
        return (self.starts, self.sums), (self.results, self.ends)

    def of_op(self, ops: int) -> IntArray:
        """The message of each of a graph's `ops`, NONE for other ops; shape (N,)."""
        message: IntArray = np.full(ops, NONE, dtype=np.int64)
        for firsts, lasts in self.ranges:
            for number, (first, last) in enumerate(
                zip(firsts.tolist(), lasts.tolist(), strict=True)
            ):
                message[first : last + 1] = number
        return message


class Network:
    """Adds the messages of one plan to a builder, any number of times.

    `layer` (M,): layers of the messages' ops.
    """

    def __init__(
        self, batches: Sequence[Batch], shapes: ShapeCache, around: Surroundings, layer: IntArray
    ) -> None:
        self._batches = batches
        self._around = around
        self._layer = layer
        self._port_names = shapes.port_names
        self._joined = shapes.joined(batches, around)
        messages = len(layer)
        self._kind = np.zeros(messages, dtype=np.int64)  # the number of each message's batch
        self._place = np.zeros(messages, dtype=np.int64)  # and its own within the batch
        for number, batch in enumerate(batches):
            self._kind[batch.numbers] = number
            self._place[batch.numbers] = np.arange(len(batch.numbers))

    def emit(self, to: DfgBuilder, issued: IntArray) -> MessageOps:
        """Add the messages of one step; the ops `issued` (W, M) issue them."""
        joined = self._joined
        columns = joined.in_builder(to)
        lengths = joined.ops.counts[self._kind]
        offsets = np.cumsum(lengths) - lengths
        base = to.ops + offsets
        row, message = joined.ops.rows(self._kind)
        duration_s, size_bytes = self._amounts(row, message)
        edge, edge_message = joined.edge_parts.rows(self._kind)
        start = base[edge_message]
        to.edges(joined.edges[0].take(edge) + start, joined.edges[1].take(edge) + start)
        first, first_message = joined.first_parts.rows(self._kind)
        to.edges(issued[:, first_message], joined.first[first] + base[first_message])
        self._chain(to, base)
        self._connect(to, base)
        queue, channel, kind, worker, acquires, releases = columns.take(row, axis=1)
        to.block(
            len(row),
            self._names(offsets),
            duration_s=duration_s,
            size_bytes=size_bytes,
            layer=self._layer[message],
            queue=queue,
            channel=channel,
            kind=kind,
            worker=worker,
            acquires=acquires,
            releases=releases,
        )
        return MessageOps.whole(base, base + lengths - 1)

    def ports(self, to: DfgBuilder) -> tuple[tuple[int, int], ...]:
        """(queue, lock or NONE) of each port in the graph, for messages to all hosts."""
        ports = []
        for name, discipline in self._joined.queues:
            if name not in self._port_names:
                continue
            shared = discipline is Discipline.SHARED
            lock = to.lock(1, to_all_hosts(name)) if shared else NONE
            ports.append((to.queue(name, discipline), lock))
        return tuple(ports)

    def _amounts(self, row: IntArray, message: IntArray) -> tuple[FloatArray, FloatArray]:
        """(seconds, bytes) of every op, (N,)."""
        pairs = list(zip(self._joined.shapes, self._batches, strict=True))
        tables = (
            [shape.durations_s(batch) for shape, batch in pairs],
            [shape.sizes_bytes(batch) for shape, batch in pairs],
        )
        slots = self._joined.slots.take(row, axis=1)
        counts = np.array([len(batch.numbers) for batch in self._batches], dtype=np.int64)
        amounts = []
        for slot, of_batches in zip(slots, tables, strict=True):
            sizes = np.array([table.size for table in of_batches], dtype=np.int64)
            starts = np.cumsum(sizes) - sizes
            first = starts[self._kind] + self._place
            at = first[message] + slot * counts[self._kind][message]
            amounts.append(np.concatenate([table.ravel() for table in of_batches])[at])
        return amounts[0], amounts[1]

    def _names(self, offsets: IntArray) -> BlockName:
        names = [self._joined.shapes[number].names for number in self._kind.tolist()]

        def name(number: int) -> str:
            message = int(np.searchsorted(offsets, number, side="right")) - 1
            return f"message {message} {names[message][number - int(offsets[message])]}"

        return name

    def _chain(self, to: DfgBuilder, base: IntArray) -> None:
        """Each lane's thread takes the pieces of all messages in plan order.

        It takes one when that `limit` places before it has ended on the lane. Direct exchanges have
        a limit of their own, and a queue of the device has none. Behind a message of rows, one of
        another kind waits until the rows have arrived: the first lane carries only their counts.
        """
        around = self._around
        limits = [around.limit_of(batch.direct) for batch in self._batches]
        limit = np.array([each or UNLIMITED for each in limits], dtype=np.int64)
        for lane in self._joined.lanes:
            row, message = lane.parts.rows(self._kind)
            if not len(row):
                continue
            start = base[message][:, None]
            first, last = start + lane.threads[row], start + lane.ends[row]
            held, of_rows = start + lane.holds[row], self._joined.rows[self._kind[message]]
            most = limit[self._kind[message]]
            if (most != 1).any():
                to.edges(first[:-1], first[1:])
            limited = np.flatnonzero(most < UNLIMITED)
            behind = np.arange(len(limited)) - most[limited]
            waits = behind >= 0
            ahead, waiting = limited[behind[waits]], limited[waits]
            other = (of_rows[ahead] & ~of_rows[waiting])[:, None]
            to.edges(np.where(other, held[ahead], last[ahead]), first[waiting])

    def _connect(self, to: DfgBuilder, base: IntArray) -> None:
        """Each connection carries the tensors of all messages in plan order."""
        for connections in self._joined.connections:
            message = np.flatnonzero(connections.used[self._kind])
            kind = self._kind[message]
            first = base[message] + connections.first[:, kind]
            last = base[message] + connections.last[:, kind]
            to.edges(last[:, :-1], first[:, 1:])
