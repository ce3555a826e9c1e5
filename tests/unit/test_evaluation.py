"""Ranking quality against slow references, splits without leaks, and the choice of the ranker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from autotune.arrays import FloatArray
from autotune.errors import InvalidInput
from autotune.features.extract import StrategyFeatures
from autotune.records import RankingQuality
from autotune.rng import generator
from autotune.simulators.evaluation import (
    ANALYTIC,
    PAPER,
    RANDOM,
    REPLAY,
    UNLEARNED,
    best_of_top_k_regret,
    choose_ranker,
    evaluate,
    k_fold,
    kendall_tau,
    ordered_pairs,
    pairwise_accuracy,
)
from autotune.simulators.interface import Example, FitReport
from autotune.simulators.linear import linear_simulator
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer, VariableStrategy


def strategy(number: int) -> Strategy:
    """Return a strategy for each number."""
    return Strategy((VariableStrategy(f"v{number}", (Shard(Synchronizer.ALL_REDUCE),)),))


def example(number: int, analytic_s: float, step_s: float, domain: str = "d") -> Example:
    shards = np.zeros((1, 1), dtype=np.float32)
    none = np.zeros((0, 2), dtype=np.int64)
    numbers = np.zeros(12)
    numbers[0] = number
    features = StrategyFeatures(
        strategy(number), shards, np.zeros(1, dtype=np.int64), 1, none, numbers, analytic_s, 1.0
    )
    return Example(features, step_s, domain)


def noisy(count: int, domain: str = "d", seed: int = 0) -> list[Example]:
    """Return examples whose analytic time is a part of the true time."""
    draw = generator(seed, "noisy", domain)
    known, hidden = draw.uniform(1, 2, count), draw.uniform(0, 1, count)
    return [example(i, float(known[i]), float(known[i] + hidden[i]), domain) for i in range(count)]


class Oracle:
    """Predicts the true time of new strategies, and refuses those it was fitted on."""

    name = "oracle"

    def __init__(self, truth: dict[str, float]) -> None:
        self.truth = truth
        self.seen: set[str] = set()

    def fit(self, examples: Sequence[Example], seed: int, warm_start: bool = False) -> FitReport:
        self.seen = {item.features.strategy_id for item in examples}
        return FitReport(0, 0, 0.0, "nothing to learn")

    def predict_step_s(self, features: Sequence[StrategyFeatures]) -> FloatArray:
        assert not self.seen & {item.strategy_id for item in features}
        return np.array([self.truth[item.strategy_id] for item in features])

    def embed(self, features: Sequence[StrategyFeatures]) -> FloatArray:
        return np.ones((len(features), 1))

    def save(self, path: Path) -> None:
        path.write_text("", encoding="utf-8")

    def load(self, path: Path) -> None:
        path.read_text(encoding="utf-8")


def test_pairwise_accuracy_equals_its_slow_twin_and_skips_ties() -> None:
    draw = generator(1, "accuracy")
    predicted, measured = draw.integers(1, 6, 25).astype(float), draw.uniform(1, 2, 25)
    right, total = 0.0, 0
    for i in range(25):
        for j in range(i):
            fast, slow = (i, j) if measured[i] < measured[j] else (j, i)
            if measured[slow] > measured[fast] * 1.1:
                total += 1
                right += (
                    1.0
                    if predicted[fast] < predicted[slow]
                    else 0.5
                    if predicted[fast] == predicted[slow]
                    else 0.0
                )
    assert pairwise_accuracy(predicted, measured, 0.1) == pytest.approx(right / total)
    assert len(ordered_pairs(measured, 0.1)[0]) == total


def test_figures_at_their_ends() -> None:
    measured = np.array([1.0, 2.0, 3.0, 4.0])
    assert pairwise_accuracy(measured, measured, 0.0) == 1.0
    assert pairwise_accuracy(-measured, measured, 0.0) == 0.0
    assert pairwise_accuracy(measured, np.ones(4), 0.01) == 0.5
    assert kendall_tau(measured, measured) == pytest.approx(1.0)
    assert kendall_tau(-measured, measured) == pytest.approx(-1.0)
    assert kendall_tau(np.ones(4), measured) == 0.0


def test_regret_is_how_much_slower_the_best_of_the_top_k_is() -> None:
    measured, predicted = np.array([1.0, 1.5, 2.0, 4.0]), np.array([3.0, 2.0, 4.0, 1.0])
    assert [best_of_top_k_regret(predicted, measured, k) for k in (1, 2, 3, 9)] == [
        3.0,
        0.5,
        0.0,
        0.0,
    ]


def test_unequal_lengths_and_nonsense_k_are_refused() -> None:
    with pytest.raises(InvalidInput, match="one prediction"):
        pairwise_accuracy([1.0], [1.0, 2.0], 0.0)
    with pytest.raises(InvalidInput, match="k is 0"):
        best_of_top_k_regret([1.0], [1.0], 0)


def test_folds_test_every_example_once_and_spread_each_domain() -> None:
    examples = noisy(20, "a") + noisy(10, "b")
    splits = k_fold(examples, 5, seed=3)
    assert sorted(np.concatenate([test for _, test in splits]).tolist()) == list(range(30))
    for training, test in splits:
        assert not set(training) & set(test)
        assert [examples[index].domain for index in test].count("a") == 4
    with pytest.raises(InvalidInput, match="folds"):
        k_fold(examples, 1, seed=3)


def test_a_plan_that_several_domains_measured_lies_in_one_fold() -> None:
    examples = [
        replace(item, group=f"plan {number % 20}")
        for number, item in enumerate(noisy(20, "a") + noisy(20, "b"))
    ]
    for training, test in k_fold(examples, 4, seed=3):
        assert not {examples[index].group for index in training} & {
            examples[index].group for index in test
        }
        assert [examples[index].domain for index in test].count("a") == 5


def test_every_simulator_stands_beside_the_analytic_rankers_and_chance() -> None:
    examples = noisy(40)
    truth = {item.features.strategy_id: item.step_s for item in examples}
    qualities = {
        q.ranker: q
        for q in evaluate(
            examples,
            {"oracle": lambda: Oracle(truth)},
            k_fold(examples, 4, 0),
            seed=0,
            tie_band=0.01,
        )
    }
    assert list(qualities) == [ANALYTIC, PAPER, RANDOM, "oracle"]
    assert qualities["oracle"].pairwise_accuracy == 1.0
    assert qualities["oracle"].kendall_tau == pytest.approx(1.0)
    assert qualities["oracle"].regret_top_1 == 0.0
    assert qualities[PAPER].pairwise_accuracy == 0.5
    assert qualities[RANDOM].pairwise_accuracy < qualities[ANALYTIC].pairwise_accuracy < 1.0
    assert {q.points for q in qualities.values()} == {40}
    assert len({q.pairs for q in qualities.values()}) == 1


def test_domains_are_never_compared_with_one_another() -> None:
    slow_domain = [
        replace(item, step_s=item.step_s * 100, domain="slow") for item in noisy(20, "b")
    ]
    examples = noisy(20, "a") + slow_domain
    pairs = evaluate(examples, {}, k_fold(examples, 4, 0), seed=0, tie_band=0.0)[0].pairs
    assert pairs == 4 * 2 * (5 * 4 // 2)


def test_chance_is_the_same_in_every_run_of_one_seed() -> None:
    examples = noisy(20)
    runs = [
        evaluate(
            examples, {"linear": linear_simulator}, k_fold(examples, 2, 0), seed=5, tie_band=0.01
        )[2]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_too_few_test_points_are_refused() -> None:
    examples = noisy(3)
    with pytest.raises(InvalidInput, match="fewer folds"):
        evaluate(examples, {}, k_fold(examples, 3, 0), seed=0, tie_band=0.01)


def quality(ranker: str, accuracy: float, pairs: int = 200) -> RankingQuality:
    gain = (None, None) if ranker in UNLEARNED else (accuracy - 0.8, 0.02)
    return RankingQuality(ranker, accuracy, 2 * accuracy - 1, 0.0, 0.0, pairs, 30, *gain)


def test_a_simulator_ranks_only_where_it_surely_beats_the_analytic_ranker() -> None:
    analytic = quality(ANALYTIC, 0.8)
    assert choose_ranker([analytic, quality("rnn", 0.9), quality("linear", 0.85)]).ranker == "rnn"
    assert choose_ranker([analytic, quality("rnn", 0.8)]).ranker == ANALYTIC
    assert (
        choose_ranker([analytic, quality("rnn", 0.82)]).ranker == "rnn"
    )  # one look, and ahead by more than 0.84 of its error
    luck = choose_ranker(
        [analytic, quality("rnn", 0.82), quality("gat", 0.81), quality("linear", 0.7)]
    )  # by less than 1.5 of it
    assert luck.ranker == ANALYTIC and luck.reason.endswith("which may be luck")
    assert choose_ranker([analytic, quality(PAPER, 0.95), quality(RANDOM, 0.99)]).ranker == ANALYTIC
    few = choose_ranker([quality(ANALYTIC, 0.8, 10), quality("rnn", 0.9, 10)])
    assert few.ranker == ANALYTIC
    assert "fewer than 30 pairs" in few.reason


def _same(made: Oracle) -> Oracle:
    return made


@pytest.mark.parametrize("count", [24, 60])
def test_simulators_that_are_no_better_than_the_replay_seldom_rank(count: int) -> None:
    """Three rankers with the replay's time and their own noise."""
    examples = noisy(count)
    chosen = 0
    for seed in range(100):
        guessed = np.array([e.step_s for e in examples]) * np.exp(
            0.1 * generator(seed, "no better").standard_normal((4, count))
        )
        names = [e.features.strategy_id for e in examples]
        rows = guessed.tolist()
        made = {
            f"s{number}": Oracle(dict(zip(names, rows[number], strict=True))) for number in range(3)
        }
        replayed = [
            replace(e, features=replace(e.features, replayed_step_s=at))
            for e, at in zip(examples, rows[3], strict=True)
        ]
        found = evaluate(
            replayed,
            {name: partial(_same, own) for name, own in made.items()},
            k_fold(examples, 4, seed),
            0,
            0.01,
        )
        chosen += choose_ranker(found).ranker != REPLAY
    assert chosen <= 100 * 0.2


def test_a_simulator_that_is_far_better_ranks() -> None:
    examples = noisy(60)
    truth = {item.features.strategy_id: item.step_s for item in examples}
    found = evaluate(
        examples, {"oracle": lambda: Oracle(truth)}, k_fold(examples, 4, 0), seed=0, tie_band=0.01
    )
    assert choose_ranker(found).ranker == "oracle"


def test_the_reason_names_both_figures() -> None:
    reason = choose_ranker([quality(ANALYTIC, 0.8), quality("rnn", 0.9)]).reason
    assert (
        reason == "the rnn simulator ranks: on 200 held-out pairs the rnn simulator orders "
        "90.0% correctly and the analytic ranker 80.0%"
    )


def test_a_choice_without_the_analytic_ranker_is_refused() -> None:
    with pytest.raises(InvalidInput, match="analytic"):
        choose_ranker([quality("rnn", 0.9)])
