"""What `job.json` states of recorded TensorFlow steps: each device's parts, and what was sent."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray
from autotune.recordings.graph_file import GraphNode, NodePhase, StepGraph
from autotune.recordings.job_file import RankRecord, trace_name
from autotune.recordings.recorded_steps import (
    TOP_OPS,
    OpTime,
    SeenCollective,
    StepBreakdown,
    breakdown,
    union,
)
from runtime_rewriter.tensorflow.recording.partitions import PartitionNode, Partitions
from runtime_rewriter.tensorflow.recording.step_events import StepEvents

_SHOWN_CHARACTERS = 60
_EDGE = re.compile(r"^edge_\d+_(_recv_)?")
_NO_WORK = ("_Send", "_Recv", "_HostSend", "_HostRecv", "NoOp", "Const", "VarHandleOp")


@dataclass(frozen=True)
class DeviceSummary:
    """One device. `seen`: its collectives, and the transfers that it received."""

    record: RankRecord
    seen: tuple[SeenCollective, ...]


def device_summaries(
    partitions: Partitions, graph: StepGraph, steps: Sequence[StepEvents]
) -> list[DeviceSummary]:
    """The devices of a recording in the order of their ranks."""
    updates = any(node.phase is NodePhase.UPDATE for node in graph.nodes)
    summaries = []
    for device in graph.devices:
        nodes = [partitions.nodes[node.id] for node in graph.nodes if node.rank == device.rank]
        phases = {node.id: node.phase for node in graph.nodes if node.rank == device.rank}
        seen = tuple(_seen(nodes, partitions, graph, steps))
        times = _times(nodes, phases, seen, steps, graph.steps.recorded_s, updates)
        record = RankRecord(
            rank=device.rank,
            host=device.host or socket.gethostname(),
            device=device.device,
            device_name="",
            process_id=os.getpid() if device.rank == 0 else 0,
            trace=trace_name(device.rank),
            clocks=(),
            step_s=graph.steps.recorded_s,
            collectives=len(seen),
            untimed=sum(one.start_s is None for one in seen),
            times=times,
        )
        summaries.append(DeviceSummary(record, seen))
    return summaries


def _times(
    nodes: Sequence[PartitionNode],
    phases: dict[int, NodePhase],
    seen: Sequence[SeenCollective],
    steps: Sequence[StepEvents],
    step_s: Sequence[float],
    updates: bool,
) -> StepBreakdown:
    """The client's call is the step. It ends with results, whose time counts after the nodes."""
    work: list[tuple[float, float]] = []
    backward: list[tuple[float, float]] = []
    steps_us: list[tuple[float, float]] = []
    lengths_us: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    device = nodes[0].device
    for events, length_s in zip(steps, step_s, strict=True):
        of_device = events.nodes.get(device, {})
        begin_us = min((event.start_ns / 1e3 for event in of_device.values()), default=0.0)
        steps_us.append((begin_us, begin_us + length_s * 1e6))
        ends_us = {NodePhase.FORWARD: begin_us, NodePhase.BACKWARD: 0.0}
        for node in nodes:
            event = of_device.get(node.name)
            if event is None or node.op in _NO_WORK or node.collective is not None:
                continue
            span = (event.start_ns / 1e3, event.end_ns / 1e3)
            work.append(span)
            lengths_us[node.op] += span[1] - span[0]
            calls[node.op] += 1
            if (phase := phases[node.number]) in ends_us:
                ends_us[phase] = max(ends_us[phase], span[1])
        if ends_us[NodePhase.BACKWARD] > ends_us[NodePhase.FORWARD]:
            backward.append((ends_us[NodePhase.FORWARD], ends_us[NodePhase.BACKWARD]))
    sent = [
        (one.start_s * 1e6, one.end_s * 1e6)
        for one in seen
        if one.start_s is not None and one.end_s is not None
    ]
    count = len(steps)
    top_ops = tuple(
        OpTime(op[:200], lengths_us[op] / 1e6 / count, calls[op] / count)
        for op in sorted(lengths_us, key=lambda op: -lengths_us[op])[:TOP_OPS]
    )
    return breakdown(
        _intervals(steps_us),
        union(_intervals(work)),
        union(_intervals(sent)),
        _intervals(backward),
        top_ops,
        count if updates else 0,
    )


def _intervals(spans: Sequence[tuple[float, float]]) -> FloatArray:
    return np.array(spans, dtype=np.float64).reshape(-1, 2)


def _seen(
    nodes: Sequence[PartitionNode],
    partitions: Partitions,
    graph: StepGraph,
    steps: Sequence[StepEvents],
) -> Iterator[SeenCollective]:
    for number, events in enumerate(steps):
        received = {one.rendezvous: one for one in events.received}
        of_device = events.nodes.get(nodes[0].device, {})
        for node in nodes:
            if node.collective is not None and node.name in of_device:
                kind, group, instance = node.collective
                event = of_device[node.name]
                yield SeenCollective(
                    transaction=f"{number}:{group}:{instance}",
                    label=f"group {group}",
                    op=kind,
                    size_bytes=sum(size for _, size in event.memory),
                    ranks=len(partitions.members(kind, group)),
                    start_s=event.start_ns / 1e9,
                    end_s=event.end_ns / 1e9,
                    queue_s=None,
                )
            elif node.receives and node.transfer in partitions.crossing:
                transfer = received.get(node.transfer)
                yield SeenCollective(
                    transaction=f"{number}:{node.transfer}",
                    label=_label(graph.by_id[node.number], node.transfer),
                    op="transfer",
                    size_bytes=graph.by_id[node.number].output_bytes,
                    ranks=2,
                    start_s=None if transfer is None else transfer.start_ns / 1e9,
                    end_s=None if transfer is None else transfer.end_ns / 1e9,
                    queue_s=None,
                )


def _label(node: GraphNode, transfer: str) -> str:
    """The variable that is pulled, or the tensor without the number of its edge."""
    tensor = _EDGE.sub("", transfer.partition(";")[0])
    return (node.reads or tensor)[-_SHOWN_CHARACTERS:]
