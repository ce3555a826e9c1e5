"""Joins what processes recorded, each of its own graph, into the records of one job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime_rewriter.tensorflow.recording.partitions import PartitionNode, Partitions
from runtime_rewriter.tensorflow.recording.recorder import StepRecords
from runtime_rewriter.tensorflow.recording.step_events import StepEvents

_LOCAL = "/job:localhost/replica:0/task:0"
"""Task of a session without servers."""


def of_task(records: StepRecords, task: str) -> StepRecords:
    """The records of a session without servers, with `task` in the names of its devices."""
    assert records.partitions is not None
    nodes = [
        replace(
            node,
            device=node.device.replace(_LOCAL, task),
            peer=node.peer.replace(_LOCAL, task),
            transfer=node.transfer.replace(_LOCAL, task),
        )
        for node in records.partitions.nodes
    ]
    steps = [
        replace(step, nodes={device.replace(_LOCAL, task): of for device, of in step.nodes.items()})
        for step in records.steps
    ]
    return replace(records, partitions=_partitions(nodes), steps=steps)


def joined(ranks: Sequence[StepRecords]) -> StepRecords:
    """The records of all ranks, as of one client. A step lasts as long as on the slowest rank."""
    nodes: list[PartitionNode] = []
    for records in ranks:
        assert records.partitions is not None
        first = len(nodes)
        nodes += [
            replace(
                node, number=first + node.number, inputs=[first + source for source in node.inputs]
            )
            for node in records.partitions.nodes
        ]
    return StepRecords(
        _partitions(nodes),
        [
            StepEvents({name: of for one in step for name, of in one.nodes.items()}, (), ())
            for step in zip(*(records.steps for records in ranks), strict=False)
        ],
        _slowest([records.recorded_s for records in ranks]),
        _slowest([records.plain_s for records in ranks]),
    )


def _partitions(nodes: Sequence[PartitionNode]) -> Partitions:
    return Partitions(nodes, {(node.device, node.name): node for node in nodes})


def _slowest(times_s: Sequence[Sequence[float]]) -> list[float]:
    return [max(step) for step in zip(*times_s, strict=False)]
