"""Completes the collectives of Kineto traces from execution traces: sequence, group and size.

Kineto writes the record-function id of a host op, and the execution trace that of its node. So each
collective leads to its node through the op that issued it. The process id leads from an execution
trace to its rank. Traces until 2023 lack the ids of functions. Their collectives are linked in
order, only where names and sizes of the whole sequence agree.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from autotune.profiling.formats.execution_trace import ExecutionTrace
from autotune.profiling.formats.rank_trace import MISSING, Comm, RankTrace, Repair, listed_numbers
from autotune.profiling.traces.collectives import TracedCollective

_Collectives = Sequence[TracedCollective]


@dataclass(frozen=True)
class ExecutionLink:
    """The link of a rank's execution trace.

    `by_id`, `in_order`: how many `collectives` are linked by record-function id and in order.
    """

    rank: int
    schema: str
    nodes: int
    by_id: int
    in_order: int
    collectives: int


def enriched(
    traces: Sequence[RankTrace],
    collectives: Sequence[_Collectives],
    execution: Sequence[ExecutionTrace],
) -> tuple[tuple[tuple[TracedCollective, ...], ...], tuple[ExecutionLink, ...], list[Repair]]:
    """Return the collectives of every rank completed, the links, and what could not be linked."""
    partners, repairs = _by_process(traces, execution)
    completed: list[tuple[TracedCollective, ...]] = []
    links: list[ExecutionLink] = []
    for place, (trace, traced) in enumerate(zip(traces, collectives, strict=True)):
        other = partners.get(place)
        if other is None:
            completed.append(tuple(traced))
            continue
        linked, by_id, in_order = _linked(traced, other)
        completed.append(linked)
        rank = trace.rank or 0
        links.append(ExecutionLink(rank, other.schema, other.nodes, by_id, in_order, len(traced)))
        if problem := _problem(links[-1]):
            repairs.append(Repair(problem, rank=trace.rank))
    return tuple(completed), tuple(links), repairs


def _by_process(
    traces: Sequence[RankTrace], execution: Sequence[ExecutionTrace]
) -> tuple[dict[int, ExecutionTrace], list[Repair]]:
    """Place of a rank -> its execution trace, and a repair for each guess and each one left out.

    An execution trace states its process, which is that of one Kineto trace. One of each belong
    together where the process is not stated. Ranks in containers may have one process id: of these,
    it is the one whose path has most in common.
    """
    if len(traces) == len(execution) == 1 and not execution[0].process:
        return {0: execution[0]}, []
    places_of: dict[str, list[int]] = {}
    for place, trace in enumerate(traces if execution else ()):
        for process in {lane.process for lane in trace.lanes if not lane.device}:
            places_of.setdefault(process, []).append(place)
    words = [_path_words(trace.source) for trace in traces]
    partners: dict[int, ExecutionTrace] = {}
    repairs = []
    for other in execution:
        places = places_of.get(other.process, [])
        nearest = _nearest(_path_words(other.source), [(place, words[place]) for place in places])
        ranks = listed_numbers(traces[place].rank or 0 for place in places)
        if problem := _left_out(ranks, len(nearest), bool(nearest) and nearest[0] in partners):
            repairs.append(Repair(f"{other.source} {problem}"))
            continue
        partners[nearest[0]] = other
        if len(places) > 1:
            what = f"taken as this rank's by its path, since ranks {ranks} have its process id"
            repairs.append(Repair(f"{other.source} is {what}", rank=traces[nearest[0]].rank))
    return partners, repairs


def _left_out(ranks: str, nearest: int, taken: bool) -> str:
    """Return the reason to leave an execution trace out; "" for one that belongs to one rank."""
    if not nearest:
        how = "ranks are recognized by their process ids"
        return f"is the execution trace of no rank here; left out ({how})"
    if nearest > 1:
        how = "a rank's files are recognized by a folder, or by a number in their names"
        return f"has the process id of ranks {ranks}, and may be of any; left out ({how})"
    return f"is a second execution trace of one of ranks {ranks}; left out" if taken else ""


_Words = tuple[frozenset[str], frozenset[int]]


def _nearest(words: _Words, candidates: Sequence[tuple[int, _Words]]) -> list[int]:
    """The places whose paths have most folders, and then most numbers, in common with `words`."""
    scores = {
        place: (len(words[0] & folders), len(words[1] & numbers))
        for place, (folders, numbers) in candidates
    }
    best = max(scores.values(), default=(0, 0))
    return [place for place, score in scores.items() if score == best]


def _path_words(source: str) -> _Words:
    """The folders of a file, and the numbers in its name."""
    path = PurePosixPath(source.replace(":", "/"))
    numbers = (int(number) for number in re.findall(r"\d{1,18}", path.name))
    return frozenset(path.parts[:-1]), frozenset(numbers)


def _problem(link: ExecutionLink) -> str:
    """Describe the links that were not made by id; "" if all were."""
    if link.in_order:
        how = "linked to the execution trace in order, since the traces have no ids in common"
        return f"{link.in_order} collectives {how}"
    if link.collectives and not link.by_id:
        return (
            "execution trace not linked: it has neither the ids nor the sequence of collectives of "
            "the Kineto trace"
        )
    missed = link.collectives - link.by_id
    where = "have no node in the execution trace"
    return f"{missed} of {link.collectives} collectives {where}" if missed else ""


def _linked(
    collectives: _Collectives, other: ExecutionTrace
) -> tuple[tuple[TracedCollective, ...], int, int]:
    """The collectives, how many were linked by id, and how many in order."""
    nodes = {
        int(other.rf_id[node]): comm
        for table in (other.marks, other.comms)
        for node, comm in table.items()
        if other.rf_id[node] > 0
    }
    linked, by_id = [], 0
    for one in collectives:
        partners = [nodes[number] for number in one.functions if number in nodes]
        fits = bool(partners) and partners[0].name in ("", one.comm.name)
        linked.append(_joined(one, partners[0]) if fits else one)
        by_id += fits
    if by_id:
        return tuple(linked), by_id, 0
    for table in (other.comms, other.marks):
        comms = list(table.values())
        if collectives and _same_sequence(collectives, comms):
            pairs = zip(collectives, comms, strict=True)
            return tuple(_joined(one, comm) for one, comm in pairs), 0, len(collectives)
    return tuple(collectives), 0, 0


def _same_sequence(collectives: _Collectives, comms: Sequence[Comm]) -> bool:
    if [one.comm.name for one in collectives] != [comm.name for comm in comms]:
        return False
    pairs = zip(collectives, comms, strict=True)
    return not any(comm.size_bytes < one.comm.size_bytes for one, comm in pairs)


def _joined(one: TracedCollective, other: Comm) -> TracedCollective:
    """Kineto's values come first; sizes of an execution trace are those of whole tensors."""
    comm = one.comm
    merged = replace(
        comm,
        sequence=other.sequence if comm.sequence == MISSING else comm.sequence,
        size_bytes=max(comm.size_bytes, other.size_bytes),
        group=comm.group or other.group,
        group_ranks=comm.group_ranks or other.group_ranks,
    )
    return replace(one, comm=merged)
