"""Graphs that time one exchange between TensorFlow's servers, written by the plans' own writer.

All members of all groups meet, pause, note the time, exchange, and note the time again. A size is
the argument of `CollectiveFit.seconds`, as in `probe.operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.core.framework.graph_pb2 import GraphDef

from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.tensorflow.collectives import Carrier, Flat, Keys
from runtime_rewriter.tensorflow.node_writing import GraphWriter

ROOT = 0
"""The member of a group that sums or sends."""
PAUSE_S = 0.01
"""From the signal to start until members do: no signal then waits behind what its sender sends."""
_PULLS = 2
"""A dataset of one element is asked for it and for its end, and waits each time."""
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class TimedExchange:
    """`spans`: for each member that receives something, the tensors (start, end), in s, float64.

    Each pair is of one server's clock. Further graphs on these servers take keys from `next_key`.
    """

    graph_def: GraphDef
    spans: tuple[tuple[str, str], ...]
    next_key: int


Received = dict[int, list[str]]
"""The tensors that each member has to have in the end."""
_Writer = Callable[[Carrier, Flat], Received]


def timed_exchange(
    scope: str,
    primitive: str | None,
    groups: Sequence[Sequence[str]],
    size_bytes: int,
    first_key: int,
) -> TimedExchange:
    """Return the graph of an exchange by all `groups` at once, given as the devices of members.

    Nodes are named below `scope`. `primitive` None: the members only meet.
    """
    writer = GraphWriter(GraphDef())
    elements = _elements(primitive, size_bytes, len(groups[0]))
    starts = _start_together(writer, scope, groups, elements)
    spans: list[tuple[str, str]] = []
    for number, devices in enumerate(groups):
        keys = Keys(first_key)  # the same numbers of members mean other devices in another group
        within = f"{scope}/group_{number}"
        sent = []
        for rank, device in enumerate(devices):
            with writer.at(device, f"{within}/rank_{rank}"):
                filled = f"{within}/rank_{rank}/filled"
                sent.append(writer.identity(filled, tf.float32, "sent", [starts[number][rank]]))
        carrier = Carrier(writer, tuple(devices), keys, within, ((),) * len(devices))
        received: Received = {rank: [tensor] for rank, tensor in enumerate(sent)}
        if primitive is not None:
            flat = Flat(dict(enumerate(sent)), elements, tf.float32)
            received = TENSORFLOW_OPERATIONS[primitive](carrier, flat)
        for rank, tensors in received.items():
            with carrier.at(rank):
                here = [writer.identity(one, tf.float32, "received") for one in tensors]
                end = writer.node("Timestamp", "end", (), here)
            spans.append((f"{starts[number][rank]}:0", f"{end}:0"))
        first_key = keys.next_key
    return TimedExchange(writer.graph_def, tuple(spans), first_key)


def _elements(primitive: str | None, size_bytes: int, members: int) -> int:
    """Elements that each member sends."""
    elements = max(size_bytes // ELEMENT_BYTES // members, 1)
    return elements if primitive == "all_gather" else elements * members


def _start_together(
    writer: GraphWriter, scope: str, groups: Sequence[Sequence[str]], elements: int
) -> list[list[str]]:
    """Fill what each member sends, and return the nodes that note the time when all have."""
    ready = []
    for number, devices in enumerate(groups):
        for rank, device in enumerate(devices):
            with writer.at(device, f"{scope}/group_{number}/rank_{rank}"):
                shape = writer.constant([elements], tf.int32, "shape")
                value = writer.constant(0.0, tf.float32, "zero")
                filled = writer.node(
                    "Fill", "filled", [shape, value], T=tf.float32, index_type=tf.int32
                )
                ready.append(writer.identity(value, tf.float32, "ready", [filled]))
    with writer.at(groups[0][ROOT], scope):
        all_ready = writer.add_n(ready, tf.float32, "all_ready")
    starts: list[list[str]] = []
    for number, devices in enumerate(groups):
        starts.append([])
        for rank, device in enumerate(devices):
            with writer.at(device, f"{scope}/group_{number}/rank_{rank}"):
                go = writer.identity(all_ready, tf.float32, "go")
                starts[-1].append(writer.node("Timestamp", "start", (), [_later(writer, go)]))
    return starts


def _later(writer: GraphWriter, signal: str) -> str:
    """A node that ends `PAUSE_S` after `signal` is there."""
    types = AttrValue(list=AttrValue.ListValue(type=[tf.float32.as_datatype_enum]))
    shapes = AttrValue(list=AttrValue.ListValue(shape=[tf.TensorShape([]).as_proto()]))
    element = writer.node(
        "TensorDataset", "signal", [signal], Toutput_types=types, output_shapes=shapes
    )
    pause_us = writer.constant(round(PAUSE_S * 1e6 / _PULLS), tf.int64, "pause")
    kinds = {"output_types": types, "output_shapes": shapes}
    waiting = writer.node("SleepDataset", "waiting", [element, pause_us], **kinds)
    return writer.node("DatasetToSingleElement", "later", [waiting], **kinds)


def _exchange(synchronizer: Synchronizer) -> _Writer:
    """A plan's message between all members."""

    def write(carrier: Carrier, sent: Flat) -> Received:
        results = carrier.exchange(sent, synchronizer, ROOT)
        return {rank: [tensor] for rank, tensor in results.items()}

    return write


def _reduce(carrier: Carrier, sent: Flat) -> Received:
    return {ROOT: [carrier.sum_at(sent, ROOT)]}


def _broadcast(carrier: Carrier, sent: Flat) -> Received:
    results = carrier.broadcast(sent.tensors[ROOT], sent, ROOT)
    return {rank: [tensor] for rank, tensor in results.items()}


def _all_gather(carrier: Carrier, sent: Flat) -> Received:
    """As rows of sparse gradients are sent: each member reads the tensor of every other one."""
    return {rank: list(sent.tensors.values()) for rank in sent.members}


TENSORFLOW_OPERATIONS: dict[str, _Writer] = {
    "all_reduce": _exchange(Synchronizer.ALL_REDUCE),
    "push_pull": _exchange(Synchronizer.PARAMETER_SERVER),
    "reduce_scatter_all_gather": _exchange(Synchronizer.REDUCE_SCATTER_ALL_GATHER),
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
}
"""In order of importance: a probe that runs out of time lacks the last ones."""
ON_OTHER_GROUPS = ("all_reduce", "reduce", "broadcast")


def mean_by_root(primitive: str, members: int) -> float:
    """The mean work of a member by that of the first one, by the tensors that each sends and takes.

    In a star the root takes part in each of the `members` - 1 transfers, of which every other
    member has one. A broadcast is a tree of two branches.
    """
    ends = 2 * (members - 1) / members
    if primitive in ("push_pull", "reduce"):
        return ends / (members - 1)
    return ends / min(2, members - 1) if primitive == "broadcast" else 1.0
