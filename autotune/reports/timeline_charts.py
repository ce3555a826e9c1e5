"""Timelines as inline SVG: rows of bars, colored by the kind of op; bounded in size.

| symbol | meaning |
|---|---|
| C | columns: pixels across the plot |
| K | kinds of op that have a color |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from autotune.arrays import FloatArray
from autotune.dfg.critical_path import CriticalPath
from autotune.dfg.graph import Kind
from autotune.dfg.replay import Timeline
from autotune.dfg.utilisation import busy_share
from autotune.units import format_seconds

WIDE, LEFT, ROW, TOP, BOTTOM = 1060, 210, 20, 8, 26
COLUMNS = WIDE - LEFT
MOST_ROWS = 32
"""Number of queues shown, the busiest ones."""
LABEL = 30
CHARACTER = 7
"""Width in pixels of a character in a bar."""

COLORS = {
    Kind.FORWARD: "s0",
    Kind.BACKWARD: "s2",
    Kind.UPDATE: "s3",
    Kind.OTHER: "s5",
    Kind.SERVER: "s5",
    Kind.LOAD: "s5",
    Kind.LAUNCH: "soft",
    Kind.PACK: "s4",
    Kind.UNPACK: "s4",
    Kind.COPY: "s4",
    Kind.SEND: "s1",
    Kind.RECV: "s1",
    Kind.COLLECTIVE: "s1",
}
LEGEND = (
    ("forward", "s0"),
    ("backward", "s2"),
    ("update", "s3"),
    ("other computation", "s5"),
    ("communication", "s1"),
    ("copies, packing", "s4"),
    ("host launches", "soft"),
)
"""Names of the colors, in their order on the page."""


@dataclass(frozen=True)
class Bar:
    """`left` and `width` in pixels of the plot. `title` appears on hovering, `text` if it fits."""

    left: float
    width: float
    style: str
    title: str = ""
    text: str = ""


@dataclass(frozen=True)
class Row:
    name: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Window:
    """The times from `begin_s` to `end_s` of a timeline, on an axis of `axis_s` seconds."""

    begin_s: float
    end_s: float
    axis_s: float

    def pixels(self, time_s: float) -> float:
        """The place of a time on the plot; times outside are at an end of the window."""
        inside_s = min(max(time_s, self.begin_s), self.end_s) - self.begin_s
        return COLUMNS * inside_s / self.axis_s


def gantt_chart(timeline: Timeline, path: CriticalPath) -> Markup | None:
    """Draw the critical path and the busiest queues. None if nothing has a duration."""
    if timeline.makespan_s <= 0:
        return None
    window = Window(0.0, timeline.makespan_s, timeline.makespan_s)
    rows = [Row("critical path", kind_bars(timeline, path.ops, window))]
    rows += [
        Row(timeline.dfg.names.queues[queue], kind_bars(timeline, ops_of(timeline, queue), window))
        for queue in _shown_queues(timeline)
    ]
    return drawing(rows, window, "timeline")


def drawing(
    rows: Sequence[Row], window: Window, label: str, ends_s: Sequence[float] = ()
) -> Markup:
    """The rows above an axis of time that begins at 0. `ends_s`: times marked across all rows."""
    height = TOP + ROW * len(rows) + BOTTOM
    marks = _axis(window, height)
    marks += [mark for place, row in enumerate(rows) for mark in _row(TOP + place * ROW, row)]
    line = Markup('<line class="line guide" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"></line>')
    marks += [line.format(LEFT + window.pixels(end_s), TOP, height - BOTTOM) for end_s in ends_s]
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDE, height, label, Markup("").join(marks)
    )


def _shown_queues(timeline: Timeline) -> list[int]:
    share = busy_share(timeline)
    busiest = np.argsort(-share, kind="stable")[:MOST_ROWS]
    return sorted(int(queue) for queue in busiest if share[queue] > 0)


def ops_of(timeline: Timeline, queue: int) -> NDArray[np.intp]:
    return np.flatnonzero((timeline.dfg.queue == queue) | (timeline.dfg.channel == queue))


def kind_bars(timeline: Timeline, ops: NDArray[np.integer], window: Window) -> list[Bar]:
    """Bars of the ops, colored by their kinds."""
    kinds = ((op, COLORS.get(Kind(int(timeline.dfg.kind[op])))) for op in ops.tolist())
    return span_bars(
        ((style, timeline.start_s[op], timeline.end_s[op]) for op, style in kinds if style), window
    )


def span_bars(spans: Iterable[tuple[str, float, float]], window: Window) -> list[Bar]:
    """Color every column by the style that fills most of it, if it is over a quarter full.

    `spans`: style, begin and end in seconds.
    """
    filled: dict[str, FloatArray] = {}
    for style, begin_s, end_s in spans:
        columns = filled.setdefault(style, np.zeros(COLUMNS + 1))
        _fill(columns, window.pixels(begin_s), window.pixels(end_s))
    if not filled:
        return []
    styles = sorted(filled)
    shares = np.column_stack([filled[style] for style in styles])[:COLUMNS]
    chosen = np.where(shares.sum(axis=1) > 0.25, shares.argmax(axis=1), -1).tolist()
    bars, at = [], 0
    for style_number, group in groupby(chosen):
        length = sum(1 for _ in group)
        if style_number >= 0:
            bars.append(Bar(at, length, styles[style_number]))
        at += length
    return bars


def _fill(row: FloatArray, start: float, end: float) -> None:
    """Add the share of every column that [start, end] covers."""
    first, last = int(start), min(int(end), len(row) - 1)
    if first == last:
        row[first] += end - start
        return
    row[first] += first + 1 - start
    row[first + 1 : last] += 1.0
    row[last] += end - last


def _row(top: int, row: Row) -> list[Markup]:
    name = row.name
    short = name if len(name) <= LABEL else f"{name[: LABEL - 1]}…"
    text = Markup('<text class="label" x="{}" y="{}" text-anchor="end">{}<title>{}</title></text>')
    marks = [text.format(LEFT - 8, top + ROW - 6, short, name)] if name else []
    shape = Markup('<rect class="bar {}" x="{:g}" y="{}" width="{:g}" height="{}">{}</rect>')
    title = Markup("<title>{}</title>")
    number = Markup('<text class="inside" x="{:.1f}" y="{}" text-anchor="middle">{}</text>')
    for bar in row.bars:
        left, width = round(LEFT + bar.left, 1), round(bar.width, 1)
        hint = title.format(bar.title) if bar.title else ""
        marks.append(shape.format(bar.style, left, top + 2, width, ROW - 4, hint))
        if bar.text and width > CHARACTER * (len(bar.text) + 1):
            marks.append(number.format(left + width / 2, top + ROW - 6, bar.text))
    return marks


def _axis(window: Window, height: int) -> list[Markup]:
    marks = []
    for part in range(5):
        x = LEFT + COLUMNS * part / 4
        line = Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"></line>').format(
            x, x, TOP, height - BOTTOM
        )
        anchor = "end" if part == 4 else "start" if part == 0 else "middle"
        text = Markup('<text class="label" x="{}" y="{}" text-anchor="{}">{}</text>')
        time_s = window.axis_s * part / 4
        label = format_seconds(time_s) if part else "0"
        marks += [line, text.format(x, height - 8, anchor, label)]
    return marks
