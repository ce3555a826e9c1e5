"""The workload of a recorded TensorFlow step, whose graph names variables, gradients and reads.

Times come from the replay of one replica's step in which everything that is received takes no time,
so they include no waiting for others (Daydream, sec. 4.2: remove, then simulate). The forward pass
ends with the last node that a gradient depends on outside the scopes of gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from autotune.arrays import FloatArray
from autotune.dfg.graph import Dfg, Kind
from autotune.dfg.replay import Timeline, replay
from autotune.errors import InvalidInput
from autotune.profiling.formats.rank_trace import MISSING
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces.job import TraceJob
from autotune.recordings.graph_file import GraphNode, NodePhase, StepGraph
from autotune.workload import Workload


def replayed_without(graph: Dfg, ops: list[int]) -> Timeline:
    """The replay in which these ops take no time."""
    duration_s: FloatArray = np.array(graph.duration_s)
    duration_s[ops] = 0.0
    return replay(replace(graph, duration_s=duration_s))


def stated_workload(job: TraceJob, graph: StepGraph, step: int, model: str) -> Workload:
    """The workload of the first rank. Raises `InvalidInput` without a gradient."""
    rank = job.rank_numbers[0]
    steps = TracedSteps(job.alone(rank))
    ops = steps.parts(step)[0].ops.ops  # the first ops of the rank's graph, in this order
    received = [op for op, one in enumerate(ops) if one.collective != MISSING]
    timeline = replayed_without(steps.dfg(step), received)
    op_of = {one.node: op for op, one in enumerate(ops)}
    nodes = {node.id: node for node in graph.nodes if node.rank == rank and node.id in op_of}

    def end_s(chosen: Iterable[GraphNode]) -> float:
        return max((float(timeline.end_s[op_of[node.id]]) for node in chosen), default=0.0)

    gradients: dict[str, list[GraphNode]] = {}
    for node in nodes.values():
        if node.gradient_of:
            gradients.setdefault(node.gradient_of, []).append(node)
    turn_s = end_s(node for node in nodes.values() if node.phase is NodePhase.FORWARD)
    ready_s = {name: max(end_s(of), turn_s) - turn_s for name, of in gradients.items()}
    needed_s = _needed_s(nodes, op_of, timeline)
    variables = [
        replace(
            variable,
            ready_s=ready_s[variable.name],
            needed_s=min(needed_s.get(variable.name, 0.0), turn_s),
        )
        for variable in graph.variables
        if variable.name in ready_s
    ]
    if not variables:
        raise InvalidInput(
            f"a workload needs a step that computes gradients, but rank {rank} of "
            f"{job.source} computes none of {len(graph.variables)} recorded variables"
        )
    variables.sort(key=lambda variable: (variable.ready_s, variable.name))
    return Workload(
        model,
        tuple(variables),
        edges=tuple((first, first + 1) for first in range(len(variables) - 1)),
        forward_s=turn_s,
        backward_s=max(ready_s.values()),
        update_s=_update_s(steps, step, nodes, op_of) + client_s(graph, job, step),
        device="cuda" if any("GPU" in device.device for device in graph.devices) else "cpu",
        source="measured",
    )


def median_workload(workloads: Sequence[Workload]) -> Workload:
    """The workload with the median of each time, over workloads of the same variables."""
    ready_s: dict[str, list[float]] = {}
    needed_s: dict[str, list[float]] = {}
    for workload in workloads:
        for variable in workload.variables:
            ready_s.setdefault(variable.name, []).append(variable.ready_s or 0.0)
            needed_s.setdefault(variable.name, []).append(variable.needed_s or 0.0)
    variables = [
        replace(one, ready_s=median(ready_s[one.name]), needed_s=median(needed_s[one.name]))
        for one in workloads[0].variables
    ]
    variables.sort(key=lambda variable: (variable.ready_s, variable.name))
    return replace(
        workloads[0],
        variables=tuple(variables),
        forward_s=median(one.forward_s for one in workloads),
        backward_s=median(one.backward_s for one in workloads),
        update_s=median(one.update_s for one in workloads),
    )


def _needed_s(
    nodes: dict[int, GraphNode], op_of: dict[int, int], timeline: Timeline
) -> dict[str, float]:
    """Variable -> when the first node computes with it."""
    needed_s: dict[str, float] = {}
    for node in nodes.values():
        if node.phase is not NodePhase.FORWARD or node.reads:
            continue
        start_s = float(timeline.start_s[op_of[node.id]])
        for source in node.inputs:
            if source in nodes and (variable := nodes[source].reads):
                needed_s[variable] = min(needed_s.get(variable, start_s), start_s)
    return needed_s


def _update_s(
    steps: TracedSteps, step: int, nodes: dict[int, GraphNode], op_of: dict[int, int]
) -> float:
    """Seconds of the replica's own update ops."""
    ops = steps.parts(step)[0].ops.ops
    return sum(
        ops[op_of[node.id]].duration_s
        for node in nodes.values()
        if node.phase is NodePhase.UPDATE and ops[op_of[node.id]].kind is Kind.UPDATE
    )


def client_s(graph: StepGraph, job: TraceJob, step: int) -> float:
    """Seconds of the client's call around the step itself: dispatch, feeds, fetches."""
    if step >= len(graph.steps.recorded_s):
        return 0.0
    return max(graph.steps.recorded_s[step] - TracedSteps(job).measured_s(step), 0.0)
