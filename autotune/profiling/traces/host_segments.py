"""Host threads as sequences of segments: stretches during which one and the same event is the innermost.

Events of a thread nest (an operator calls another, which calls the driver). A graph needs what follows what, so the time of an event
that none of its children takes becomes segments of its own; where no event is open the thread idles, or runs code that the profiler
does not see, and that is a gap. Annotations and module frames are no work: they only tell layer and kind of what runs inside,
and the time of one that is open within an event is that event's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from autotune.dfg.graph import Kind
from autotune.profiling.traces.rank_trace import MISSING, Category, RankTrace

_EXECUTING_MARK = re.compile(r"(?:gloo|ucc|mpi):|autotune\.message#")
"""Annotations that are the collective itself, run by a thread of the backend; `nccl:` encloses a launch only."""
_NO_LAYER = re.compile(
    r"ProfilerStep#|enumerate\(DataLoader\)|(?:nccl|gloo|ucc|mpi):|autotune\.|Optimizer\.|DistributedDataParallel\.forward|"
    r"## (?:forward|backward|optimizer|zero_grad) ##"
)
_BACKWARD = re.compile(r"\w+Backward\d*")
_MODULE = re.compile(r"nn\.Module: ")


@dataclass(slots=True)
class Segment:
    """`event` is the innermost one. `first` is True for the first segment of its event; `scope` says what encloses it."""

    event: int
    lane: int
    start_s: float
    end_s: float
    scope: Scope
    first: bool


@dataclass(frozen=True, slots=True)
class Scope:
    """Kind and layer by the enclosing events; the layer is "" where none of them tells."""

    kind: Kind
    layer: str
    collective: int = MISSING


NO_SCOPE = Scope(Kind.OTHER, "")


def is_executing_mark(name: str) -> bool:
    return _EXECUTING_MARK.match(name) is not None


def host_segments(trace: RankTrace, events: Iterable[int]) -> dict[int, list[Segment]]:
    """Segments of every host thread in order of time, from the host events given (ascending numbers)."""
    lanes: dict[int, list[int]] = {}
    for event in events:
        lanes.setdefault(int(trace.lane[event]), []).append(event)
    found = {lane: list(_segments(trace, lane, own)) for lane, own in lanes.items()}
    forward = _forward_layers(trace, found)
    return {lane: _backward_scopes(trace, own, forward) for lane, own in found.items()}


@dataclass(slots=True)
class _Open:
    event: int
    end_s: float
    work: bool
    scope: Scope
    emitted: bool = False


def _segments(trace: RankTrace, lane: int, events: list[int]) -> Iterator[Segment]:
    stack: list[_Open] = []
    cursor = 0.0

    def emit(until_s: float) -> Iterator[Segment]:
        nonlocal cursor
        top = stack[-1]
        own = next((one for one in reversed(stack) if one.work), None)
        if own is not None and (until_s > cursor or (own is top and not own.emitted)):
            yield Segment(own.event, lane, cursor, max(until_s, cursor), top.scope, not own.emitted)
            own.emitted = True
        cursor = max(cursor, until_s)

    def close(until_s: float) -> Iterator[Segment]:
        while stack and stack[-1].end_s <= until_s:
            yield from emit(stack[-1].end_s)
            stack.pop()

    for event in events:
        start_s = float(trace.start_s[event])
        end_s = start_s + float(trace.duration_s[event])
        yield from close(start_s)
        if stack:
            end_s = min(
                end_s, stack[-1].end_s
            )  # profilers round to microseconds, so a child may seem to outlive its parent
            if start_s > cursor:
                yield from emit(start_s)
        cursor = max(cursor, start_s)
        category, name = trace.category[event], trace.name_of(event)
        work = category in (Category.HOST_OP, Category.RUNTIME) or (
            category == Category.HOST_MARK and is_executing_mark(name)
        )
        scope = _scope(trace, event, name, stack[-1].scope if stack else NO_SCOPE)
        stack.append(_Open(event, end_s, work, scope))
    yield from close(np.inf)


def _scope(trace: RankTrace, event: int, name: str, outer: Scope) -> Scope:
    category = trace.category[event]
    kind, layer, collective = outer.kind, outer.layer, outer.collective
    if trace.comm[event] != MISSING:
        collective = event
    if category in (Category.HOST_MARK, Category.MODULE):
        if name.startswith("Optimizer.step") or name.strip("# ") == "optimizer":
            kind = Kind.UPDATE
        elif name.startswith("enumerate(DataLoader)"):
            kind = Kind.LOAD
        elif name.strip("# ") == "forward" or name.startswith("DistributedDataParallel.forward"):
            kind = Kind.FORWARD
        if is_executing_mark(name):
            kind = Kind.COLLECTIVE
        if not _NO_LAYER.match(name):
            layer = _MODULE.sub("", name).strip("# ")
    elif name.startswith("autograd::engine::evaluate_function") or (
        kind == Kind.OTHER and _BACKWARD.fullmatch(name)
    ):
        kind = Kind.BACKWARD
    elif kind == Kind.OTHER and trace.sequence[event] >= 0 and name.startswith("aten::"):
        kind = Kind.FORWARD  # autograd numbers what it will have to differentiate
    if (kind, layer, collective) == (outer.kind, outer.layer, outer.collective):
        return outer
    return Scope(kind, layer, collective)


def _forward_layers(trace: RankTrace, lanes: dict[int, list[Segment]]) -> dict[int, str]:
    """Layer of each autograd sequence number, from the annotations or modules that enclose the forward op."""
    layers: dict[int, str] = {}
    for own in lanes.values():
        for segment in own:
            sequence = int(trace.sequence[segment.event])
            if sequence >= 0 and segment.scope.layer and segment.scope.kind != Kind.BACKWARD:
                layers.setdefault(sequence, segment.scope.layer)
    return layers


def _backward_scopes(
    trace: RankTrace, segments: list[Segment], layers: dict[int, str]
) -> list[Segment]:
    """Backward ops get the layer of the forward op with their sequence number, and what they call with them."""
    if not layers:
        return segments
    layer, until_s = "", -1.0
    for segment in segments:
        if segment.scope.kind != Kind.BACKWARD:
            continue
        sequence = int(trace.sequence[segment.event])
        if sequence >= 0 and segment.first and segment.start_s >= until_s:
            layer = layers.get(sequence, "")
            until_s = float(trace.start_s[segment.event] + trace.duration_s[segment.event])
        if layer and segment.start_s < until_s:
            segment.scope = Scope(segment.scope.kind, layer, segment.scope.collective)
    return segments
