"""Predicted and measured peak memory of TensorFlow steps under plans that were never recorded.

`python -m benchmarks.replay_accuracy.tensorflow_memory OUT.json` (a process of its own: sessions
share one allocator). One recording per program, with a message per variable, gives the memory and
time of each replica's nodes. The graph of another plan comes from the rewriter, and
`autotune.memory.graph_peak` replays it. Nothing is fitted. Measured is the most that a device's
nodes had allocated at once, by TensorFlow's allocation records of the step; the memory between two
steps (variables) is not part of either. The replicas are virtual devices of one process, so buffers
of gRPC are left out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")

import numpy as np
import tensorflow as tf

from autotune.memory.graph_peak import AllocatingNode, Output, graph_peak
from autotune.strategy_space.builders import collectives
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import Synchronizer
from autotune.workload import Workload
from benchmarks.tensorflow_ranks.programs import PROGRAMS, program
from runtime_rewriter.scheduling import usable_cores
from runtime_rewriter.tensorflow.distributed_graph import DistributedGraph
from runtime_rewriter.tensorflow.graph_view import GraphView, TensorName, control_inputs
from runtime_rewriter.tensorflow.graph_workload import workload_of
from runtime_rewriter.tensorflow.recording.graph_nodes import graph_nodes
from runtime_rewriter.tensorflow.recording.recorder import StepRecords, record_steps
from runtime_rewriter.tensorflow.recording.replicas import replicated
from runtime_rewriter.tensorflow.running import RunningGraph
from runtime_rewriter.tensorflow.training_graph import Types

RANKS, STEPS, WARMUP = 2, 5, 2
TRANSFER_S = 1e-3
"""Length of a collective in the replay. Virtual devices exchange memory in about this time."""
_SHARES = frozenset({"Identity", "Reshape", "Bitcast", "StopGradient"})
"""Ops whose output is their first input."""
_KEEPS = frozenset({"Const", "VarHandleOp", "NoOp", "AssignVariableOp", "ReadVariableOp"})
"""Ops without memory of the step: theirs is that of variables and constants."""
_IN_PLACE = ("Mul", "CollectiveReduce")
"""Ops that write into their input if nothing else reads it."""


@dataclass(frozen=True)
class MemoryCase:
    """Bytes of the step on rank 0 under one plan."""

    model: str
    setting: str
    measured_bytes: int
    predicted_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


class VirtualDevices:
    """CPU devices of this process."""

    target = ""
    devices = tuple(f"/job:localhost/replica:0/task:0/device:CPU:{rank}" for rank in range(RANKS))
    hosts: tuple[tuple[int, ...], ...] = ()

    @property
    def config(self) -> Any:
        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=1, device_count={"CPU": RANKS}
        )
        config.graph_options.optimizer_options.opt_level = -1
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        return config


@dataclass(frozen=True)
class RecordedNode:
    """A node of a recorded replica; `shared`: names of inputs whose memory its outputs use."""

    output_bytes: int
    shared: tuple[str, ...]
    scratch_bytes: int
    seconds: float
    turn: float


def settings(workload: Workload) -> dict[str, Plan]:
    """Plans by name; the first one is recorded."""
    count = len(workload.variables)
    plans = {
        f"{size} variables a message": collectives.all_reduce_chunks(workload, size)
        for size in (1, 4, 16)
    }
    plans["one message"] = collectives.all_reduce_chunks(workload, count)
    synchronizer = Synchronizer.REDUCE_SCATTER_ALL_GATHER
    plans["one reduce-scatter"] = collectives.single_bucket(workload, synchronizer)
    # An optimizer of Keras takes each row for itself, so its rows cannot be sent dense.
    return {name: plan(with_rows(one, workload), workload, RANKS) for name, one in plans.items()}


def cases(model: str) -> Iterator[MemoryCase]:
    """Record one setting of a program, then predict and measure the others."""
    captured, batch = program(model)
    running = RunningGraph(captured.training, VirtualDevices(), 60.0)
    recorded: dict[str, RecordedNode] = {}
    for setting, wanted in settings(workload_of(captured.training, model)).items():
        running.load(wanted)

        def run(options: Any, metadata: Any) -> None:
            running.observed_step(batch, metadata, {}, options)

        records = record_steps(run, steps=STEPS, warmup=WARMUP)
        if not recorded:
            recorded = recorded_nodes(records, running)
            continue
        assert running.graph is not None
        device = running.graph.devices[0]
        measured = median(events.allocated_peak(device) for events in records.steps)
        nodes = allocating_nodes(running.graph, 0, recorded)
        predicted = graph_peak(nodes, threads=usable_cores()).peak_bytes
        yield MemoryCase(model, setting, round(measured), predicted)
    running.close()


def recorded_nodes(records: StepRecords, running: RunningGraph) -> dict[str, RecordedNode]:
    """The replicas' own nodes, by name, with the times of the last recorded step."""
    assert records.partitions is not None
    nodes = graph_nodes(records.partitions, replicated(running.training, RANKS), records.steps)
    events = {name: one for of in records.steps[-1].nodes.values() for name, one in of.items()}
    begin_ns = min(event.start_ns for event in events.values())
    names = {node.id: node.name for node in nodes}
    return {
        node.name: RecordedNode(
            node.output_bytes,
            tuple(names[source] for source in node.shared),
            node.scratch_bytes,
            (event.end_ns - event.start_ns) * 1e-9,
            (event.start_ns - begin_ns) * 1e-9,
        )
        for node in nodes
        if node.name.startswith("replica_") and (event := events.get(node.name)) is not None
    }


def allocating_nodes(
    graph: DistributedGraph, rank: int, recorded: Mapping[str, RecordedNode]
) -> list[AllocatingNode]:
    """The nodes that a step runs on one rank: recorded ones, and those of the plan's messages."""
    return _RankNodes(graph, rank, recorded).nodes()


class _RankNodes:
    def __init__(
        self, graph: DistributedGraph, rank: int, recorded: Mapping[str, RecordedNode]
    ) -> None:
        self._view, self._types = GraphView(graph.graph_def), Types.of(graph.graph_def)
        self._recorded = recorded
        results = [tensor.partition(":")[0] for tensor in graph.fetches.values()]
        needed = self._view.upstream([*graph.targets, *results])
        device = graph.devices[rank]
        self._names = [
            name
            for name, node in self._view.nodes.items()
            if name in needed and node.device == device
        ]
        self._number = {name: number for number, name in enumerate(self._names)}

    def nodes(self) -> list[AllocatingNode]:
        return [self._node(name) for name in self._names]

    def _node(self, name: str) -> AllocatingNode:
        node, number = self._view.nodes[name], self._number
        data = self._view.inputs[name]
        reads = tuple((number[one.node], one.output) for one in data if one.node in number)
        control = [number[source] for source in control_inputs(node) if source in number]
        inputs = tuple(dict.fromkeys([*(source for source, _ in reads), *control]))
        known = self._recorded.get(name)
        if known is not None:
            shared = tuple((number[source], 0) for source in known.shared if source in number)
            return AllocatingNode(
                inputs,
                reads,
                (known.output_bytes,),
                shared,
                known.scratch_bytes,
                seconds=known.seconds,
                turn=known.turn,
            )
        outputs, shared = self._of_message(name, reads)
        sends = node.op.startswith("Collective")
        return AllocatingNode(
            inputs,
            reads,
            outputs,
            shared,
            seconds=TRANSFER_S if sends else 0.0,
            turn=-1.0,  # messages start as soon as they can
            needs_thread=not sends,
        )

    def _of_message(
        self, name: str, reads: tuple[Output, ...]
    ) -> tuple[tuple[int, ...], tuple[Output, ...]]:
        """(bytes of new outputs, outputs that it shares) of a node that the rewriter added."""
        node = self._view.nodes[name]
        if node.op in _KEEPS:
            return (0,), ()
        if node.op in _SHARES or (node.op.startswith(_IN_PLACE) and self._reads_alone(name)):
            return (0,), reads[:1]
        count = node.attr["num_split"].i if node.op in ("Split", "SplitV") else 1
        return tuple(self._bytes(TensorName(name, output)) for output in range(count)), ()

    def _reads_alone(self, name: str) -> bool:
        """Whether the memory of a node's first input belongs to the step and has one reader."""
        view = self._view
        source = view.inputs[name][0].node
        while len(view.consumers.get(source, ())) == 1:
            known = self._recorded.get(source)
            shares = view.nodes[source].op in _SHARES if known is None else not known.output_bytes
            if not shares or not view.inputs[source]:
                return known.output_bytes > 0 if known else view.nodes[source].op not in _KEEPS
            source = view.inputs[source][0].node
        return False

    def _bytes(self, tensor: TensorName) -> int:
        shape, dtype = self._types.shapes.get(tensor), self._types.dtypes.get(tensor)
        if shape is None or dtype in (None, "resource") or None in shape:
            return 0
        size: int = tf.as_dtype(dtype).size
        return int(np.prod([extent or 0 for extent in shape])) * size


def summary(found: Sequence[MemoryCase]) -> dict[str, float]:
    """The keys of the benchmark's last line."""
    errors = [abs(case.error) for case in found]
    return {
        "settings_memory_tensorflow": len(found),
        "memory_error_mean_tensorflow": mean(errors),
        "memory_error_max_tensorflow": max(errors),
    }


def main() -> int:
    measured_cases = []
    for model in PROGRAMS:
        for case in cases(model):
            measured_cases.append(case)
            print(
                f"{case.model:12} {case.setting:24} measured {case.measured_bytes / 2**20:6.2f} "
                f"MiB, predicted {case.predicted_bytes / 2**20:6.2f} MiB, error {case.error:+.1%}",
                flush=True,
            )
    result = summary(measured_cases) | {"cases": [asdict(case) for case in measured_cases]}
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(result))
    print(json.dumps(summary(measured_cases)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
