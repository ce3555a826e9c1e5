"""Finds where training steps begin and end.

From `ProfilerStep#n`, else from an annotation that repeats, else the whole trace is one step.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autotune.arrays import IntArray
from autotune.errors import InvalidInput
from autotune.profiling.formats.rank_trace import (
    INFERRED,
    MISSING,
    WHOLE,
    Category,
    RankTrace,
    Repair,
    TracedStep,
)
from autotune.recordings.job_file import ORDINARY_STEPS

_STEP = re.compile(r"ProfilerStep#(\d{1,15})$")
_UPDATE = "Optimizer.step#"
_REPEATED = (
    _UPDATE,
    "Optimizer.zero_grad#",
    "DistributedDataParallel.forward",
    "enumerate(DataLoader)#",
)
FEWEST = 2
"""An annotation must occur more often than this before steps are inferred from it."""
CUT_OFF = 1
"""Repetitions by which annotations of once per step differ at the edges of a recording."""


def find_steps(trace: RankTrace) -> RankTrace:
    """Return the trace with its steps, and with repairs for steps that are empty or inferred.

    Raises `InvalidInput` if two steps have one number.
    """
    annotated = _annotated(trace)
    steps = _with_work(trace, annotated)
    repairs = list(trace.repairs)
    if len(steps) < len(annotated):
        repairs.append(Repair("empty profiler step, left out", len(annotated) - len(steps)))
    if steps:
        return replace(trace, steps=tuple(steps), repairs=tuple(repairs))
    steps, name = _inferred(trace)
    missing = "no ProfilerStep annotations" + " with work" * bool(annotated)
    if steps:
        repair = Repair(f"{missing}; {len(steps)} steps inferred from {name!r}")
    else:
        steps = [TracedStep(0, 0.0, float(trace.end_s.max()), WHOLE)]
        cause = "nothing that repeats once per step"
        repair = Repair(f"{missing} and {cause}; the whole trace is taken as one step")
    return replace(trace, steps=tuple(steps), repairs=(*repairs, repair))


def _annotated(trace: RankTrace) -> list[TracedStep]:
    """Steps from annotations.

    A step ends where the next one begins and so includes what the script does between the two. The
    next one may be an ordinary step, which was not recorded. The last one ends where its annotation
    ends.
    """
    marks = []
    ordinary_s = []
    for event in np.flatnonzero(trace.category == Category.HOST_MARK).tolist():
        if trace.name_of(event) == ORDINARY_STEPS:
            ordinary_s.append(float(trace.start_s[event]))
        if match := _STEP.match(trace.name_of(event)):
            start_s = float(trace.start_s[event])
            end_s = float(trace.start_s[event] + trace.duration_s[event])
            marks.append((start_s, end_s, int(match.group(1))))
    marks.sort()
    numbers = Counter(number for _, _, number in marks)
    if numbers and (most := numbers.most_common(1)[0])[1] > 1:
        raise InvalidInput(
            f"{trace.source} must name each step once, but has ProfilerStep#{most[0]} {most[1]} "
            "times; are these several runs in one file?"
        )
    begins_s = np.sort([start_s for start_s, _, _ in marks] + ordinary_s)
    steps = []
    for start_s, end_s, number in marks:
        following = int(np.searchsorted(begins_s, start_s, side="right"))
        next_s = float(begins_s[following]) if following < len(begins_s) else end_s
        steps.append(TracedStep(number, start_s, next_s))
    return steps


def _with_work(trace: RankTrace, steps: list[TracedStep]) -> list[TracedStep]:
    """The steps in which the host begins an op or a collective; a driver call, without any op.

    The profiler opens a step after the script's last one. It ends with the recording, and holds
    the profiler's own driver calls and kernels of the steps before.
    """
    is_collective = (trace.category == Category.HOST_MARK) & (trace.comm != MISSING)
    is_work = (trace.category == Category.HOST_OP) | is_collective
    work_s = trace.start_s[is_work if is_work.any() else trace.category == Category.RUNTIME]
    first = np.searchsorted(work_s, [step.start_s for step in steps])
    last = np.searchsorted(work_s, [step.end_s for step in steps])
    return [step for step, works in zip(steps, (last > first).tolist(), strict=True) if works]


def _inferred(trace: RankTrace) -> tuple[list[TracedStep], str]:
    """Steps between the repetitions of an annotation that occurs once per step, and its name.

    Annotations with the fewest repetitions come first: an optimizer steps several times per step in
    a GAN, and once per parameter where each one has its own. Events before the first and after the
    last repetition are cut off.
    """
    named = list(enumerate(trace.names))
    candidates: list[tuple[str, IntArray]] = []
    for prefix in _REPEATED:
        # the order of the names differs between ranks whose recordings begin elsewhere in a step
        for name, number in sorted((name, at) for at, name in named if name.startswith(prefix)):
            events = np.flatnonzero((trace.name == number) & (trace.category == Category.HOST_MARK))
            if len(events) > FEWEST:
                candidates.append((name, events))
    if not candidates:
        return [], ""
    least = min(len(events) for _, events in candidates)
    name, events = next(one for one in candidates if len(one[1]) <= least + CUT_OFF)
    cuts_s = (trace.end_s if name.startswith(_UPDATE) else trace.start_s)[events].tolist()
    steps = [
        TracedStep(step, start_s, end_s, INFERRED)
        for step, (start_s, end_s) in enumerate(pairwise(cuts_s))
    ]
    return [step for step in steps if step.end_s > step.start_s], name
