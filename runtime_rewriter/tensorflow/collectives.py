"""Exchanges of one flat tensor per rank, written as nodes.

Each function of `_EXCHANGES` takes the sent tensor of each member, which are already divided by the
number of ranks, and returns the tensor with their sum for each member.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import tensorflow as tf

from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.tensorflow.node_writing import GraphWriter

RING = "ring"
TIMEOUT_S = 60.0
"""A collective whose peers do not take part within this time fails, instead of a wait for ever."""


@dataclass
class Keys:
    """Hands out collective keys that no other graph on the same servers may use."""

    next_key: int
    groups: dict[tuple[int, ...], int] = field(default_factory=dict)

    def group(self, ranks: tuple[int, ...]) -> int:
        """Return the key of a group of ranks."""
        if ranks not in self.groups:
            self.groups[ranks] = self.instance()
        return self.groups[ranks]

    def instance(self) -> int:
        self.next_key += 1
        return self.next_key - 1


@dataclass(frozen=True)
class Flat:
    """A flat tensor of `elements` elements of `dtype` that each member sends.

    `tensors`: by rank, in the order of the ring.
    """

    tensors: Mapping[int, str]
    elements: int
    dtype: tf.DType

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self.tensors)


Sums = dict[int, str]
"""The sum at each member."""


@dataclass(frozen=True)
class Carrier:
    """Writes exchanges between `devices`, one per rank, below `scope`.

    `own_ring`: reduce in rings of our own, which follow the order of the members. TensorFlow's
    rings follow the ranks.
    """

    writer: GraphWriter
    devices: tuple[str, ...]
    keys: Keys
    scope: str
    control: tuple[tuple[str, ...], ...]
    """Nodes of each rank after which its collective may start."""
    own_ring: bool = False

    def exchange(self, sent: Flat, synchronizer: Synchronizer, owner: int | None) -> Sums:
        """Return the sum at each member."""
        return _EXCHANGES[synchronizer](self, sent, owner)

    def sum_at(self, sent: Flat, rank: int) -> str:
        """Sum on the device of one rank, to which the others send."""
        with self.at(rank):
            return self.writer.add_n(tuple(sent.tensors.values()), sent.dtype, "pushed_sum")

    def begun(self, sent: Flat) -> Flat:
        """Let the tensors wait as a collective would, for exchanges that are none."""
        started = {}
        for rank, tensor in sent.tensors.items():
            with self.at(rank):
                started[rank] = self.writer.identity(
                    tensor, sent.dtype, "begun", self.control[rank]
                )
        return Flat(started, sent.elements, sent.dtype)

    def gathered(self, sent: Flat) -> Sums:
        """Concatenate the tensors of all members, of equal size, at each of them."""
        dtype = tf.half if sent.dtype == tf.bfloat16 else sent.dtype  # gathers know no bfloat16
        group, instance = self.keys.group(sent.members), self.keys.instance()
        results = {}
        for rank, tensor in sent.tensors.items():
            with self.at(rank):
                if dtype != sent.dtype:
                    tensor = self.writer.bitcast(tensor, sent.dtype, dtype)
                inputs = [tensor, *self._group_inputs(len(sent.members), group, instance)]
                result = self.writer.node(
                    "CollectiveGatherV2",
                    "all_gather",
                    inputs,
                    self.control[rank],
                    T=dtype,
                    Nordering_token=0,
                    communication_hint=RING,
                    timeout_seconds=TIMEOUT_S,
                )
                if dtype != sent.dtype:
                    result = self.writer.bitcast(result, dtype, sent.dtype)
                results[rank] = result
        return results

    def all_reduced(self, sent: Flat) -> Sums:
        """Sum the tensors of all members at each of them."""
        group, instance = self.keys.group(sent.members), self.keys.instance()
        results = {}
        for rank, tensor in sent.tensors.items():
            with self.at(rank):
                inputs = [tensor, *self._group_inputs(len(sent.members), group, instance)]
                results[rank] = self.writer.node(
                    "CollectiveReduceV2",
                    "all_reduce",
                    inputs,
                    self.control[rank],
                    T=sent.dtype,
                    Nordering_token=0,
                    merge_op="Add",
                    final_op="Id",
                    communication_hint=RING,
                    timeout_seconds=TIMEOUT_S,
                    max_subdivs_per_device=-1,
                )
        return results

    def broadcast(self, tensor: str, sent: Flat, root: int) -> Sums:
        """Copy the root's tensor, of the size of those that were sent, to each member."""
        dtype = sent.dtype
        dtype_sent = tf.half if dtype == tf.bfloat16 else dtype  # broadcasts know no bfloat16
        group, instance = self.keys.group(sent.members), self.keys.instance()
        results = {}
        for rank in sent.members:
            with self.at(rank):
                keys = self._group_inputs(len(sent.members), group, instance)
                kinds = {"communication_hint": "auto", "timeout_seconds": TIMEOUT_S}
                if rank == root:
                    if dtype_sent != dtype:
                        tensor = self.writer.bitcast(tensor, dtype, dtype_sent)
                    inputs = [tensor, *keys]
                    result = self.writer.node(
                        "CollectiveBcastSendV2",
                        "broadcast",
                        inputs,
                        self.control[rank],
                        T=dtype_sent,
                        **kinds,
                    )
                else:
                    inputs = [*keys, self.writer.constant([sent.elements], tf.int32, "shape")]
                    result = self.writer.node(
                        "CollectiveBcastRecvV2",
                        "broadcast",
                        inputs,
                        self.control[rank],
                        T=dtype_sent,
                        Tshape=tf.int32,
                        **kinds,
                    )
                if dtype_sent != dtype:
                    result = self.writer.bitcast(result, dtype_sent, dtype)
                results[rank] = result
        return results

    def at(self, rank: int) -> AbstractContextManager[None]:
        return self.writer.at(self.devices[rank], f"{self.scope}/rank_{rank}")

    def _group_inputs(self, size: int, group: int, instance: int) -> list[str]:
        constants = {"group_size": size, "group_key": group, "instance_key": instance}
        return [self.writer.constant(v, tf.int32, name) for name, v in constants.items()]


def _all_reduce(carrier: Carrier, sent: Flat, owner: int | None) -> Sums:
    return _ring(carrier, sent) if carrier.own_ring else carrier.all_reduced(sent)


def _parameter_server(carrier: Carrier, sent: Flat, owner: int | None) -> Sums:
    """Push to the owner, which sums; each rank pulls the sum."""
    assert owner is not None
    return dict.fromkeys(sent.members, carrier.sum_at(sent, owner))


def _reduce_broadcast(carrier: Carrier, sent: Flat, owner: int | None) -> Sums:
    assert owner is not None
    return carrier.broadcast(carrier.sum_at(sent, owner), sent, owner)


def _parts(carrier: Carrier, sent: Flat) -> tuple[int, dict[int, list[str]]]:
    """Cut each tensor into one part per member, of equal sizes; the last ones are padded."""
    members, writer = sent.members, carrier.writer
    part = -(-sent.elements // len(members))
    pieces = {}
    for rank, tensor in sent.tensors.items():
        with carrier.at(rank):
            padded = writer.padded(tensor, part * len(members) - sent.elements, sent.dtype)
            pieces[rank] = writer.split(padded, [part] * len(members), 0, sent.dtype)
    return part, pieces


def _without_padding(carrier: Carrier, sent: Flat, gathered: Sums) -> Sums:
    results = {}
    for rank, tensor in gathered.items():
        with carrier.at(rank):
            results[rank] = carrier.writer.cut(tensor, [0], [sent.elements], sent.dtype)
    return results


def _reduce_scatter_all_gather(carrier: Carrier, sent: Flat, owner: int | None) -> Sums:
    """Each rank sums one part, which the others send to it, and all parts are gathered.

    TensorFlow's own reduce-scatter exists for NCCL only, and a gather needs equal sizes.
    """
    if carrier.own_ring:
        return _ring(carrier, sent)
    part, pieces = _parts(carrier, sent)
    summed = {}
    for place, rank in enumerate(sent.members):
        to_sum = {of: parts[place] for of, parts in pieces.items()}
        summed[rank] = carrier.sum_at(Flat(to_sum, part, sent.dtype), rank)
    gathered = carrier.gathered(Flat(summed, part, sent.dtype))
    return _without_padding(carrier, sent, gathered)


def _ring(carrier: Carrier, sent: Flat) -> Sums:
    """Reduce-scatter and all-gather in a ring that follows the order of the members.

    In each round every member sends one part to the next one. Part p starts at place p, is whole at
    place p - 1 after w - 1 sends, and goes on to all others by w - 1 more.
    """
    members, writer = sent.members, carrier.writer
    count = len(members)
    _, pieces = _parts(carrier, carrier.begun(sent))
    held = {rank: list(parts) for rank, parts in pieces.items()}
    for sends in range(1, count):
        for part in range(count):
            before, rank = (members[(part + sends + back) % count] for back in (-1, 0))
            with carrier.at(rank):
                held[rank][part] = writer.node(
                    "AddV2", "ring_sum", [held[before][part], held[rank][part]], T=sent.dtype
                )
    for sends in range(count, 2 * count - 1):
        for part in range(count):
            before, rank = (members[(part + sends + back) % count] for back in (-1, 0))
            with carrier.at(rank):
                # a node of its own, so that the next member gets the part from here
                held[rank][part] = writer.identity(held[before][part], sent.dtype, "ring_part")
    gathered = {}
    for rank in members:
        with carrier.at(rank):
            gathered[rank] = writer.concat(held[rank], 0, sent.dtype)
    return _without_padding(carrier, sent, gathered)


_EXCHANGES: dict[Synchronizer, Callable[[Carrier, Flat, int | None], Sums]] = {
    Synchronizer.ALL_REDUCE: _all_reduce,
    Synchronizer.PARAMETER_SERVER: _parameter_server,
    Synchronizer.REDUCE_BROADCAST: _reduce_broadcast,
    Synchronizer.REDUCE_SCATTER_ALL_GATHER: _reduce_scatter_all_gather,
}
