"""Plots of what-ifs: what limits a step before and after, and step time over an amount."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from autotune.reports.dots import Dot, drawn
from autotune.reports.plot import (
    BOTTOM,
    HEIGHT,
    LEFT,
    NARROW,
    RIGHT,
    SERIES,
    TOP,
    Axis,
    Scale,
    fitted_scale,
    frame,
    line,
)
from autotune.reports.timeline_charts import Bar, Row, Window, drawing
from autotune.units import format_seconds
from autotune.whatif.answers.answered import Answered
from autotune.whatif.answers.curves import Curve
from autotune.whatif.answers.limits import Limits

PARTS = (
    ("only the host computes", "s5"),
    ("host and device compute", "s2"),
    ("only the device computes", "s0"),
    ("only communication", "s1"),
    ("nothing runs", "soft"),
)
MOST_BARS = 40


def limits_chart(found: Answered) -> Markup:
    """A bar for the training as it is and for each prediction, the fastest first."""
    named = [("now", found.before_limits)]
    for one in found.predicted[:MOST_BARS]:
        assert one.limits is not None
        workers = "" if one.workers is None else f" on {one.workers} workers"
        named.append((f"{one.asked.text}{workers}", one.limits))
    longest_s = max(limits.step_s for _, limits in named)
    window = Window(0.0, longest_s, longest_s)
    return drawing([Row(name, _bars(limits, window)) for name, limits in named], window, "limits")


def _bars(limits: Limits, window: Window) -> list[Bar]:
    seconds = (
        limits.host_only_s,
        limits.both_s,
        limits.device_only_s,
        limits.communication_only_s,
        limits.idle_s,
    )
    bars, at_s = [], 0.0
    for (name, style), part_s in zip(PARTS, seconds, strict=True):
        width = window.pixels(at_s + part_s) - window.pixels(at_s)
        if width > 0:
            text = format_seconds(part_s)
            bars.append(Bar(window.pixels(at_s), width, style, f"{name}: {text}", text))
        at_s += part_s
    return bars


def curve_chart(
    curves: Sequence[Curve], name: str, amount_text: Callable[[float], str]
) -> Markup | None:
    """Step time over an amount, which doubles from tick to tick; None without a curve."""
    if not curves:
        return None
    amounts = [amount for curve in curves for amount, _ in curve.points]
    unit = min(amounts)
    steps_s = [step_s for curve in curves for _, step_s in curve.points]
    doublings = math.log2(max(amounts) / unit)
    x = Scale(-0.15, max(doublings, 1.0) + 0.15, LEFT, NARROW - RIGHT)
    y = fitted_scale([0.0, *steps_s], HEIGHT - BOTTOM, TOP)
    y = Scale(0.0, y.high, y.start, y.stop)
    body = []
    for number, curve in enumerate(curves):
        style = f"s{number % SERIES}"
        points = [(x(math.log2(amount / unit)), y(step_s)) for amount, step_s in curve.points]
        body.append(line(points, style))
        body += [
            drawn(
                Dot(
                    left,
                    top,
                    style,
                    f"{curve.name}, {amount_text(amount)}: {format_seconds(step_s)}",
                )
            )
            for (left, top), (amount, step_s) in zip(points, curve.points, strict=True)
        ]
    x_axis = Axis(x, name, lambda power: amount_text(unit * 2**power), 8, whole=True)
    return frame(
        x_axis, Axis(y, "step time", format_seconds), body, f"Step time over {name}", NARROW
    )
