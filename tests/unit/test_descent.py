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
    found = descent(history)
    assert found is not None and found.incumbent == strategy(0).id and found.winner is None
    assert history.rounds[-1].proposals == ()


def test_a_failed_neighbour_has_lost_and_the_descent_goes_on():
    bad = strategy(0b11000).id
    world = hamming_world(0b11001, fails=lambda request: request.strategy_id == bad)
    _, decision = decided(DESCENDING, world)
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
