"""The report's plots as inline SVG. Colors are the page's CSS classes, so that they follow light and dark.

Every text goes through `Markup.format`, which escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from autotune.records import CURRENT_SETUP, Measured, Role
from autotune.tuning.events import Proposed, TrialFinished
from autotune.tuning.history import History
from autotune.units import format_seconds

WIDE, NARROW = 1060, 520
"""Widths in pixels of a plot across the page and of one of two side by side, so that text is of one size in both."""
HEIGHT = 300
LEFT, RIGHT, TOP, BOTTOM = 76, 14, 14, 40
SERIES = 7
"""How many series the page has colors for (CSS classes s0 to s6)."""


@dataclass(frozen=True)
class _Scale:
    """From data to pixels, linear."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self, wanted: int) -> list[float]:
        """Round values in the range, about `wanted` of them."""
        raw = (self.high - self.low) / wanted
        magnitude = 10.0 ** math.floor(math.log10(raw))
        step = next(
            factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw * 0.999
        )
        first = math.ceil(self.low / step - 1e-9)
        return [step * index for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _scale(values: Sequence[float], start: float, stop: float, pad: float = 0.06) -> _Scale:
    low, high = min(values), max(values)
    margin = (high - low) * pad or abs(high) * pad or 1.0
    return _Scale(low - margin, high + margin, start, stop)


def search_chart(history: History) -> Markup | None:
    """Step time over trials: candidates, references and failures, and the best so far as a line."""
    trials = [trial for trial in history.trials if trial.request.role is not Role.AB]
    seconds = [_shown_s(history, trial) for trial in trials if isinstance(trial.outcome, Measured)]
    if not seconds:
        return None
    x = _scale([float(trial.request.number) for trial in trials], LEFT, WIDE - RIGHT, 0.02)
    y = _scale(_without_outliers(seconds), HEIGHT - BOTTOM, TOP + 12)
    marks, line, best_s = [], [], math.inf
    for trial in trials:
        number, outcome = trial.request.number, trial.outcome
        reference = trial.request.role is Role.REFERENCE
        name = (
            "current setup"
            if trial.request.strategy_id == CURRENT_SETUP
            else trial.request.strategy_id
        )
        if not isinstance(outcome, Measured):
            marks.append(
                _cross(x(number), TOP + 6, f"trial {number}: {name} failed ({outcome.kind.value})")
            )
            continue
        disturbed = number in history.disturbed
        style = "reference" if reference else "disturbed" if disturbed else "candidate"
        shown_s = _shown_s(history, trial)
        height = min(max(y(shown_s), TOP), HEIGHT - BOTTOM)
        title = f"trial {number}: {name}, {format_seconds(outcome.median_s)} as measured{', disturbed' if disturbed else ''}"
        marks.append(_dot(x(number), height, style, title))
        if not reference and not disturbed:
            best_s = min(best_s, shown_s)
        if best_s < math.inf:
            line.append((x(number), y(best_s)))
    steps = [
        point for before, after in pairwise(line) for point in (before, (after[0], before[1]))
    ] + line[-1:]
    body = [_path(steps, "best")] if len(steps) > 1 else []
    return _frame(
        x,
        y,
        "trial",
        "step time",
        True,
        [*body, *marks],
        "Step time of every trial of the search and the best so far",
        WIDE,
    )


def _shown_s(history: History, trial: TrialFinished) -> float:
    """References as they were measured; candidates corrected by them."""
    assert isinstance(trial.outcome, Measured)
    return (
        trial.outcome.median_s if trial.request.role is Role.REFERENCE else history.steady_s(trial)
    )


def prediction_chart(history: History) -> Markup | None:
    """Measured against predicted step time of every candidate that had a prediction; on the diagonal they agree."""
    pairs = [
        (trial.request.predicted_s, history.steady_s(trial), trial)
        for trial in history.candidates
        if isinstance(trial.outcome, Measured) and trial.request.predicted_s is not None
    ]
    if not pairs:
        return None
    both = [value for predicted, measured, _ in pairs for value in (predicted, measured)]
    x, y = _scale(both, LEFT, NARROW - RIGHT), _scale(both, HEIGHT - BOTTOM, TOP)
    diagonal = _path([(x(x.low), y(x.low)), (x(x.high), y(x.high))], "guide")
    marks = [
        _dot(
            x(predicted),
            y(measured),
            "disturbed" if trial.request.number in history.disturbed else "candidate",
            f"{trial.request.strategy_id}: predicted {format_seconds(predicted)}, measured {format_seconds(measured)}",
        )
        for predicted, measured, trial in pairs
    ]
    return _frame(
        x,
        y,
        "predicted",
        "measured",
        True,
        [diagonal, *marks],
        "Measured against predicted step time",
        NARROW,
        True,
    )


def rankers(rounds: Sequence[Proposed]) -> list[str]:
    """Names of all rankers whose quality was measured, in a fixed order."""
    return sorted({quality.ranker for proposed in rounds for quality in proposed.quality})


def quality_chart(rounds: Sequence[Proposed]) -> Markup | None:
    """Pairwise accuracy of every ranker per round; 0.5 is chance."""
    names = rankers(rounds)
    if not names:
        return None
    numbers = [float(proposed.round) for proposed in rounds if proposed.quality]
    x = _Scale(min(numbers) - 0.2, max(numbers) + 0.2, LEFT, NARROW - RIGHT)
    lowest = min(quality.pairwise_accuracy for proposed in rounds for quality in proposed.quality)
    y = _Scale(min(0.4, lowest - 0.05), 1.02, HEIGHT - BOTTOM, TOP)
    body = [_path([(x(x.low), y(0.5)), (x(x.high), y(0.5))], "guide")]
    for index, name in enumerate(names):
        points = [
            (x(proposed.round), y(quality.pairwise_accuracy), quality.pairwise_accuracy)
            for proposed in rounds
            for quality in proposed.quality
            if quality.ranker == name
        ]
        body.append(_path([(left, top) for left, top, _ in points], f"s{index % SERIES}"))
        body += [
            _dot(left, top, f"s{index % SERIES}", f"{name}: {value:.2f}")
            for left, top, value in points
        ]
    return _frame(
        x,
        y,
        "round",
        "pairs in the right order",
        False,
        body,
        "Ranking quality of every ranker per round",
        NARROW,
    )


def _without_outliers(values: Sequence[float]) -> list[float]:
    """Values up to three times the median: one hopeless strategy must not flatten the rest of the plot."""
    middle = sorted(values)[len(values) // 2]
    return [min(value, 3 * middle) for value in values]


def _frame(
    x: _Scale,
    y: _Scale,
    x_label: str,
    y_label: str,
    seconds_y: bool,
    body: Sequence[Markup],
    title: str,
    width: int,
    seconds_x: bool = False,
) -> Markup:
    parts = []
    for value in y.ticks(5):
        text = format_seconds(value) if seconds_y else f"{value:.2g}"
        parts.append(_path([(LEFT, y(value)), (width - RIGHT, y(value))], "grid"))
        parts.append(_text(LEFT - 6, y(value) + 4, text, "end"))
    for value in x.ticks(5 if seconds_x else 8):
        if seconds_x or value == round(value):
            parts.append(
                _text(
                    x(value),
                    HEIGHT - BOTTOM + 16,
                    format_seconds(value) if seconds_x else f"{value:.0f}",
                    "middle",
                )
            )
    parts.append(_path([(LEFT, HEIGHT - BOTTOM), (width - RIGHT, HEIGHT - BOTTOM)], "axis"))
    parts.append(_text((LEFT + width - RIGHT) / 2, HEIGHT - 6, x_label, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        Markup(
            '<text class="label" text-anchor="middle" transform="translate(12 {:.0f}) rotate(-90)">{}</text>'
        ).format(middle, y_label)
    )
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
        width, HEIGHT, title
    )
    return head + Markup("").join([*parts, *body]) + Markup("</svg>")


def _text(left: float, top: float, text: str, anchor: str) -> Markup:
    return Markup('<text class="label" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        left, top, anchor, text
    )


def _path(points: Sequence[tuple[float, float]], style: str) -> Markup:
    commands = " ".join(
        f"{'L' if index else 'M'}{left:.1f} {top:.1f}" for index, (left, top) in enumerate(points)
    )
    return Markup('<path class="line {}" d="{}"/>').format(style, commands)


def _dot(left: float, top: float, style: str, title: str) -> Markup:
    return Markup(
        '<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="4"><title>{}</title></circle>'
    ).format(style, left, top, title)


def _cross(left: float, top: float, title: str) -> Markup:
    commands = f"M{left - 4:.1f} {top - 4:.1f} L{left + 4:.1f} {top + 4:.1f} M{left - 4:.1f} {top + 4:.1f} L{left + 4:.1f} {top - 4:.1f}"
    return Markup('<path class="line failed" d="{}"><title>{}</title></path>').format(
        commands, title
    )
