"""Greedy Eq. 11 against brute force, and both similarities against slow twins."""

from __future__ import annotations

from dataclasses import replace
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


def candidates(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random times and similarities of candidates."""
    states = generator(seed, "states").normal(size=(count, 4))
    return generator(seed, "times").uniform(0.1, 0.2, count), (hidden_cosine(states) + 1) / 2


def slow_greedy(times: np.ndarray, similarity: np.ndarray, k: int, alpha: float) -> list[int]:
    """Add the candidate with the lowest value of Eq. 11 for the grown set, evaluated in full."""
    chosen: list[int] = []
    for _ in range(k):
        rest = [i for i in range(len(times)) if i not in chosen]
        grown = [[*chosen, i] for i in rest]
        speeds = [sum(times[j] for j in each) / np.median(times) for each in grown]
        sums = [sum(similarity[a, b] for a in each for b in each) for each in grown]
        values = [speed + alpha / k * total for speed, total in zip(speeds, sums, strict=True)]
        chosen.append(rest[int(np.argmin(values))])
    return chosen


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.floats(0, 2))
def test_selection_equals_its_slow_twin(seed: int, k: int, alpha: float) -> None:
    times, similarity = candidates(9, seed)
    np.fill_diagonal(similarity, 1.0)
    assert select_diverse(times, similarity, k, alpha) == slow_greedy(times, similarity, k, alpha)


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0])
def test_greedy_is_close_to_the_best_of_all_sets(alpha: float) -> None:
    gaps = []
    for seed in range(20):
        values = candidates(10, seed)
        best = min(objective(*values, chosen, alpha) for chosen in combinations(range(10), 4))
        greedy = objective(*values, select_diverse(*values, 4, alpha), alpha)
        gaps.append(greedy / best - 1)
    assert min(gaps) >= -1e-12
    assert max(gaps) < 0.1


def test_alpha_trades_speed_for_diversity_and_0_is_the_plain_top_k() -> None:
    times, similarity = candidates(200, 2)
    chosen = [select_diverse(times, similarity, 20, alpha) for alpha in (0.0, 0.2, 1.0)]
    means = [float(similarity[np.ix_(index, index)].mean()) for index in chosen]
    assert means[0] > means[1] > means[2]
    speeds = [float(times[index].mean()) for index in chosen]
    assert speeds[0] < speeds[1] < speeds[2]
    assert chosen[0] == np.argsort(times)[:20].tolist()


def test_neither_a_callable_similarity_nor_the_unit_of_time_matters() -> None:
    times, similarity = candidates(60, 3)
    expected = select_diverse(times, similarity, 12, 0.5)
    assert select_diverse(times, lambda row: similarity[row], 12, 0.5) == expected
    assert select_diverse(times * 1000, similarity, 12, 0.5) == expected


def test_more_wanted_than_there_are_gives_all_once() -> None:
    assert sorted(select_diverse(*candidates(4, 5), 10, 0.5)) == [0, 1, 2, 3]
    assert select_diverse(np.zeros(0), np.zeros((0, 0)), 3, 0.5) == []
    assert choice_agreement([]).shape == (0, 0)


def test_bad_input_is_refused() -> None:
    for times, count, k, rule in (
        ([1.0, 2.0], 3, 1, "shape"),
        ([1.0, float("nan")], 2, 1, "finite"),
        ([1.0], 1, 0, "k=0"),
    ):
        with pytest.raises(InvalidInput, match=rule):
            select_diverse(times, np.eye(count), k, 0.5)
    with pytest.raises(InvalidInput, match="one model"):
        choice_agreement([strategy(0, 3), strategy(0, 4)])


def shard(draw: np.random.Generator) -> Shard:
    kind = draw.random()
    if kind < 0.3:
        return Shard(Synchronizer.PARAMETER_SERVER, placement=int(draw.integers(2)))
    if kind < 0.6:
        shares = OWNERS if draw.random() < 0.5 else None
        pieces = int(draw.integers(1, 3))
        return Shard(Synchronizer.DIRECT_EXCHANGE, shares=shares, pieces=pieces)
    compressor = Compressor.FP16 if draw.random() < 0.5 else Compressor.NONE
    return Shard(Synchronizer.ALL_REDUCE, compressor, group=int(draw.integers(2)))


def strategy(seed: int, variables: int = 5) -> Strategy:
    draw = generator(seed, "strategy")
    choices = []
    for number in range(variables):
        parts = int(draw.integers(1, 4))
        partition = Partition(0, (2,) * parts) if parts > 1 else None
        shards = tuple(shard(draw) for _ in range(parts))
        choices.append(VariableStrategy(f"v{number}", shards, partition))
    return Strategy(
        tuple(choices),
        cross_step=bool(draw.integers(2)),
        op_fusion=FUSED if draw.random() < 0.5 else (),
        local_copies=bool(draw.integers(2)),
    )


OWNERS = (0.5, 0.25, 0.25)
FUSED = (("add", "mul"),)
CHOICES: list[tuple[str, ...]] = [("synchronizer",), ("compressor", "ratio", "rank")]
CHOICES += [("placement",), ("group",), ("priority",), ("hierarchical",), ("shares", "pieces")]


def slow_agreement(one: Strategy, two: Strategy) -> float:
    whole = ("cross_step", "ring_order", "in_flight", "op_fusion", "local_copies")
    equal = [getattr(one, name) == getattr(two, name) for name in whole]
    for a, b in zip(one.variables, two.variables, strict=True):
        equal += [a.partition == b.partition, a.sparse == b.sparse]
        for names in CHOICES:
            first, second = (
                [[getattr(shard, name) for name in names] for shard in choice.shards]
                for choice in (a, b)
            )
            equal.append(first == second)
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
    shard = Shard(Synchronizer.ALL_REDUCE)
    plain = Strategy(tuple(VariableStrategy(f"v{i}", (shard,)) for i in range(4)))
    lossy = VariableStrategy("v3", (replace(shard, compressor=Compressor.FP16),))
    changed = Strategy((*plain.variables[:3], lossy))
    choices = choice_codes([plain]).shape[1]
    assert choice_agreement([plain, changed])[0, 1] == pytest.approx(1 - 1 / choices)


def test_owners_pieces_and_fused_ops_are_choices() -> None:
    def direct(shares: tuple[float, ...] | None, pieces: int) -> Strategy:
        shard = Shard(Synchronizer.DIRECT_EXCHANGE, shares=shares, pieces=pieces)
        return Strategy((VariableStrategy("v", (shard,)),))

    plain = direct(None, 1)
    others = [direct((1.0, 0.0, 0.0, 0.0), 1), direct(None, 8)]
    others += [replace(plain, op_fusion=FUSED), replace(plain, local_copies=False)]
    assert max(choice_agreement([plain, *others])[0, 1:]) < 1.0


def test_hidden_cosine_equals_its_slow_twin_and_zero_states_are_unlike_all() -> None:
    states = np.array([[1.0, 0.0], [3.0, 4.0], [-2.0, 0.0], [0.0, 0.0]])
    expected = [[1, 0.6, -1], [0.6, 1, -0.6], [-1, -0.6, 1]]
    np.testing.assert_allclose(hidden_cosine(states)[:3, :3], expected)
    assert not hidden_cosine(states)[3].any()
