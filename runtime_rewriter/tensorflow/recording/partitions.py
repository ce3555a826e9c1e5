"""The nodes of `RunMetadata.partition_graphs`: what each reads, and which transfer it belongs to.

A partition is the part of the graph on one device, after the server's own rewriting. Where an edge
crosses devices, the sender has a `_Send` and the receiver a `_Recv` with one rendezvous key.
Collectives of several devices carry a group key and an instance key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from runtime_rewriter.tensorflow.recording.step_events import device_name

SOURCE = "_SOURCE"
_SENDS, _RECEIVES = ("_Send", "_HostSend"), ("_Recv", "_HostRecv")
COLLECTIVES = {
    "CollectiveReduce": "all_reduce",
    "CollectiveReduceV2": "all_reduce",
    "CollectiveReduceV3": "all_reduce",
    "CollectiveGather": "all_gather",
    "CollectiveGatherV2": "all_gather",
    "CollectiveReduceScatterV2": "reduce_scatter",
    "CollectiveAllToAllV2": "all_to_all",
    "CollectiveAllToAllV3": "all_to_all",
    "CollectiveBcastSend": "broadcast",
    "CollectiveBcastSendV2": "broadcast",
    "CollectiveBcastRecv": "broadcast",
    "CollectiveBcastRecvV2": "broadcast",
}
"""Op -> the collective, by the names that traces of PyTorch have."""
HOROVOD = "horovod"
"""Group of the collectives of Horovod's global process set."""
HOROVOD_COLLECTIVES = {
    "HorovodAllreduce": "all_reduce",
    "HorovodGroupedAllreduce": "all_reduce",
    "HorovodAllgather": "all_gather",
    "HorovodGroupedAllgather": "all_gather",
    "HorovodBroadcast": "broadcast",
    "HorovodAlltoall": "all_to_all",
    "HorovodReducescatter": "reduce_scatter",
    "HorovodGroupedReducescatter": "reduce_scatter",
}
"""The same for ops of Horovod, which all ranks call by the name of the node."""
_GROUP_INPUT, _INSTANCE_INPUT = 2, 3
"""Inputs of the ops V2 that hold the keys; older ops hold them as attributes."""
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "Gather", "GatherV2")
_GRADIENT_SCOPES = ("gradients", "gradient_tape")
"""Scopes in which `tf.gradients` and `tf.GradientTape` place the nodes that they add."""


@dataclass
class PartitionNode:
    """One node.

    - `inputs`: numbers of nodes of the same device. `transfer`: the rendezvous key of a `_Send` or
      `_Recv`, `peer` the device at its other end. `collective`: (kind, group, instance).
    - `handle`: the VarHandleOp of the variable that it reads.
    """

    number: int
    device: str
    name: str
    op: str
    inputs: list[int] = field(default_factory=list)
    transfer: str = ""
    peer: str = ""
    collective: tuple[str, str, str] | None = None
    handle: str = ""

    @property
    def sends(self) -> bool:
        return self.op in _SENDS

    @property
    def receives(self) -> bool:
        return self.op in _RECEIVES

    @property
    def passes_on(self) -> bool:
        """Whether its output is its only input, perhaps on another device."""
        return self.sends or self.receives or self.op == "Identity"


@dataclass(frozen=True)
class Partitions:
    """All nodes by number, and by device and name."""

    nodes: Sequence[PartitionNode]
    by_name: Mapping[tuple[str, str], PartitionNode]

    @cached_property
    def crossing(self) -> dict[str, tuple[PartitionNode, PartitionNode]]:
        """Rendezvous key -> its sender and its receiver."""
        sends = {node.transfer: node for node in self.nodes if node.sends}
        receives = [node for node in self.nodes if node.receives and node.transfer in sends]
        return {node.transfer: (sends[node.transfer], node) for node in receives}

    def members(self, kind: str, group: str) -> list[str]:
        """The devices that take part in collectives of a group."""
        return sorted(
            {
                node.device
                for node in self.nodes
                if node.collective is not None and node.collective[:2] == (kind, group)
            }
        )

    @cached_property
    def consumers(self) -> dict[int, list[int]]:
        """Node -> its readers, over edges between devices too."""
        readers: dict[int, list[int]] = defaultdict(list)
        for node in self.nodes:
            for source in node.inputs:
                readers[source].append(node.number)
        for sender, receiver in self.crossing.values():
            readers[sender.number].append(receiver.number)
        return readers

    @cached_property
    def sources(self) -> dict[int, list[int]]:
        """Node -> what it reads, over edges between devices too."""
        read = {node.number: list(node.inputs) for node in self.nodes}
        for sender, receiver in self.crossing.values():
            read[receiver.number].append(sender.number)
        return read


def read_partitions(graphs: Iterable[Any]) -> Partitions:
    """The nodes of the partition graphs of one step, behind a source node of each device."""
    nodes: list[PartitionNode] = []
    by_name: dict[tuple[str, str], PartitionNode] = {}
    definitions: list[tuple[PartitionNode, Any]] = []
    sources: dict[str, PartitionNode] = {}

    def add(device: str, name: str, op: str) -> PartitionNode:
        node = PartitionNode(len(nodes), device, name, op)
        nodes.append(node)
        return by_name.setdefault((device, name), node)

    for graph in graphs:
        for definition in graph.node:
            device = device_name(definition.device)
            if device not in sources:
                sources[device] = add(device, SOURCE, "NoOp")
            node = add(device, definition.name, definition.op)
            definitions.append((node, definition))
    constants = {
        (node.device, node.name): definition.attr["value"].tensor
        for node, definition in definitions
        if definition.op == "Const"
    }
    for node, definition in definitions:
        names = [text.removeprefix("^").partition(":")[0] for text in definition.input]
        known = [by_name[node.device, name] for name in names if (node.device, name) in by_name]
        node.inputs = sorted({one.number for one in known} or {sources[node.device].number})
        _set_transfer(node, definition)
        _set_collective(node, definition, names, constants)
        if node.op in _READS and known and known[0].op == "VarHandleOp":
            node.handle = known[0].name
    called = (node for node in nodes if node.op in HOROVOD_COLLECTIVES)
    for number, node in enumerate(sorted(called, key=lambda node: node.name)):
        node.collective = (HOROVOD_COLLECTIVES[node.op], HOROVOD, str(number))
    return Partitions(nodes, by_name)


def _set_transfer(node: PartitionNode, definition: Any) -> None:
    if not (node.sends or node.receives):
        return
    ends = [device_name(definition.attr[key].s.decode()) for key in ("send_device", "recv_device")]
    tensor = definition.attr["tensor_name"].s.decode()
    node.transfer = ";".join((tensor, *ends))
    node.peer = ends[1] if node.sends else ends[0]


def _set_collective(
    node: PartitionNode,
    definition: Any,
    names: Sequence[str],
    constants: Mapping[tuple[str, str], Any],
) -> None:
    kind = COLLECTIVES.get(node.op)
    if kind is None:
        return
    keys = []
    for attribute, place in (("group_key", _GROUP_INPUT), ("instance_key", _INSTANCE_INPUT)):
        if attribute in definition.attr:
            keys.append(str(definition.attr[attribute].i))
            continue
        place -= node.op.startswith("CollectiveBcastRecv")  # it has no input tensor
        tensor = constants.get((node.device, names[place])) if place < len(names) else None
        values = [] if tensor is None else list(tensor.int_val)
        keys.append(str(values[0]) if values else f"of {node.name}")
    node.collective = (kind, keys[0], keys[1])


def phases(partitions: Partitions, gradients: Iterable[int], forward: Collection[str]) -> list[str]:
    """(N,) the pass of each node: "forward", "backward", "update" or "other".

    What leads to a gradient is forward if `forward` names it, else backward. Without names, it is
    backward in TensorFlow's own scopes of gradients. What depends on a gradient is the update.
    """
    marked = set(gradients)
    behind = _reached(marked, partitions.consumers) - marked
    before = _reached(marked, partitions.sources)
    phases = []
    for node in partitions.nodes:
        if node.number in behind:
            phases.append("update")
        elif node.number not in before:
            phases.append("other")
        elif is_forward(node.name, forward):
            phases.append("forward")
        else:
            phases.append("backward")
    return phases


def is_forward(node: str, forward: Collection[str]) -> bool:
    """Whether a node that leads to a gradient belongs to the forward pass, as in `phases`."""
    if forward:
        return node in forward
    return not any(scope in _GRADIENT_SCOPES for scope in node.split("/"))


def _reached(first: Iterable[int], edges: Mapping[int, Sequence[int]]) -> set[int]:
    reached: set[int] = set()
    waiting = list(first)
    while waiting:
        number = waiting.pop()
        if number not in reached:
            reached.add(number)
            waiting.extend(edges.get(number, ()))
    return reached
