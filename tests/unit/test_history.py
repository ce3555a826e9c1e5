"""Figures derived from the events of a job."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from synthetic_job import WORKLOAD, SyntheticWorld, drive, job_spec, measured, strategy

from autotune.cluster import Cluster
from autotune.records import CURRENT_SETUP, Failed, FailureKind, Measured, Role, TrialRequest
from autotune.rng import generator
from autotune.strategy_space.plan import PlannedStrategy
from autotune.tuning.events import Profiled, Proposal, Proposed, TrialFinished
from autotune.tuning.history import History


def history_of(*trials: tuple[str, float | None], deviation: float = 0.15) -> History:
    """Trials as (r: reference, A: strategy 0, ...; median in seconds, None: failed)."""
    events = []
    for number, (letter, seconds) in enumerate(trials):
        role = Role.REFERENCE if letter == "r" else Role.CANDIDATE
        strategy_id = CURRENT_SETUP if letter == "r" else strategy(ord(letter) - ord("A")).id
        outcome = measured(seconds, 3) if seconds else Failed(FailureKind.HANG, "no step in 60 s")
        request = TrialRequest(number, strategy_id, role, 2, 3)
        events.append(TrialFinished(request, outcome, None, float(number)))
    return History(tuple(events), deviation)


def test_an_empty_history_has_no_figures():
    empty = History((), 0.15)
    assert empty.profiled is None and empty.reference_s is None and empty.elapsed_s == 0.0
    assert not empty.disturbed and not empty.ranking() and not empty.proposals


def test_candidates_between_two_agreeing_references_are_undisturbed():
    assert not history_of(("r", 1.0), ("A", 0.5), ("B", 3.0), ("r", 1.1)).disturbed


@pytest.mark.parametrize("second", [1.2, 0.8])
def test_a_deviating_reference_marks_the_candidates_since_the_one_before_it(second):
    assert history_of(
        ("r", 1.0), ("A", 1.0), ("r", 1.0), ("B", 1.0), ("C", 1.0), ("r", second)
    ).disturbed == {3, 4}


def test_a_failed_reference_marks_no_trial_and_clears_none():
    assert not history_of(("r", 1.0), ("A", 1.0), ("r", None)).disturbed
    assert history_of(("r", 1.0), ("A", 1.0), ("r", None), ("B", 1.0), ("r", 2.0)).disturbed == {
        1,
        3,
    }


def test_a_reference_that_deviates_alone_marks_both_sides_of_it():
    assert history_of(
        ("r", 1.0), ("A", 1.5), ("r", 1.5), ("A", 1.0), ("r", 1.0), ("A", 1.0), ("r", 1.0)
    ).disturbed == {1, 3}


def test_a_lasting_change_disturbs_only_the_trials_around_it():
    times_s = (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0)
    assert history_of(*zip("rArBrCrDr", times_s, strict=True)).disturbed == {3}


def test_a_temporarily_slower_machine_does_not_change_the_ranking():
    history = history_of(
        ("r", 1.0), ("A", 0.9), ("r", 1.0), ("r", 2.0), ("B", 1.8), ("C", 1.6), ("r", 2.0)
    )
    assert history.measured_s[strategy(0).id] == pytest.approx(history.measured_s[strategy(1).id])
    assert history.ranking()[0][0] == strategy(2).id


def test_undisturbed_measurements_replace_disturbed_ones_and_are_combined_by_their_median():
    history = history_of(
        ("r", 1.0), ("A", 1.5), ("B", 1.8), ("r", 2.0), ("A", 2.2), ("A", 2.4), ("r", 2.0)
    )
    assert history.measured_s[strategy(0).id] == pytest.approx(2.3)
    assert history.measured_s[strategy(1).id] == pytest.approx(
        1.8 * 2.0 / 1.5
    )  # only ever disturbed: better than nothing


def test_the_noise_ignores_changes_of_the_machine():
    steady = [("r", 1.0), ("r", 1.02), ("r", 1.0), ("r", 1.02), ("r", 1.0)]
    changed = [*steady, *(("r", 2 * value) for _, value in steady)]
    assert history_of(*changed).noise == pytest.approx(math.log(1.02) / (0.6745 * math.sqrt(2)))


def test_references_that_agree_well_tighten_the_tolerance_and_find_a_change_of_5_percent():
    quiet = [("r", 1.0), ("r", 1.004), ("r", 0.998), ("r", 1.002), ("r", 1.0)]
    changed = history_of(
        *quiet, ("A", 1.0), ("r", 1.003), ("B", 1.0), ("r", 1.055), ("C", 1.05), ("r", 1.053)
    )
    assert changed.tolerance < 0.05 and changed.disturbed == {7}
    few = history_of(*quiet[:3], ("B", 1.0), ("r", 1.055))
    assert few.tolerance == 0.15 and not few.disturbed


def test_a_trial_whose_own_steps_changed_is_disturbed_without_any_reference():
    trial = history_of(("A", 1.0)).trials[0]
    burst = replace(trial, outcome=Measured(((1.0, 1.01, 1.0, 1.02, 1.3, 1.31, 1.3, 1.32),)))
    assert burst.unsteady and History((burst,), 0.15).disturbed == {0}
    assert (
        not trial.unsteady
        and not replace(trial, outcome=Failed(FailureKind.HANG, "no step")).unsteady
    )


def test_the_noise_of_the_references_is_unknown_until_there_are_a_few():
    assert history_of(("r", 1.0), ("r", 1.0), ("r", 1.0)).reference_noise is None
    assert (
        "noise between runs of the current setup unknown, 0 of 0 trials disturbed"
        in history_of(("r", 1.0)).quality
    )
    assert (
        history_of(*[("r", 1.0)] * 4).reference_noise == 0.0
        and history_of(*[("r", 1.0)] * 4).noise == 0.01
    )


def test_a_measured_trial_has_an_interval_and_a_failed_one_has_none():
    events = history_of(("A", 1.0), ("B", None)).trials
    eight = replace(events[0], outcome=measured(1.0, 8, generator(0, "eight")))
    assert (
        eight.interval is not None
        and eight.interval.low < eight.outcome.median_s < eight.interval.high
    )
    assert events[0].interval is None and events[1].interval is None  # three steps are too few


def test_the_ranking_is_fastest_first_without_failed_strategies():
    history = history_of(("r", 1.0), ("A", 0.9), ("B", 0.7), ("C", 0.5), ("C", None), ("D", 0.8))
    assert [strategy_id for strategy_id, _ in history.ranking()] == [
        strategy(number).id for number in (1, 3, 0)
    ]
    assert list(history.failed) == [strategy(2).id]


def test_the_closing_comparison_does_not_change_the_measured_times():
    history, _ = drive(job_spec(), SyntheticWorld({5: 0.05}, noise=0.05))
    search = History(
        tuple(event for event in history.events if event not in history.ab_trials),
        history.deviation,
    )
    assert history.ab_trials and search.measured_s == history.measured_s


def test_then_leaves_the_older_history_alone():
    first = history_of(("r", 1.0))
    second = first.then(history_of(("r", 1.0), ("A", 1.0)).events[1])
    assert len(first.events) == 1 and len(second.events) == 2 and second.candidates


def test_a_strategy_is_planned_once_for_all_histories_of_a_job():
    strategies = [strategy(0), strategy(1)]
    proposals = tuple(Proposal(one, "sampled") for one in strategies)
    profile = Profiled(WORKLOAD, Cluster.local(2), 0.0, {})
    history = History((profile,), 0.15)
    handed_over = PlannedStrategy.of(strategies[0], WORKLOAD, 2)
    history.keep_plan(handed_over)
    longer = history.then(Proposed(0, proposals, "none", "", 2, (), 0.0))
    assert longer.planned(strategies[0].id) is handed_over
    planned = longer.first(2).planned(strategies[1].id)
    assert planned == PlannedStrategy.of(strategies[1], WORKLOAD, 2)
    assert longer.planned(strategies[1].id) is planned
    assert longer.planned(CURRENT_SETUP) is None
