"""The collectives of Kineto traces with what execution traces say about them: sequence number, group and size.

Kineto writes the record-function id of a host op, and the execution trace that of its node, so each collective leads to its node through
the op that issued it. Traces until 2023 have no such ids; their collectives are linked in order, and only where names and sizes of the
whole sequence agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.profiling.traces.collectives import Collective
from autotune.profiling.traces.execution_trace import ExecutionTrace
from autotune.profiling.traces.rank_trace import MISSING, Comm, RankTrace, Repair


@dataclass(frozen=True)
class Link:
    """How the execution trace of a rank was linked: collectives by record-function id, in order, and of how many."""

    rank: int
    schema: str
    nodes: int
    by_id: int
    in_order: int
    collectives: int


def enriched(
    traces: Sequence[RankTrace],
    collectives: Sequence[Sequence[Collective]],
    execution: Sequence[ExecutionTrace],
) -> tuple[tuple[tuple[Collective, ...], ...], tuple[Link, ...], list[Repair]]:
    """The collectives completed by the execution traces, how they were linked, and what was not as it should be."""
    by_rank = {trace.rank: trace for trace in execution}
    completed: list[tuple[Collective, ...]] = []
    links: list[Link] = []
    repairs: list[Repair] = []
    for trace, own in zip(traces, collectives, strict=True):
        other = by_rank.pop(trace.rank, None)
        if other is None:
            completed.append(tuple(own))
            continue
        found, by_id, in_order = _linked(own, other)
        completed.append(found)
        links.append(Link(trace.rank or 0, other.schema, other.nodes, by_id, in_order, len(own)))
        if told := _told(links[-1]):
            repairs.append(Repair(told, rank=trace.rank))
    repairs += [
        Repair(f"{other.source} is the execution trace of no rank here; left out")
        for other in by_rank.values()
    ]
    return tuple(completed), tuple(links), repairs


def _told(link: Link) -> str:
    if link.in_order:
        return f"{link.in_order} collectives linked to the execution trace in order, since the traces have no ids in common"
    if link.collectives and not link.by_id:
        return "execution trace not linked: it has neither the ids nor the sequence of collectives of the Kineto trace"
    missed = link.collectives - link.by_id
    return (
        f"{missed} of {link.collectives} collectives have no node in the execution trace"
        if missed
        else ""
    )


def _linked(
    own: Sequence[Collective], other: ExecutionTrace
) -> tuple[tuple[Collective, ...], int, int]:
    """The collectives, how many were linked by id, and how many in order."""
    nodes = {
        int(other.rf_id[node]): comm
        for table in (other.marks, other.comms)
        for node, comm in table.items()
        if other.rf_id[node] > 0
    }
    partners = [
        next((nodes[number] for number in one.functions if number in nodes), None) for one in own
    ]
    agree = [
        comm is not None and comm.name in ("", one.comm.name)
        for one, comm in zip(own, partners, strict=True)
    ]
    if any(agree):
        pairs = zip(own, partners, agree, strict=True)
        return (
            tuple(
                _joined(one, comm) if fits and comm is not None else one
                for one, comm, fits in pairs
            ),
            sum(agree),
            0,
        )
    for table in (other.comms, other.marks):
        said = list(table.values())
        if own and _same_sequence(own, said):
            return (
                tuple(_joined(one, comm) for one, comm in zip(own, said, strict=True)),
                0,
                len(own),
            )
    return tuple(own), 0, 0


def _same_sequence(own: Sequence[Collective], said: Sequence[Comm]) -> bool:
    if [one.comm.name for one in own] != [comm.name for comm in said]:
        return False
    return not any(
        one.comm.size_bytes and comm.size_bytes < one.comm.size_bytes
        for one, comm in zip(own, said, strict=True)
    )


def _joined(one: Collective, said: Comm) -> Collective:
    """What Kineto says comes first; sizes of an execution trace are those of whole tensors."""
    comm = one.comm
    return replace(
        one,
        comm=replace(
            comm,
            sequence=said.sequence if comm.sequence == MISSING else comm.sequence,
            size_bytes=max(comm.size_bytes, said.size_bytes),
            group=comm.group or said.group,
            group_ranks=comm.group_ranks or said.group_ranks,
        ),
    )
