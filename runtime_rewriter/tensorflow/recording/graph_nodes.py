"""The graph of a recorded step: partitions, phases, variables and memory of every node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.recordings.graph_file import GraphNode, NodePhase
from runtime_rewriter.tensorflow.recording.partitions import PartitionNode, Partitions, phases
from runtime_rewriter.tensorflow.recording.step_events import NodeEvent, StepEvents


@dataclass(frozen=True)
class TrainedVariables:
    """Where the graph holds its variables.

    - `gradients`: node -> the variable whose gradient it computes, on each replica.
    - `handles`: VarHandleOp -> its variable; a replica's copy has the name of the variable.
    - `forward`: nodes that lead to the loss; empty if they are not known.
    """

    gradients: Mapping[str, str]
    handles: Mapping[str, str]
    forward: frozenset[str] = frozenset()


def rank_devices(partitions: Partitions, trained: TrainedVariables) -> list[str]:
    """The devices in the order of their ranks: those that compute gradients first, then servers."""
    replicas = {node.device for node in partitions.nodes if node.name in trained.gradients}
    devices = dict.fromkeys(node.device for node in partitions.nodes)
    return sorted(devices, key=lambda device: (device not in replicas, _with_numbers(device)))


def _with_numbers(text: str) -> list[tuple[str, int]]:
    """A key that orders task:2 before task:10."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D+)(\d*)", text)]


def graph_nodes(
    partitions: Partitions, trained: TrainedVariables, steps: Sequence[StepEvents]
) -> list[GraphNode]:
    """One node of the recording per node of the partitions, with the memory that it took."""
    ranks = {device: rank for rank, device in enumerate(rank_devices(partitions, trained))}
    gradients = [node.number for node in partitions.nodes if node.name in trained.gradients]
    phase = phases(partitions, gradients, trained.forward)
    reads = _reads(partitions, trained)
    events = _first_events(steps)
    received = _received_bytes(partitions, steps)
    nodes = []
    for node in partitions.nodes:
        output, shared, scratch = _memory(node, partitions, events, received)
        nodes.append(
            GraphNode(
                id=node.number,
                rank=ranks[node.device],
                name=node.name[:400],
                op=node.op[:80],
                phase=NodePhase(phase[node.number]),
                inputs=tuple(node.inputs),
                gradient_of=trained.gradients.get(node.name, ""),
                reads=reads.get(node.number, ""),
                output_bytes=output,
                shared=tuple(shared),
                scratch_bytes=scratch,
            )
        )
    return nodes


def _reads(partitions: Partitions, trained: TrainedVariables) -> dict[int, str]:
    """Node -> the variable that it reads, or passes on as it was read."""
    reads: dict[int, str] = {}
    waiting = [node.number for node in partitions.nodes if node.handle in trained.handles]
    for number in waiting:
        reads[number] = trained.handles[partitions.nodes[number].handle]
    while waiting:
        number = waiting.pop()
        for reader in partitions.consumers.get(number, ()):
            if reader not in reads and partitions.nodes[reader].passes_on:
                reads[reader] = reads[number]
                waiting.append(reader)
    return reads


def _first_events(steps: Sequence[StepEvents]) -> dict[tuple[str, str], NodeEvent]:
    return {
        (device, name): event
        for events in reversed(steps)
        for device, of_device in events.nodes.items()
        for name, event in of_device.items()
    }


def _received_bytes(partitions: Partitions, steps: Sequence[StepEvents]) -> dict[str, int]:
    """Rendezvous key -> bytes, from any step.

    A server may miss a transfer as its log is switched on. What the sender computed then counts.
    """
    sizes = {one.rendezvous: one.size_bytes for events in steps for one in events.received}
    events = _first_events(steps)
    for key, (sender, _) in partitions.crossing.items():
        producers = [partitions.nodes[number] for number in sender.inputs]
        computed = [events.get((sender.device, producer.name)) for producer in producers]
        outputs = [size for event in computed if event is not None for _, size in event.memory]
        sizes.setdefault(key, max(outputs, default=0))
    return sizes


def _memory(
    node: PartitionNode,
    partitions: Partitions,
    events: Mapping[tuple[str, str], NodeEvent],
    received: Mapping[str, int],
) -> tuple[int, list[int], int]:
    """(bytes of new outputs, inputs whose memory the outputs share, scratch bytes)."""
    if node.receives:
        return received.get(node.transfer, 0), [], 0
    event = events.get((node.device, node.name))
    if event is None or node.handle or node.op in ("Const", "VarHandleOp"):
        return 0, [], 0  # variables and constants keep their memory between steps
    inputs = [partitions.nodes[number] for number in node.inputs]
    addresses = {address for address, _ in event.memory}
    shared = []
    known: set[int] = set()
    for one in inputs:
        source = events.get((one.device, one.name))
        same = addresses & {address for address, _ in source.memory} if source else set()
        if same or (one.receives and event.scratch_bytes == 0 and event.memory):
            shared.append(one.number)
            known |= same or addresses
    new = sum({address: size for address, size in event.memory if address not in known}.values())
    return new, shared, max(event.scratch_bytes - new, 0)
