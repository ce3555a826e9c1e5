"""Cuts host threads into segments: stretches during which the same event is the innermost one.

Events of a thread nest (an operator calls another, which calls the driver), but a graph needs to
know what follows what. So the time of an event that none of its children takes becomes segments of
its own. Where no event is open, the thread idles or runs code that the profiler does not see; that
is a gap. Annotations and module frames are no work. They only state layer and kind of the ops
inside. The time of one that is open within an event belongs to that event.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from autotune.dfg.graph import Kind
from autotune.profiling.formats.collective_args import is_executing_mark
from autotune.profiling.formats.rank_trace import MISSING, Category, RankTrace
from autotune.profiling.graph.host_units import TICK_S, host_units
from autotune.profiling.graph.layers import find_layers

_NO_LAYER = re.compile(
    r"ProfilerStep#|enumerate\(DataLoader\)|(?:nccl|gloo|ucc|mpi):|autotune\.|Optimizer\.|"
    r"DistributedDataParallel\.forward|## (?:forward|backward|optimizer|zero_grad) ##"
)
_BACKWARD = re.compile(r"\w+Backward\d*")
MXNET_BACKWARD = re.compile(r"\[?_backward_")
"""Operators of MXNet's backward pass; brackets are around several that run as one."""
_MODULE = re.compile(r"nn\.Module: ")


@dataclass(frozen=True, slots=True)
class Scope:
    """Kind, layer and collective event by the enclosing events; layer "" where none states it."""

    kind: Kind
    layer: str
    collective: int = MISSING


NO_SCOPE = Scope(Kind.OTHER, "")


@dataclass(slots=True)
class HostSegment:
    """A stretch of a host thread. `first`: whether it is the first segment of its event."""

    event: int
    lane: int
    start_s: float
    end_s: float
    scope: Scope
    first: bool


def host_segments(trace: RankTrace, events: Iterable[int]) -> dict[int, list[HostSegment]]:
    """Lane -> segments in order of time, of the given host events (ascending numbers)."""
    by_lane: dict[int, list[int]] = {}
    for event in events:
        by_lane.setdefault(int(trace.lane[event]), []).append(event)
    segments = {lane: list(_segments(trace, lane, events)) for lane, events in by_lane.items()}
    _set_layers(trace, sorted(chain(*by_lane.values())), segments)
    return segments


@dataclass(slots=True)
class _OpenEvent:
    event: int
    end_s: float
    work: bool
    scope: Scope
    emitted: bool = False


def _segments(trace: RankTrace, lane: int, events: list[int]) -> Iterator[HostSegment]:
    stack: list[_OpenEvent] = []
    cursor_s = 0.0

    def emit(until_s: float) -> Iterator[HostSegment]:
        nonlocal cursor_s
        top = stack[-1]
        working = next((one for one in reversed(stack) if one.work), None)
        if working is not None:
            is_first = working is top and not working.emitted
            if until_s > cursor_s or is_first:
                end_s, first = max(until_s, cursor_s), not working.emitted
                yield HostSegment(working.event, lane, cursor_s, end_s, top.scope, first)
                working.emitted = True
        cursor_s = max(cursor_s, until_s)

    def close(until_s: float) -> Iterator[HostSegment]:
        while stack and stack[-1].end_s <= until_s:
            yield from emit(stack[-1].end_s)
            stack.pop()

    for event in events:
        start_s = float(trace.start_s[event])
        end_s = start_s + float(trace.duration_s[event])
        yield from close(start_s + TICK_S)
        if stack:
            # profilers round to microseconds, so a child may seem to outlive its parent
            end_s = min(end_s, stack[-1].end_s)
            if start_s > cursor_s:
                yield from emit(start_s)
        cursor_s = max(cursor_s, start_s)
        category, name = trace.category[event], trace.name_of(event)
        work = category in (Category.HOST_OP, Category.RUNTIME)
        work = work or (category == Category.HOST_MARK and is_executing_mark(name))
        scope = _scope(trace, event, name, stack[-1].scope if stack else NO_SCOPE)
        stack.append(_OpenEvent(event, end_s, work, scope))
    yield from close(np.inf)


def _scope(trace: RankTrace, event: int, name: str, outer: Scope) -> Scope:
    scope = outer
    if trace.comm[event] != MISSING:
        scope = replace(scope, collective=event)
    if trace.category[event] in (Category.HOST_MARK, Category.MODULE):
        kind = _marked_kind(name) or scope.kind
        layer = scope.layer if _NO_LAYER.match(name) else _MODULE.sub("", name).strip("# ")
        scope = replace(scope, kind=kind, layer=layer)
    elif name.startswith("autograd::engine::evaluate_function"):
        scope = replace(scope, kind=Kind.BACKWARD)
    elif scope.kind == Kind.OTHER:
        if _BACKWARD.fullmatch(name) or MXNET_BACKWARD.match(name):
            scope = replace(scope, kind=Kind.BACKWARD)
        elif trace.sequence[event] >= 0 and name.startswith("aten::"):
            # autograd numbers the ops that it will have to differentiate
            scope = replace(scope, kind=Kind.FORWARD)
    return scope


def _marked_kind(name: str) -> Kind | None:
    """The kind of the ops inside an annotation or module frame, None where it states none."""
    plain = name.strip("# ")
    if is_executing_mark(name):
        return Kind.COLLECTIVE
    if name.startswith("Optimizer.step") or plain == "optimizer":
        return Kind.UPDATE
    if name.startswith("enumerate(DataLoader)"):
        return Kind.LOAD
    if plain == "forward" or name.startswith("DistributedDataParallel.forward"):
        return Kind.FORWARD
    return None


def _set_layers(
    trace: RankTrace, events: Sequence[int], segments: Mapping[int, Sequence[HostSegment]]
) -> None:
    """Give segments the layers of the units that they are of.

    An annotation around a whole forward pass states no layer.
    """
    first = {one.event: one.scope for of_lane in segments.values() for one in of_lane if one.first}
    stated = {event: scope.layer for event, scope in first.items() if scope.layer}
    updates = {event for event, scope in first.items() if scope.kind == Kind.UPDATE}
    units = host_units(trace, events)
    phases = find_layers(units.units, trace.steps, stated, updates)
    for of_lane in segments.values():
        for segment in of_lane:
            scope, unit = segment.scope, units.of_event.get(segment.event)
            layer = unit.layer if unit is not None and unit.layer else scope.layer
            layer = "" if layer in phases else layer
            if layer != scope.layer:
                segment.scope = Scope(scope.kind, layer, scope.collective)
