"""Writes the messages of a plan: local gradients in, averaged gradients out.

A message's gradients are packed by concatenation on each rank, because Grappler, which would merge
collectives, is disabled. Control edges start the messages of a rank in the plan's order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import tensorflow as tf

from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import MOST_IN_FLIGHT, SparseHandling, Synchronizer
from runtime_rewriter.tensorflow.collectives import Carrier, Flat, Keys, Sums
from runtime_rewriter.tensorflow.compressed import Start, compressed_sum
from runtime_rewriter.tensorflow.kept_state import KeptTensor
from runtime_rewriter.tensorflow.kept_writing import KeptWriter
from runtime_rewriter.tensorflow.node_writing import GraphWriter
from runtime_rewriter.tensorflow.rows import (
    add_rows,
    every_row,
    merge_rows,
    rows_with_values,
    select_rows,
)
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


@dataclass
class Fed:
    """The residuals of a message, flat, before and after it, of the ranks that have them.

    None: zeros.
    """

    before: dict[int, str] = field(default_factory=dict)
    after: dict[int, str] = field(default_factory=dict)


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
        self.plan, self.kept = plan, kept
        self.hosts, self.waiting = circumstances.hosts, circumstances.waiting
        self.fed: dict[int, Fed] = {}
        """By the number of the message."""
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

    @property
    def variables_in_rows(self) -> tuple[str, ...]:
        """The variables whose gradients travel as rows."""
        return tuple(self._rows)

    def residual_of(self, variable: str, rank: int, after: bool) -> str | None:
        """A rank's residual of a whole variable before or after the step; None if it has none."""
        dtype = tf.as_dtype(self.training.by_name[variable].dtype)
        pieces: list[tuple[int, str]] = []
        axis, found = None, False
        for number, message in enumerate(self.plan.messages):
            parts = [part for part in message.slices if part.variable == variable]
            if not parts:
                continue
            fed = self.fed.get(number, Fed())
            whole = (fed.after if after else fed.before).get(rank)
            found |= whole is not None
            tensors = self._split(message, whole, dtype) if whole is not None else None
            for place, part in enumerate(message.slices):
                if part.variable == variable:
                    axis = part.axis
                    shape = self._shape(part)
                    value = tensors[place] if tensors else self.writer.zeros(shape, dtype)
                    pieces.append((part.start, value))
        if not found:
            return None
        return self.writer.concat([one for _, one in sorted(pieces)], axis or 0, dtype)

    def _write(self, number: int, message: Message) -> None:
        scope = f"{SCOPE}/message_{number}"
        dtype = tf.as_dtype(message.dtype)
        wire = tf.as_dtype(message.compressor.description.wire_dtype or message.dtype)
        sent: dict[int, str] = {}
        residuals = self._residuals(number, message, dtype)
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
        self._keep(number, message, residuals, unsent)
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
            shapes = [self._shape(part) for part in message.slices]
            result = compressed_sum(carrier, message, among, shapes, self._start_of)
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

    def _start_of(self, rank: int, part: TensorSlice) -> Start:
        device, k = self.devices[rank], self._rank_of[part]
        dtype = tf.as_dtype(self.training.by_name[part.variable].dtype)
        kept = self.kept.start(rank, device, part, self._shape(part), k, dtype)
        return Start(kept.value, lambda tensor: self.kept.replace(kept, device, tensor))

    @cached_property
    def _rank_of(self) -> dict[TensorSlice, int]:
        """PowerSGD's rank of each slice."""
        return {
            part: message.rank
            for message in self.plan.messages
            for part in message.slices
            if message.rank is not None
        }

    def _residuals(self, number: int, message: Message, dtype: tf.DType) -> dict[int, KeptTensor]:
        """The residual of each rank that may have one before or after this message."""
        ranks: set[int] = set()
        if any(part.variable in self.waiting for part in message.slices):
            ranks = set(range(len(self.devices)))
        elif message.compressor.error_feedback:
            two_levels = self._two_levels(message)
            members = self._leaders(message) if two_levels else range(len(self.devices))
            ranks = set(members) if len(members) > 1 else set()
        return {
            rank: self.kept.residual(rank, self.devices[rank], number, message.slices, dtype)
            for rank in sorted(ranks)
        }

    def _keep(
        self,
        number: int,
        message: Message,
        residuals: Mapping[int, KeptTensor],
        unsent: Mapping[int, str],
    ) -> None:
        """Replace the residuals of a message by what it has not sent, which is nothing else."""
        assert unsent.keys() <= residuals.keys()
        if not residuals:
            return
        self.fed[number] = Fed({rank: kept.value for rank, kept in residuals.items()}, dict(unsent))
        for rank, kept in residuals.items():
            device = self.devices[rank]
            if rank in unsent:
                self.kept.replace(kept, device, unsent[rank])
                continue
            with self.writer.at(device, f"{SCOPE}/message_{number}/rank_{rank}"):
                zeros = self.writer.zeros([message.elements], tf.as_dtype(kept.dtype))
            self.kept.replace(kept, device, zeros)

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
            extent = self._shape(part)
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
        return add_rows(self.writer, values, indices, rows, dtype, self.index_dtype(gradient))

    def index_dtype(self, gradient: Gradient) -> tf.DType:
        assert gradient.indices is not None
        return tf.as_dtype(self.training.view.nodes[gradient.indices.node].attr["T"].type)

    def _write_rows(self, number: int, message: Message) -> None:
        """Send rows as values and indices: to every rank, or by way of the owner.

        Ranks may send different numbers of rows, so a rank reads those of the others one by one.
        """
        (part,) = message.slices
        gradient = self.training.gradient_of[part.variable]
        dtype, index_dtype = tf.as_dtype(message.dtype), self.index_dtype(gradient)
        wire = tf.as_dtype(message.compressor.description.wire_dtype or message.dtype)
        scope = f"{SCOPE}/message_{number}"
        values, indices = [], []
        residuals = self._residuals(number, message, dtype)
        self._keep(number, message, residuals, {})
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
                if rank in residuals:
                    residual = self.writer.reshape(residuals[rank].value, self._shape(part), dtype)
                    unsent, unsent_places = rows_with_values(
                        self.writer, residual, part.start, self._shape(part), dtype, index_dtype
                    )
                    scaled = self.writer.concat([scaled, unsent], 0, dtype)
                    places = self.writer.concat([places, unsent_places], 0, index_dtype)
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
        index_dtype = self.index_dtype(gradient)
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
        self, message: Message, scope: str, received: Sums, wire: tf.DType
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

    def _unpack(self, message: Message, scope: str, received: Sums, wire: tf.DType) -> None:
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
                indices.append(every_row(self.writer, rows, self.index_dtype(gradient)))
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
