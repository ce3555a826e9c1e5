"""The axes of a plot as inline SVG, colored by the page's CSS classes (light and dark).

Every text goes through `Markup.format`, which escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDE, NARROW = 1060, 520
"""Widths in pixels of a plot across the page and of half of it, so that text has one size."""
HEIGHT = 300
LEFT, RIGHT, TOP, BOTTOM = 76, 14, 14, 40
SERIES = 7
"""Number of series that the page has colors for (CSS classes s0 to s6)."""


@dataclass(frozen=True)
class Scale:
    """A linear map from data to pixels."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self, count: int) -> list[float]:
        """About `count` round values in the range."""
        raw = (self.high - self.low) / count
        magnitude = 10.0 ** math.floor(math.log10(raw))
        step = next(k * magnitude for k in (1, 2, 5, 10) if k * magnitude >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [step * index for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def fitted_scale(values: Sequence[float], start: float, stop: float, pad: float = 0.06) -> Scale:
    low, high = min(values), max(values)
    margin = (high - low) * pad or abs(high) * pad or 1.0
    return Scale(low - margin, high + margin, start, stop)


@dataclass(frozen=True)
class Axis:
    """`count`: about how many ticks. `whole`: label only whole numbers."""

    scale: Scale
    label: str
    text: Callable[[float], str]
    count: int = 5
    whole: bool = False


def frame(x: Axis, y: Axis, body: Sequence[Markup], title: str, width: int) -> Markup:
    """A plot of `width` pixels: the axes with their ticks, and `body` on them."""
    parts = []
    right, bottom = width - RIGHT, HEIGHT - BOTTOM
    for value in y.scale.ticks(y.count):
        parts.append(line([(LEFT, y.scale(value)), (right, y.scale(value))], "grid"))
        parts.append(label(LEFT - 6, y.scale(value) + 4, y.text(value), "end"))
    for value in x.scale.ticks(x.count):
        if not x.whole or value == round(value):
            parts.append(label(x.scale(value), bottom + 16, x.text(value), "middle"))
    parts.append(line([(LEFT, bottom), (right, bottom)], "axis"))
    parts.append(label((LEFT + right) / 2, HEIGHT - 6, x.label, "middle"))
    rotated = Markup(
        '<text class="label" text-anchor="middle" '
        'transform="translate(12 {:.0f}) rotate(-90)">{}</text>'
    )
    parts.append(rotated.format((TOP + bottom) / 2, y.label))
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">')
    return head.format(width, HEIGHT, title) + Markup("").join([*parts, *body]) + Markup("</svg>")


def label(left: float, top: float, text: str, anchor: str) -> Markup:
    """A text at a place in pixels; `anchor`: start, middle or end."""
    return Markup('<text class="label" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        left, top, anchor, text
    )


def line(points: Sequence[tuple[float, float]], style: str) -> Markup:
    """A line through points in pixels, of a CSS class."""
    commands = " ".join(
        f"{'L' if index else 'M'}{left:.1f} {top:.1f}" for index, (left, top) in enumerate(points)
    )
    return Markup('<path class="line {}" d="{}"/>').format(style, commands)
