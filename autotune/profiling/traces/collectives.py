"""The collectives of one rank: where each ran, and what the trace states about it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autotune.profiling.formats.collective_args import MESSAGE, PARAM_COMMS, is_executing_mark
from autotune.profiling.formats.rank_trace import MISSING, Category, Comm, RankTrace


@dataclass(frozen=True)
class TracedCollective:
    """One collective on one rank.

    - `event`: the kernel, or the annotation of the thread that ran the collective.
    - `issued_s`: the start of the event where the trace states nothing better.
    - `step`: index of the rank's step that issued the collective, MISSING outside of all steps.
    - `functions`: record-function ids of the event and its issuing host events, innermost first.
    """

    event: int
    start_s: float
    end_s: float
    issued_s: float
    step: int
    comm: Comm
    functions: tuple[int, ...] = ()


def rank_collectives(trace: RankTrace) -> list[TracedCollective]:
    """The rank's collectives in order of issue.

    A kernel takes name, size and group from its own arguments and from the host events that
    enclose its launch.
    """
    host_comms = _HostComms(trace)
    collectives = []
    for event in np.flatnonzero(trace.comm != MISSING).tolist():
        start_s = float(trace.start_s[event])
        if trace.category[event] == Category.KERNEL:
            launch = int(trace.launch[event])
            hosts = host_comms.around(event, launch)
            comms = [int(trace.comm[one]) for one in (event, *hosts)]
            comm = _merged([trace.comms[number] for number in comms if number != MISSING])
            issued_s = float(trace.start_s[launch if launch != MISSING else event])
        elif trace.category[event] == Category.HOST_MARK and is_executing_mark(
            trace.name_of(event)
        ):
            hosts = [event]
            comm = trace.comms[trace.comm[event]]
            issued_s = start_s - comm.queued_s
        else:
            continue
        ids = trace.function[hosts].tolist()
        functions = tuple(number for number in ids if number >= 0)
        end_s = start_s + float(trace.duration_s[event])
        step = step_of(trace, issued_s)
        collectives.append(TracedCollective(event, start_s, end_s, issued_s, step, comm, functions))
    collectives.sort(key=lambda one: (one.issued_s, one.start_s))
    return _without_enclosed(trace, collectives)


def step_of(trace: RankTrace, at_s: float) -> int:
    """Index of the step that runs at `at_s`, MISSING if none does."""
    starts = [step.start_s for step in trace.steps]
    number = int(np.searchsorted(starts, at_s, side="right")) - 1
    return number if number >= 0 and at_s < trace.steps[number].end_s else MISSING


def _without_enclosed(
    trace: RankTrace, collectives: list[TracedCollective]
) -> list[TracedCollective]:
    """Keep a message of this package's recorder instead of the backend's collective inside it."""
    events = [one.event for one in collectives]
    is_message = np.array(
        [trace.name_of(event).startswith(MESSAGE) for event in events], dtype=bool
    )
    if not is_message.any():
        return collectives
    starts_s = np.array([one.start_s for one in collectives])
    ends_s = np.array([one.end_s for one in collectives])
    lanes = trace.lane[events]
    unrepeated = []
    for number, one in enumerate(collectives):
        within = (starts_s <= one.start_s) & (one.end_s <= ends_s) & (lanes == lanes[number])
        if is_message[number] or not (within & is_message).any():
            unrepeated.append(one)
    return unrepeated


class _HostComms:
    """Host events that state something about a collective, by thread.

    In older traces only their name states it.
    """

    def __init__(self, trace: RankTrace) -> None:
        self.trace = trace
        named = np.array([name == PARAM_COMMS for name in trace.names], dtype=np.bool_)
        on_host = np.isin(trace.category, (Category.HOST_OP, Category.HOST_MARK))
        events = np.flatnonzero(on_host & ((trace.comm != MISSING) | named[trace.name]))
        lanes = trace.lane[events]
        self.by_lane = {int(lane): events[lanes == lane] for lane in np.unique(lanes)}
        self.by_external = {
            int(trace.external[e]): int(e) for e in events.tolist() if trace.external[e] >= 0
        }

    def around(self, kernel: int, launch: int) -> list[int]:
        """The events around the kernel's launch, innermost first; else the one with its id."""
        trace = self.trace
        if launch == MISSING:
            event = self.by_external.get(int(trace.external[kernel]))
            return [] if event is None else [event]
        events = self.by_lane.get(int(trace.lane[launch]), np.empty(0, dtype=np.int64))
        at_s = trace.start_s[launch]
        ends_s = trace.start_s[events] + trace.duration_s[events]
        inside = (trace.start_s[events] <= at_s) & (at_s <= ends_s)
        enclosing: list[int] = events[inside][::-1].tolist()
        return enclosing


def _merged(comms: list[Comm]) -> Comm:
    """Merge field by field: the first event that states a field decides.

    A send-receive kernel takes the host's name for the collective.
    """
    names = [comm.name for comm in comms if comm.name]
    specific = [name for name in names if name != "send_recv"] or names
    merged = replace(comms[0], name=specific[0] if specific else "")
    for comm in comms[1:]:
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
