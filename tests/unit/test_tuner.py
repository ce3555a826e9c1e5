"""The tuner as a pure state machine, driven through whole jobs with synthetic events."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import wilcoxon
from synthetic_job import SyntheticWorld, decided, drive, job_spec, measured, roles, strategy

from autotune.records import CURRENT_SETUP, Measured, Role, Stopped, TrialRequest
from autotune.rng import generator
from autotune.strategy_space.strategy import Compressor
from autotune.tuning.events import Proposed, TrialFinished, event_from_data, event_to_data
from autotune.tuning.finalists import contender, second_looks
from autotune.tuning.history import History
from autotune.tuning.instructions import Abort, ProfileWorkload, Propose, RunTrial
from autotune.tuning.job import JobSpec
from autotune.tuning.statistics import (
    EXACT_PAIRS,
    compare,
    compare_pairs,
    further_steps,
    signed_rank_bound,
)
from autotune.tuning.tuner import (
    REFERENCE_TRIES,
    look_instruction,
    next_instruction,
    search_instruction,
)

FAST = {5: 0.06, 3: 0.07}
IDS = [strategy(number).id for number in range(32)]
SEARCH = "r" + "ccccr" + "ccccr" + "cccc"
LOOK = "r" + "cc" + "r"
AB, BA = "abba" * 3, "baab" * 3
WHOLE = SEARCH + LOOK + AB
LOOKED = "rc" + SEARCH[:-1] + "crcr" + AB
"""With first looks at the current setup and the first candidate."""


def candidate(request: TrialRequest) -> bool:
    return request.role is Role.CANDIDATE


def second_look(request: TrialRequest) -> bool:
    return candidate(request) and request.predicted_s is None and request.strategy_id == IDS[5]


def late_pair(request: TrialRequest) -> bool:
    return request.role is Role.AB and request.strategy_id == IDS[5] and request.number > 19


def current_pair(request: TrialRequest) -> bool:
    return request.role is Role.AB and request.strategy_id == CURRENT_SETUP


def tuned_block(request: TrialRequest) -> bool:
    return request.role is Role.AB and request.strategy_id != CURRENT_SETUP


def trial(number: int):
    return lambda request: request.number == number


def from_trial(number: int):
    return lambda request: request.number >= number


def test_a_job_starts_with_the_profile_then_the_reference_then_the_first_round():
    spec, world = job_spec(), SyntheticWorld(FAST)
    history = History((), spec.deviation)
    assert next_instruction(spec, history) == ProfileWorkload()
    history = history.then(world.answer(spec, history, ProfileWorkload()))
    first = next_instruction(spec, history)
    assert isinstance(first, RunTrial) and first.request.role is Role.REFERENCE
    assert first.request.strategy_id == CURRENT_SETUP
    history = history.then(world.answer(spec, history, first))
    assert next_instruction(spec, history) == Propose(0, spec.top_k)


ALL_FAILED = "the report says why each failed"
FASTER = "faster than the current setup"
NO_FASTER = "not significantly faster"
SLOWER = "slower than the current setup"
NO_MORE = "2 strategies failed in the closing comparison and the setting finalists allows no more"
FAILED_TOO = "right after that the current setup failed too, so nothing was proven: rank 1 exited"
W = SyntheticWorld
DECISIONS = {
    "insignificant": (W({5: 0.0999}, noise=0.05), None, LOOKED, NO_FASTER),
    "slower": (W(default_s=0.2, noise=0.01), None, WHOLE, SLOWER),
    "first reference fails": (W(FAST, fails=trial(0)), 5, "r" + WHOLE, FASTER),
    "later reference fails": (W(FAST, fails=trial(5)), 5, WHOLE, FASTER),
    "all fail": (W(fails=candidate), None, SEARCH, ALL_FAILED),
    "all refused": (W(FAST, refuses=candidate), None, "r" + "c" * 12, ALL_FAILED),
    "all six refused": (W(FAST, refuses=candidate, available=6), None, "rcccccc", ALL_FAILED),
    "second look fails": (W(FAST, fails=second_look), 3, WHOLE, FASTER),
    "comparison fails": (W(FAST, fails=late_pair), 3, SEARCH + LOOK + "abba" + BA, FASTER),
    "all comparisons fail": (W(FAST, fails=tuned_block), None, SEARCH + LOOK + "aba", NO_MORE),
    "network fails": (W(FAST, fails=from_trial(19)), None, SEARCH + LOOK + "ab", FAILED_TOO),
    "current setup fails": (W(FAST, fails=current_pair), None, SEARCH + LOOK + "abb", "twice"),
    "it fails once": (W(FAST, fails=trial(20)), 5, SEARCH + LOOK + "ab" + AB[1:], FASTER),
}
"""The world, the exported strategy, the roles of all trials, and a part of the reason."""


@pytest.mark.parametrize("case", DECISIONS)
def test_a_strategy_is_exported_only_after_a_won_comparison(case):
    world, exported, all_roles, reason = DECISIONS[case]
    history, decision = decided(job_spec(), world)
    assert decision.strategy_id == (CURRENT_SETUP if exported is None else IDS[exported])
    assert roles(history) == all_roles and not history.disturbed
    assert reason in decision.reason
    comparison = decision.comparison
    assert (comparison is not None) == (reason in (FASTER, NO_FASTER, SLOWER))
    if comparison is not None:
        assert (comparison.high < 1) == (exported is not None) and comparison.pairs == 6
        assert decision.best_candidate_id is not None


def test_the_comparison_of_the_fastest_strategy_has_its_true_ratio():
    _, decision = decided(job_spec(), SyntheticWorld(FAST, noise=0.02))
    assert decision.strategy_id == decision.best_candidate_id == IDS[5]
    assert decision.comparison.high < 1
    assert decision.comparison.ratio == pytest.approx(0.6, rel=0.05)


def test_the_search_can_be_had_without_its_closing_comparison():
    """Instruction for instruction the same, and the same contender."""
    spec, world = job_spec(), SyntheticWorld(FAST, noise=0.02)
    whole, _ = drive(spec, world)
    history = History((), spec.deviation)
    for part, new in ((search_instruction, SEARCH), (look_instruction, LOOK)):
        before = roles(history)
        while (instruction := part(spec, history)) is not None:
            history = history.then(world.answer(spec, history, instruction))
        assert roles(history) == before + new
    assert history.events == whole.events[: len(history.events)]
    assert contender(history) == whole.ab_trials[0].request.strategy_id == IDS[5]
    assert contender(History((), spec.deviation)) is None


def test_trial_numbers_count_up_and_candidates_carry_their_round_and_prediction():
    history, _ = drive(job_spec(), SyntheticWorld(FAST))
    assert roles(history) == WHOLE
    assert [trial.request.number for trial in history.trials] == list(range(len(history.trials)))
    searched = [trial for trial in history.candidates if trial.request.predicted_s is not None]
    assert [trial.request.round for trial in searched] == [0] * 4 + [1] * 4 + [2] * 4


def test_a_comparison_that_ends_for_being_slower_states_no_interval():
    spec = job_spec(ab_pairs=20, ab_precision=1e-9)
    _, decision = decided(spec, SyntheticWorld(default_s=0.2, noise=0.05))
    assert decision.strategy_id == CURRENT_SETUP and decision.comparison.pairs < 20
    assert "is clearly slower in" in decision.reason and "without an interval" in decision.reason
    assert "95 %" not in decision.reason and not decision.comparison.bounded


def test_the_same_seed_gives_the_same_job_event_by_event():
    spec, world = job_spec(), SyntheticWorld(FAST, noise=0.05, seed=3)
    assert drive(spec, world) == drive(spec, world)


LONG = {"reference_every": 1, "timed_steps": 8, "most_steps": 24, "ab_pairs": 10}


@pytest.mark.parametrize(
    ("settings", "disturbed"),
    [({}, False), ({}, True), pytest.param(LONG, False, marks=pytest.mark.slow), (LONG, True)],
)
def test_a_job_cut_at_any_event_continues_identically(settings, disturbed):
    spec = job_spec(**settings)
    world = SyntheticWorld(
        FAST,
        noise=0.02,
        factor=lambda number: 1.6 if disturbed and 3 <= number <= 6 else 1.0,
        fails=lambda request: request.strategy_id == IDS[1] or request.number == 13,
    )
    whole, end = drive(spec, world)
    for cut in range(len(whole.events) + 1):
        stored = tuple(event_from_data(event_to_data(event)) for event in whole.events[:cut])
        again, again_end = drive(spec, world, History(stored, spec.deviation))
        assert again == whole and again_end == end


def test_candidates_before_a_deviating_reference_are_marked_and_repeated_once():
    world = SyntheticWorld(FAST, factor=lambda number: 1.5 if number >= 3 else 1.0)
    history, _ = drive(job_spec(max_trials=20), world)
    assert history.disturbed == {1, 2, 3, 4}
    requests = [trial.request for trial in history.candidates if trial.request.attempt == 1]
    assert [request.strategy_id for request in requests if request.round == 0] == IDS[:4]
    for number in range(4):
        ratio = history.measured_s[IDS[number]] / history.reference_s
        assert ratio == pytest.approx(FAST.get(number, 0.1) / 0.1)


def test_a_trial_that_is_disturbed_every_time_is_repeated_at_most_max_repeats_times():
    spec = job_spec(max_trials=40, max_repeats=2)
    # Every reference takes far longer than those before it, so every candidate is disturbed.
    world = SyntheticWorld(factor=lambda number: 1.2**number, available=4)
    history, _ = decided(spec, world)
    attempts = [trial.request.attempt for trial in history.candidates if trial.request.round == 0]
    assert max(attempts) == 2 and len(attempts) == 12


def test_a_second_look_that_is_disturbed_is_repeated_between_references():
    world = SyntheticWorld(FAST, factor=lambda number: 1.5 if number >= 17 else 1.0)
    history, decision = decided(job_spec(), world)
    assert roles(history) == SEARCH + "r" + "ccr" + "ccr" + AB
    assert history.disturbed == {16, 17} and history.repeated == 2
    looks = history.candidates[12:]
    assert [(IDS.index(look.request.strategy_id), look.request.attempt) for look in looks] == [
        (5, 1),
        (3, 1),
        (5, 2),
        (3, 2),
    ]
    assert decision.strategy_id == IDS[5]


def test_second_looks_at_many_finalists_have_references_between_them():
    history, _ = decided(job_spec(finalists=6), SyntheticWorld(FAST))
    assert roles(history) == SEARCH + "r" + "ccccr" + "ccr" + AB


def test_second_looks_are_repeated_at_most_max_repeats_times_and_not_when_they_failed():
    def fails(request: TrialRequest) -> bool:
        return candidate(request) and request.predicted_s is None and request.strategy_id == IDS[3]

    world = SyntheticWorld(FAST, factor=lambda n: 1.2 ** max(0, n - 15), fails=fails)
    history, _ = decided(job_spec(max_repeats=2), world)
    assert roles(history) == SEARCH + "r" + "ccr" + "cr" + "cr" + AB


def test_references_that_fail_before_any_measurement_abort_the_job():
    world = SyntheticWorld(fails=lambda request: request.strategy_id == CURRENT_SETUP)
    history, end = drive(job_spec(), world)
    assert isinstance(end, Abort) and "rank 1 exited with code 1" in end.message
    assert roles(history) == "r" * REFERENCE_TRIES


def test_refused_trials_cost_no_budget_need_no_reference_and_are_not_repeated():
    refused = {IDS[number] for number in (0, 1, 4, 7)}
    world = SyntheticWorld(FAST, refuses=lambda request: request.strategy_id in refused)
    history, decision = decided(job_spec(), world)
    assert decision.strategy_id == IDS[5] and len(history.refused) == 4
    for trial in history.trials:
        assert trial.refused == (candidate(trial.request) and trial.request.strategy_id in refused)
    tried = [trial for trial in history.candidates if trial.request.round < len(history.rounds)]
    assert len(tried) == job_spec().max_trials + 4
    # 2, 2, 4 and 4 strategies of the rounds ran. A reference follows every 4 of them, and a round
    # that leaves half as many.
    assert roles(history) == "r" + "ccccr" * 3 + "cccc" + LOOK + AB


@pytest.mark.parametrize(("after_s", "all_fit"), [(5.0, True), (65.0, False)])
def test_the_next_contender_gets_the_pairs_that_fit_into_the_time_left(after_s, all_fit):
    spec = job_spec(ab_pairs=20, ab_precision=1e-9, max_seconds=100.0)
    began: list[float] = []

    class Slow(SyntheticWorld):
        def _run(self, history, request):
            event = super()._run(history, request)
            if request.role is Role.AB:
                began.append(history.elapsed_s)
            return replace(event, elapsed_s=began[0] + after_s) if request.number == 21 else event

    history, decision = decided(spec, Slow(FAST, noise=0.02, fails=late_pair))
    second = next(trial for trial in history.ab_trials if trial.request.round == 1)
    before = history.events[history.events.index(second) - 1]
    block_s = (spec.warmup_steps + spec.timed_steps) * history.reference_s
    fitting = int((spec.max_seconds - before.elapsed_s) / (2 * block_s))
    assert decision.comparison.pairs == (20 if all_fit else fitting)
    assert all_fit == (fitting >= 20) and fitting > 6


def test_no_further_contender_begins_after_the_time_is_over():
    spec = job_spec(max_seconds=100.0)

    class Hanging(SyntheticWorld):
        def _run(self, history, request):
            event = super()._run(history, request)
            return replace(event, elapsed_s=101.0) if tuned_block(request) else event

    history, decision = decided(spec, Hanging(FAST, fails=tuned_block))
    assert roles(history) == SEARCH + LOOK + "a"
    assert decision.strategy_id == CURRENT_SETUP and "the time is over" in decision.reason


def test_the_winner_is_one_of_the_finalists_that_were_measured_twice():
    """The finalists turn out slower than in their first trial, and than a third strategy."""

    class Curse(SyntheticWorld):
        def _run(self, history, request):
            lucky_s = 0.09 if request.predicted_s is None else 0.05
            self.true_s = {2: lucky_s, 5: lucky_s, 7: 0.06}
            return super()._run(history, request)

    history, decision = decided(job_spec(), Curse())
    assert history.ranking()[0][0] == IDS[7]
    assert decision.best_candidate_id in (IDS[2], IDS[5])


@pytest.mark.parametrize("repeats", [False, True])
def test_a_round_with_nothing_new_ends_the_search(repeats):
    class Stubborn(SyntheticWorld):
        def answer(self, spec, history, instruction):
            event = super().answer(spec, history, instruction)
            if isinstance(event, Proposed) and history.rounds and repeats:
                return replace(event, proposals=history.rounds[0].proposals)
            return event

    history, decision = decided(job_spec(max_trials=100), Stubborn({3: 0.05}, available=6))
    assert decision.strategy_id == IDS[3] and len(history.rounds) == (2 if repeats else 3)
    assert repeats or not history.rounds[-1].proposals


def test_the_time_budget_leaves_room_for_the_closing_comparison():
    spec = job_spec(max_trials=1000, max_seconds=30.0)
    history, decision = decided(spec, SyntheticWorld(FAST))
    assert decision.comparison is not None
    assert history.elapsed_s <= 30.0 and len(history.candidates) > 12
    history, decision = decided(job_spec(max_seconds=0.5), SyntheticWorld(FAST))
    assert decision.strategy_id == CURRENT_SETUP and not history.candidates
    assert "the budget ended before a strategy could be tried" in decision.reason


def test_no_second_look_takes_the_time_of_the_closing_comparison():
    """The comparison needs twelve blocks, each of which takes a twentieth of the time.

    The search may exceed the rest by its last trial and the reference after it.
    """
    block_s = 0.1 * (job_spec().warmup_steps + job_spec().timed_steps)
    spec = job_spec(max_trials=1000, finalists=3, max_seconds=20 * block_s)
    history, decision = decided(spec, SyntheticWorld(FAST, default_s=0.1))
    assert decision.comparison is not None and not second_looks(history)
    assert history.elapsed_s <= spec.max_seconds + 2 * block_s


def test_a_job_whose_space_holds_no_strategy_states_the_reason_of_its_round():
    history, decision = decided(job_spec(), SyntheticWorld(available=0))
    assert decision.strategy_id == CURRENT_SETUP and not history.candidates
    reason = history.rounds[-1].reason
    expected = f"no strategy could be tried, so the current setup stays: {reason}"
    assert decision.reason == expected


@pytest.mark.parametrize("seed", range(30))
def test_every_job_in_a_hostile_world_ends_within_its_trial_budget(seed):
    rng = generator(seed, "hostile")
    limits = {"max_trials": 20, "top_k": 6, "reference_every": 6}
    spec = job_spec(**{name: int(rng.integers(1, most)) for name, most in limits.items()})
    broken, slow, refused = (set(rng.choice(80, 15, replace=False).tolist()) for _ in range(3))
    world = SyntheticWorld(
        FAST,
        noise=0.1,
        seed=seed,
        fails=lambda request: request.number in broken - {0},
        factor=lambda number: 2.0 if number in slow else 1.0,
        available=16,
        refuses=lambda request: request.number in refused - {0} and candidate(request),
    )
    history, _ = decided(spec, world)
    looks = spec.finalists * (1 + spec.max_repeats)
    assert len(history.candidates) <= spec.max_trials + looks + len(history.failed)


@pytest.mark.parametrize("noise", [pytest.param(0.02, marks=pytest.mark.slow), 0.05])
def test_identical_time_distributions_are_called_different_at_most_at_the_stated_rate(noise):
    # A two-sided 95 % interval lies below 1 in 2.5 % of null comparisons: 2.5 of 100 jobs on
    # average; more than 7 has a probability below 1 %. The number of pairs follows the noise.
    spec = job_spec(max_trials=3, ab_pairs=20)
    worlds = [SyntheticWorld(noise=noise, seed=seed) for seed in range(100)]
    decisions = [decided(spec, world)[1] for world in worlds]
    assert sum(decision.strategy_id != CURRENT_SETUP for decision in decisions) <= 7
    assert len({decision.comparison.pairs for decision in decisions}) > 1


def test_a_gain_of_5_percent_at_a_noise_of_2_percent_is_exported_nearly_always():
    spec = job_spec(max_trials=4, ab_pairs=20, timed_steps=8, most_steps=40)
    worlds = [SyntheticWorld({2: 0.095}, noise=0.02, seed=seed) for seed in range(40)]
    decisions = [decided(spec, world)[1] for world in worlds]
    won = [decision for decision in decisions if decision.strategy_id == IDS[2]]
    assert len(won) >= 39
    assert all(decision.comparison.pairs < 20 for decision in won)
    assert all("as precise as asked for" in decision.reason for decision in won)


def test_search_trials_run_until_they_are_precise_and_blocks_have_a_fixed_length():
    spec = job_spec(timed_steps=8, most_steps=40)
    for noise, fewest, most in ((0.0, 8, 8), (0.03, 16, 40), (0.5, 40, 40)):
        history, _ = drive(spec, SyntheticWorld(FAST, noise=noise))
        search = [trial.outcome for trial in history.trials if trial.request.role is Role.REFERENCE]
        assert fewest <= np.median([len(outcome.slowest_s) for outcome in search]) <= most
        assert {len(trial.outcome.slowest_s) for trial in history.ab_trials} == {8}
        assert all(trial.outcome.stopped is None for trial in history.ab_trials)
    assert {outcome.stopped for outcome in search} == {Stopped.CAP}


@pytest.mark.parametrize("settings", [{}, {"deviation": 0.4}, {"precision": 0.03}])
def test_the_first_reference_and_candidate_are_only_as_precise_as_a_disturbance_needs(settings):
    spec = job_spec(timed_steps=8, most_steps=40, **settings)
    history, _ = drive(spec, SyntheticWorld(FAST, noise=0.05))
    first, candidate_, second, *_ = history.trials
    assert roles(history).startswith("rcrccccrccccr")
    for look in (first, candidate_):
        assert look.outcome.stopped is Stopped.PRECISE and len(look.outcome.slowest_s) <= 16
        assert spec.precision < look.interval.half_width <= spec.deviation / math.sqrt(2)
        assert look.first_look
    assert not any(trial.request.first_look for trial in history.trials[2:])
    assert second.interval.half_width < first.interval.half_width
    # Both are replaced.
    again = history.trials[3]
    assert again.request.strategy_id == candidate_.request.strategy_id
    assert history.measured_s[again.request.strategy_id] == history.steady_s(again)
    assert history.first(4).references[0][0] == 0 and history.references[0][0] == 2


@pytest.mark.parametrize(
    ("noise", "settings"),
    [(0.01, {}), (0.05, {"most_steps": 0}), (0.05, {"precision": 0.2}), (1.0, {})],
)
def test_a_first_reference_that_is_precise_or_at_its_cap_is_not_measured_again_at_once(
    noise, settings
):
    spec = job_spec(**{"timed_steps": 8, "most_steps": 40} | settings)
    history, _ = drive(spec, SyntheticWorld(noise=noise))
    assert roles(history).startswith("rccccr")


def trials_of(history: History, number: int) -> list[TrialFinished]:
    """The candidate trials of a strategy."""
    return [trial for trial in history.candidates if trial.request.strategy_id == IDS[number]]


def test_a_clearly_losing_candidate_is_stopped_early_at_whatever_speed_the_machine_is():
    spec = job_spec(max_trials=24, timed_steps=8, most_steps=40, precision=0.001)
    true_s = {5: 0.06, 8: 0.2}
    world = SyntheticWorld(true_s, noise=0.02, factor=lambda number: 2.0 if number >= 6 else 1.0)
    history, _ = drive(spec, world)
    loser, before = trials_of(history, 8)[0], trials_of(history, 1)[0]
    assert loser.outcome.stopped is Stopped.LOSING and len(loser.outcome.slowest_s) == 8
    # As fast as the current setup, which was the best so far:
    assert before.outcome.stopped is Stopped.CAP
    assert before.request.losing_s == pytest.approx(1.15 * 0.1, rel=0.02)
    # Measured at half the speed, against the best at half the speed:
    assert loser.request.losing_s == pytest.approx(1.15 * 0.06 * 2, rel=0.1)


BUDGETS = [({}, 40), ({"max_seconds": 61.0}, 12), ({"max_seconds": 15.0}, 4)]


@pytest.mark.parametrize(("budget", "most"), BUDGETS)
def test_a_trial_costs_a_small_share_of_the_budget_or_its_first_batch(budget, most):
    """2 % of 61 s are 1.2 s; a step takes 0.1 s."""
    history, _ = drive(job_spec(most_steps=40, **budget), SyntheticWorld(FAST))
    assert {trial.request.most_steps for trial in history.candidates} == {most}


def test_a_trial_during_which_the_machine_changed_is_repeated_once():
    class Burst(SyntheticWorld):
        def _run(self, history, request):
            event = super()._run(history, request)
            if request.strategy_id != IDS[2] or not candidate(request):
                return event
            rows = event.outcome.step_s
            slower = tuple((*row[:4], *(1.5 * value for value in row[4:])) for row in rows)
            return replace(event, outcome=Measured(slower, 0.0, stopped=event.outcome.stopped))

    history, _ = drive(job_spec(timed_steps=8, most_steps=8), Burst(FAST, noise=0.01))
    first, second = (trial.request for trial in trials_of(history, 2))
    assert (first.attempt, second.attempt) == (0, 1)
    assert second.number == first.number + 1 and history.repeated == 1
    assert {first.number, second.number} <= history.disturbed
    disturbed = f"{len(history.disturbed)} of {len(history.candidates)} candidate trials disturbed"
    assert f"{disturbed}, 1 repeated" in history.quality


@pytest.mark.parametrize(("lossy_s", "winner"), [(0.0597, 3), (0.05, 5)])
def test_of_finalists_closer_than_the_noise_the_lossless_one_is_compared(lossy_s, winner):
    class Lossy(SyntheticWorld):
        def answer(self, spec, history, instruction):
            event = super().answer(spec, history, instruction)
            if not isinstance(event, Proposed):
                return event
            proposals = [replace(p, strategy=self.compressed(p.strategy)) for p in event.proposals]
            return replace(event, proposals=tuple(proposals))

        def compressed(self, plain):
            if plain.id != IDS[5]:
                return plain
            shard = replace(strategy(0).variables[0].shards[0], compressor=Compressor.FP16)
            choices = tuple(replace(choice, shards=(shard,)) for choice in plain.variables)
            lossy = replace(plain, variables=choices)
            self.by_id[lossy.id] = 5
            return lossy

    world = Lossy({5: lossy_s, 3: 0.06})
    _, decision = decided(job_spec(), world)
    assert world.by_id[decision.best_candidate_id] == winner


def test_events_and_jobs_that_were_stored_before_trials_had_a_free_length_are_read():
    history, _ = drive(job_spec(most_steps=0), SyntheticWorld(FAST))
    for event in history.trials:
        data = event_to_data(event)
        for name in ("most_steps", "precision", "losing_s"):
            del data["request"][name]
        for name in ("left_out", "stopped"):
            del data["outcome"][name]
        old = event_from_data(data)
        assert isinstance(old, TrialFinished) and isinstance(old.outcome, Measured)
        assert old.outcome == event.outcome and old.request.most_steps == 0
        assert further_steps(old.request, old.outcome) == 0
    data = job_spec(timed_steps=50).to_data()
    for name in ("most_steps", "precision", "losing", "ab_precision"):
        del data[name]
    assert JobSpec.from_data(data).timed_steps == 50


@pytest.mark.parametrize("pairs", [6, 7, 10])
def test_the_bound_of_the_interval_equals_that_of_all_sign_patterns_counted(pairs):
    patterns = np.array(list(itertools.product([False, True], repeat=pairs)))
    sums = patterns @ np.arange(1, pairs + 1)
    bound = signed_rank_bound(pairs, 0.025)
    assert np.mean(sums < bound) <= 0.025 < np.mean(sums < bound + 1)


def counted_bound(pairs: int, tail: float) -> int:
    """`signed_rank_bound` by counting."""
    ways = np.ones(1)
    for rank in range(1, pairs + 1):
        padding = np.zeros(rank)
        ways = (np.concatenate([ways, padding]) + np.concatenate([padding, ways])) / 2
    return int(np.searchsorted(np.cumsum(ways), tail, side="right"))


@pytest.mark.parametrize("tail", [0.025, 0.0005])
def test_the_bound_of_many_pairs_is_nearly_that_of_all_sign_patterns_and_no_tighter(tail):
    for pairs in (EXACT_PAIRS - 1, EXACT_PAIRS):
        assert signed_rank_bound(pairs, tail) == counted_bound(pairs, tail)
    for pairs in (EXACT_PAIRS + 1, 600):
        deviation = math.sqrt(pairs * (pairs + 1) * (2 * pairs + 1) / 24)
        difference = counted_bound(pairs, tail) - signed_rank_bound(pairs, tail)
        assert 0 <= difference < 0.02 * deviation


def test_thousands_of_pairs_have_an_interval():
    d = generator(0, "many pairs").normal(0.01, 0.1, 1500)
    comparison = compare_pairs(d, 0.95)
    half_width = 1.96 * 0.1 * math.sqrt(math.pi / 3 / len(d))  # Hodges and Lehmann, 1963
    assert math.log(comparison.high / comparison.low) == pytest.approx(2 * half_width, rel=0.1)


def test_the_interval_holds_exactly_the_ratios_that_the_signed_rank_test_does_not_reject():
    rng = generator(0, "compare")
    tuned, current = ([measured(at_s, 6, rng, 0.05) for _ in range(8)] for at_s in (0.09, 0.1))
    comparison = compare(tuned, current, 0.95)
    pairs = zip(tuned, current, strict=True)
    logs = np.array([math.log(a.median_s / b.median_s) for a, b in pairs])

    def rejected(ratio: float) -> bool:
        return bool(wilcoxon(logs - math.log(ratio), method="exact").pvalue <= 0.05)

    assert comparison.low < comparison.ratio < comparison.high
    assert not rejected(comparison.low * 1.0001) and not rejected(comparison.high * 0.9999)
    assert rejected(comparison.low * 0.9999) and rejected(comparison.high * 1.0001)


def test_a_pair_during_which_the_machine_changed_does_not_hide_a_clear_gain():
    tuned = [measured(0.09 + 0.0001 * number, 4) for number in range(12)]
    tuned[5] = measured(0.2, 4)
    comparison = compare(tuned, [measured(0.1, 4)] * 12, 0.95)
    assert comparison.high < 1 and comparison.ratio == pytest.approx(0.906, abs=0.005)
