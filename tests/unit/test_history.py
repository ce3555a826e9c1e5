"""Figures derived from the events of a job."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from synthetic_job import WORKLOAD, SyntheticWorld, drive, job_spec, measured, strategy

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.records import CURRENT_SETUP, Failed, FailureKind, Measured, Role, TrialRequest
from autotune.rng import generator
from autotune.strategy_space.plan import PlannedStrategy
from autotune.tuning.events import Profiled, Proposal, Proposed, TrialFinished
from autotune.tuning.history import History

IDS = [strategy(number).id for number in range(4)]


def history_of(letters: str, *medians_s: float | None) -> History:
    """Trials of r (the reference) and strategies (A: 0, ...); None as a median: it failed."""
    events = []
    for number, (letter, median_s) in enumerate(zip(letters, medians_s, strict=True)):
        role = Role.REFERENCE if letter == "r" else Role.CANDIDATE
        strategy_id = CURRENT_SETUP if letter == "r" else IDS["ABCD".index(letter)]
        outcome = measured(median_s, 3) if median_s else Failed(FailureKind.HANG, "no step in 60 s")
        request = TrialRequest(number, strategy_id, role, 2, 3)
        events.append(TrialFinished(request, outcome, None, float(number)))
    return History(tuple(events), 0.15)


def test_an_empty_history_has_no_figures():
    empty = History((), 0.15)
    assert empty.profiled is None and empty.reference_s is None and empty.elapsed_s == 0.0
    assert not empty.disturbed and not empty.ranking() and not empty.proposals


QUIET = (1.0, 1.004, 0.998, 1.002, 1.0)
DISTURBED = {
    "references agree": ("rABr", (1.0, 0.5, 3.0, 1.1), set()),
    "slower reference": ("rArBCr", (1.0, 1.0, 1.0, 1.0, 1.0, 1.2), {3, 4}),
    "faster reference": ("rArBCr", (1.0, 1.0, 1.0, 1.0, 1.0, 0.8), {3, 4}),
    "failed reference marks none": ("rAr", (1.0, 1.0, None), set()),
    "failed reference clears none": ("rArBr", (1.0, 1.0, None, 1.0, 2.0), {1, 3}),
    "one deviates": ("rArArAr", (1.0, 1.5, 1.5, 1.0, 1.0, 1.0, 1.0), {1, 3}),
    "lasting change": ("rArBrCrDr", (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0), {3}),
    "quiet: 5 %": ("rrrrrArBrCr", (*QUIET, 1.0, 1.003, 1.0, 1.055, 1.05, 1.053), {7}),
    "few: 5 %": ("rrrBr", (*QUIET[:3], 1.0, 1.055), set()),
}
"""The candidates around a reference that deviates from the one before it are disturbed."""


@pytest.mark.parametrize("case", DISTURBED)
def test_candidates_next_to_a_deviating_reference_are_disturbed(case):
    letters, medians_s, disturbed = DISTURBED[case]
    history = history_of(letters, *medians_s)
    assert history.disturbed == disturbed
    assert history.tolerance < 0.05 if case == "quiet: 5 %" else history.tolerance == 0.15


def test_a_temporarily_slower_machine_does_not_change_the_ranking():
    history = history_of("rArrBCr", 1.0, 0.9, 1.0, 2.0, 1.8, 1.6, 2.0)
    assert history.measured_s[IDS[0]] == pytest.approx(history.measured_s[IDS[1]])
    assert history.ranking()[0][0] == IDS[2]


def test_undisturbed_measurements_replace_disturbed_ones_and_are_combined_by_their_median():
    history = history_of("rABrAAr", 1.0, 1.5, 1.8, 2.0, 2.2, 2.4, 2.0)
    assert history.measured_s[IDS[0]] == pytest.approx(2.3)
    only_disturbed_s = 1.8 * 2.0 / 1.5  # better than nothing
    assert history.measured_s[IDS[1]] == pytest.approx(only_disturbed_s)


def test_the_noise_ignores_changes_of_the_machine():
    steady = np.array([1.0, 1.02, 1.0, 1.02, 1.0])
    history = history_of("r" * 10, *steady, *(2 * steady))
    assert history.noise == pytest.approx(math.log(1.02) / (0.6745 * math.sqrt(2)))


def test_a_trial_whose_own_steps_changed_is_disturbed_without_any_reference():
    trial = history_of("A", 1.0).trials[0]
    burst = replace(trial, outcome=Measured(((1.0, 1.01, 1.0, 1.02, 1.3, 1.31, 1.3, 1.32),)))
    assert burst.unsteady and History((burst,), 0.15).disturbed == {0}
    assert not trial.unsteady and not history_of("A", None).trials[0].unsteady


def test_the_noise_of_the_references_is_unknown_until_there_are_a_few():
    assert history_of("rrr", 1.0, 1.0, 1.0).reference_noise is None
    unknown = "noise between runs of the current setup unknown, 0 of 0 candidate trials disturbed"
    assert unknown in history_of("r", 1.0).quality
    four = history_of("rrrr", 1.0, 1.0, 1.0, 1.0)
    assert four.reference_noise == 0.0 and four.noise == 0.01


def test_a_measured_trial_has_an_interval_and_a_failed_one_has_none():
    three, failed = history_of("AB", 1.0, None).trials
    eight = replace(three, outcome=measured(1.0, 8, generator(0, "eight")))
    assert eight.interval.low < eight.outcome.median_s < eight.interval.high
    assert three.interval is None and failed.interval is None  # three steps are too few


def test_the_ranking_is_fastest_first_without_failed_strategies():
    history = history_of("rABCCD", 1.0, 0.9, 0.7, 0.5, None, 0.8)
    assert [strategy_id for strategy_id, _ in history.ranking()] == [IDS[1], IDS[3], IDS[0]]
    assert list(history.failed) == [IDS[2]]


def test_the_closing_comparison_does_not_change_the_measured_times():
    history, _ = drive(job_spec(), SyntheticWorld({5: 0.05}, noise=0.05))
    search = tuple(event for event in history.events if event not in history.ab_trials)
    assert history.ab_trials
    assert History(search, history.deviation).measured_s == history.measured_s


def test_then_leaves_the_older_history_alone():
    first = history_of("r", 1.0)
    second = first.then(history_of("rA", 1.0, 1.0).events[1])
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


def test_a_trial_of_a_strategy_that_was_never_proposed_is_refused():
    with pytest.raises(InvalidInput, match="must be proposed after a profile"):
        history_of("A", 0.1).planned(IDS[0])
