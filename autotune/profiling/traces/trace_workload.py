"""A traced data-parallel step as a workload: what it would take with its gradients sent in another way.

A trace does not know variables, only what was sent: every bucket of gradients counts as one variable, which can be sent together with
others or in pieces, but not taken apart into its gradients. When it is ready is taken from the replay of one rank's step in which
gradients and buffers travel in no time, so that no waiting for others is in it (Daydream, sec. 4.2: remove, then simulate).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.dfg.graph import Dfg, Kind
from autotune.dfg.replay import Timeline, replay
from autotune.errors import InvalidInput
from autotune.profiling.traces.collectives import Collective
from autotune.profiling.traces.job import StepChoice, TraceJob
from autotune.profiling.traces.rank_trace import MISSING
from autotune.workload import DTYPE_BYTES, Variable, Workload

LATE_SHARE = 0.01
"""Of the backward pass: so much later than its last op the last bucket may be launched."""
SUMS = frozenset({"all_reduce", "reduce_scatter"})
_DTYPES = {"double": "float64", "float": "float32", "half": "float16", "bfloat16": "bfloat16"}
"""Names of the traces; those of torch are taken as they are."""


@dataclass(frozen=True)
class TracedWorkload:
    """`notes`: what the trace does not say, and what was assumed instead."""

    workload: Workload
    rank: int
    step: int
    notes: tuple[str, ...]


def workload_of(
    job: TraceJob, step: StepChoice = "median", model: str = "traced"
) -> TracedWorkload:
    """By the first rank that has a trace. Raises `InvalidInput` where its step sends no gradients in a backward pass."""
    alone = job.alone(job.rank_numbers[0])
    number = alone.chosen_step(step)
    ops = alone.parts(number)[0].ops.ops
    graph = alone.global_dfg(number)  # of one rank alone: its first ops are these, in this order
    kind = np.asarray(graph.kind)
    backward = np.flatnonzero(kind == Kind.BACKWARD)
    if not len(backward):
        raise InvalidInput(
            f"a workload needs a step with a backward pass, but rank {alone.rank_numbers[0]}'s step {number} of {job.source} shows none: "
            "trace with record_function or a newer profiler, or give a workload's file"
        )
    sent = {
        at: alone.collectives[0][op.collective]
        for at, op in enumerate(ops)
        if op.collective != MISSING
    }
    candidates = [
        at for at, each in sent.items() if each.comm.name in SUMS and each.comm.size_bytes > 0
    ]
    early = [at for at, each in sent.items() if each.comm.name == "broadcast"]
    timeline = _free(graph, [*candidates, *early])
    begin_s, end_s = float(timeline.start_s[backward].min()), float(timeline.end_s[backward].max())
    late_s = end_s + LATE_SHARE * (end_s - begin_s)
    sums = [at for at in candidates if begin_s <= timeline.start_s[at] <= late_s]
    if not sums:
        raise InvalidInput(
            f"a workload needs gradients that are summed during the backward pass, but of the {len(sent)} collectives of rank "
            f"{alone.rank_numbers[0]}'s step {number} of {job.source} none is an all-reduce or reduce-scatter there: trace a data-parallel "
            "job, or give a workload's file"
        )
    buffers = [at for at in early if timeline.start_s[at] < begin_s]
    device = "cuda" if any(lane.device for lane in alone.ranks[0].lanes) else "cpu"
    workload = _workload(
        model, _free(graph, [*sums, *buffers]), backward, [(at, sent[at]) for at in sums], device
    )
    workload = replace(
        workload,
        buffer_bytes=tuple(round(sent[at].comm.size_bytes) for at in buffers),
        buffers=len(buffers),
    )
    notes = (
        "buckets as they were sent, whose gradients are not known apart",
        "every bucket's parameters are read as the forward pass begins",
    )
    return TracedWorkload(workload, alone.rank_numbers[0], number, notes)


def _free(graph: Dfg, ops: list[int]) -> Timeline:
    """The replay in which these ops take no time."""
    duration_s: FloatArray = np.array(graph.duration_s)
    duration_s[ops] = 0.0
    return replay(replace(graph, duration_s=duration_s))


def _workload(
    model: str,
    timeline: Timeline,
    backward: IntArray,
    sums: list[tuple[int, Collective]],
    device: str,
) -> Workload:
    begin_s, end_s = float(timeline.start_s[backward].min()), float(timeline.end_s[backward].max())
    ready_s = [max(float(timeline.start_s[at]) - begin_s, 0.0) for at, _ in sums]
    end_s = max(end_s, begin_s + max(ready_s))
    variables: list[Variable] = []
    for place in np.argsort(ready_s, kind="stable").tolist():
        comm = sums[place][1].comm
        dtype = _DTYPES.get(
            comm.dtype.lower(), comm.dtype if comm.dtype in DTYPE_BYTES else "float32"
        )
        elements = max(round(comm.size_bytes / DTYPE_BYTES[dtype]), 1)
        variables.append(
            Variable(
                f"bucket{len(variables)}", (elements,), dtype, ready_s=ready_s[place], needed_s=0.0
            )
        )
    edges = tuple((first, first + 1) for first in range(len(variables) - 1))
    update_s = max(timeline.makespan_s - end_s, 0.0)
    return Workload(
        model,
        tuple(variables),
        edges,
        begin_s,
        end_s - begin_s,
        update_s,
        device=device,
        source="measured",
    )
