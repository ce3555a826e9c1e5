"""Writes the messages of a plan: local gradients in, averaged gradients out.

A message's gradients are packed by concatenation on each rank, because Grappler, which would merge
collectives, is disabled. Control edges start the messages of a rank in the plan's order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import MOST_IN_FLIGHT, SparseHandling, Synchronizer
from runtime_rewriter.tensorflow.collectives import Carrier, Flat, Keys, Sums
from runtime_rewriter.tensorflow.compressed import compressed_sum
from runtime_rewriter.tensorflow.kept_writing import KeptWriter
from runtime_rewriter.tensorflow.message_residuals import MessageResiduals
from runtime_rewriter.tensorflow.message_slices import MessageSlices
from runtime_rewriter.tensorflow.node_writing import GraphWriter
from runtime_rewriter.tensorflow.row_messages import RowMessages
from runtime_rewriter.tensorflow.rows import add_rows, every_row
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


@dataclass(frozen=True)
class Circumstances:
    """What a plan's messages depend on beside the plan.

    `hosts`: the ranks of each host; empty if they are not known. `waiting`: variables of which a
    rank has not sent everything under an earlier plan.
    """

    hosts: tuple[tuple[int, ...], ...] = ()
    waiting: frozenset[str] = frozenset()


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
        kept: KeptWriter,
        circumstances: Circumstances,
    ) -> None:
        self.plan, self.hosts = plan, circumstances.hosts
        self.training, self.writer, self.devices, self.keys = training, writer, devices, keys
        self.local, self.served = local, served
        self._issued: list[list[str]] = [[] for _ in devices]
        self._finished: list[list[str]] = [[] for _ in devices]
        self._pieces: dict[str, list[tuple[int, Sequence[str]]]] = defaultdict(list)
        self._at_server: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self._axis: dict[str, int | None] = {}
        self._slices = MessageSlices(training, writer)
        self._residuals = MessageResiduals(plan, self._slices, devices, kept, circumstances.waiting)
        self._rows = RowMessages(self._slices, devices, local, served, self._start, SCOPE)
        for number, message in enumerate(plan.messages):
            if message.sparse is SparseHandling.DENSE:
                self._write(number, message)
            else:
                self._write_rows(number, message)

    def averaged(self) -> dict[str, Averaged]:
        """Return the averaged gradient of each variable, joined from its slices."""
        joined = {name: self._joined(name) for name in self._pieces}
        joined |= {name: self._on_servers(name) for name in self._at_server}
        rows = {name: Averaged(*self._rows.averaged(name)) for name in self._rows.variables}
        return joined | rows

    @property
    def variables_in_rows(self) -> tuple[str, ...]:
        """The variables whose gradients travel as rows."""
        return self._rows.variables

    def residual_of(self, variable: str, rank: int, after: bool) -> str | None:
        """A rank's residual of a whole variable before or after the step; None if it has none."""
        return self._residuals.of_variable(variable, rank, after)

    def _write_rows(self, number: int, message: Message) -> None:
        dtype = tf.as_dtype(message.dtype)
        residuals = self._residuals.read(number, message, self._compressing(message), dtype)
        self._residuals.replace(number, message, residuals, {})
        self._rows.write(number, message, residuals)

    def _write(self, number: int, message: Message) -> None:
        scope = f"{SCOPE}/message_{number}"
        dtype = tf.as_dtype(message.dtype)
        wire = tf.as_dtype(message.compressor.description.wire_dtype or message.dtype)
        sent: dict[int, str] = {}
        residuals = self._residuals.read(number, message, self._compressing(message), dtype)
        for rank in self._ring:
            with self.writer.at(self.devices[rank], f"{scope}/rank_{rank}"):
                parts = [self._flat(part, rank, dtype) for part in message.slices]
                packed = self.writer.concat(parts, 0, dtype)
                values = self.writer.scale(packed, 1 / len(self.devices), dtype)
                if rank in residuals:
                    values = self.writer.binary("AddV2", values, residuals[rank].value, dtype)
                packed = self.writer.cast(values, dtype, wire)
                sent[rank] = self._start(rank, number, packed, wire)
        flat = Flat(sent, message.elements, wire)
        own_ring = self._ring != tuple(range(len(self.devices)))
        carrier = Carrier(self.writer, self.devices, self.keys, scope, self._window(), own_ring)
        received, unsent = self._exchange(carrier, message, flat)
        self._residuals.replace(number, message, residuals, unsent)
        if message.synchronizer is not Synchronizer.PARAMETER_SERVER:
            for rank, tensor in received.items():
                self._finished[rank].append(tensor.partition(":")[0])
        self._unpack_at_server(message, scope, received, wire)
        self._unpack(message, scope, received, wire)

    @property
    def _ring(self) -> tuple[int, ...]:
        return self.plan.ring_order or tuple(range(len(self.devices)))

    def _two_levels(self, message: Message) -> bool:
        """Whether the message is hierarchical, and some of several hosts holds several ranks."""
        return message.hierarchical and len(self.hosts) > 1 and max(map(len, self.hosts)) > 1

    def _leaders(self, message: Message) -> dict[int, tuple[int, ...]]:
        """The leader of each host and the host's ranks, in the order of the ring.

        The leader of the owner's host is the owner. That of any other host is its lowest rank.
        """
        led = {message.owner if message.owner in host else min(host): host for host in self.hosts}
        return {rank: led[rank] for rank in self._ring if rank in led}

    def _compressing(self, message: Message) -> Collection[int]:
        """The ranks that compress a message."""
        return self._leaders(message) if self._two_levels(message) else range(len(self.devices))

    def _exchange(
        self, carrier: Carrier, message: Message, sent: Flat
    ) -> tuple[Sums, Mapping[int, str]]:
        """Return the sum at each rank, and the residual of each rank that keeps one.

        A hierarchical message is summed at the leader of each host, then by its own synchronizer
        between the leaders, and copied to the ranks of each host.
        """
        leaders = self._leaders(message) if self._two_levels(message) else {}
        among = sent
        if leaders:
            begun = carrier.begun(sent)
            inside = {}
            for leader, host in leaders.items():
                of_host = {rank: begun.tensors[rank] for rank in host}
                inside[leader] = carrier.sum_at(Flat(of_host, sent.elements, sent.dtype), leader)
            among = Flat(inside, sent.elements, sent.dtype)
        unsent: Mapping[int, str] = {}
        if message.compressor.error_feedback and len(among.members) > 1:
            shapes = [self._slices.shape(part) for part in message.slices]
            result = compressed_sum(carrier, message, among, shapes, self._residuals.start)
            sums, unsent = result.sums, result.kept
        else:
            sums = carrier.exchange(among, message.synchronizer, message.owner)
        if leaders:
            sums = self._copied(carrier, sums, leaders, sent.dtype)
        return sums, unsent

    def _copied(
        self, carrier: Carrier, sums: Sums, leaders: Mapping[int, tuple[int, ...]], dtype: tf.DType
    ) -> Sums:
        """Copy the sum of each leader to the ranks of its host."""
        copies = {}
        for leader, host in leaders.items():
            for rank in host:
                with carrier.at(rank):
                    copies[rank] = self.writer.identity(sums[leader], dtype, "from_leader")
        return copies

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
        tensor = self.dense(self.training.gradient_of[part.variable], rank, dtype)
        if part.axis is not None:
            extent = self._slices.shape(part)
            start = [0] * len(extent)
            start[part.axis] = part.start
            tensor = self.writer.cut(tensor, start, extent, dtype)
        return self.writer.reshape(tensor, [-1], dtype)

    def dense(self, gradient: Gradient, rank: int, dtype: tf.DType) -> str:
        """Return a gradient as one tensor of the variable's shape; rows are added up."""
        values = self.local(str(gradient.values), rank)
        if gradient.indices is None:
            return values
        indices = self.local(str(gradient.indices), rank)
        rows = self.training.by_name[gradient.variable].shape[0]
        return add_rows(
            self.writer, values, indices, rows, dtype, self.training.index_dtype(gradient)
        )

    def _unpack_at_server(
        self, message: Message, scope: str, received: Sums, wire: tf.DType
    ) -> None:
        """Take the slices of served variables, whose sums stay at the server."""
        if not any(part.variable in self.served for part in message.slices):
            return
        rank = message.owner
        assert rank is not None
        with self.writer.at(self.devices[rank], f"{scope}/rank_{rank}/update"):
            parts = self._slices.split(message, received[rank], wire)
        for part, tensor in zip(message.slices, parts, strict=True):
            if part.variable in self.served:
                self._axis[part.variable] = part.axis
                self._at_server[part.variable].append((part.start, tensor))

    def _unpack(self, message: Message, scope: str, received: Sums, wire: tf.DType) -> None:
        """Take the slices of all other variables on each rank."""
        if all(part.variable in self.served for part in message.slices):
            return
        by_rank = []
        for rank, device in enumerate(self.devices):
            with self.writer.at(device, f"{scope}/rank_{rank}"):
                by_rank.append(self._slices.split(message, received[rank], wire))
        for place, part in enumerate(message.slices):
            if part.variable not in self.served:
                self._axis[part.variable] = part.axis
                tensors = [parts[place] for parts in by_rank]
                self._pieces[part.variable].append((part.start, tensors))

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
                indices.append(every_row(self.writer, rows, self.training.index_dtype(gradient)))
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
