"""The plots of a job's report as inline SVG, colored by the page's CSS classes (light and dark).

Every text goes through `Markup.format`, which escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from markupsafe import Markup

from autotune.records import CURRENT_SETUP, Failed, Measured, Role
from autotune.reports.dots import FEWEST_PLACES, RADIUS, Dot, axis_range, drawn, merged, places
from autotune.reports.plot import (
    BOTTOM,
    HEIGHT,
    LEFT,
    NARROW,
    RIGHT,
    SERIES,
    TOP,
    WIDE,
    Axis,
    Scale,
    fitted_scale,
    frame,
    label,
    line,
)
from autotune.tuning.events import Proposed, TrialFinished
from autotune.tuning.history import History
from autotune.units import format_seconds


def _whole_text(value: float) -> str:
    return f"{value:.0f}"


def search_chart(history: History) -> Markup | None:
    """Step time over trials: candidates, references and failures, and the best so far as a line."""
    trials = [trial for trial in history.trials if trial.request.role is not Role.AB]
    # References as measured; candidates corrected by them.
    shown_s = dict(history.measured_references) | history.steady_by_number
    if not shown_s:
        return None
    # References differ from candidates, so they would widen the fences; all of them are shown.
    references = [shown_s[number] for number, _ in history.measured_references]
    candidates = list(history.steady_by_number.values())
    x = fitted_scale([float(trial.request.number) for trial in trials], LEFT, WIDE - RIGHT, 0.02)
    y = fitted_scale(axis_range(candidates, references), HEIGHT - BOTTOM, TOP + 12)
    failed = [trial for trial in trials if isinstance(trial.outcome, Failed)]
    marks = [_failure(trial, x) for trial in failed]
    dots, best_line, best_s, last = [], [], math.inf, max(shown_s)
    for trial in trials:
        number = trial.request.number
        if number not in shown_s:
            continue
        style = _style(history, trial)
        beyond = not y.low <= shown_s[number] <= y.high
        height = TOP + RADIUS if shown_s[number] > y.high else HEIGHT - BOTTOM
        dots.append(
            Dot(
                x(number),
                height if beyond else y(shown_s[number]),
                style,
                _trial_title(trial, style),
                beyond,
            )
        )
        is_better = style == "candidate" and shown_s[number] < best_s
        best_s = shown_s[number] if is_better else best_s
        if y.low <= best_s <= y.high and (is_better or number == last):
            best_line.append((x(number), y(best_s)))
    steps = [
        point for before, after in pairwise(best_line) for point in (before, (after[0], before[1]))
    ]
    body = [line(steps + best_line[-1:], "best")] if steps else []
    body += [*map(drawn, merged(dots)), *marks, *_beyond_label(dots, WIDE, TOP + 16)]
    title = "Step time of every trial of the search and the best so far"
    x_axis = Axis(x, "trial", _whole_text, 8, whole=True)
    return frame(x_axis, Axis(y, "step time", format_seconds), body, title, WIDE)


def _style(history: History, trial: TrialFinished) -> str:
    if trial.request.role is Role.REFERENCE:
        return "reference"
    return "disturbed" if trial.request.number in history.disturbed else "candidate"


def _trial_title(trial: TrialFinished, style: str) -> str:
    assert isinstance(trial.outcome, Measured)
    name = "current setup" if style == "reference" else trial.request.strategy_id
    note = ", disturbed" if style == "disturbed" else ""
    measured = format_seconds(trial.outcome.median_s)
    return f"trial {trial.request.number}: {name}, {measured} as measured{note}"


def _failure(trial: TrialFinished, x: Scale) -> Markup:
    assert isinstance(trial.outcome, Failed)
    request, kind = trial.request, trial.outcome.kind.value
    name = "current setup" if request.strategy_id == CURRENT_SETUP else request.strategy_id
    return _cross(x(request.number), TOP + 6, f"trial {request.number}: {name} failed ({kind})")


def _beyond_label(dots: Sequence[Dot], width: int, top: int) -> list[Markup]:
    """The number of outliers; nothing if there are none."""
    count = sum(dot.beyond for dot in dots)
    if not count:
        return []
    what = "triangle: a trial" if count == 1 else f"triangles: {count} trials"
    return [label(width - RIGHT - 4, top, f"{what} beyond the axes", "end")]


def prediction_chart(history: History) -> Markup | None:
    """Measured over predicted step time of every predicted candidate; the diagonal is equality.

    None without predictions, and if dots would cover each other in very few places.
    """
    pairs = [
        (trial.request.predicted_s, history.steady_by_number[trial.request.number], trial)
        for trial in history.candidates
        if isinstance(trial.outcome, Measured) and trial.request.predicted_s is not None
    ]
    if not pairs:
        return None
    both = [value for predicted_s, measured_s, _ in pairs for value in (predicted_s, measured_s)]
    both_range = axis_range(both)
    x = fitted_scale(both_range, LEFT, NARROW - RIGHT)
    y = fitted_scale(both_range, HEIGHT - BOTTOM, TOP)
    dots = []
    for predicted_s, measured_s, trial in pairs:
        title = (
            f"{trial.request.strategy_id}: predicted {format_seconds(predicted_s)}, "
            f"measured {format_seconds(measured_s)}"
        )
        at_x, at_y = (min(max(value, x.low), x.high) for value in (predicted_s, measured_s))
        beyond = (at_x, at_y) != (predicted_s, measured_s)
        dots.append(Dot(x(at_x), y(at_y), _style(history, trial), title, beyond))
    if places(dots) < FEWEST_PLACES:
        return None
    body = [line([(x(x.low), y(x.low)), (x(x.high), y(x.high))], "guide")]
    body += [*map(drawn, merged(dots)), *_beyond_label(dots, NARROW, HEIGHT - BOTTOM - 8)]
    x_axis, y_axis = Axis(x, "predicted", format_seconds), Axis(y, "measured", format_seconds)
    return frame(x_axis, y_axis, body, "Measured against predicted step time", NARROW)


def rankers(rounds: Sequence[Proposed]) -> list[str]:
    """Names of all rankers with a measured quality, in a fixed order."""
    return sorted({quality.ranker for proposed in rounds for quality in proposed.quality})


def quality_chart(rounds: Sequence[Proposed]) -> Markup | None:
    """Pairwise accuracy of every ranker per round; 0.5 is chance."""
    names = rankers(rounds)
    if not names:
        return None
    numbers = [float(proposed.round) for proposed in rounds if proposed.quality]
    x = Scale(min(numbers) - 0.2, max(numbers) + 0.2, LEFT, NARROW - RIGHT)
    lowest = min(quality.pairwise_accuracy for proposed in rounds for quality in proposed.quality)
    y = Scale(min(0.4, lowest - 0.05), 1.02, HEIGHT - BOTTOM, TOP)
    body = [line([(x(x.low), y(0.5)), (x(x.high), y(0.5))], "guide")]
    for index, name in enumerate(names):
        points = [
            (x(proposed.round), y(quality.pairwise_accuracy), quality.pairwise_accuracy)
            for proposed in rounds
            for quality in proposed.quality
            if quality.ranker == name
        ]
        style = f"s{index % SERIES}"
        body.append(line([(left, top) for left, top, _ in points], style))
        body += [
            drawn(Dot(left, top, style, f"{name}: {value:.2f}")) for left, top, value in points
        ]
    x_axis = Axis(x, "round", _whole_text, 8, whole=True)
    y_axis = Axis(y, "pairs in the right order", lambda value: f"{value:.2g}")
    return frame(x_axis, y_axis, body, "Ranking quality of every ranker per round", NARROW)


def _cross(left: float, top: float, title: str) -> Markup:
    down = f"M{left - 4:.1f} {top - 4:.1f} L{left + 4:.1f} {top + 4:.1f}"
    up = f"M{left - 4:.1f} {top + 4:.1f} L{left + 4:.1f} {top - 4:.1f}"
    path = Markup('<path class="line failed" d="{} {}"><title>{}</title></path>')
    return path.format(down, up, title)
