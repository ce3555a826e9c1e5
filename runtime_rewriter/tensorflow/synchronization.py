"""Writes the messages of a plan: local gradients in, averaged gradients out.

A message's gradients are packed by concatenation on each rank, because Grappler, which would merge
collectives, is disabled. Control edges start the messages of a rank in the plan's order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import MOST_IN_FLIGHT, SparseHandling, Synchronizer
from runtime_rewriter.tensorflow.collectives import Carrier, Flat, Keys
from runtime_rewriter.tensorflow.node_writing import GraphWriter
from runtime_rewriter.tensorflow.rows import add_rows, every_row, merge_rows, select_rows
from runtime_rewriter.tensorflow.serving import Served
from runtime_rewriter.tensorflow.training_graph import Gradient, TrainingGraph

SCOPE = "autotune"
MESSAGE = "_autotune_message"
"""Attribute of the node that starts a message on a rank: the message's number in the plan."""

LocalTensor = Callable[[str, int], str]
"""The name of a tensor of the training graph in a rank's copy."""


@dataclass(frozen=True)
class Averaged:
    """The averaged gradient of a variable on each rank; rows have `indices`.

    `parts`: of a served variable that is cut, each on its server.
    """

    values: tuple[str, ...]
    indices: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


class Synchronization:
    """Writes all messages of a plan."""

    def __init__(
        self,
        training: TrainingGraph,
        plan: Plan,
        writer: GraphWriter,
        devices: tuple[str, ...],
        keys: Keys,
        local: LocalTensor,
        served: Mapping[str, Served],
    ) -> None:
        self.training, self.writer, self.devices, self.keys = training, writer, devices, keys
        self.local, self.served = local, served
        self._issued: list[list[str]] = [[] for _ in devices]
        self._finished: list[list[str]] = [[] for _ in devices]
        self._pieces: dict[str, list[tuple[int, Sequence[str]]]] = defaultdict(list)
        self._rows: dict[str, list[list[tuple[str, str]]]] = defaultdict(list)
        self._at_server: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self._axis: dict[str, int | None] = {}
        for number, message in enumerate(plan.messages):
            if message.sparse is SparseHandling.DENSE:
                self._write(number, message)
            else:
                self._write_rows(number, message)

    def averaged(self) -> dict[str, Averaged]:
        """Return the averaged gradient of each variable, joined from its slices."""
        joined = {name: self._joined(name) for name in self._pieces}
        joined |= {name: self._on_servers(name) for name in self._at_server}
        return joined | {name: self._joined_rows(name) for name in self._rows}

    def _write(self, number: int, message: Message) -> None:
        scope = f"{SCOPE}/message_{number}"
        dtype = tf.as_dtype(message.dtype)
        wire = tf.as_dtype(message.compressor.description.wire_dtype or message.dtype)
        sent = []
        for rank, device in enumerate(self.devices):
            with self.writer.at(device, f"{scope}/rank_{rank}"):
                parts = [self._flat(part, rank, dtype) for part in message.slices]
                packed = self.writer.concat(parts, 0, dtype)
                scaled = self.writer.scale(packed, 1 / len(self.devices), dtype)
                sent.append(self._start(rank, number, self.writer.cast(scaled, dtype, wire), wire))
        flat = Flat(tuple(sent), message.elements, wire)
        carrier = Carrier(self.writer, self.devices, self.keys, scope, self._window())
        received = carrier.exchange(flat, message.synchronizer, message.owner)
        if message.synchronizer is not Synchronizer.PARAMETER_SERVER:
            for rank, tensor in enumerate(received):
                self._finished[rank].append(tensor.partition(":")[0])
        self._unpack_at_server(message, scope, received, wire)
        self._unpack(message, scope, received, wire)

    def _start(self, rank: int, number: int, tensor: str, dtype: tf.DType) -> str:
        """Let a message start after the one before it on this rank."""
        started = self.writer.node(
            "Identity", "start", [tensor], self._issued[rank][-1:], T=dtype, **{MESSAGE: number}
        )
        self._issued[rank].append(started)
        return started

    def _window(self) -> tuple[tuple[str, ...], ...]:
        """Let at most `MOST_IN_FLIGHT` collectives of a rank run at once, as gloo does.

        Without a bound all of them would share the network, and their order would be lost.
        """
        return tuple(
            tuple(finished[-MOST_IN_FLIGHT:][:1] if len(finished) >= MOST_IN_FLIGHT else ())
            for finished in self._finished
        )

    def _flat(self, part: TensorSlice, rank: int, dtype: tf.DType) -> str:
        tensor = self._dense(self.training.gradient_of[part.variable], rank, dtype)
        if part.axis is not None:
            extent = self._shape(part)
            start = [0] * len(extent)
            start[part.axis] = part.start
            tensor = self.writer.cut(tensor, start, extent, dtype)
        return self.writer.reshape(tensor, [-1], dtype)

    def _dense(self, gradient: Gradient, rank: int, dtype: tf.DType) -> str:
        """Return a gradient as one tensor of the variable's shape; rows are added up."""
        values = self.local(str(gradient.values), rank)
        if gradient.indices is None:
            return values
        indices = self.local(str(gradient.indices), rank)
        rows = self.training.by_name[gradient.variable].shape[0]
        return add_rows(self.writer, values, indices, rows, dtype, self._index_dtype(gradient))

    def _index_dtype(self, gradient: Gradient) -> tf.DType:
        assert gradient.indices is not None
        return tf.as_dtype(self.training.view.nodes[gradient.indices.node].attr["T"].type)

    def _write_rows(self, number: int, message: Message) -> None:
        """Send rows as values and indices: to every rank, or by way of the owner.

        Ranks may send different numbers of rows, so a rank reads those of the others one by one.
        """
        (part,) = message.slices
        gradient = self.training.gradient_of[part.variable]
        dtype, index_dtype = tf.as_dtype(message.dtype), self._index_dtype(gradient)
        wire = tf.as_dtype(message.compressor.description.wire_dtype or message.dtype)
        scope = f"{SCOPE}/message_{number}"
        values, indices = [], []
        for rank, device in enumerate(self.devices):
            with self.writer.at(device, f"{scope}/rank_{rank}"):
                rows = self.local(str(gradient.values), rank)
                places = self.local(str(gradient.indices), rank)
                if part.axis is not None:
                    between = (part.start, part.stop)
                    rows, places = select_rows(
                        self.writer, rows, places, between, dtype, index_dtype
                    )
                scaled = self.writer.scale(rows, 1 / len(self.devices), dtype)
                packed = self.writer.cast(scaled, dtype, wire)
                values.append(self._start(rank, number, packed, wire))
                indices.append(places)
        if message.synchronizer is Synchronizer.PARAMETER_SERVER:
            assert message.owner is not None
            with self.writer.at(self.devices[message.owner], f"{scope}/rank_{message.owner}"):
                rows, places = self._merged(values, indices, wire, dtype, index_dtype)
                packed = self.writer.cast(rows, dtype, wire)
            if part.variable in self.served:
                self._rows[part.variable].append([(rows, places)] * len(self.devices))
                return
            received = []
            for rank, device in enumerate(self.devices):
                with self.writer.at(device, f"{scope}/rank_{rank}"):
                    received.append((self.writer.cast(packed, wire, dtype), places))
        else:
            received = []
            for rank, device in enumerate(self.devices):
                with self.writer.at(device, f"{scope}/rank_{rank}"):
                    received.append(self._merged(values, indices, wire, dtype, index_dtype))
        self._rows[part.variable].append(received)

    def _merged(
        self,
        values: Sequence[str],
        indices: Sequence[str],
        wire: tf.DType,
        dtype: tf.DType,
        index_dtype: tf.DType,
    ) -> tuple[str, str]:
        """Join the rows of all ranks, those of equal index added up.

        An average is one row per index. Optimizers that square rows would else depend on how
        rows are spread over ranks.
        """
        rows = self.writer.cast(self.writer.concat(values, 0, wire), wire, dtype)
        places = self.writer.concat(indices, 0, index_dtype)
        return merge_rows(self.writer, rows, places, dtype, index_dtype)

    def _joined_rows(self, variable: str) -> Averaged:
        gradient = self.training.gradient_of[variable]
        dtype = tf.as_dtype(self.training.by_name[variable].dtype)
        index_dtype = self._index_dtype(gradient)
        values, indices = [], []
        for rank, device in enumerate(self.devices):
            with self.writer.at(device, f"{SCOPE}/averaged/rank_{rank}"):
                parts = [received[rank] for received in self._rows[variable]]
                values.append(self.writer.concat([rows for rows, _ in parts], 0, dtype))
                indices.append(self.writer.concat([places for _, places in parts], 0, index_dtype))
        return Averaged(tuple(values), tuple(indices))

    def _shape(self, part: TensorSlice) -> list[int]:
        shape = list(self.training.by_name[part.variable].shape)
        if part.axis is not None:
            shape[part.axis] = part.stop - part.start
        return shape

    def _unpack_at_server(
        self, message: Message, scope: str, received: Sequence[str], wire: tf.DType
    ) -> None:
        """Take the slices of served variables, whose sums stay at the server."""
        if not any(part.variable in self.served for part in message.slices):
            return
        rank = message.owner
        assert rank is not None
        with self.writer.at(self.devices[rank], f"{scope}/rank_{rank}/update"):
            parts = self._split(message, received[rank], wire)
        for part, tensor in zip(message.slices, parts, strict=True):
            if part.variable in self.served:
                self._axis[part.variable] = part.axis
                self._at_server[part.variable].append((part.start, tensor))

    def _unpack(
        self, message: Message, scope: str, received: Sequence[str], wire: tf.DType
    ) -> None:
        """Take the slices of all other variables on each rank."""
        if all(part.variable in self.served for part in message.slices):
            return
        by_rank = []
        for rank, device in enumerate(self.devices):
            with self.writer.at(device, f"{scope}/rank_{rank}"):
                by_rank.append(self._split(message, received[rank], wire))
        for place, part in enumerate(message.slices):
            if part.variable not in self.served:
                self._axis[part.variable] = part.axis
                tensors = [parts[place] for parts in by_rank]
                self._pieces[part.variable].append((part.start, tensors))

    def _split(self, message: Message, tensor: str, wire: tf.DType) -> list[str]:
        """Return the slices of a message, each in its shape."""
        dtype = tf.as_dtype(message.dtype)
        sizes = [part.elements for part in message.slices]
        flat = self.writer.split(self.writer.cast(tensor, wire, dtype), sizes, 0, dtype)
        return [
            self.writer.reshape(one, self._shape(part), dtype)
            for one, part in zip(flat, message.slices, strict=True)
        ]

    def _on_servers(self, variable: str) -> Averaged:
        """Return the averaged gradient of a served variable.

        Who reads the whole of it elsewhere, as a global norm does, gets it from the servers.
        """
        dtype = tf.as_dtype(self.training.by_name[variable].dtype)
        served = self.served[variable]
        parts = [tensor for _, tensor in sorted(self._at_server[variable])]
        if served.is_whole:
            return Averaged(tuple(parts) * len(self.devices), self._all_rows(variable))
        values = []
        for rank, device in enumerate(self.devices):
            with self.writer.at(device, f"{SCOPE}/averaged/rank_{rank}"):
                values.append(self.writer.concat(parts, served.axis or 0, dtype))
        return Averaged(tuple(values), parts=tuple(parts))

    def _all_rows(self, variable: str) -> tuple[str, ...]:
        """Return the indices of a sparse gradient that was sent dense, on each rank."""
        gradient = self.training.gradient_of[variable]
        if not gradient.sparse:
            return ()
        indices = []
        for rank, device in enumerate(self.devices):
            with self.writer.at(device, f"{SCOPE}/averaged/rank_{rank}"):
                rows = self.training.by_name[variable].shape[0]
                indices.append(every_row(self.writer, rows, self._index_dtype(gradient)))
        return tuple(indices)

    def _joined(self, variable: str) -> Averaged:
        dtype = tf.as_dtype(self.training.by_name[variable].dtype)
        in_order = [tensors for _, tensors in sorted(self._pieces[variable], key=lambda p: p[0])]
        results = []
        for rank, device in enumerate(self.devices):
            with self.writer.at(device, f"{SCOPE}/averaged/rank_{rank}"):
                parts = [tensors[rank] for tensors in in_order]
                results.append(self.writer.concat(parts, self._axis[variable] or 0, dtype))
        return Averaged(tuple(results), self._all_rows(variable))
