"""Splits the recorded steps of one rank into computation and communication.

The input are the events of its Kineto trace. All values are medians over the steps. Computation is
operators on the host, or kernels and copies where there is a device. Waiting for a collective is no
computation.

| symbol | meaning | unit |
|---|---|---|
| M | disjoint intervals, ascending | - |
| intervals | starts and ends, shape (M, 2) | us |
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from autotune.arrays import FloatArray
from autotune.errors import InvalidInput

Event = Mapping[str, Any]

TOP_OPS = 10
ROUNDING_S = 1e-6
"""Differences of sums of times, as `exposed_s`, may fall below 0 by this much."""
_NO_WORK = re.compile(r"c10d::|autograd::engine::|torch::autograd::|record_param_comms|Profiler")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP = "ProfilerStep#"
_UPDATE = "Optimizer.step#"
_BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class OpTime:
    """An operator or kernel by name: seconds per step without its callees, and calls per step."""

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    self_s: float
    calls: float

    def __post_init__(self) -> None:
        refuse_negative(f"op {self.name[:80]!r}", self.self_s, self.calls)


@dataclass(frozen=True)
class StepBreakdown:
    """The parts of a median step.

    - `forward_s`: until the backward pass begins; `backward_s`: until its last operator ends;
      `rest_s`: the rest.
    - `computation_s`, `communication_s`: while anything is computed, while a collective runs.
    - `exposed_s`: while a collective runs and nothing is computed.
    - `updated_steps`: steps in which an optimizer of torch steps.
    """

    __pydantic_config__ = {"extra": "forbid"}

    forward_s: float = 0.0
    backward_s: float = 0.0
    rest_s: float = 0.0
    computation_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    top_ops: tuple[OpTime, ...] = ()
    updated_steps: int = 0

    def __post_init__(self) -> None:
        passes_s = (self.forward_s, self.backward_s, self.rest_s)
        work_s = (self.computation_s, self.communication_s, self.exposed_s)
        refuse_negative("the parts of a step", *passes_s, *work_s, self.updated_steps)


def refuse_negative(what: str, *figures: float) -> None:
    """Raise `InvalidInput` unless all times and counts are finite and at least 0."""
    wrong = [figure for figure in figures if not -ROUNDING_S <= figure < math.inf]
    if wrong:
        raise InvalidInput(f"{what} must have finite figures of at least 0, but one is {wrong[0]}")


def step_times(
    events: Iterable[Event], collectives_us: Sequence[tuple[float, float]]
) -> StepBreakdown:
    """`collectives_us`: start and end of each collective, on the clock of the events."""
    spans = [
        event for event in events if event.get("ph") == "X" and isinstance(event.get("tid"), int)
    ]
    marks = [event for event in spans if event.get("cat") == "user_annotation"]
    steps = _intervals(event for event in marks if event["name"].startswith(_STEP))
    if not len(steps):
        return StepBreakdown()
    on_device = any(event.get("cat") in _ON_DEVICE for event in spans)
    work = [event for event in spans if _is_work(event, on_device)]
    computing, sending = union(_intervals(work)), union(np.array(collectives_us))
    backward = _intervals(
        event
        for event in spans
        if event["name"].startswith(_BACKWARD) and event.get("cat") != "gpu_user_annotation"
    )
    updates = _intervals(event for event in marks if event["name"].startswith(_UPDATE))[:, 0]
    updated = np.searchsorted(updates, steps[:, 1]) > np.searchsorted(updates, steps[:, 0])
    first, last = steps[0, 0], steps[-1, 1]
    inside = [event for event in work if first <= event["ts"] < last]
    return breakdown(
        steps, computing, sending, backward, _top_ops(inside, len(steps)), int(updated.sum())
    )


def breakdown(
    steps_us: FloatArray,
    computing_us: FloatArray,
    sending_us: FloatArray,
    backward_us: FloatArray,
    top_ops: tuple[OpTime, ...] = (),
    updated_steps: int = 0,
) -> StepBreakdown:
    """The parts of a median step, from intervals on one clock.

    Steps; the union of all computation and of all communication; work of the backward pass.
    """
    parts_s = (
        np.array([_parts(step, backward_us, computing_us, sending_us) for step in steps_us]) / 1e6
    )
    forward_s, backward_s, rest_s, *medians_s = np.median(parts_s, axis=0).tolist()
    computation_s, communication_s, exposed_s = medians_s
    return StepBreakdown(
        forward_s=forward_s,
        backward_s=backward_s,
        rest_s=rest_s,
        computation_s=computation_s,
        communication_s=communication_s,
        exposed_s=exposed_s,
        top_ops=top_ops,
        updated_steps=updated_steps,
    )


def _intervals(events: Iterable[Event]) -> FloatArray:
    """Start and end of the events, sorted, shape (M, 2)."""
    ends = sorted((event["ts"], event["ts"] + event.get("dur", 0.0)) for event in events)
    return np.array(ends, dtype=np.float64).reshape(-1, 2)


def _is_work(event: Event, on_device: bool) -> bool:
    if on_device:
        return event.get("cat") in _ON_DEVICE and "nccl" not in event["name"].lower()
    return event.get("cat") == "cpu_op" and not _NO_WORK.match(event["name"])


def _parts(
    step: FloatArray, backward: FloatArray, computing: FloatArray, sending: FloatArray
) -> tuple[float, ...]:
    """The figures of `StepBreakdown` for one step, us."""
    start, end = step
    inside = backward[(backward[:, 0] >= start) & (backward[:, 0] < end)]
    began = inside[:, 0].min(initial=end)
    ended = min(end, inside[:, 1].max(initial=began))
    computed, sent = _clipped(computing, start, end), _clipped(sending, start, end)
    either = _length(union(np.concatenate([computed, sent])))
    return (
        began - start,
        ended - began,
        end - ended,
        _length(computed),
        _length(sent),
        either - _length(computed),
    )


def union(intervals: FloatArray) -> FloatArray:
    """The union, as ascending intervals that do not touch."""
    merged: list[list[float]] = []
    for start, end in sorted(intervals.tolist()):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.array(merged, dtype=np.float64).reshape(-1, 2)


def _clipped(intervals: FloatArray, start: float, end: float) -> FloatArray:
    inside = intervals[(intervals[:, 1] > start) & (intervals[:, 0] < end)]
    return np.clip(inside, start, end)


def _length(intervals: FloatArray) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def _top_ops(work: Sequence[Event], steps: int) -> tuple[OpTime, ...]:
    """The ops with the most time of their own; events of a thread nest."""
    self_us: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in work:
        threads[event.get("pid"), event["tid"]].append(event)
    for of_thread in threads.values():
        enclosing: list[tuple[float, str]] = []  # end and name of the events around the next one
        for event in sorted(of_thread, key=lambda e: (e["ts"], -e.get("dur", 0.0))):
            start, duration, name = event["ts"], event.get("dur", 0.0), event["name"]
            while enclosing and enclosing[-1][0] <= start:
                enclosing.pop()
            if enclosing:
                self_us[enclosing[-1][1]] -= duration
            self_us[name] += duration
            calls[name] += 1
            enclosing.append((start + duration, name))
    return tuple(
        OpTime(name[:200], max(0.0, self_us[name]) / 1e6 / steps, calls[name] / steps)
        for name in sorted(self_us, key=lambda name: -self_us[name])[:TOP_OPS]
    )


@dataclass(frozen=True)
class SeenCollective:
    """A collective on one rank. Times are None where the trace does not contain it.

    `label` names its owner: a bucket, a step of a message, or a line of the script.
    """

    transaction: str
    label: str
    op: str
    size_bytes: int
    ranks: int
    start_s: float | None
    end_s: float | None
    queue_s: float | None


@dataclass(frozen=True)
class CollectiveRow:
    """The collectives of one label, op and size; times are medians.

    - `lasts_s`: on the rank that waits least, which is nearest to the transfer itself.
    - `waits_s`: the additional time on the rank that waits most.
    - `queue_s`: between issue and start on the slowest rank.
    """

    __pydantic_config__ = {"extra": "forbid"}

    label: str
    op: str
    size_bytes: int
    ranks: int
    per_step: float
    lasts_s: float
    waits_s: float
    queue_s: float

    def __post_init__(self) -> None:
        counts = (self.size_bytes, self.ranks, self.per_step)
        refuse_negative(f"{self.op[:80]!r}", *counts, self.lasts_s, self.waits_s, self.queue_s)


def collective_rows(
    collectives: Sequence[Sequence[SeenCollective]], steps: int
) -> tuple[CollectiveRow, ...]:
    """Rows in the order of their first collective; `collectives` are by rank."""
    members_of: dict[str, list[SeenCollective]] = defaultdict(list)
    for of_rank in collectives:
        for one in of_rank:
            members_of[one.transaction].append(one)
    times_of: dict[tuple[str, str, int, int], list[tuple[float, float, float]]] = {}
    counts: Counter[tuple[str, str, int, int]] = Counter()
    for members in members_of.values():
        first, size_bytes = members[0], max(member.size_bytes for member in members)
        key = (first.label, first.op, size_bytes, first.ranks)
        counts[key] += 1
        times = times_of.setdefault(key, [])
        lengths_s = [
            m.end_s - m.start_s for m in members if m.start_s is not None and m.end_s is not None
        ]
        if lengths_s:
            queue_s = max(member.queue_s or 0.0 for member in members)
            times.append((min(lengths_s), max(lengths_s) - min(lengths_s), queue_s))
    rows = []
    for key, times in times_of.items():
        medians = (median(values) for values in zip(*(times or [(0.0,) * 3]), strict=True))
        rows.append(CollectiveRow(*key, counts[key] / max(steps, 1), *medians))
    return tuple(rows)
