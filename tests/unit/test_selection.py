"""Greedy Eq. 11 against brute force, and both similarities against slow twins."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InvalidInput
from autotune.rng import generator
from autotune.sampler.selection import (
    choice_agreement,
    choice_agreement_rows,
    choice_codes,
    hidden_cosine,
    objective,
    select_diverse,
)
from autotune.strategy_space.strategy import (
    Compressor,
    Partition,
    Shard,
    Strategy,
    Synchronizer,
    VariableStrategy,
)


def random_similarity(count: int, seed: int) -> np.ndarray:
    states = generator(seed, "states").normal(size=(count, 4))
    return (hidden_cosine(states) + 1) / 2


def random_times(count: int, seed: int) -> np.ndarray:
    return generator(seed, "times").uniform(0.1, 0.2, count)


def slow_greedy(times: np.ndarray, similarity: np.ndarray, k: int, alpha: float) -> list[int]:
    """Adds whichever candidate gives the lowest value of Eq. 11 for the grown set, evaluated in
    full.
    """
    chosen: list[int] = []
    for _ in range(k):
        rest = [i for i in range(len(times)) if i not in chosen]
        scale = alpha / k
        values = [
            sum(times[j] for j in [*chosen, i]) / np.median(times)
            + scale * sum(similarity[a, b] for a in [*chosen, i] for b in [*chosen, i])
            for i in rest
        ]
        chosen.append(rest[int(np.argmin(values))])
    return chosen


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.floats(0, 2))
def test_selection_equals_its_slow_twin(seed: int, k: int, alpha: float) -> None:
    times, similarity = random_times(9, seed), random_similarity(9, seed)
    np.fill_diagonal(similarity, 1.0)
    assert select_diverse(times, similarity, k, alpha) == slow_greedy(times, similarity, k, alpha)


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0])
def test_greedy_is_close_to_the_best_of_all_sets(alpha: float) -> None:
    gaps = []
    for seed in range(20):
        times, similarity = random_times(10, seed), random_similarity(10, seed)
        best = min(
            objective(times, similarity, chosen, alpha) for chosen in combinations(range(10), 4)
        )
        gaps.append(
            objective(times, similarity, select_diverse(times, similarity, 4, alpha), alpha) / best
            - 1
        )
    assert min(gaps) >= -1e-12
    assert max(gaps) < 0.1


def test_alpha_0_is_the_plain_top_k() -> None:
    times = random_times(50, 1)
    assert (
        select_diverse(times, random_similarity(50, 1), 10, 0.0) == np.argsort(times)[:10].tolist()
    )


def test_a_larger_alpha_lowers_the_mean_similarity() -> None:
    times, similarity = random_times(200, 2), random_similarity(200, 2)
    chosen = [select_diverse(times, similarity, 20, alpha) for alpha in (0.0, 0.2, 1.0)]
    means = [float(similarity[np.ix_(index, index)].mean()) for index in chosen]
    assert means[0] > means[1] > means[2]
    speeds = [float(times[index].mean()) for index in chosen]
    assert speeds[0] < speeds[1] < speeds[2]


def test_a_callable_similarity_selects_as_the_matrix_does() -> None:
    times, similarity = random_times(60, 3), random_similarity(60, 3)
    assert select_diverse(times, lambda row: similarity[row], 12, 0.5) == select_diverse(
        times, similarity, 12, 0.5
    )


def test_the_unit_of_time_does_not_matter() -> None:
    times, similarity = random_times(60, 4), random_similarity(60, 4)
    assert select_diverse(times, similarity, 12, 0.5) == select_diverse(
        times * 1000, similarity, 12, 0.5
    )


def test_more_wanted_than_there_are_gives_all_once() -> None:
    assert sorted(select_diverse(random_times(4, 5), random_similarity(4, 5), 10, 0.5)) == [
        0,
        1,
        2,
        3,
    ]
    assert select_diverse(np.zeros(0), np.zeros((0, 0)), 3, 0.5) == []


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidInput, match="shape"):
        select_diverse([1.0, 2.0], np.eye(3), 1, 0.5)
    with pytest.raises(InvalidInput, match="finite"):
        select_diverse([1.0, float("nan")], np.eye(2), 1, 0.5)
    with pytest.raises(InvalidInput, match="k=0"):
        select_diverse([1.0], np.eye(1), 0, 0.5)


def strategy(seed: int, variables: int = 5) -> Strategy:
    draw = generator(seed, "strategy")
    choices = []
    for number in range(variables):
        parts = int(draw.integers(1, 4))
        partition = Partition(0, (2,) * parts) if parts > 1 else None
        shards = tuple(
            Shard(Synchronizer.PARAMETER_SERVER, placement=int(draw.integers(2)))
            if draw.random() < 0.5
            else Shard(
                Synchronizer.ALL_REDUCE,
                Compressor.FP16 if draw.random() < 0.5 else Compressor.NONE,
                group=int(draw.integers(2)),
            )
            for _ in range(parts)
        )
        choices.append(VariableStrategy(f"v{number}", shards, partition))
    return Strategy(tuple(choices), cross_step=bool(draw.integers(2)))


def slow_agreement(one: Strategy, two: Strategy) -> float:
    equal = [
        one.cross_step == two.cross_step,
        one.ring_order == two.ring_order,
        one.in_flight == two.in_flight,
    ]
    for a, b in zip(one.variables, two.variables, strict=True):
        equal += [a.partition == b.partition, a.sparse == b.sparse]
        for fields in (
            ("synchronizer",),
            ("compressor", "ratio", "rank"),
            ("placement",),
            ("group",),
            ("priority",),
            ("hierarchical",),
        ):
            sides = [
                [tuple(getattr(shard, field) for field in fields) for shard in side.shards]
                for side in (a, b)
            ]
            equal.append(sides[0] == sides[1])
    return sum(equal) / len(equal)


def test_choice_agreement_equals_its_slow_twin() -> None:
    strategies = [strategy(seed) for seed in range(12)]
    agreement = choice_agreement(strategies)
    expected = [[slow_agreement(one, two) for two in strategies] for one in strategies]
    np.testing.assert_allclose(agreement, expected)
    assert agreement.diagonal().tolist() == [1.0] * 12
    row = choice_agreement_rows(strategies)
    np.testing.assert_allclose([row(index) for index in range(12)], agreement)


def test_one_changed_choice_lowers_the_agreement_by_one_choice() -> None:
    plain = Strategy(
        tuple(VariableStrategy(f"v{i}", (Shard(Synchronizer.ALL_REDUCE),)) for i in range(4))
    )
    changed = Strategy(
        (
            *plain.variables[:3],
            VariableStrategy("v3", (Shard(Synchronizer.ALL_REDUCE, Compressor.FP16),)),
        )
    )
    choices = choice_codes([plain]).shape[1]
    assert choice_agreement([plain, changed])[0, 1] == pytest.approx(1 - 1 / choices)


def test_strategies_of_different_models_are_not_compared() -> None:
    with pytest.raises(InvalidInput, match="one model"):
        choice_agreement([strategy(0, 3), strategy(0, 4)])


def test_no_strategy_has_an_empty_agreement() -> None:
    assert choice_agreement([]).shape == (0, 0)


def test_hidden_cosine_equals_its_slow_twin_and_zero_states_are_unlike_all() -> None:
    states = np.array([[1.0, 0.0], [3.0, 4.0], [-2.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(
        hidden_cosine(states)[:3, :3], [[1, 0.6, -1], [0.6, 1, -0.6], [-1, -0.6, 1]]
    )
    assert not hidden_cosine(states)[3].any()
