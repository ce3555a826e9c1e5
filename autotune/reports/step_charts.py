"""Steps of a plan as a chart: computation, links, every message, and the time that is exposed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from markupsafe import Markup

from autotune.dfg.graph import NONE, Kind
from autotune.dfg.replay import Timeline
from autotune.lowering.steady import COMPUTES, DEVICE, SteadySteps
from autotune.reports.timeline_charts import (
    COLORS,
    Bar,
    Row,
    Window,
    drawing,
    kind_bars,
    ops_of,
    span_bars,
)
from autotune.strategy_space.describe import SHOWN
from autotune.strategy_space.plan import Message, Plan
from autotune.units import format_bytes, format_seconds

EXPOSED, LATE = "exposed", COLORS[Kind.OTHER]
STEP_LEGEND = (
    ("forward", COLORS[Kind.FORWARD]),
    ("backward", COLORS[Kind.BACKWARD]),
    ("update", COLORS[Kind.UPDATE]),
    ("message", COLORS[Kind.SEND]),
    ("message that runs into the next step", LATE),
    ("packing and unpacking", COLORS[Kind.PACK]),
    ("exposed: nothing computes", EXPOSED),
)
QUEUES = ((DEVICE, "computation"), ("r0 host", "host: packing, applying"))
MOST_ROWS = 8
"""Rows of messages under way at the same time; further ones are counted."""
MOST_LINKS = 2
NARROWEST, GAP = 1.5, 1.0
"""Width in pixels of the narrowest bar, and of the gap behind a message."""
MORE = "; and those behind it"


def step_chart(steps: SteadySteps, plan: Plan, axis_s: float) -> Markup:
    """Draw the steps on an axis of `axis_s` seconds, so that charts of two plans compare."""
    timeline, window = steps.timeline, Window(steps.begin_s, steps.end_s, axis_s)
    queues = timeline.dfg.names.queues
    rows = [
        Row(label, kind_bars(timeline, ops_of(timeline, queues.index(name)), window))
        for name, label in QUEUES
        if name in queues
    ]
    rows += _message_rows(steps, plan, window)
    rows += [
        Row(f"link {queues[queue]}", kind_bars(timeline, ops_of(timeline, queue), window))
        for queue in _busiest_links(timeline)
    ]
    rows.append(Row("exposed", span_bars(_exposed(steps), window)))
    ends_s = [steps.begin_s + number * steps.step_s for number in range(1, steps.count + 1)]
    return drawing(rows, window, "replayed steps", ends_s)


def _busiest_links(timeline: Timeline) -> list[int]:
    """Queues of the links that send for the longest time."""
    dfg = timeline.dfg
    sends = (dfg.kind == Kind.SEND) & (dfg.queue != NONE)
    busy_s = np.bincount(dfg.queue[sends], weights=timeline.duration_s[sends], minlength=dfg.queues)
    longest = np.argsort(-busy_s, kind="stable")[:MOST_LINKS]
    return [int(queue) for queue in longest if busy_s[queue] > 0]


def _exposed(steps: SteadySteps) -> list[tuple[str, float, float]]:
    """The gaps between the computations of worker 0."""
    timeline = steps.timeline
    dfg = timeline.dfg
    device = dfg.names.queues.index(DEVICE)
    computes = np.flatnonzero(np.isin(dfg.kind, COMPUTES) & (dfg.queue == device))
    order = computes[np.argsort(timeline.start_s[computes], kind="stable")]
    begins_s = np.append(timeline.start_s[order], steps.end_s).tolist()
    ends_s = np.maximum.accumulate(np.concatenate([[0.0], timeline.end_s[order]])).tolist()
    gaps = zip(ends_s, begins_s, strict=True)
    return [(EXPOSED, end_s, begin_s) for end_s, begin_s in gaps if begin_s > end_s]


def _message_rows(steps: SteadySteps, plan: Plan, window: Window) -> list[Row]:
    """Messages in rows, so that those under way at the same time do not overlap."""
    rows: list[list[Bar]] = []
    ends_s: list[float] = []
    left_out = 0
    for step, number in _by_time(steps):
        begin_s, end_s = steps.began_s[step, number], steps.arrived_s[step, number]
        free = next((row for row, until_s in enumerate(ends_s) if until_s <= begin_s), len(rows))
        if free == MOST_ROWS:
            left_out += 1
            continue
        if free == len(rows):
            rows.append([])
            ends_s.append(0.0)
        ends_s[free] = end_s
        step_end_s = steps.begin_s + step * steps.step_s
        for style, from_s, to_s in (
            (COLORS[Kind.SEND], begin_s, min(end_s, step_end_s)),
            (LATE, max(begin_s, step_end_s), end_s),
        ):
            left, width = window.pixels(from_s), window.pixels(to_s) - window.pixels(from_s)
            if width > 0:
                words = _words(plan.messages[number], number, end_s - begin_s)
                _add(rows[free], Bar(left, width, style, words, str(number + 1)))
    names = ["messages"] + [""] * (len(rows) - 1)
    if left_out:
        names[-1] = f"and {left_out} more at the same time"
    return [Row(name, bars) for name, bars in zip(names, rows, strict=True)]


def _by_time(steps: SteadySteps) -> list[tuple[int, int]]:
    """Step and number of the messages that are under way in the window, in order of time."""
    shown = (steps.arrived_s > steps.begin_s) & (steps.began_s < steps.end_s)
    places = np.argwhere(shown)
    order = np.argsort(steps.began_s[shown], kind="stable")
    return [(int(step), int(number)) for step, number in places[order]]


def _add(bars: list[Bar], bar: Bar) -> None:
    """Add a bar, or make one bar of it and the last one if both are too narrow to tell apart."""
    bar = replace(bar, width=max(bar.width - GAP, NARROWEST))
    last = bars[-1] if bars else None
    if last is None or bar.left >= last.left + last.width or bar.style != last.style:
        bars.append(bar)
    elif bar.left + bar.width > last.left + last.width:
        title = last.title if last.title.endswith(MORE) else f"{last.title}{MORE}"
        bars[-1] = replace(last, width=bar.left + bar.width - last.left, title=title, text="")


def _words(message: Message, number: int, taken_s: float) -> str:
    names = dict.fromkeys(part.variable for part in message.slices)
    listed = ", ".join(list(names)[:SHOWN])
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (
        f"message {number + 1}: {message.synchronizer.value}, {format_bytes(message.grad_bytes)} "
        f"of {listed}{more}; {format_seconds(taken_s)}"
    )
