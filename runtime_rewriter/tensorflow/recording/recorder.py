"""Records steps of a graph that a session runs on one or more devices.

Ordinary and recorded steps take turns, so their times give the cost of the recording. The first
recorded step also returns the partitions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from autotune.errors import InvalidInput
from autotune.recordings.graph_file import GraphDevice, GraphSteps, StepGraph
from autotune.workload import Variable
from runtime_rewriter.tensorflow.recording.graph_nodes import (
    TrainedVariables,
    graph_nodes,
    rank_devices,
)
from runtime_rewriter.tensorflow.recording.partitions import Partitions, read_partitions
from runtime_rewriter.tensorflow.recording.step_events import StepEvents, all_events, step_events
from runtime_rewriter.tensorflow.recording.trace_file import TraceWriter

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class RunStep(Protocol[T_co]):
    """Runs one step with the given RunOptions and RunMetadata, which `Session.run` takes."""

    def __call__(self, options: Any, metadata: Any) -> T_co: ...


RECORDED_STEPS = 10
WARMUP_STEPS = 3


@dataclass
class StepRecords:
    """The recorded steps of one graph, and the times of the client's calls in seconds."""

    partitions: Partitions | None = None
    steps: list[StepEvents] = field(default_factory=list)
    recorded_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)

    def write(
        self,
        folder: Path,
        trained: TrainedVariables,
        variables: Sequence[Variable] = (),
        hosts: Mapping[str, str] | None = None,
    ) -> StepGraph:
        """Write `graph.json.gz` and one trace per device; return the graph.

        `hosts`: task, such as `/job:worker/replica:0/task:0` -> its host. Raises `InvalidInput` if
        no node of the graph computes one of the gradients, and `OSError`.
        """
        partitions = self.partitions
        if partitions is None:
            raise InvalidInput("a recording needs at least one step, but none was recorded")
        missing = set(trained.gradients) - {node.name for node in partitions.nodes}
        if missing:
            raise InvalidInput(
                "the graph of a step must hold every gradient's node, but lacks "
                f"{', '.join(sorted(missing)[:3])}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        devices = rank_devices(partitions, trained)
        host_of = [_host(device, hosts or {}) for device in devices]
        nodes = graph_nodes(partitions, trained, self.steps)
        replicas = {node.device for node in partitions.nodes if node.name in trained.gradients}
        TraceWriter(
            partitions,
            nodes,
            devices=devices,
            replicas=len(replicas),
            hosts=host_of,
            begin_ns=min(event.start_ns for events in self.steps for event in all_events(events)),
        ).write(folder, self.steps)
        graph = StepGraph(
            tuple(nodes),
            tuple(
                GraphDevice(rank, device, host_of[rank], *self._memory(device))
                for rank, device in enumerate(devices)
            ),
            tuple(variables),
            GraphSteps(tuple(self.recorded_s), tuple(self.plain_s)),
        )
        graph.write(folder)
        return graph

    def _memory(self, device: str) -> tuple[int | None, int | None]:
        """Bytes in use on a device before a step, and at most.

        The allocator is asked as nodes end, which misses what they freed before. So the most is
        also at least what the records of allocations add up to.
        """
        in_use = [
            event.in_use_bytes
            for events in self.steps
            for event in sorted(events.nodes.get(device, {}).values(), key=lambda e: e.end_ns)
            if event.in_use_bytes
        ]
        if not in_use:
            return None, None
        allocated = max(events.allocated_peak(device) for events in self.steps)
        return min(in_use), max(*in_use, min(in_use) + allocated)


@dataclass
class StepRecording:
    """Decides for each step of a graph how it is run, and keeps what was recorded.

    The first `warmup` steps are ordinary. The next one returns the partitions, if `partitions`.
    Then ordinary and recorded steps take turns until `steps` are recorded.

    Events are read once `records` are asked for: between two steps, other ranks would wait for it.
    `touched`: indices of the rows of sparse gradients in the warm-up steps, by variable.
    """

    steps: int = RECORDED_STEPS
    warmup: int = WARMUP_STEPS
    partitions: bool = True
    taken: int = 0
    recorded: int = 0
    touched: dict[str, list[np.ndarray]] = field(default_factory=dict)
    _records: StepRecords = field(default_factory=StepRecords)
    _unread: list[Any] = field(default_factory=list)  # StepStats

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0:
            raise InvalidInput(
                "a recording needs at least 1 step and 0 warm-up steps, but has "
                f"{self.steps} and {self.warmup}"
            )

    @property
    def steps_before(self) -> int:
        """Steps before the first recorded one, with the ordinary one of its turn."""
        return self.warmup + self.partitions + 1

    @property
    def done(self) -> bool:
        return self.recorded == self.steps

    def further_fetches(self, rows: Mapping[str, str]) -> Mapping[str, str]:
        """The part of `rows` that this step fetches; none of them changes a recorded graph."""
        return rows if self.taken <= self.warmup else {}

    def note_rows(self, indices: Mapping[str, np.ndarray]) -> None:
        """Note what was fetched."""
        for variable, rows in indices.items():
            self.touched.setdefault(variable, []).append(rows)

    @property
    def records(self) -> StepRecords:
        """The records of all steps so far. Traces are parsed here, after the timed steps."""
        self._records.steps += map(step_events, self._unread)
        self._unread.clear()
        return self._records

    def step(self, run: RunStep[T]) -> T:
        """Run the next step and return what `run` returns."""
        v1 = tf.compat.v1
        number = self.taken - self.warmup - self.partitions
        self.taken += 1
        if self.taken <= self.warmup or self.done:
            return run(None, None)
        metadata = v1.RunMetadata()
        if number < 0:
            result = run(v1.RunOptions(output_partition_graphs=True), metadata)
            self._records.partitions = read_partitions(metadata.partition_graphs)
            return result
        recorded = number % 2 == 1
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE) if recorded else None
        begin_s = time.perf_counter()
        result = run(options, metadata if recorded else None)
        step_s = time.perf_counter() - begin_s
        (self._records.recorded_s if recorded else self._records.plain_s).append(step_s)
        if recorded:
            self._unread.append(metadata.step_stats)
            self.recorded += 1
        return result


def record_steps(
    run: RunStep[Any], steps: int = RECORDED_STEPS, warmup: int = WARMUP_STEPS
) -> StepRecords:
    """Run as many steps as a `StepRecording` needs; return what it recorded."""
    recording = StepRecording(steps, warmup)
    while not recording.done:
        recording.step(run)
    return recording.records


def _host(device: str, hosts: Mapping[str, str]) -> str:
    return hosts.get(device.rpartition("/device:")[0], "")
