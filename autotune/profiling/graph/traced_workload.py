"""A traced data-parallel step as a workload, to predict other ways to send its gradients.

A trace does not know variables, only what was sent. So every bucket of gradients counts as one
variable. It can be sent together with others or in pieces, but not be taken apart into its
gradients. Its ready time comes from the replay of one rank's step in which gradients and buffers
travel in no time, so it includes no waiting for others (Daydream, sec. 4.2: remove, then simulate).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import IntArray
from autotune.dfg.graph import Kind
from autotune.dfg.replay import Timeline
from autotune.errors import InvalidInput
from autotune.profiling.formats.rank_trace import MISSING
from autotune.profiling.graph.stated_workload import (
    median_workload,
    replayed_without,
    stated_workload,
)
from autotune.profiling.graph.traced_steps import StepChoice, TracedSteps
from autotune.profiling.traces.collectives import TracedCollective
from autotune.profiling.traces.groups import process_groups, require_one_group
from autotune.profiling.traces.job import TraceJob
from autotune.recordings.graph_file import StepGraph
from autotune.workload import DTYPE_BYTES, Variable, Workload

LATE_SHARE = 0.01
"""The last bucket may be launched this share of the backward pass after its last op."""
SUMS = frozenset({"all_reduce", "reduce_scatter"})
_DTYPES = {"double": "float64", "float": "float32", "half": "float16", "bfloat16": "bfloat16"}
"""Names of the traces; torch's names are kept."""
NOTES = (
    "buckets as they were sent, whose gradients are not known apart",
    "every bucket's parameters are read as the forward pass begins",
)


@dataclass(frozen=True)
class TracedWorkload:
    """`notes`: what the trace does not state, and what was assumed instead."""

    workload: Workload
    rank: int
    step: int
    notes: tuple[str, ...]


def workload_of(
    job: TraceJob, step: StepChoice = "median", model: str = "traced"
) -> TracedWorkload:
    """The workload of the first rank that has a trace.

    Raises `InvalidInput` where its step sends no gradients in a backward pass, or something to a
    part of the ranks.
    """
    if job.graph is not None:
        return _stated_workload(job, job.graph, step, model)
    rank = job.rank_numbers[0]
    alone = job.alone(rank)
    steps = TracedSteps(alone)
    number = steps.chosen(step)
    graph = steps.dfg(number)  # of one rank alone: its first ops are those below, in this order
    where = f"rank {rank}'s step {number} of {job.source}"
    backward = np.flatnonzero(np.asarray(graph.kind) == Kind.BACKWARD)
    if not len(backward):
        raise InvalidInput(
            f"a workload needs a step with a backward pass, but {where} shows none: trace with "
            "record_function or a newer profiler, or give a workload's file"
        )
    sent = {
        op: alone.collectives[0][one.collective]
        for op, one in enumerate(steps.parts(number)[0].ops.ops)
        if one.collective != MISSING
    }
    require_one_group(process_groups(sent.values()), alone.ranks[0].world_size)
    candidates = [
        op for op, one in sent.items() if one.comm.name in SUMS and one.comm.size_bytes > 0
    ]
    broadcasts = [op for op, one in sent.items() if one.comm.name == "broadcast"]
    timeline = replayed_without(graph, [*candidates, *broadcasts])
    begin_s, end_s = float(timeline.start_s[backward].min()), float(timeline.end_s[backward].max())
    late_s = end_s + LATE_SHARE * (end_s - begin_s)
    sums = [op for op in candidates if begin_s <= timeline.start_s[op] <= late_s]
    if not sums:
        raise InvalidInput(
            "a workload needs gradients that are summed during the backward pass, but of the "
            f"{len(sent)} collectives of {where} none is an all-reduce or reduce-scatter there: "
            "trace a data-parallel job, or give a workload's file"
        )
    buffers = [op for op in broadcasts if timeline.start_s[op] < begin_s]
    timeline = replayed_without(graph, [*sums, *buffers])
    workload = _workload(model, timeline, backward, {op: sent[op] for op in sums})
    workload = replace(
        workload,
        device="cuda" if any(lane.device for lane in alone.ranks[0].lanes) else "cpu",
        device_name=alone.ranks[0].info.get("device_name", ""),
        buffer_bytes=tuple(round(sent[op].comm.size_bytes) for op in buffers),
        buffers=len(buffers),
    )
    return TracedWorkload(workload, rank, number, NOTES)


def _stated_workload(
    job: TraceJob, graph: StepGraph, step: StepChoice, model: str
) -> TracedWorkload:
    """The variables that the recorded graph names, on the first rank.

    For the median step, each time is the median over all steps.
    """
    number = TracedSteps(job).chosen(step)
    numbers = job.steps if step == "median" else (number,)
    workload = median_workload([stated_workload(job, graph, one, model) for one in numbers])
    return TracedWorkload(workload, job.rank_numbers[0], number, ())


def _workload(
    model: str, timeline: Timeline, backward: IntArray, sums: dict[int, TracedCollective]
) -> Workload:
    begin_s, end_s = float(timeline.start_s[backward].min()), float(timeline.end_s[backward].max())
    ready_s = {op: max(float(timeline.start_s[op]) - begin_s, 0.0) for op in sums}
    end_s = max(end_s, begin_s + max(ready_s.values()))
    variables: list[Variable] = []
    for op in sorted(sums, key=ready_s.__getitem__):
        comm = sums[op].comm
        known = comm.dtype if comm.dtype in DTYPE_BYTES else "float32"
        dtype = _DTYPES.get(comm.dtype.lower(), known)
        shape = (max(round(comm.size_bytes / DTYPE_BYTES[dtype]), 1),)
        name = f"bucket{len(variables)}"
        variables.append(Variable(name, shape, dtype, ready_s=ready_s[op], needed_s=0.0))
    return Workload(
        model,
        variables=tuple(variables),
        edges=tuple((first, first + 1) for first in range(len(variables) - 1)),
        forward_s=begin_s,
        backward_s=end_s - begin_s,
        update_s=max(timeline.makespan_s - end_s, 0.0),
        source="measured",
    )
