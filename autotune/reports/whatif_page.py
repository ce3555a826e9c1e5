"""The HTML page of `autotune what-if`: predictions, limits, curves, and measured changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.reports.pages import write_page
from autotune.reports.plot import SERIES
from autotune.reports.whatif_charts import PARTS, curve_chart, limits_chart
from autotune.units import format_rate, format_ratio, format_seconds
from autotune.whatif.answers.answered import Answered, MeasuredChange
from autotune.whatif.answers.answers import Answer
from autotune.whatif.answers.curves import Curve


def write_whatif_report(path: Path, found: Answered) -> None:
    """Write the page; raises `InvalidInput` if `path` cannot be written."""
    best = found.predicted[0] if found.predicted else None
    context = {
        "found": found,
        "source": Path(found.source).name or found.source,
        "title": _title(best),
        "limits": limits_chart(found),
        "legend": PARTS,
        "rows": [_row(one) for one in found.predicted],
        "refused": [(one.asked.text, one.reason) for one in found.refused],
        "plots": _plots(found),
        "slow": found.slow,
        "checked": [_checked(one) for one in found.checked],
        "refusals": found.refusals,
    }
    write_page(path, "whatif_page.html.j2", context, "the report")


def _title(best: Answer | None) -> str:
    if best is None or best.prediction is None:
        return "No what-if applies"
    speedup = best.prediction.speedup
    if speedup <= 1:
        return "No what-if is faster"
    return f"{best.asked.text}: {format_ratio(speedup)}"


def _row(one: Answer) -> dict[str, Any]:
    prediction, limits = one.prediction, one.limits
    assert prediction is not None and limits is not None
    path = [
        f"{name} {100 * part_s / limits.step_s:.0f} %"
        for name, part_s in limits.path_s.items()
        if part_s >= 0.01 * limits.step_s
    ]
    return {
        "name": one.asked.text,
        "title": one.title,
        "workers": "" if one.workers is None else str(one.workers),
        "step": format_seconds(prediction.after_s),
        "speedup": format_ratio(prediction.speedup),
        "interval": (
            f"{format_ratio(prediction.speedup_low)} to {format_ratio(prediction.speedup_high)}"
        ),
        "samples": "" if one.samples_ratio is None else format_ratio(one.samples_ratio),
        "exposed": format_seconds(limits.exposed_communication_s),
        "path": ", ".join(path),
        "enact": one.enact,
        "assumptions": [(what_if.source, what_if.assumptions) for what_if in one.what_ifs],
    }


def _plots(found: Answered) -> list[dict[str, Any]]:
    plots = [
        ("workers", found.over_workers, lambda amount: f"{amount:.0f}"),
        ("bandwidth of the slowest host", found.over_bandwidth, format_rate),
    ]
    return [
        {"name": name, "chart": curve_chart(curves, name, text), "legend": _legend(curves)}
        for name, curves, text in plots
        if curves
    ]


def _legend(curves: tuple[Curve, ...]) -> list[tuple[str, str]]:
    return [(curve.name, f"s{number % SERIES}") for number, curve in enumerate(curves)]


def _checked(one: MeasuredChange) -> dict[str, Any]:
    def ratio(middle: float | None, low: float | None, high: float | None) -> str:
        if middle is None:
            return "none"
        return f"{middle:.3f}x" + ("" if low is None else f" ({low:.3f}x to {high:.3f}x)")

    return {
        "name": one.name,
        "predicted": ratio(one.predicted, one.predicted_low, one.predicted_high),
        "measured": ratio(one.measured, one.measured_low, one.measured_high),
        "error": "" if one.error is None else f"{100 * one.error:+.1f} %",
        "steps": f"{format_seconds(one.baseline_s)}, then {format_seconds(one.changed_s)}",
        "turns": f"{one.pairs} pairs of {one.steps_per_turn} steps",
        "notes": one.notes,
    }
