"""Where training steps begin and end: from `ProfilerStep#n`, else from what repeats, else the whole trace is one step."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autotune.profiling.traces.rank_trace import Category, RankTrace, Repair, Step

_STEP = re.compile(r"ProfilerStep#(\d{1,15})$")
_REPEATED = ("Optimizer.step#", "Optimizer.zero_grad#", "DistributedDataParallel.forward")
FEWEST = 2
"""Occurrences of an annotation before steps are inferred from it."""


def find_steps(trace: RankTrace) -> RankTrace:
    """The same trace with its steps, and a repair where they had to be inferred."""
    found = _annotated(trace)
    if found:
        return replace(trace, steps=tuple(found))
    inferred, name = _inferred(trace)
    if inferred:
        told = Repair(f"no ProfilerStep annotations; {len(inferred)} steps inferred from {name!r}")
        return replace(trace, steps=tuple(inferred), repairs=(*trace.repairs, told))
    whole = Step(0, 0.0, float(trace.end_s.max()), "whole trace")
    told = Repair(
        "no ProfilerStep annotations and nothing that repeats once per step; the whole trace is taken as one step"
    )
    return replace(trace, steps=(whole,), repairs=(*trace.repairs, told))


def _annotated(trace: RankTrace) -> list[Step]:
    """A step ends where the next one begins, so that what a script does between two is part of it; the last one where it says."""
    marks = [
        (
            float(trace.start_s[event]),
            float(trace.start_s[event] + trace.duration_s[event]),
            int(match.group(1)),
        )
        for event in np.flatnonzero(trace.category == Category.HOST_MARK)
        if (match := _STEP.match(trace.name_of(int(event))))
    ]
    marks.sort()
    ends = [start for start, _, _ in marks[1:]] + [marks[-1][1]] if marks else []
    return [Step(number, start, end) for (start, _, number), end in zip(marks, ends, strict=True)]


def _inferred(trace: RankTrace) -> tuple[list[Step], str]:
    """Steps from one end of an annotation that comes once per step to the next: what lies before the first and behind the last is cut."""
    for prefix in _REPEATED:
        numbers = [n for n, name in enumerate(trace.names) if name.startswith(prefix)]
        for number in numbers:
            events = np.flatnonzero((trace.name == number) & (trace.category == Category.HOST_MARK))
            if len(events) > FEWEST:
                cuts = trace.end_s[events] if "step" in prefix else trace.start_s[events]
                steps = [
                    Step(k, float(a), float(b), "inferred")
                    for k, (a, b) in enumerate(pairwise(cuts))
                ]
                return [step for step in steps if step.end_s > step.start_s], trace.names[number]
    return [], ""
