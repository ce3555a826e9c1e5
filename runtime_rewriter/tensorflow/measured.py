"""Turns recorded steps into a workload: when each replica computes what.

| symbol | meaning | unit |
|---|---|---|
| ready_s | start of the backward pass until the node of a gradient has ended | s |
| needed_s | start of the forward pass until the first node that reads a variable starts | s |

The forward pass ends with the last node that leads to the loss. `recording.step_events` reads the
times, and `recording.partitions` tells the passes apart, as for the files of a recording.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from autotune.recordings.recorded_steps import union
from autotune.workload import Variable, Workload
from runtime_rewriter.tensorflow.recording.partitions import is_forward
from runtime_rewriter.tensorflow.recording.replicas import forward_nodes
from runtime_rewriter.tensorflow.recording.step_events import NodeEvent, StepEvents, all_events
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

_NANOSECOND_S = 1e-9
_SHORTEST_S = 1e-6


@dataclass(frozen=True)
class ReplicaTimes:
    """One replica's step. `ready_s` and `needed_s` by variable.

    `update_s`: from its first node behind the gradients until its last one, as far as both come
    after the last gradient. It does not count while only messages are under way.
    """

    forward_s: float
    backward_s: float
    update_s: float
    ready_s: Mapping[str, float]
    needed_s: Mapping[str, float]


def replica_times(
    training: TrainingGraph, events: StepEvents, rank: int, messages: Collection[str] = ()
) -> ReplicaTimes:
    """The times of a replica's copies of the training graph's nodes.

    `messages`: nodes of the step by which the program itself synchronizes its gradients.
    """
    prefix = f"replica_{rank}/"
    known = {event.name: event for event in all_events(events)}
    compute = training.view.upstream([one.values.node for one in training.gradients])
    own = {name: known[prefix + name] for name in compute if prefix + name in known}
    begin_ns = min(event.start_ns for event in own.values())
    forward = forward_nodes(training)
    turn_ns = max(
        (event.end_ns for name, event in own.items() if is_forward(name, forward)), default=begin_ns
    )
    ends_ns = {
        one.variable: max(own[one.values.node].end_ns, turn_ns)
        for one in training.gradients
        if one.values.node in own
    }
    end_ns = max(ends_ns.values(), default=turn_ns)
    after = training.view.upstream(training.targets) - compute
    late = [known[prefix + name] for name in after if prefix + name in known]
    return ReplicaTimes(
        forward_s=(turn_ns - begin_ns) * _NANOSECOND_S,
        backward_s=max((end_ns - turn_ns) * _NANOSECOND_S, _SHORTEST_S),
        update_s=_length_s(
            [event for event in late if event.end_ns > end_ns],
            end_ns,
            [known[name] for name in messages if name in known],
        ),
        ready_s={name: (at_ns - turn_ns) * _NANOSECOND_S for name, at_ns in ends_ns.items()},
        needed_s=_reads(training, own, begin_ns),
    )


def _length_s(events: Sequence[NodeEvent], from_ns: int, messages: Sequence[NodeEvent]) -> float:
    """The time from the first until the last event, without that of messages alone."""
    if not events:
        return 0.0
    first_ns = max(min(event.start_ns for event in events), from_ns)
    last_ns = max(event.end_ns for event in events)
    spans = _spans(events, first_ns, last_ns)
    alone_ns = _covered(spans + _spans(messages, first_ns, last_ns)) - _covered(spans)
    return (last_ns - first_ns - alone_ns) * _NANOSECOND_S


def _spans(events: Sequence[NodeEvent], first_ns: int, last_ns: int) -> list[tuple[int, int]]:
    """The parts of events between two times, from the first of these."""
    clipped = [(max(event.start_ns, first_ns), min(event.end_ns, last_ns)) for event in events]
    return [(start - first_ns, end - first_ns) for start, end in clipped if start < end]


def _covered(spans: Sequence[tuple[int, int]]) -> float:
    intervals = union(np.array(spans, dtype=np.float64).reshape(-1, 2))
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def _reads(
    training: TrainingGraph, own: Mapping[str, NodeEvent], begin_ns: int
) -> dict[str, float]:
    reads = {}
    for gradient in training.gradients:
        readers = training.view.consumers.get(gradient.variable, [])
        starts_ns = [own[name].start_ns for name in readers if name in own]
        if starts_ns:
            reads[gradient.variable] = (min(starts_ns) - begin_ns) * _NANOSECOND_S
    return reads


def client_time(step_s: float, events: StepEvents) -> float:
    """Seconds of the client's call, `step_s`, around the nodes of the first replica.

    These are dispatch, feeds and results. The client's host runs that replica, so one clock counts.
    """
    own = [event for event in all_events(events) if event.name.startswith("replica_0/")]
    begin_ns = min((event.start_ns for event in own), default=0)
    end_ns = max((event.end_ns for event in own), default=0)
    return max(step_s - (end_ns - begin_ns) * _NANOSECOND_S, 0.0)


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
            rows_only=training.rows_only(name),
        )
        for name in sorted(order, key=lambda name: (ready_s[name], order[name]))
    )
    return Workload(
        model,
        variables=variables,
        forward_s=median(step.forward_s for step in steps),
        backward_s=backward_s,
        update_s=update_s,
        threads=threads,
        source="measured",
    )
