"""The sweep of a rival: every setting once, then the faster half, until the budget is used up."""

from __future__ import annotations

import math

import pytest

from autotune.errors import InvalidInput
from benchmarks.outcome.sweeps import FINALISTS, best_of, medians_s, missing, neighbors

STEP_S = {"a": 0.5, "b": 0.2, "c": 0.4, "d": math.inf, "e": 0.3, "f": 0.6}


def swept(settings, budget):
    """Measure what is missing, in the order of the sweep."""
    by_round: dict[int, dict[str, float]] = {}
    order = []
    while (left := missing(by_round, settings, budget)) is not None:
        number, names = left
        by_round.setdefault(number, {})[names[0]] = STEP_S[names[0]]
        order.append(names[0])
    return by_round, "".join(order)


@pytest.mark.parametrize(
    ("budget", "order"), [(14, "abcdefbecbebeb"), (8, "abcdefbe"), (4, "abcb"), (11, "abcdefbecbe")]
)
def test_the_faster_half_of_the_settings_is_measured_again_within_the_budget(budget, order):
    by_round, measured = swept("abcdef", budget)
    finalists = "bca" if budget == 4 else "bec"
    assert measured == order + finalists
    assert sum(map(len, by_round.values())) == budget + FINALISTS
    assert best_of(by_round, "rival") == "b"


def test_one_setting_alone_needs_no_trial():
    assert swept("a", 25) == ({}, "")


def test_a_setting_counts_by_the_median_of_its_trials_and_a_failure_as_infinite():
    by_round = {0: {"a": 0.1, "b": 0.2}, 1: {"a": 0.9, "b": 0.2}, 2: {"a": math.inf}}
    assert medians_s(by_round) == {"b": 0.2, "a": 0.9}
    with pytest.raises(InvalidInput, match="every trial of PS failed"):
        best_of({0: {"a": math.inf}}, "PS")


def test_a_setting_that_was_fast_once_does_not_beat_finalists_that_were_measured_twice():
    by_round = {
        0: {"a": 0.97, "b": 0.98, "c": 0.99, "d": 1.0},
        1: {"a": 1.04, "b": 1.05, "c": 1.06},
    }
    assert best_of(by_round, "rival") == "a"
    assert best_of({**by_round, 1: dict.fromkeys("abc", math.inf)}, "rival") == "d"


GRID = [f"{mib:g} MiB, {credit} in flight" for credit in (4, 2, 8, 1) for mib in (1, 2, 4, 8)]


def test_neighbors_differ_in_one_number():
    assert neighbors("2 MiB, 4 in flight", GRID) == [
        "1 MiB, 4 in flight",
        "4 MiB, 4 in flight",
        "2 MiB, 2 in flight",
        "2 MiB, 8 in flight",
    ]
    assert neighbors("8 MiB, 1 in flight", GRID) == ["4 MiB, 1 in flight", "8 MiB, 2 in flight"]
    assert neighbors("its default", [*GRID, "its default"]) == []


def test_a_larger_family_is_searched_around_its_fastest_setting():
    """Every size is tried first; the fastest credit is the last one on the grid."""
    step_s = {
        one: 1 + abs(math.log2(float(one.split()[0])) - 2) + float(one.split()[2]) for one in GRID
    }
    by_round: dict[int, dict[str, float]] = {}
    while (left := missing(by_round, GRID, 12)) is not None:
        number, names = left
        by_round.setdefault(number, {})[names[0]] = step_s[names[0]]
    assert list(by_round[0]) == GRID[:9]
    assert sum(map(len, by_round.values())) == 12 + FINALISTS
    assert best_of(by_round, "rival") == "4 MiB, 1 in flight" == min(step_s, key=step_s.__getitem__)
