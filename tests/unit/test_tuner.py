"""The tuner as a pure state machine, driven through whole jobs with synthetic events."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import wilcoxon
from synthetic_job import SyntheticWorld, drive, job_spec, measured, roles, strategy

from autotune.records import CURRENT_SETUP, Measured, Role, Stopped
from autotune.rng import generator
from autotune.strategy_space.strategy import (
    Compressor,
    Shard,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.tuning.events import Proposed, TrialFinished, event_from_data, event_to_data
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.tuning.statistics import compare, further_steps, signed_rank_bound
from autotune.tuning.tuner import (
    REFERENCE_TRIES,
    Abort,
    Finish,
    ProfileWorkload,
    Propose,
    RunTrial,
    contender,
    look_instruction,
    next_instruction,
    search_instruction,
)

FAST = {5: 0.06, 3: 0.07}


def test_a_job_starts_with_the_profile_then_the_reference_then_the_first_round():
    spec, world = job_spec(), SyntheticWorld(FAST)
    history = History((), spec.deviation)
    assert next_instruction(spec, history) == ProfileWorkload()
    history = history.then(world.answer(spec, history, ProfileWorkload()))
    first = next_instruction(spec, history)
    assert (
        isinstance(first, RunTrial)
        and first.request.role is Role.REFERENCE
        and first.request.strategy_id == CURRENT_SETUP
    )
    history = history.then(world.answer(spec, history, first))
    assert next_instruction(spec, history) == Propose(0, spec.top_k)


def test_the_fastest_strategy_is_exported_when_it_is_really_faster():
    _, end = drive(job_spec(), SyntheticWorld(FAST, noise=0.02))
    assert isinstance(end, Finish)
    assert end.decision.strategy_id == end.decision.best_candidate_id == strategy(5).id
    assert end.decision.comparison is not None and end.decision.comparison.high < 1
    assert end.decision.comparison.ratio == pytest.approx(0.6, rel=0.05)


def test_trials_run_in_the_documented_order():
    history, _ = drive(job_spec(), SyntheticWorld(FAST))
    assert roles(history) == "r" + "ccccr" + "ccccr" + "cccc" + "cc" + "r" + "abba" * 3


def test_the_search_can_be_had_without_its_closing_comparison():
    """Instruction for instruction the same, and the same contender."""
    spec, world = job_spec(), SyntheticWorld(FAST, noise=0.02)
    whole, _ = drive(spec, world)
    history = History((), spec.deviation)
    for part, shown in (
        (search_instruction, "r" + "ccccr" * 2 + "cccc"),
        (look_instruction, "cc" + "r"),
    ):
        before = roles(history)
        while (instruction := part(spec, history)) is not None:
            history = history.then(world.answer(spec, history, instruction))
        assert roles(history) == before + shown
    assert history.events == whole.events[: len(history.events)]
    assert contender(history) == whole.ab_trials[0].request.strategy_id == strategy(5).id
    assert contender(History((), spec.deviation)) is None


def test_trial_numbers_count_up_and_candidates_carry_their_round_and_prediction():
    history, _ = drive(job_spec(), SyntheticWorld(FAST))
    assert [trial.request.number for trial in history.trials] == list(range(len(history.trials)))
    searched = [trial for trial in history.candidates if trial.request.predicted_s is not None]
    assert [trial.request.round for trial in searched] == [0] * 4 + [1] * 4 + [2] * 4


def test_a_strategy_that_is_not_significantly_faster_leaves_the_current_setup():
    _, end = drive(job_spec(), SyntheticWorld({5: 0.0999}, noise=0.05))
    assert isinstance(end, Finish)
    assert end.decision.strategy_id == CURRENT_SETUP and end.decision.best_candidate_id is not None
    assert end.decision.comparison is not None and end.decision.comparison.high >= 1
    assert "not significantly faster" in end.decision.reason


def test_a_slower_best_candidate_leaves_the_current_setup():
    _, end = drive(job_spec(), SyntheticWorld({}, default_s=0.2, noise=0.01))
    assert isinstance(end, Finish) and end.decision.strategy_id == CURRENT_SETUP


def test_a_comparison_that_was_ended_for_being_slower_is_not_said_to_have_its_interval():
    spec = job_spec(ab_pairs=20, ab_precision=1e-9)
    _, end = drive(spec, SyntheticWorld({}, default_s=0.2, noise=0.05))
    assert isinstance(end, Finish) and end.decision.strategy_id == CURRENT_SETUP
    assert end.decision.comparison is not None and end.decision.comparison.pairs < 20
    assert (
        "is clearly slower in" in end.decision.reason
        and "without an interval" in end.decision.reason
    )
    assert "95 %" not in end.decision.reason


def test_the_same_seed_gives_the_same_job_event_by_event():
    spec, world = job_spec(), SyntheticWorld(FAST, noise=0.05, seed=3)
    assert drive(spec, world) == drive(spec, world)


@pytest.mark.parametrize("disturbed", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"reference_every": 1, "timed_steps": 8, "most_steps": 24, "ab_pairs": 20}]
)
def test_a_job_cut_at_any_event_continues_identically(disturbed, settings):
    spec = job_spec(**settings)
    world = SyntheticWorld(
        FAST,
        noise=0.02,
        factor=lambda number: 1.6 if disturbed and 3 <= number <= 6 else 1.0,
        fails=lambda request: request.strategy_id == strategy(1).id or request.number == 13,
    )
    whole, end = drive(spec, world)
    for cut in range(len(whole.events) + 1):
        stored = tuple(event_from_data(event_to_data(event)) for event in whole.events[:cut])
        again, again_end = drive(spec, world, History(stored, spec.deviation))
        assert again == whole and again_end == end


def test_candidates_before_a_deviating_reference_are_marked_and_repeated_once():
    spec = job_spec(max_trials=20)
    history, _ = drive(
        spec, SyntheticWorld(FAST, factor=lambda number: 1.5 if number >= 3 else 1.0)
    )
    assert history.disturbed == {1, 2, 3, 4}
    repeats = [
        trial.request
        for trial in history.candidates
        if trial.request.attempt == 1 and trial.request.round == 0
    ]
    assert [request.strategy_id for request in repeats] == [
        strategy(number).id for number in range(4)
    ]
    for number in range(4):
        true_ratio = SyntheticWorld(FAST).true_s.get(number, 0.1) / 0.1
        assert history.measured_s[strategy(number).id] / history.reference_s == pytest.approx(
            true_ratio
        )


def test_a_trial_that_is_disturbed_every_time_is_repeated_at_most_max_repeats_times():
    spec = job_spec(max_trials=40, max_repeats=2)
    # Every reference takes far longer than those before it, so every candidate is disturbed.
    history, end = drive(spec, SyntheticWorld({}, factor=lambda number: 1.2**number, available=4))
    assert isinstance(end, Finish)
    attempts = [trial.request.attempt for trial in history.candidates if trial.request.round == 0]
    assert max(attempts) == 2 and len(attempts) == 12


def test_references_that_fail_before_any_measurement_abort_the_job():
    history, end = drive(
        job_spec(), SyntheticWorld(fails=lambda request: request.strategy_id == CURRENT_SETUP)
    )
    assert isinstance(end, Abort) and "rank 1 exited with code 1" in end.message
    assert roles(history) == "r" * REFERENCE_TRIES


def test_one_failed_reference_is_tried_again():
    history, end = drive(
        job_spec(), SyntheticWorld(FAST, fails=lambda request: request.number == 0)
    )
    assert isinstance(end, Finish) and roles(history).startswith("rrcccc")


def test_a_failing_reference_in_the_middle_does_not_stop_the_search():
    history, end = drive(
        job_spec(), SyntheticWorld(FAST, fails=lambda request: request.number == 5)
    )
    assert isinstance(end, Finish) and end.decision.strategy_id == strategy(5).id
    assert not history.disturbed


def test_when_every_candidate_fails_the_current_setup_stays_without_a_comparison():
    history, end = drive(
        job_spec(), SyntheticWorld(fails=lambda request: request.role is Role.CANDIDATE)
    )
    assert (
        isinstance(end, Finish)
        and end.decision.strategy_id == CURRENT_SETUP
        and end.decision.comparison is None
    )
    assert len(history.candidates) == job_spec().max_trials and not history.ab_trials


def test_refused_trials_cost_no_budget_need_no_reference_and_are_not_repeated():
    refused = {strategy(number).id for number in (0, 1, 4, 7)}
    spec = job_spec()
    history, end = drive(
        spec, SyntheticWorld(FAST, refuses=lambda request: request.strategy_id in refused)
    )
    assert isinstance(end, Finish) and end.decision.strategy_id == strategy(5).id
    assert [trial.request.strategy_id in refused for trial in history.candidates] == [
        trial.refused for trial in history.candidates
    ]
    assert len(history.refused) == 4
    tried = [trial for trial in history.candidates if trial.request.round < len(history.rounds)]
    assert len(tried) == spec.max_trials + 4
    # 2, 2, 4 and 4 strategies of the rounds ran. A reference follows every 4 of them, and a round
    # that leaves half as many.
    assert roles(history) == "r" + "ccccr" + "ccccr" + "ccccr" + "cccc" + "cc" + "r" + "abba" * 3
    assert not any(
        trial.refused for trial in history.trials if trial.request.role is not Role.CANDIDATE
    )


@pytest.mark.parametrize("available", [6, 32])
def test_a_job_in_which_everything_is_refused_ends_with_the_current_setup(available):
    spec = job_spec()
    history, end = drive(
        spec,
        SyntheticWorld(
            FAST, refuses=lambda request: request.role is Role.CANDIDATE, available=available
        ),
    )
    assert (
        isinstance(end, Finish)
        and end.decision.strategy_id == CURRENT_SETUP
        and end.decision.comparison is None
    )
    assert roles(history) == "r" + "c" * min(available, spec.max_trials)
    assert "the report says why each failed" in end.decision.reason


def test_a_finalist_that_fails_its_second_look_gives_way_to_the_next():
    def fails(request):
        return (
            request.role is Role.CANDIDATE
            and request.predicted_s is None
            and request.strategy_id == strategy(5).id
        )

    _, end = drive(job_spec(), SyntheticWorld(FAST, fails=fails))
    assert isinstance(end, Finish) and end.decision.strategy_id == strategy(3).id


def test_a_strategy_that_fails_in_its_comparison_gives_way_to_the_next_compared_from_scratch():
    def fails(request):
        return (
            request.role is Role.AB
            and request.strategy_id == strategy(5).id
            and request.number > 18
        )

    history, end = drive(job_spec(), SyntheticWorld(FAST, fails=fails))
    assert isinstance(end, Finish) and end.decision.strategy_id == strategy(3).id
    blocks = [trial for trial in history.ab_trials if trial.request.round == 1]
    assert len(blocks) == 2 * job_spec().ab_pairs


@pytest.mark.parametrize(("after_s", "all_fit"), [(5.0, True), (70.0, False)])
def test_the_pairs_of_the_next_contender_are_those_that_fit_into_what_the_failed_one_left(
    after_s, all_fit
):
    spec = job_spec(ab_pairs=20, ab_precision=1e-9, max_seconds=100.0)
    began: list[float] = []

    class Slow(SyntheticWorld):
        def _run(self, history, request):
            event = super()._run(history, request)
            if request.role is Role.AB:
                began.append(history.elapsed_s)
            return replace(event, elapsed_s=began[0] + after_s) if request.number == 20 else event

    def fails(request):
        return (
            request.role is Role.AB
            and request.strategy_id == strategy(5).id
            and request.number > 18
        )

    history, end = drive(spec, Slow(FAST, noise=0.02, fails=fails))
    assert isinstance(end, Finish) and end.decision.comparison is not None
    second = next(
        i
        for i, event in enumerate(history.events)
        if event in history.ab_trials and event.request.round == 1
    )
    left_s = spec.max_seconds - history.events[second - 1].elapsed_s
    assert history.reference_s is not None
    fitting = int(left_s / (2 * (spec.warmup_steps + spec.timed_steps) * history.reference_s))
    assert end.decision.comparison.pairs == (20 if all_fit else fitting)
    assert all_fit == (fitting >= 20) and fitting > 6


def test_a_current_setup_that_fails_twice_in_the_comparison_proves_nothing():
    _, end = drive(
        job_spec(),
        SyntheticWorld(FAST, fails=lambda r: r.role is Role.AB and r.strategy_id == CURRENT_SETUP),
    )
    assert (
        isinstance(end, Finish)
        and end.decision.strategy_id == CURRENT_SETUP
        and "failed twice" in end.decision.reason
    )


def test_a_current_setup_that_fails_once_in_the_comparison_runs_that_block_again():
    history, end = drive(job_spec(), SyntheticWorld(FAST, fails=lambda r: r.number == 19))
    assert (
        roles(history).endswith("rabbbaabbaabba")
        and isinstance(end, Finish)
        and end.decision.strategy_id == strategy(5).id
    )


def test_the_winner_is_one_of_the_finalists_that_were_measured_twice():
    # The finalists turn out slower than in their first trial, and than a third strategy.
    spec = job_spec()
    lucky = {strategy(number).id for number in (2, 5)}

    class Curse(SyntheticWorld):
        def _run(self, history, request):
            first = request.predicted_s is not None
            self.true_s = {2: 0.05 if first else 0.09, 5: 0.05 if first else 0.09, 7: 0.06}
            return super()._run(history, request)

    history, end = drive(spec, Curse())
    assert isinstance(end, Finish)
    assert history.ranking()[0][0] == strategy(7).id
    assert end.decision.best_candidate_id in lucky


def test_a_search_space_with_nothing_new_ends_the_search():
    history, end = drive(job_spec(max_trials=100), SyntheticWorld({3: 0.05}, available=6))
    assert isinstance(end, Finish) and end.decision.strategy_id == strategy(3).id
    assert isinstance(history.rounds[-1], Proposed) and not history.rounds[-1].proposals


def test_a_sampler_that_only_repeats_itself_ends_the_search():
    class Stubborn(SyntheticWorld):
        def answer(self, spec, history, instruction):
            event = super().answer(spec, history, instruction)
            return (
                replace(event, proposals=history.rounds[0].proposals)
                if isinstance(event, Proposed) and history.rounds
                else event
            )

    history, end = drive(job_spec(), Stubborn({3: 0.05}))
    assert isinstance(end, Finish) and len(history.rounds) == 2


def test_the_time_budget_leaves_room_for_the_closing_comparison():
    spec = job_spec(max_trials=1000, max_seconds=30.0)
    history, end = drive(spec, SyntheticWorld(FAST))
    assert isinstance(end, Finish) and end.decision.comparison is not None
    assert history.elapsed_s <= 30.0 and len(history.candidates) > 12


def test_a_budget_that_is_spent_by_the_profile_ends_with_the_current_setup():
    _, end = drive(job_spec(max_seconds=0.5), SyntheticWorld(FAST))
    assert isinstance(end, Finish) and end.decision.strategy_id == CURRENT_SETUP


@pytest.mark.parametrize("seed", range(30))
def test_every_job_in_a_hostile_world_ends_within_its_trial_budget(seed):
    rng = generator(seed, "hostile")
    spec = job_spec(
        max_trials=int(rng.integers(1, 20)),
        top_k=int(rng.integers(1, 6)),
        reference_every=int(rng.integers(1, 6)),
    )
    broken = set(rng.choice(80, size=15, replace=False).tolist()) - {0}
    slow = set(rng.choice(80, size=15, replace=False).tolist())
    refused = set(rng.choice(80, size=15, replace=False).tolist()) - {0}
    world = SyntheticWorld(
        FAST,
        noise=0.1,
        seed=seed,
        fails=lambda r: r.number in broken,
        factor=lambda n: 2.0 if n in slow else 1.0,
        available=16,
        refuses=lambda r: r.number in refused and r.role is Role.CANDIDATE,
    )
    history, end = drive(spec, world)
    assert isinstance(end, Finish)
    assert len(history.candidates) <= spec.max_trials + spec.finalists + len(history.failed)


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_identical_time_distributions_are_called_different_at_most_at_the_stated_rate(noise):
    # A two-sided 95 % interval lies below 1 in 2.5 % of null comparisons: 2.5 of 100 jobs on
    # average; more than 7 has a probability below 1 %. The number of pairs follows the noise.
    false_positives, pairs = 0, set()
    for seed in range(100):
        _, end = drive(
            job_spec(max_trials=3, ab_pairs=20), SyntheticWorld({}, noise=noise, seed=seed)
        )
        assert isinstance(end, Finish) and end.decision.comparison is not None
        false_positives += end.decision.strategy_id != CURRENT_SETUP
        pairs.add(end.decision.comparison.pairs)
    assert false_positives <= 7 and len(pairs) > 1


def test_a_gain_of_5_percent_at_a_noise_of_2_percent_is_exported_nearly_always():
    spec = job_spec(max_trials=4, ab_pairs=20, timed_steps=8, most_steps=40)
    ends = [drive(spec, SyntheticWorld({2: 0.095}, noise=0.02, seed=seed))[1] for seed in range(40)]
    won = [
        end
        for end in ends
        if isinstance(end, Finish) and end.decision.strategy_id == strategy(2).id
    ]
    assert len(won) >= 39
    assert all(
        end.decision.comparison.pairs < 20 and "as precise as asked for" in end.decision.reason
        for end in won
    )


def test_search_trials_run_until_they_are_precise_and_blocks_have_a_fixed_length():
    spec = job_spec(timed_steps=8, most_steps=40)
    for noise, fewest, most in ((0.0, 8, 8), (0.03, 16, 40), (0.5, 40, 40)):
        history, _ = drive(spec, SyntheticWorld(FAST, noise=noise))
        search = [trial.outcome for trial in history.trials if trial.request.role is Role.REFERENCE]
        assert fewest <= np.median([len(outcome.slowest_s) for outcome in search]) <= most
        assert {len(trial.outcome.slowest_s) for trial in history.ab_trials} == {8}
        assert all(trial.outcome.stopped is None for trial in history.ab_trials)
    assert {outcome.stopped for outcome in search} == {Stopped.CAP}


def test_a_clearly_losing_candidate_is_stopped_early_at_whatever_speed_the_machine_is():
    spec = job_spec(max_trials=24, timed_steps=8, most_steps=40, precision=0.001)
    world = SyntheticWorld(
        {5: 0.06, 8: 0.2}, noise=0.02, factor=lambda number: 2.0 if number >= 6 else 1.0
    )
    history, _ = drive(spec, world)
    loser = next(
        trial for trial in history.candidates if trial.request.strategy_id == strategy(8).id
    )
    assert loser.outcome.stopped is Stopped.LOSING and len(loser.outcome.slowest_s) == 8
    before = next(
        trial for trial in history.candidates if trial.request.strategy_id == strategy(0).id
    )
    assert (
        before.outcome.stopped is Stopped.CAP
    )  # as fast as the current setup, which was the best so far
    assert before.request.losing_s == pytest.approx(1.15 * 0.1, rel=0.02)
    # Measured at half the speed, against the best at half the speed: 1.15 * 0.06 * 2
    assert loser.request.losing_s == pytest.approx(1.15 * 0.06 * 2, rel=0.1)


def test_a_trial_costs_a_small_share_of_the_budget_or_its_first_batch():
    def most_of(**settings):
        history, _ = drive(job_spec(most_steps=40, **settings), SyntheticWorld(FAST))
        return {trial.request.most_steps for trial in history.candidates}

    assert most_of() == {40}
    assert most_of(max_seconds=61.0) == {12}  # 2 % of 61 s are 1.2 s, a step takes 0.1 s
    assert most_of(max_seconds=15.0) == {4}


def test_a_trial_during_which_the_machine_changed_is_repeated_once():
    class Burst(SyntheticWorld):
        def _run(self, history, request):
            event = super()._run(history, request)
            if request.strategy_id != strategy(2).id or request.role is not Role.CANDIDATE:
                return event
            assert isinstance(event.outcome, Measured)
            rows = tuple(
                tuple(1.5 * value if at >= len(row) // 2 else value for at, value in enumerate(row))
                for row in event.outcome.step_s
            )
            return replace(event, outcome=replace(event.outcome, step_s=rows))

    spec = job_spec(timed_steps=8, most_steps=8)
    history, _ = drive(spec, Burst(FAST, noise=0.01))
    tried = [
        trial.request for trial in history.candidates if trial.request.strategy_id == strategy(2).id
    ]
    assert [request.attempt for request in tried] == [0, 1]
    assert tried[1].number == tried[0].number + 1 and history.repeated == 1
    assert {request.number for request in tried} <= history.disturbed
    assert (
        f"{len(history.disturbed)} of {len(history.candidates)} trials disturbed, 1 repeated"
        in history.quality
    )


def test_of_finalists_closer_than_the_noise_the_lossless_one_is_compared():
    class Lossy(SyntheticWorld):
        def answer(self, spec, history, instruction):
            event = super().answer(spec, history, instruction)
            if not isinstance(event, Proposed):
                return event
            return replace(
                event,
                proposals=tuple(
                    replace(p, strategy=self.compressed(p.strategy)) for p in event.proposals
                ),
            )

        def compressed(self, plain):
            if plain.id != strategy(5).id:
                return plain
            shard = Shard(Synchronizer.ALL_REDUCE, compressor=Compressor.FP16)
            lossy = Strategy(
                tuple(VariableStrategy(choice.variable, (shard,)) for choice in plain.variables)
            )
            self.by_id[lossy.id] = 5
            return lossy

    for lossy_s, wanted in ((0.0597, 3), (0.05, 5)):
        world = Lossy({5: lossy_s, 3: 0.06})
        _, end = drive(job_spec(), world)
        assert isinstance(end, Finish) and world.by_id[end.decision.best_candidate_id] == wanted


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
        assert (
            old.outcome == event.outcome
            and old.request.most_steps == 0
            and further_steps(old.request, old.outcome) == 0
        )
    data = job_spec(timed_steps=50).to_data()
    for name in ("most_steps", "precision", "losing", "ab_precision"):
        del data[name]
    assert JobSpec.from_data(data).timed_steps == 50


@pytest.mark.parametrize("pairs", [6, 7, 10])
def test_the_bound_of_the_interval_equals_that_of_all_sign_patterns_counted(pairs):
    ranks = np.arange(1, pairs + 1)
    sums = [
        int(ranks[np.array(signs)].sum())
        for signs in itertools.product([False, True], repeat=pairs)
    ]
    bound = signed_rank_bound(pairs, 0.025)
    assert np.mean(np.array(sums) < bound) <= 0.025 < np.mean(np.array(sums) < bound + 1)


def test_the_interval_holds_exactly_the_ratios_that_the_signed_rank_test_does_not_reject():
    rng = generator(0, "compare")
    mine = [measured(0.09, 6, rng, 0.05) for _ in range(8)]
    current = [measured(0.1, 6, rng, 0.05) for _ in range(8)]
    comparison = compare(mine, current, 0.95)
    logs = np.array([math.log(a.median_s / b.median_s) for a, b in zip(mine, current, strict=True)])

    def rejected(ratio: float) -> bool:
        return bool(wilcoxon(logs - math.log(ratio), method="exact").pvalue <= 0.05)

    assert comparison.low < comparison.ratio < comparison.high
    assert not rejected(comparison.low * 1.0001) and not rejected(comparison.high * 0.9999)
    assert rejected(comparison.low * 0.9999) and rejected(comparison.high * 1.0001)


def test_a_pair_during_which_the_machine_changed_does_not_hide_a_clear_gain():
    mine = [measured(0.09 + 0.0001 * number, 4) for number in range(12)]
    current = [measured(0.1, 4) for _ in range(12)]
    mine[5] = measured(0.2, 4)
    comparison = compare(mine, current, 0.95)
    assert comparison.high < 1 and comparison.ratio == pytest.approx(0.906, abs=0.005)
