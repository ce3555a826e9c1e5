"""What the recorded steps of one rank were spent on, from the events of its Kineto trace.

| symbol | meaning | unit |
|---|---|---|
| M | stretches of time, ascending and apart | |
| stretches | starts and ends, shape (M, 2) | us |

All values are medians over the steps. Computation are operators on the host, or kernels and copies where there is a device; what waits for
a collective is none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from autotune.arrays import FloatArray

Event = Mapping[str, Any]

TOP_OPS = 10
_NO_WORK = re.compile(r"c10d::|autograd::engine::|torch::autograd::|record_param_comms|Profiler")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP = "ProfilerStep#"
_UPDATE = "Optimizer.step#"


@dataclass(frozen=True)
class OpTime:
    """An operator or kernel by name: its own time in a step, without what it calls, and how often it runs in one."""

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    self_s: float
    calls: float


@dataclass(frozen=True)
class StepTimes:
    """Of a median step: until the backward pass begins, until its last operator ends, and the rest; and of all three together:

    when something is computed, when a collective is under way, and when a collective is under way and nothing is computed.
    `updated_steps`: how many of the steps hold a step of an optimizer of torch.
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


def step_times(events: Iterable[Event], collectives_us: Sequence[tuple[float, float]]) -> StepTimes:
    """`collectives_us`: start and end of each collective, on the clock of the events."""
    spans = [
        event for event in events if event.get("ph") == "X" and isinstance(event.get("tid"), int)
    ]
    steps = sorted(
        (e["ts"], e["ts"] + e.get("dur", 0.0))
        for e in spans
        if e["name"].startswith(_STEP) and e.get("cat") == "user_annotation"
    )
    if not steps:
        return StepTimes()
    on_device = any(event.get("cat") in _ON_DEVICE for event in spans)
    work = [event for event in spans if _is_work(event, on_device)]
    computing = _merged((event["ts"], event["ts"] + event.get("dur", 0.0)) for event in work)
    sending = _merged(collectives_us)
    engine = np.array(_of(spans, "autograd::engine::evaluate_function")).reshape(-1, 2)
    parts = np.array([_parts(step, engine, computing, sending) for step in steps]) / 1e6
    forward_s, backward_s, rest_s, computation_s, communication_s, exposed_s = (
        float(value) for value in np.median(parts, axis=0)
    )
    first, last = steps[0][0], steps[-1][1]
    top = _top_ops([event for event in work if first <= event["ts"] < last], len(steps))
    updates = np.array(
        sorted(
            e["ts"]
            for e in spans
            if e["name"].startswith(_UPDATE) and e.get("cat") == "user_annotation"
        )
    )
    updated = sum(
        bool(np.searchsorted(updates, end) > np.searchsorted(updates, start))
        for start, end in steps
    )
    return StepTimes(
        forward_s, backward_s, rest_s, computation_s, communication_s, exposed_s, top, updated
    )


def _of(spans: Iterable[Event], name: str) -> list[tuple[float, float]]:
    """Start and end of the spans whose name begins so, by start; their shadows on a device are others."""
    return sorted(
        (event["ts"], event["ts"] + event.get("dur", 0.0))
        for event in spans
        if event["name"].startswith(name) and event.get("cat") != "gpu_user_annotation"
    )


def _is_work(event: Event, on_device: bool) -> bool:
    if on_device:
        return event.get("cat") in _ON_DEVICE and "nccl" not in event["name"].lower()
    return event.get("cat") == "cpu_op" and not _NO_WORK.match(event["name"])


def _parts(
    step: tuple[float, float], engine: FloatArray, computing: FloatArray, sending: FloatArray
) -> tuple[float, ...]:
    start, end = step
    inside = engine[(engine[:, 0] >= start) & (engine[:, 0] < end)]
    began, ended = (
        (float(inside[:, 0].min()), min(end, float(inside[:, 1].max())))
        if len(inside)
        else (end, end)
    )
    computed, sent = _clipped(computing, start, end), _clipped(sending, start, end)
    both = (
        _length(computed)
        + _length(sent)
        - _length(_merged([*map(tuple, computed), *map(tuple, sent)]))
    )
    return (
        began - start,
        ended - began,
        end - ended,
        _length(computed),
        _length(sent),
        _length(sent) - both,
    )


def _merged(stretches: Iterable[tuple[float, ...]]) -> FloatArray:
    """The union, as ascending stretches that do not touch."""
    found: list[list[float]] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return np.array(found, dtype=np.float64).reshape(-1, 2)


def _clipped(stretches: FloatArray, start: float, end: float) -> FloatArray:
    inside = stretches[(stretches[:, 1] > start) & (stretches[:, 0] < end)]
    return np.clip(inside, start, end)


def _length(stretches: FloatArray) -> float:
    return float((stretches[:, 1] - stretches[:, 0]).sum())


def _top_ops(work: Sequence[Event], steps: int) -> tuple[OpTime, ...]:
    """By their own time, the largest first; events of a thread nest."""
    own_us: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in work:
        threads[event.get("pid"), event["tid"]].append(event)
    for of_thread in threads.values():
        open_: list[tuple[float, str]] = []  # end and name of the events that enclose the next one
        for event in sorted(of_thread, key=lambda e: (e["ts"], -e.get("dur", 0.0))):
            start, took = event["ts"], event.get("dur", 0.0)
            while open_ and open_[-1][0] <= start:
                open_.pop()
            if open_:
                own_us[open_[-1][1]] -= took
            own_us[event["name"]] += took
            calls[event["name"]] += 1
            open_.append((start + took, event["name"]))
    ranked = sorted(own_us, key=lambda name: -own_us[name])[:TOP_OPS]
    return tuple(
        OpTime(name[:200], max(0.0, own_us[name]) / 1e6 / steps, calls[name] / steps)
        for name in ranked
    )


@dataclass(frozen=True)
class SeenCollective:
    """A collective on one rank: `label` says whose it is (a bucket, a message's step, a line of the script). None: not in the trace."""

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
    """Those of one label, op and size. Medians: `lasts_s` on the rank that waits least, `waits_s` what the one that waits most adds to it,

    `queue_s` between issue and start on the slowest rank. The first is the nearest to the transfer itself that whole collectives show.
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


def collective_rows(
    seen: Sequence[Sequence[SeenCollective]], steps: int
) -> tuple[CollectiveRow, ...]:
    """`seen` by rank. Rows in the order in which they are first met."""
    of_transaction: dict[str, list[SeenCollective]] = defaultdict(list)
    for of_rank in seen:
        for one in of_rank:
            of_transaction[one.transaction].append(one)
    rows: dict[tuple[str, str, int, int], list[tuple[float, float, float]]] = defaultdict(list)
    counts: dict[tuple[str, str, int, int], int] = defaultdict(int)
    for members in of_transaction.values():
        key = (
            members[0].label,
            members[0].op,
            max(member.size_bytes for member in members),
            members[0].ranks,
        )
        counts[key] += 1
        lasted = [
            m.end_s - m.start_s for m in members if m.start_s is not None and m.end_s is not None
        ]
        if lasted:
            queued = max(m.queue_s or 0.0 for m in members)
            rows[key].append((min(lasted), max(lasted) - min(lasted), queued))
    return tuple(
        CollectiveRow(
            *key,
            counts[key] / max(steps, 1),
            *(median(values) for values in zip(*rows.get(key, [(0.0,) * 3]), strict=True)),
        )
        for key in counts
    )
