"""Exchanges of one flat tensor per rank, written as nodes.

Each function of `_EXCHANGES` takes the sent tensor of each rank, which are already divided by the
number of ranks, and returns the tensor with their sum for each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A flat tensor of `elements` elements of `dtype` that each rank sends."""

    tensors: tuple[str, ...]
    elements: int
    dtype: tf.DType


@dataclass(frozen=True)
class Carrier:
    """Writes exchanges between `devices`, one per rank, below `scope`."""

    writer: GraphWriter
    devices: tuple[str, ...]
    keys: Keys
    scope: str
    control: tuple[tuple[str, ...], ...]
    """Nodes of each rank after which its collective may start."""

    def exchange(self, sent: Flat, synchronizer: Synchronizer, owner: int | None) -> list[str]:
        """Return the sum at each rank."""
        return _EXCHANGES[synchronizer](self, sent, owner)

    def sum_at(self, sent: Flat, rank: int) -> str:
        """Sum on the device of one rank, to which the others send."""
        with self.writer.at(self.devices[rank], f"{self.scope}/rank_{rank}"):
            return self.writer.add_n(sent.tensors, sent.dtype, "pushed_sum")

    def gathered(self, sent: Flat) -> list[str]:
        """Concatenate the tensors of all ranks, of equal size, at each rank."""
        dtype = tf.half if sent.dtype == tf.bfloat16 else sent.dtype  # gathers know no bfloat16
        group, instance = self.keys.group(self._all), self.keys.instance()
        results = []
        for rank, tensor in enumerate(sent.tensors):
            with self.at(rank):
                if dtype != sent.dtype:
                    tensor = self.writer.bitcast(tensor, sent.dtype, dtype)
                inputs = [tensor, *self._group_inputs(len(self.devices), group, instance)]
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
                results.append(result)
        return results

    def all_reduced(self, sent: Flat, ranks: Sequence[int]) -> list[str]:
        """Sum the tensors of `ranks` (one each, in this order) at each of them."""
        group, instance = self.keys.group(tuple(ranks)), self.keys.instance()
        results = []
        for rank, tensor in zip(ranks, sent.tensors, strict=True):
            with self.at(rank):
                inputs = [tensor, *self._group_inputs(len(ranks), group, instance)]
                result = self.writer.node(
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
                results.append(result)
        return results

    def broadcast(self, tensor: str, elements: int, dtype: tf.DType, root: int) -> list[str]:
        """Copy the root's tensor to each rank."""
        dtype_sent = tf.half if dtype == tf.bfloat16 else dtype  # broadcasts know no bfloat16
        group, instance = self.keys.group(self._all), self.keys.instance()
        results = []
        for rank in self._all:
            with self.at(rank):
                keys = self._group_inputs(len(self.devices), group, instance)
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
                    inputs = [*keys, self.writer.constant([elements], tf.int32, "shape")]
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
                results.append(result)
        return results

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(len(self.devices)))

    def at(self, rank: int) -> AbstractContextManager[None]:
        return self.writer.at(self.devices[rank], f"{self.scope}/rank_{rank}")

    def _group_inputs(self, size: int, group: int, instance: int) -> list[str]:
        constants = {"group_size": size, "group_key": group, "instance_key": instance}
        return [self.writer.constant(v, tf.int32, name) for name, v in constants.items()]


def _all_reduce(carrier: Carrier, sent: Flat, owner: int | None) -> list[str]:
    return carrier.all_reduced(sent, range(len(sent.tensors)))


def _parameter_server(carrier: Carrier, sent: Flat, owner: int | None) -> list[str]:
    """Push to the owner, which sums; each rank pulls the sum."""
    assert owner is not None
    return [carrier.sum_at(sent, owner)] * len(sent.tensors)


def _reduce_broadcast(carrier: Carrier, sent: Flat, owner: int | None) -> list[str]:
    assert owner is not None
    total = carrier.sum_at(sent, owner)
    return carrier.broadcast(total, sent.elements, sent.dtype, owner)


def _reduce_scatter_all_gather(carrier: Carrier, sent: Flat, owner: int | None) -> list[str]:
    """Each rank sums one part, which the others send to it, and all parts are gathered.

    TensorFlow's own reduce-scatter exists for NCCL only. The last parts are padded: a gather needs
    equal sizes.
    """
    ranks, writer = len(sent.tensors), carrier.writer
    part = -(-sent.elements // ranks)
    padding = part * ranks - sent.elements
    pieces = []
    for rank, tensor in enumerate(sent.tensors):
        with carrier.at(rank):
            if padding:
                zeros = writer.constant([0] * padding, sent.dtype, "padding")
                tensor = writer.concat([tensor, zeros], 0, sent.dtype)
            pieces.append(writer.split(tensor, [part] * ranks, 0, sent.dtype))
    summed = [
        carrier.sum_at(Flat(tuple(of[rank] for of in pieces), part, sent.dtype), rank)
        for rank in range(ranks)
    ]
    gathered = carrier.gathered(Flat(tuple(summed), part, sent.dtype))
    results = []
    for rank, tensor in enumerate(gathered):
        with carrier.at(rank):
            results.append(writer.cut(tensor, [0], [sent.elements], sent.dtype))
    return results


_EXCHANGES: dict[Synchronizer, Callable[[Carrier, Flat, int | None], list[str]]] = {
    Synchronizer.ALL_REDUCE: _all_reduce,
    Synchronizer.PARAMETER_SERVER: _parameter_server,
    Synchronizer.REDUCE_BROADCAST: _reduce_broadcast,
    Synchronizer.REDUCE_SCATTER_ALL_GATHER: _reduce_scatter_all_gather,
}
