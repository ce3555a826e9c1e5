"""The end of a search: neighbours of the fastest strategy, each measured next to it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from synthetic_job import SyntheticWorld, decided, drive, job_spec, strategy

from autotune.records import Role
from autotune.tuning.descent import Descent, Verdict, descent, pairs_of, verdict
from autotune.tuning.history import History

DESCENDING = job_spec(max_trials=24, descent=0.6, top_k=4)


def trials_of(history: History) -> list[int]:
    """The strategies of the search's candidate trials, in order."""
    by_id = SyntheticWorld().by_id
    return [
        by_id[trial.request.strategy_id]
        for trial in history.candidates
        if trial.request.round < len(history.rounds)
    ]


def hamming_world(best: int, **settings) -> SyntheticWorld:
    """A world in which every bit that differs from `best` costs 3 ms."""
    true_s = {number: 0.05 + 0.003 * (number ^ best).bit_count() for number in range(32)}
    return SyntheticWorld(true_s, **settings)


def test_the_descent_finds_what_the_rounds_before_did_not_propose():
    world = hamming_world(0b11001, noise=0.01)
    history, decision = decided(DESCENDING, world)
    assert decision.strategy_id == strategy(0b11001).id
    assert len(trials_of(history)) <= DESCENDING.max_trials
    _, without = decided(job_spec(max_trials=24, top_k=4), hamming_world(0b11001, noise=0.01))
    assert without.strategy_id != strategy(0b11001).id


def test_every_neighbour_is_measured_next_to_its_incumbent():
    history, _ = drive(DESCENDING, hamming_world(0b11001, noise=0.01))
    rounds = {event.round: event for event in history.rounds}
    order = [trial for trial in history.trials if trial.request.role is Role.CANDIDATE]
    for place, trial in enumerate(order):
        incumbent = rounds[trial.request.round].incumbent if trial.request.round in rounds else ""
        if not incumbent or trial.request.strategy_id == incumbent:
            continue
        beside = order[max(place - 1, 0) : place] + order[place + 1 : place + 2]
        last = trial is order[-1] or order[place + 1].request.round != trial.request.round
        assert last or incumbent in {other.request.strategy_id for other in beside}


def test_a_machine_that_slows_down_for_good_does_not_choose_the_winner():
    """Each trial is 4 % slower than the one before, more than neighbours differ."""
    spec = job_spec(max_trials=24, descent=0.6, top_k=4, reference_every=100, deviation=10.0)
    world = hamming_world(0b00111, factor=lambda number: 1.04**number)
    history, _ = drive(spec, world)
    incumbents = [event.incumbent for event in history.rounds if event.incumbent]
    numbers = [world.by_id[incumbent] for incumbent in incumbents]
    for before, after in pairwise(dict.fromkeys(numbers)):
        assert world.true_s[after] < world.true_s[before]


def test_measuring_the_incumbent_again_refreshes_its_time():
    history, _ = drive(DESCENDING, hamming_world(0b11001, noise=0.02))
    incumbent = next(event.incumbent for event in history.rounds if event.incumbent)
    times = [
        history.steady_s(trial)
        for trial in history.candidates
        if trial.request.strategy_id == incumbent and trial.request.number not in history.disturbed
    ]
    assert len(times) > 2
    middle = sorted(times)[(len(times) - 1) // 2 : len(times) // 2 + 1]
    assert history.measured_s[incumbent] == pytest.approx(sum(middle) / len(middle))


def test_the_descent_ends_when_the_whole_neighbourhood_has_lost():
    world = hamming_world(0, available=8)  # the first strategy is the best one
    spec = job_spec(max_trials=200, descent=0.95, top_k=4)
    history, _ = drive(spec, world)
    found = descent(history, spec.max_repeats)
    assert found is not None and found.incumbent == strategy(0).id and found.winner is None
    assert history.rounds[-1].proposals == ()


def test_a_failed_neighbour_has_lost_and_the_descent_goes_on():
    bad = strategy(0b11000).id
    world = hamming_world(0b11001, fails=lambda request: request.strategy_id == bad)
    _, decision = decided(DESCENDING, world)
    assert decision.strategy_id == strategy(0b11001).id


STEADY_SEARCH = job_spec(
    max_trials=60, descent=0.8, top_k=4, timed_steps=12, reference_every=100, max_repeats=2
)
"""Its trials are long enough to show that the machine changed."""


def unsteady_world(*numbers: int) -> SyntheticWorld:
    """A world whose machine changes in the trials of these strategies in rounds of the descent."""
    ids = {strategy(number).id for number in numbers}
    return hamming_world(
        0b11001, unsteady=lambda request: request.strategy_id in ids and request.round > 2
    )


def in_descent(history: History) -> list[int]:
    """`trials_of` the rounds of the descent."""
    first = next(event.round for event in history.rounds if event.incumbent)
    before = sum(trial.request.round < first for trial in history.candidates)
    return trials_of(history)[before:]


def test_a_neighbour_whose_trials_are_all_unsteady_has_lost_after_its_repeats():
    history, decision = decided(STEADY_SEARCH, unsteady_world(0b11000))
    assert any(trial.unsteady for trial in history.candidates)
    assert in_descent(history).count(0b11000) == 1 + STEADY_SEARCH.max_repeats
    assert decision.strategy_id == strategy(0b11001).id


def test_an_incumbent_whose_trials_are_all_unsteady_is_used_after_its_repeats():
    first, _ = drive(STEADY_SEARCH, unsteady_world())
    incumbent = SyntheticWorld().by_id[next(e.incumbent for e in first.rounds if e.incumbent)]
    history, decision = decided(STEADY_SEARCH, unsteady_world(incumbent))
    tried = in_descent(history)
    assert tried[: 1 + STEADY_SEARCH.max_repeats] == [incumbent] * (1 + STEADY_SEARCH.max_repeats)
    assert tried[1 + STEADY_SEARCH.max_repeats] != incumbent
    assert decision.strategy_id == strategy(0b11001).id


def test_a_baseline_has_no_descent():
    spec = job_spec(max_trials=12, descent=0.6, search="random")
    history, _ = drive(spec, hamming_world(0b11001))
    assert not any(event.incumbent for event in history.rounds)


@pytest.mark.parametrize(
    ("d", "expected"),
    [
        ((), Verdict.OPEN),
        ((0.01,), Verdict.LOST),
        ((-0.2,), Verdict.OPEN),
        ((-0.05, -0.03), Verdict.WON),
        ((-0.05, 0.06), Verdict.LOST),
        ((-0.005, -0.005), Verdict.OPEN),
        ((-0.005, -0.005, -0.005), Verdict.LOST),
    ],
)
def test_a_neighbour_wins_by_more_than_noise_in_two_pairs(d, expected):
    assert verdict(d, noise=0.02) is expected


def test_pairs_are_of_adjacent_trials():
    trials = [("i", 1.0), ("a", 2.0), ("b", 4.0), ("i", 2.0), ("c", 1.0), ("d", 1.0)]
    found = pairs_of(trials, "i")
    assert found == {"a": (math.log(2),), "b": (math.log(2),), "c": (math.log(0.5),)}


def test_an_unusable_trial_is_in_no_pair_and_separates_those_around_it():
    trials = [("i", 1.0), ("a", 9.0), ("b", 4.0), ("i", 9.0), ("c", 1.0), ("i", 2.0)]
    assert pairs_of(trials, "i", {1, 3}) == {"c": (math.log(0.5),)}


@pytest.mark.parametrize(
    ("trials", "d", "left", "unusable", "expected"),
    [
        (("i",), {}, "ab", {0}, "i"),
        (("i", "a"), {}, "ab", {1}, "a"),
        (("i", "a", "a"), {}, "ab", {1}, "i"),
        (("i", "a"), {}, "b", {1}, "b"),
        (("i", "a", "i", "a"), {"a": (-0.1,)}, "ab", {3}, "i"),
        (("i", "a", "b", "i"), {"a": (0.1,)}, "bc", {3}, "i"),
        (("i", "a", "b", "i", "i"), {"a": (0.1,)}, "bc", {3}, "b"),
        (("i", "a"), {}, "", {1}, None),
    ],
)
def test_an_unusable_trial_is_repeated(trials, d, left, unusable, expected):
    assert Descent("i", trials, d, None, tuple(left), frozenset(unusable)).next_trial == expected


@pytest.mark.parametrize(
    ("trials", "d", "left", "expected"),
    [
        ((), {}, "ab", "i"),
        (("i",), {}, "ab", "a"),
        (("i", "a"), {"a": (0.1,)}, "bc", "b"),
        (("i", "a", "b"), {"a": (0.1,)}, "c", "i"),
        (("i", "a"), {"a": (-0.1,)}, "ab", "i"),
        (("i", "a", "i"), {"a": (-0.1,)}, "ab", "a"),
        (("i", "a"), {"a": (0.1,)}, "", None),
    ],
)
def test_the_next_trial_completes_pairs_first(trials, d, left, expected):
    assert Descent("i", trials, d, None, tuple(left)).next_trial == expected
