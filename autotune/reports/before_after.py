"""The current setup next to the best candidate: replayed steps on one axis, and predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from autotune.lowering.steady import SteadySteps
from autotune.records import CURRENT_SETUP, Decision
from autotune.reports.step_charts import STEP_LEGEND, step_chart
from autotune.strategy_space.plan import Plan
from autotune.tuning.explanation import Explainer, Explanation
from autotune.tuning.history import History
from autotune.units import format_seconds

MOST_MISSED = 10
"""Strategies that missed their prediction, of which a report explains the worst."""


@dataclass(frozen=True)
class Side:
    """The steps of one side as a chart."""

    title: str
    text: str
    chart: Markup


def before_and_after(
    history: History, decision: Decision, explainer: Explainer, measured_s: dict[str, float]
) -> dict[str, Any] | None:
    """The timelines of both sides; None without a candidate.

    `measured_s`: median step times of the closing comparison, by strategy.
    """
    best = decision.best_candidate_id
    planned = history.planned(best) if best else None
    if best is None or planned is None:
        return None
    shown: list[tuple[str, str, Plan]] = []
    if history.current_plan is not None:
        shown.append((CURRENT_SETUP, "The current setup", history.current_plan))
    exported = decision.strategy_id == best
    title = "The exported strategy" if exported else "The best candidate (not exported)"
    shown.append((best, f"{title}: {history.in_words(best)}", planned.plan))
    # A message that runs into the next step shows only if that step is drawn.
    count = 2 if planned.plan.cross_step else 1
    replayed = [explainer.replays.steady(plan, count) for _, _, plan in shown]
    axis_s = max(steps.end_s - steps.begin_s for steps in replayed)
    sides = [
        Side(title, _figures(steps, measured_s.get(id_)), step_chart(steps, plan, axis_s))
        for (id_, title, plan), steps in zip(shown, replayed, strict=True)
    ]
    return {
        "sides": sides,
        "steps": count,
        "legend": STEP_LEGEND,
        "current_known": history.current_plan is not None,
    }


def _figures(steps: SteadySteps, measured_s: float | None) -> str:
    measured = "not measured" if measured_s is None else format_seconds(measured_s)
    return (
        f"Measured {measured} per step; replayed {format_seconds(steps.step_s)}: "
        f"{format_seconds(steps.computation_s)} of computation, "
        f"{format_seconds(max(steps.exposed_s, 0.0))} exposed."
    )


def predictions(
    history: History, decision: Decision, explainer: Explainer
) -> tuple[list[dict[str, Any]], int]:
    """Rows of the best candidate and of the predictions that were missed, and how many were."""
    best = decision.best_candidate_id
    explained = explainer.explain(best) if best else None
    missed, count = explainer.missed(MOST_MISSED)
    rows = [explained] if explained else []
    rows += [each for each in missed if each.strategy_id != best]
    return [_row(each, history) for each in rows], count


def _row(explanation: Explanation, history: History) -> dict[str, Any]:
    steps = explanation.steps
    return {
        "strategy": explanation.strategy_id,
        "words": history.in_words(explanation.strategy_id),
        "predicted_s": explanation.predicted_s,
        "measured_s": explanation.measured_s,
        "miss": explanation.miss,
        "replayed_s": steps.step_s,
        "exposed_s": max(steps.exposed_s, 0.0),
        "reason": explanation.reason,
    }
