"""One rank's step as ops whose dependencies the recording states, as TensorFlow's partitions do.

The dependency that ended last explains an op's start, as in `step_ops`. The time between becomes
the gap of the op's thread, or the delay of an edge. A receive is issued as the step begins, so it
is ready at once, and its sender explains its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autotune.dfg.graph import Kind
from autotune.profiling.formats.rank_trace import MISSING, RankTrace
from autotune.profiling.graph.rank_ops import RankOps, TracedOp
from autotune.profiling.traces.collectives import TracedCollective
from autotune.recordings.graph_file import GraphNode, NodePhase, StepGraph

_KINDS = {
    NodePhase.FORWARD: Kind.FORWARD,
    NodePhase.BACKWARD: Kind.BACKWARD,
    NodePhase.UPDATE: Kind.UPDATE,
    NodePhase.OTHER: Kind.OTHER,
}
_COMM_KINDS = {"send": Kind.SEND, "recv": Kind.RECV}


def stated_ops(
    trace: RankTrace,
    start_s: float,
    end_s: float,
    collectives: Sequence[TracedCollective],
    graph: StepGraph,
) -> RankOps:
    """The ops of the nodes whose events begin in [start_s, end_s).

    An event without a node in the graph, such as a hop of a collective, is no op.
    """
    inside = (trace.start_s >= start_s) & (trace.start_s < end_s) & (trace.function >= 0)
    event_of = {
        int(trace.function[event]): event
        for event in np.flatnonzero(inside).tolist()
        if int(trace.function[event]) in graph.by_id
    }
    collective_of = {one.event: number for number, one in enumerate(collectives)}
    out = RankOps()
    op_of: dict[int, int] = {}
    for node, event in sorted(event_of.items(), key=lambda item: (trace.start_s[item[1]], item[1])):
        collective = collective_of.get(event, MISSING)
        comm = collectives[collective].comm if collective != MISSING else None
        begin_s, length_s = float(trace.start_s[event]), float(trace.duration_s[event])
        issued_s = begin_s if comm is None else max(begin_s - comm.queued_s, start_s)
        op_of[node] = len(out.ops)
        out.ops.append(
            TracedOp(
                name=trace.name_of(event),
                lane=int(trace.lane[event]),
                kind=_kind(graph.by_id[node], comm.name if comm is not None else ""),
                start_s=issued_s,
                end_s=begin_s + length_s,
                layer=graph.by_id[node].gradient_of or graph.by_id[node].reads,
                size_bytes=0.0 if comm is None else comm.size_bytes,
                collective=collective,
                node=node,
            )
        )
    parents = {op_of[node]: _parents(node, op_of, graph.by_id) for node in op_of}
    _explain(out, parents)
    return out


def _kind(node: GraphNode, collective: str) -> Kind:
    return _COMM_KINDS.get(collective, Kind.COLLECTIVE) if collective else _KINDS[node.phase]


def _parents(node: int, op_of: Mapping[int, int], by_id: Mapping[int, GraphNode]) -> list[int]:
    """Ops of the nearest nodes that ran, upstream: a step may skip nodes, such as dead branches."""
    parents: list[int] = []
    seen: set[int] = set()
    waiting = list(by_id[node].inputs)
    while waiting:
        source = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        if source in op_of:
            parents.append(op_of[source])
        else:
            waiting.extend(by_id[source].inputs)
    return sorted(parents)


def _explain(out: RankOps, parents: Mapping[int, Sequence[int]]) -> None:
    """Add the edges, with delays and gaps that give the recorded starts again."""
    ops = out.ops
    for number, previous in _in_lanes(ops):
        op = ops[number]
        # clocks of events have microseconds, so a parent may seem to outlive the start of its child
        before = [one for one in parents[number] if one < number and ops[one].start_s <= op.start_s]
        for parent in before:
            ops[parent].end_s = min(ops[parent].end_s, op.start_s)
        if previous != MISSING:
            ops[previous].end_s = min(ops[previous].end_s, op.start_s)
    for number, previous in _in_lanes(ops):
        op = ops[number]
        before = [one for one in parents[number] if one < number and ops[one].start_s <= op.start_s]
        causes = [*before, *([previous] if previous != MISSING else [])]
        if not causes:
            continue
        binding = max(causes, key=lambda one: ops[one].end_s)
        late_s = max(op.start_s - ops[binding].end_s, 0.0)
        for parent in before:
            out.edges[parent, number] = late_s if parent == binding else 0.0
        if previous != MISSING and previous not in before:
            ops[previous].gap_s = late_s if previous == binding else 0.0
            out.edges.setdefault((previous, number), 0.0)


def _in_lanes(ops: Sequence[TracedOp]) -> Iterator[tuple[int, int]]:
    """(op, the op before it in its lane), in order of start; a receive waits for nothing there."""
    last: dict[int, int] = {}
    for number, op in enumerate(ops):
        if op.kind is Kind.RECV:
            yield number, MISSING
            continue
        yield number, last.get(op.lane, MISSING)
        last[op.lane] = number
