"""Dots of a chart: the range of an axis without outliers, and dots that lie on each other.

An outlier is outside Tukey's fences, 1.5 quartile ranges beyond the quartiles (Tukey, Exploratory
Data Analysis, 1977). It is drawn as a triangle at the edge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

RADIUS = 4.0
FENCE = 1.5
FEWEST_FENCED = 4
"""Fewer values have no quartiles to speak of."""
LISTED = 3
"""Dots whose titles a merged dot lists."""
FEWEST_PLACES = 3
"""Dots in fewer places make no chart."""


@dataclass(frozen=True)
class Dot:
    """A dot in pixels. `beyond`: an outlier, drawn at the edge. `count`: dots merged in it."""

    left: float
    top: float
    style: str
    title: str
    beyond: bool = False
    count: int = 1

    @property
    def radius(self) -> float:
        return RADIUS * (1 + math.log10(self.count))


def axis_range(values: Sequence[float], always: Sequence[float] = ()) -> tuple[float, float]:
    """The range of the values without outliers, extended to those that it must `always` hold."""
    kept = np.asarray(values, dtype=np.float64)
    if len(kept) >= FEWEST_FENCED:
        lower, upper = np.quantile(kept, [0.25, 0.75])
        beyond = FENCE * (upper - lower)
        kept = kept[(kept >= lower - beyond) & (kept <= upper + beyond)]
    shown = np.concatenate([kept, always])
    return float(shown.min()), float(shown.max())


def merged(dots: Sequence[Dot]) -> list[Dot]:
    """Make one dot of those of a style that would cover each other."""
    result: list[Dot] = []
    titles: list[list[str]] = []
    cells: dict[tuple[str, bool, int, int], list[int]] = {}
    for dot in dots:
        column, row = int(dot.left / (2 * RADIUS)), int(dot.top / (2 * RADIUS))
        near = [
            number
            for x in (column - 1, column, column + 1)
            for y in (row - 1, row, row + 1)
            for number in cells.get((dot.style, dot.beyond, x, y), ())
        ]
        place = next((number for number in near if _covers(result[number], dot)), None)
        if place is None:
            cells.setdefault((dot.style, dot.beyond, column, row), []).append(len(result))
            result.append(dot)
            titles.append([dot.title])
        else:
            result[place] = replace(result[place], count=result[place].count + 1)
            titles[place].append(dot.title)
    return [
        dot if dot.count == 1 else replace(dot, title=_joined(of_dot))
        for dot, of_dot in zip(result, titles, strict=True)
    ]


def places(dots: Sequence[Dot]) -> int:
    """The number of places, of any style, where dots do not cover each other."""
    return len(merged([replace(dot, style="", beyond=False) for dot in dots]))


def _covers(one: Dot, other: Dot) -> bool:
    return math.hypot(one.left - other.left, one.top - other.top) < 2 * RADIUS


def _joined(titles: Sequence[str]) -> str:
    listed = "; ".join(titles[:LISTED])
    more = len(titles) - LISTED
    return f"{len(titles)} trials: {listed}" + (f"; and {more} more" if more > 0 else "")


def drawn(dot: Dot) -> Markup:
    """A circle, with the number of merged dots above it; a triangle for an outlier."""
    if dot.beyond:
        left, top, r = dot.left, dot.top, dot.radius
        corners = ((left - r, top + r), (left + r, top + r), (left, top - r))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        shape = Markup('<polygon class="dot {}" points="{}"><title>{}</title></polygon>').format(
            dot.style, points, dot.title
        )
    else:
        shape = Markup(
            '<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="{:.1f}"><title>{}</title></circle>'
        ).format(dot.style, dot.left, dot.top, dot.radius, dot.title)
    if dot.count == 1:
        return shape
    number = Markup('<text class="label" x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>')
    return shape + number.format(dot.left, dot.top - dot.radius - 3, dot.count)
