"""The sweep of a rival: every setting once, then the faster half, until the budget is used up."""

from __future__ import annotations

import math

import pytest

from autotune.errors import InvalidInput
from benchmarks.outcome.sweeps import FINALISTS, best_of, medians_s, missing

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
    ("budget", "order"), [(14, "abcdefbecbebeb"), (8, "abcdefbe"), (4, "abcd"), (11, "abcdefbecbe")]
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
