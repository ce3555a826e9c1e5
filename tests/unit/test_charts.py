"""Charts whose axes serve most dots, and whose dots can be told apart."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from synthetic_job import SyntheticWorld, drive, job_spec, strategy

from autotune.reports.charts import prediction_chart, search_chart
from autotune.reports.dots import Dot, axis_range, merged, places
from autotune.tuning.events import TrialFinished
from autotune.tuning.history import History

SPEC = job_spec()


def history(true_s: dict[int, float], predicted: dict[int, float] | None = None) -> History:
    """A job whose strategies take these times, and are predicted at others."""
    world = SyntheticWorld(true_s, available=len(true_s))
    driven, _ = drive(SPEC, world)
    if predicted is None:
        return driven
    wanted = {strategy(number).id: value for number, value in predicted.items()}

    def changed(event):
        if isinstance(event, TrialFinished) and event.request.predicted_s is not None:
            request = replace(event.request, predicted_s=wanted[event.request.strategy_id])
            return replace(event, request=request)
        return event

    return History(tuple(changed(event) for event in driven.events), SPEC.deviation)


def heights(chart: str) -> list[float]:
    return [float(top) for top in re.findall(r'cy="([\d.]+)"', chart)]


def test_one_losing_trial_is_marked_at_the_edge_and_squeezes_nothing() -> None:
    usual = {number: 0.05 + 0.001 * number for number in range(9)}
    chart = str(search_chart(history(usual)))
    losing = str(search_chart(history(usual | {9: 2.0})))
    assert "<polygon" not in chart and losing.count("<polygon") == 1
    assert "triangle: a trial beyond the axes" in losing and "2 s as measured" in losing
    spread = [max(each) - min(each) for each in (heights(chart), heights(losing))]
    assert spread[1] == pytest.approx(spread[0], rel=0.1)


def test_the_current_setup_is_always_inside_the_axis() -> None:
    chart = str(search_chart(history({number: 0.01 for number in range(9)})))
    assert "<polygon" not in chart and "100 ms" in chart


def test_the_axis_holds_all_of_few_values_and_most_of_many() -> None:
    assert axis_range([1.0, 9.0]) == (1.0, 9.0)
    assert axis_range([1.0, 1.1, 1.2, 1.3, 9.0]) == (1.0, 1.3)
    assert axis_range([1.0, 1.1, 1.2, 1.3, 9.0], [5.0]) == (1.0, 5.0)
    assert axis_range([], [5.0]) == (5.0, 5.0)


def test_dots_that_cover_each_other_become_one_with_their_number() -> None:
    near = [Dot(100 + 0.5 * number, 50, "candidate", f"trial {number}") for number in range(11)]
    apart = [Dot(200, 50, "candidate", "far"), Dot(101, 50, "reference", "another")]
    dots = merged([*near, *apart])
    assert [(dot.count, dot.style) for dot in dots] == [
        (11, "candidate"),
        (1, "candidate"),
        (1, "reference"),
    ]
    assert dots[0].title == "11 trials: trial 0; trial 1; trial 2; and 8 more"
    assert places([*near, *apart]) == 2


def test_predictions_in_two_places_make_no_chart() -> None:
    times = {number: (0.05, 0.08)[number % 2] for number in range(10)}
    assert prediction_chart(history(times, times)) is None
    spread = {number: 0.05 + 0.003 * number for number in range(10)}
    chart = str(prediction_chart(history(spread, spread)))
    assert chart.count("<circle") == 10


def test_a_wrong_prediction_is_at_the_edge_of_the_chart() -> None:
    spread = {number: 0.05 + 0.003 * number for number in range(10)}
    chart = str(prediction_chart(history(spread, spread | {0: 5.0})))
    assert chart.count("<polygon") == 1 and "predicted 5 s" in chart
    assert "triangle: a trial beyond the axes" in chart
