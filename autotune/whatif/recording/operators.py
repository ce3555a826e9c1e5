"""Which operator of the framework an op belongs to: by nesting on its thread, or by its ids."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence

import numpy as np

from autotune.arrays import Int32Array
from autotune.dfg.graph import NONE
from autotune.profiling.formats.rank_trace import DEVICE_WORK, MISSING, Category, RankTrace
from autotune.profiling.graph.host_units import TICK_S
from autotune.whatif.base import Operator

_OPTIMIZER = re.compile(r"Optimizer\.step#(.+)\.step$")
"""The annotation that torch puts around the step of an optimizer; the group is its class."""


def operators_of(
    trace: RankTrace, events: Sequence[int]
) -> tuple[Int32Array, tuple[Operator, ...]]:
    """(N,) the number of each event's operator, NONE if unknown, and the operators' calls.

    `events` (N,): events of the trace, of the host and of devices; MISSING for none. An operator
    calls others; an event belongs to the innermost one. A device event belongs to the operator with
    its external id, or else to the one around the call with its correlation id.
    """
    innermost, around = _nesting(trace, events)
    by_external = {int(trace.external[event]): event for event in innermost.values()}
    by_external.pop(MISSING, None)
    by_correlation = {int(trace.correlation[event]): call for event, call in innermost.items()}
    numbers: dict[int, int] = {}
    operator_of = np.full(len(events), NONE, dtype=np.int32)
    for place, event in enumerate(events):
        call = innermost.get(event, MISSING)
        if event != MISSING and trace.category[event] in DEVICE_WORK:
            launcher = by_correlation.get(int(trace.correlation[event]), MISSING)
            call = by_external.get(int(trace.external[event]), launcher)
        if call != MISSING:
            operator_of[place] = numbers.setdefault(call, len(numbers))
    marks = _optimizer_marks(trace)
    return operator_of, tuple(_operator(trace, call, around, marks) for call in numbers)


def _operator(
    trace: RankTrace, call: int, around: dict[int, int], marks: dict[int, list[int]]
) -> Operator:
    inputs = int(trace.inputs[call])
    names: list[str] = []
    outer = around[call]
    while outer != MISSING:
        names.insert(0, trace.name_of(outer))
        outer = around[outer]
    return Operator(
        trace.name_of(call),
        tuple(names),
        None if inputs == MISSING else trace.op_inputs[inputs],
        _optimizer(trace, call, marks.get(int(trace.lane[call]), [])),
    )


def _optimizer_marks(trace: RankTrace) -> dict[int, list[int]]:
    """Lane -> the annotations of optimizers' steps, in order of time."""
    named = np.array([bool(_OPTIMIZER.match(name)) for name in trace.names], dtype=np.bool_)
    marks: dict[int, list[int]] = {}
    for mark in np.flatnonzero((trace.category == Category.HOST_MARK) & named[trace.name]).tolist():
        marks.setdefault(int(trace.lane[mark]), []).append(mark)
    return marks


def _optimizer(trace: RankTrace, call: int, marks: Sequence[int]) -> str:
    """The class of the optimizer whose step is around a call; `marks`: those of its thread."""
    start_s = float(trace.start_s[call])
    place = bisect.bisect_right(marks, start_s, key=lambda mark: float(trace.start_s[mark])) - 1
    if place < 0 or start_s >= trace.end_s[marks[place]]:
        return ""
    marked = _OPTIMIZER.match(trace.name_of(marks[place]))
    assert marked is not None
    return marked[1]


def _nesting(trace: RankTrace, events: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Event -> the innermost operator around it, itself included; operator -> the one around it.

    For all events of host threads from the first of `events` to the last one.
    """
    known = np.array([event for event in events if event != MISSING], dtype=np.int64)
    innermost: dict[int, int] = {}
    around: dict[int, int] = {}
    if not len(known):
        return innermost, around
    host = np.isin(trace.category, (Category.HOST_OP, Category.RUNTIME))
    # device events follow the calls that launch them; an operator may begin before its calls
    until_s = float(trace.start_s[known].max())
    stacks: dict[int, list[tuple[int, float]]] = {}
    for event in np.flatnonzero(host & (trace.start_s <= until_s)).tolist():
        start_s = float(trace.start_s[event])
        stack = stacks.setdefault(int(trace.lane[event]), [])
        while stack and stack[-1][1] <= start_s + TICK_S:
            stack.pop()
        if trace.category[event] == Category.HOST_OP:
            around[event] = stack[-1][0] if stack else MISSING
            stack.append((event, start_s + float(trace.duration_s[event])))
        if stack:
            innermost[event] = stack[-1][0]
    return innermost, around
