"""Turns traces of steps into a workload: when each replica computes what.

| symbol | meaning | unit |
|---|---|---|
| start_s, end_s | a node's first start and last end in a trace, on its server's clock | s |
| ready_s | start of the backward pass until the node of a gradient has ended | s |
| needed_s | start of the forward pass until the first node that reads a variable starts | s |

The backward pass starts when the last node of the forward pass that it needs has ended. TensorFlow
names the nodes of a backward pass `gradient_tape/...` or `gradients/...`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from autotune.workload import Variable, Workload
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

_BACKWARD = ("gradient_tape", "gradients")
_MICROSECOND_S = 1e-6


@dataclass(frozen=True)
class NodeTime:
    """Seconds on the clock of the node's server."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class ReplicaTimes:
    """One replica's step. `ready_s` and `needed_s` by variable."""

    forward_s: float
    backward_s: float
    ready_s: Mapping[str, float]
    needed_s: Mapping[str, float]


def node_times(metadata: Any) -> dict[str, NodeTime]:
    """The times of each node of a traced step; repeated events of one node are merged."""
    times: dict[str, NodeTime] = {}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            name = node.node_name.partition(":")[0]
            start_s = node.all_start_micros * _MICROSECOND_S
            time = NodeTime(start_s, start_s + node.all_end_rel_micros * _MICROSECOND_S)
            known = times.get(name, time)
            times[name] = NodeTime(min(known.start_s, time.start_s), max(known.end_s, time.end_s))
    return times


def replica_times(
    training: TrainingGraph, times: Mapping[str, NodeTime], rank: int
) -> ReplicaTimes:
    """What a replica's copies of the training graph's nodes took until its last gradient."""
    prefix = f"replica_{rank}/"
    compute = training.view.upstream([one.values.node for one in training.gradients])
    own = {name: times[f"{prefix}{name}"] for name in compute if f"{prefix}{name}" in times}
    ends_s = {
        one.variable: own[one.values.node].end_s
        for one in training.gradients
        if one.values.node in own
    }
    forward_start_s = min(time.start_s for time in own.values())
    end_s = max(ends_s.values(), default=forward_start_s)
    forward = [time.end_s for name, time in own.items() if not _is_backward(name)]
    backward_start_s = min(max(forward, default=forward_start_s), *ends_s.values(), end_s)
    return ReplicaTimes(
        backward_start_s - forward_start_s,
        max(end_s - backward_start_s, _MICROSECOND_S),
        {name: max(at_s - backward_start_s, 0.0) for name, at_s in ends_s.items()},
        _reads(training, own, forward_start_s),
    )


def _is_backward(name: str) -> bool:
    return any(part in name for part in _BACKWARD)


def _reads(
    training: TrainingGraph, own: Mapping[str, NodeTime], forward_start_s: float
) -> dict[str, float]:
    reads = {}
    for gradient in training.gradients:
        readers = training.view.consumers.get(gradient.variable, [])
        starts = [own[name].start_s for name in readers if name in own]
        if starts:
            reads[gradient.variable] = min(starts) - forward_start_s
    return reads


def update_time(
    training: TrainingGraph, times: Mapping[str, NodeTime], compute_end_s: float, rank: int
) -> float:
    """How long a replica's nodes behind the gradients ran: from their first start to the end."""
    compute = training.view.upstream([one.values.node for one in training.gradients])
    after = training.view.upstream(training.targets) - compute
    own = [times[name] for node in after if (name := f"replica_{rank}/{node}") in times]
    late = [time for time in own if time.end_s > compute_end_s]
    if not late:
        return 0.0
    return max(time.end_s for time in late) - max(min(time.start_s for time in late), compute_end_s)


def workload_of_steps(
    training: TrainingGraph,
    model: str,
    steps: Sequence[ReplicaTimes],
    update_s: float,
    touched: Mapping[str, Sequence[np.ndarray]],
    threads: int,
) -> Workload:
    """The workload with medians over `steps`. `touched`: indices of sparse gradients, by step."""
    backward_s = median(step.backward_s for step in steps)
    order = {gradient.variable: number for number, gradient in enumerate(training.gradients)}
    ready_s = {
        name: median(step.ready_s.get(name, step.backward_s) for step in steps) for name in order
    }
    needed_s = {name: median(step.needed_s.get(name, 0.0) for step in steps) for name in order}
    variables = tuple(
        Variable(
            name,
            training.by_name[name].shape,
            training.by_name[name].dtype,
            training.gradient_of[name].sparse,
            min(ready_s[name], backward_s),
            needed_s[name],
            median(float(len(np.unique(rows))) for rows in touched[name])
            if name in touched
            else None,
        )
        for name in sorted(order, key=lambda name: (ready_s[name], order[name]))
    )
    return Workload(
        model,
        variables,
        forward_s=median(step.forward_s for step in steps),
        backward_s=backward_s,
        update_s=update_s,
        threads=threads,
        source="measured",
    )
