"""A timeline as inline SVG: a row per queue, colored by the kind of op; bounded in size.

| symbol | meaning |
|---|---|
| C | columns: pixels across the plot |
| K | kinds of op that have a color |
"""

from __future__ import annotations

from collections.abc import Sequence
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
MOST_ROWS = 32
"""Number of queues shown, the busiest ones."""
LABEL = 30

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
class _Run:
    """Columns `first` to `last` (inclusive) of a row, mostly of one color."""

    first: int
    last: int
    style: str


def gantt_chart(timeline: Timeline, path: CriticalPath) -> Markup | None:
    """Draw the critical path and the busiest queues. None if nothing has a duration."""
    end_s = timeline.makespan_s
    if end_s <= 0:
        return None
    columns = WIDE - LEFT
    rows = [("critical path", _runs(timeline, path.ops, columns))]
    shown = _shown_queues(timeline)
    rows += [
        (timeline.dfg.names.queues[queue], _runs(timeline, _ops_of(timeline, queue), columns))
        for queue in shown
    ]
    height = TOP + ROW * len(rows) + BOTTOM
    marks = [
        mark
        for place, (name, runs) in enumerate(rows)
        for mark in _row(TOP + place * ROW, name, runs)
    ]
    marks += _axis(end_s, columns, height)
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="timeline">{}</svg>').format(
        WIDE, height, Markup("").join(marks)
    )


def _shown_queues(timeline: Timeline) -> list[int]:
    share = busy_share(timeline)
    busiest = np.argsort(-share, kind="stable")[:MOST_ROWS]
    return sorted(int(queue) for queue in busiest if share[queue] > 0)


def _ops_of(timeline: Timeline, queue: int) -> NDArray[np.intp]:
    return np.flatnonzero((timeline.dfg.queue == queue) | (timeline.dfg.channel == queue))


def _runs(timeline: Timeline, ops: NDArray[np.integer], columns: int) -> list[_Run]:
    """Color every column by the kind that fills most of it, if it is over a quarter full."""
    styles = sorted(set(COLORS.values()))
    filled = np.zeros((columns + 1, len(styles)))
    scale = columns / timeline.makespan_s
    for op in ops.tolist():
        style = COLORS.get(Kind(int(timeline.dfg.kind[op])))
        if style is not None:
            _fill(
                filled[:, styles.index(style)],
                timeline.start_s[op] * scale,
                timeline.end_s[op] * scale,
            )
    full = filled[:columns].sum(axis=1) > 0.25
    chosen = np.where(full, filled[:columns].argmax(axis=1), -1).tolist()
    runs, at = [], 0
    for style_number, group in groupby(chosen):
        length = sum(1 for _ in group)
        if style_number >= 0:
            runs.append(_Run(at, at + length - 1, styles[style_number]))
        at += length
    return runs


def _fill(row: FloatArray, start: float, end: float) -> None:
    """Add the share of every column that [start, end] covers."""
    first, last = int(start), min(int(end), len(row) - 1)
    if first == last:
        row[first] += end - start
        return
    row[first] += first + 1 - start
    row[first + 1 : last] += 1.0
    row[last] += end - last


def _row(top: int, name: str, runs: Sequence[_Run]) -> list[Markup]:
    short = name if len(name) <= LABEL else f"{name[: LABEL - 1]}…"
    text = Markup('<text class="label" x="{}" y="{}" text-anchor="end">{}<title>{}</title></text>')
    marks = [text.format(LEFT - 8, top + ROW - 6, short, name)]
    bar = Markup('<rect class="bar {}" x="{}" y="{}" width="{}" height="{}"></rect>')
    marks += [
        bar.format(run.style, LEFT + run.first, top + 2, run.last - run.first + 1, ROW - 4)
        for run in runs
    ]
    return marks


def _axis(end_s: float, columns: int, height: int) -> list[Markup]:
    marks = []
    for part in range(5):
        x = LEFT + columns * part / 4
        line = Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"></line>').format(
            x, x, TOP, height - BOTTOM
        )
        anchor = "end" if part == 4 else "start" if part == 0 else "middle"
        text = Markup('<text class="label" x="{}" y="{}" text-anchor="{}">{}</text>')
        marks += [
            line,
            text.format(x, height - 8, anchor, format_seconds(end_s * part / 4) if part else "0"),
        ]
    return marks
