"""The collectives of one rank: where each of them ran, and all that the trace says about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autotune.profiling.traces.comm_args import MESSAGE, PARAM_COMMS
from autotune.profiling.traces.host_segments import is_executing_mark
from autotune.profiling.traces.rank_trace import MISSING, Category, Comm, RankTrace


@dataclass(frozen=True)
class Collective:
    """`event`: the kernel, or the annotation of the thread that ran it. `issued_s`: its start where the trace does not tell more.

    `step`: index among the rank's steps of the one it was issued in, MISSING outside of all. `functions`: record-function ids of the event
    and of the host events that issued it, the innermost first.
    """

    event: int
    start_s: float
    end_s: float
    issued_s: float
    step: int
    comm: Comm
    functions: tuple[int, ...] = ()


def rank_collectives(trace: RankTrace) -> list[Collective]:
    """In order of issue. A kernel takes name, size and group from its own arguments and from the host events that enclose its launch."""
    launches = launch_events(trace)
    host_comms = _HostComms(trace)
    found = []
    for event in np.flatnonzero(trace.comm != MISSING).tolist():
        category = trace.category[event]
        if category == Category.KERNEL:
            launch = launches.get(int(trace.correlation[event]), MISSING)
            hosts = host_comms.around(event, launch)
            comm = _merged(
                [
                    trace.comms[trace.comm[one]]
                    for one in (event, *hosts)
                    if trace.comm[one] != MISSING
                ]
            )
            functions = _functions(trace, hosts)
            issued_s = float(trace.start_s[launch if launch != MISSING else event])
        elif category == Category.HOST_MARK and is_executing_mark(trace.name_of(event)):
            comm = trace.comms[trace.comm[event]]
            issued_s = float(trace.start_s[event]) - comm.queued_s
            functions = _functions(trace, [event])
        else:
            continue
        start_s = float(trace.start_s[event])
        end_s = start_s + float(trace.duration_s[event])
        found.append(
            Collective(event, start_s, end_s, issued_s, step_of(trace, issued_s), comm, functions)
        )
    found.sort(key=lambda one: (one.issued_s, one.start_s))
    return _without_enclosed(trace, found)


def launch_events(trace: RankTrace) -> Mapping[int, int]:
    """Correlation id -> driver call."""
    calls = np.flatnonzero((trace.category == Category.RUNTIME) & (trace.correlation >= 0))
    return dict(zip(trace.correlation[calls].tolist(), calls.tolist(), strict=True))


def step_of(trace: RankTrace, at_s: float) -> int:
    """Index of the step that runs at `at_s`, MISSING if none does."""
    starts = [step.start_s for step in trace.steps]
    number = int(np.searchsorted(starts, at_s, side="right")) - 1
    return number if number >= 0 and at_s < trace.steps[number].end_s else MISSING


def _without_enclosed(trace: RankTrace, found: list[Collective]) -> list[Collective]:
    """A message of this package's recorder stands for the backend's collective inside it."""
    messages = [one for one in found if trace.name_of(one.event).startswith(MESSAGE)]
    if not messages:
        return found
    starts, ends = (
        np.array([one.start_s for one in messages]),
        np.array([one.end_s for one in messages]),
    )
    lanes = np.array([trace.lane[one.event] for one in messages])
    kept = []
    for one in found:
        inside = (starts <= one.start_s) & (one.end_s <= ends) & (lanes == trace.lane[one.event])
        if trace.name_of(one.event).startswith(MESSAGE) or not inside.any():
            kept.append(one)
    return kept


def _functions(trace: RankTrace, events: list[int]) -> tuple[int, ...]:
    return tuple(int(trace.function[event]) for event in events if trace.function[event] >= 0)


class _HostComms:
    """Host events with something to say about a collective, by thread; of older traces those that say so by their name only."""

    def __init__(self, trace: RankTrace) -> None:
        self.trace = trace
        named = np.array([name == PARAM_COMMS for name in trace.names], dtype=np.bool_)
        host = np.isin(trace.category, (Category.HOST_OP, Category.HOST_MARK)) & (
            (trace.comm != MISSING) | named[trace.name]
        )
        events = np.flatnonzero(host)
        self.by_lane = {
            int(lane): events[trace.lane[events] == lane] for lane in np.unique(trace.lane[events])
        }
        self.by_external = {
            int(trace.external[e]): int(e) for e in events.tolist() if trace.external[e] >= 0
        }

    def around(self, kernel: int, launch: int) -> list[int]:
        """The events that enclose the kernel's launch, the innermost first; else the one with its external id."""
        trace = self.trace
        if launch != MISSING:
            own = self.by_lane.get(int(trace.lane[launch]), np.empty(0, dtype=np.int64))
            at_s = trace.start_s[launch]
            inside = own[
                (trace.start_s[own] <= at_s) & (at_s <= trace.start_s[own] + trace.duration_s[own])
            ]
            enclosing: list[int] = inside[::-1].tolist()
            return enclosing
        event = self.by_external.get(int(trace.external[kernel]))
        return [] if event is None else [event]


def _merged(said: list[Comm]) -> Comm:
    """The first that says something decides, field by field; a send-receive kernel is what the host called it."""
    names = [comm.name for comm in said if comm.name and comm.name != "send_recv"] or [
        comm.name for comm in said if comm.name
    ]
    merged = replace(said[0], name=names[0] if names else "")
    for comm in said[1:]:
        merged = replace(
            merged,
            size_bytes=merged.size_bytes or comm.size_bytes,
            dtype=merged.dtype or comm.dtype,
            group=merged.group or comm.group,
            group_ranks=merged.group_ranks or comm.group_ranks,
            sequence=merged.sequence if merged.sequence != MISSING else comm.sequence,
            root=merged.root if merged.root != MISSING else comm.root,
            peer=merged.peer if merged.peer != MISSING else comm.peer,
        )
    return merged
