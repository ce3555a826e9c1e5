"""Rankers on synthetic domains with known truth: the right one wins, and no data leaks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from autotune.arrays import FloatArray
from autotune.errors import InvalidInput
from autotune.features.extract import StrategyFeatures
from autotune.rng import generator
from autotune.simulators.evaluation import RANDOM, REPLAY, UNLEARNED
from autotune.simulators.interface import Example, FitReport
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer, VariableStrategy
from benchmarks.ranking.report import by_seed, curves, largest_own, overview, report
from benchmarks.ranking.runs import CHOSEN, Learned, RankingRow, Study, Trainer, run
from benchmarks.ranking.tasks import HeldOut, assert_no_leak, parts_of, sources_for
from benchmarks.ranking.trials import Point

MODELS, CLUSTERS, PLANS = ("a", "b"), ("even", "uneven", "wide"), 40
DOMAINS = [f"{model} on {cluster}" for model in MODELS for cluster in CLUSTERS]
ALL = tuple(HeldOut)
NONE = np.zeros(0, dtype=np.int64)
LEARNING = (Learned.OWN, Learned.OTHERS, Learned.BOTH)
STUDY = Study(3, (5, 10), 0.3, ALL, HeldOut.BOTH, None, with_choice=True)


def point(model: str, cluster: str, number: int, campaign: int, step_s: float, replayed_s: float):
    """Return plan `number` of a model, the same on every cluster; only times differ."""
    strategy = Strategy((VariableStrategy(f"{model}{number}", (Shard(Synchronizer.ALL_REDUCE),)),))
    shards, places = np.zeros((1, 1), dtype=np.float32), np.zeros(1, dtype=np.int64)
    arrays = (shards, places, 1, np.zeros((0, 2), dtype=np.int64), np.zeros(12))
    features = StrategyFeatures(strategy, *arrays, 1.0, 1.0, replayed_step_s=replayed_s)
    domain, plan = f"{model} on {cluster}", f"plan {model}{number}"
    example = Example(features, step_s, f"{domain} #{campaign}")
    return Point(example, domain, model, f"id of {model}", cluster, plan)


def points() -> list[Point]:
    """Return points whose truth is independent in every domain and noisy in the replay.

    A second campaign tried ten of the plans too.
    """
    everything = []
    for model, cluster in itertools.product(MODELS, CLUSTERS):
        draw = generator(0, "truth", model, cluster)
        for number in range(PLANS):
            step_s = float(draw.uniform(1, 2))
            replayed_s = step_s * float(np.exp(0.1 * draw.normal()))
            everything.append(point(model, cluster, number, 1, step_s, replayed_s))
            if number < 10:
                slower = (1.2 * step_s, 1.2 * replayed_s)
                everything.append(point(model, cluster, number, 2, *slower))
    return everything


def at(given: Sequence[Point], indices, field: str) -> set[str]:
    """Return the values of a field of the points at these indices."""
    return {getattr(given[index], field) for index in indices}


def key(features: StrategyFeatures) -> tuple[str, float]:
    """Return the key of a plan in a domain: no two have the same replayed time."""
    return features.strategy_id, features.replayed_step_s or 0.0


class FunctionSimulator:
    """Predicts by `truth`; keeps its training examples and refuses to predict those."""

    name = "function"
    reads_shards = False

    def __init__(self, truth: Callable[[StrategyFeatures], float], fitted=None) -> None:
        self.truth, self.fitted = truth, [] if fitted is None else fitted
        self.learned: list[Example] = []

    def fit(
        self,
        examples: Sequence[Example],
        seed: int,
        warm_start: bool = False,
        limit_s: float = math.inf,
    ) -> FitReport:
        self.learned = [*(self.learned if warm_start else []), *examples]
        self.fitted.append(list(examples))
        return FitReport(1, 1, 0.0, "")

    def predict_step_s(self, features: Sequence[StrategyFeatures]) -> FloatArray:
        known = {key(example.features) for example in self.learned}
        assert not known & {key(item) for item in features if item.replayed_step_s is not None}
        return np.array([self.truth(item) for item in features])

    def __deepcopy__(self, _: object):
        other = type(self)(self.truth, self.fitted)
        other.learned = list(self.learned)
        return other


class Memory(FunctionSimulator):
    """Remembers the times of trained strategies and guesses the rest."""

    def predict_step_s(self, features: Sequence[StrategyFeatures]) -> FloatArray:
        times = {example.features.strategy_id: example.step_s for example in self.learned}
        draw = generator(1, "guesses", len(self.learned))
        return np.array([times.get(item.strategy_id, draw.uniform(1, 2)) for item in features])


def one_second(_: object) -> float:
    return 1.0


def studied(given, make: Callable[[], Any], study: Study = STUDY, domains=DOMAINS):
    return run(given, domains, study, Trainer(given, {"made": make}, lambda *_: None))


def mean(rows: Sequence[RankingRow], figure: str, **wanted: object) -> float:
    expected = wanted.items()
    chosen = [row for row in rows if all(getattr(row, name) == value for name, value in expected)]
    return float(np.mean(by_seed(chosen, figure)))


def test_a_ranker_that_knows_the_truth_wins_everywhere_and_is_chosen():
    given = points()
    truth = {key(p.example.features): p.example.step_s for p in given}
    rows = studied(given, lambda: FunctionSimulator(lambda item: truth.get(key(item), 1.0)))
    for learned in LEARNING:
        assert mean(rows, "pairwise_accuracy", ranker="made", learned=learned) == 1.0
        assert mean(rows, "regret_top_1", ranker="made", learned=learned) == 0.0
        # The key needs the replayed time.
        blind = {"ranker": "made without replay", "learned": learned}
        assert mean(rows, "pairwise_accuracy", **blind) == 0.5
    assert 0.7 < mean(rows, "pairwise_accuracy", ranker=REPLAY) < 0.95
    assert 0.4 < mean(rows, "pairwise_accuracy", ranker=RANDOM) < 0.6
    whole = [row for row in largest_own(rows) if row.ranker == CHOSEN]
    assert {row.note for row in whole} == {"made"} and mean(whole, "pairwise_accuracy") == 1.0


def test_of_many_small_campaigns_the_replay_is_chosen():
    """No fold of the cross-validation has two strategies to compare."""
    apart = [
        replace(p, example=replace(p.example, domain=f"{p.domain} {number // 3}"))
        for number, p in enumerate(points())
    ]
    study = replace(STUDY, transfers=(), seeds=1)
    rows = studied(apart, lambda: FunctionSimulator(one_second), study, DOMAINS[:1])
    assert {row.note for row in rows if row.ranker == CHOSEN} == {REPLAY}


def test_a_ranker_that_only_remembers_is_as_good_as_chance_on_shuffled_times():
    """This holds for any training; one plan on both sides of a split would show."""
    given = points()
    times = generator(2, "shuffled").permutation([p.example.step_s for p in given]).tolist()
    shuffled = [
        replace(p, example=replace(p.example, step_s=time_s))
        for p, time_s in zip(given, times, strict=True)
    ]
    rows = studied(shuffled, lambda: Memory(one_second), replace(STUDY, with_choice=False))
    for learned in LEARNING:
        accuracy = mean(rows, "pairwise_accuracy", ranker="made", learned=learned)
        tau = mean(rows, "kendall_tau", ranker="made", learned=learned)
        assert accuracy == pytest.approx(0.5, abs=0.06) and tau == pytest.approx(0.0, abs=0.12)


OTHERS = set(DOMAINS) - {"a on even"}
SOURCES = {
    HeldOut.DOMAIN: OTHERS,
    HeldOut.MODEL: {name for name in OTHERS if not name.startswith("a ")},
    HeldOut.CLUSTER: {name for name in OTHERS if not name.endswith(" even")},
    HeldOut.BOTH: {"b on uneven", "b on wide"},
}


@pytest.mark.parametrize("held_out", ALL)
def test_no_simulator_trains_on_what_is_held_out(held_out: HeldOut):
    """Check every training of every kind of transfer, as the simulator itself saw it."""
    fitted: list[list[Example]] = []
    study = replace(STUDY, seeds=1, transfers=(held_out,), tuned_from=None, with_choice=False)
    make = partial(FunctionSimulator, one_second, fitted)
    rows = studied(points(), make, study, ["a on even"])
    trained = [{example.domain.partition(" #")[0] for example in part} for part in fitted]
    assert set().union(*trained) - {"a on even"} == SOURCES[held_out]
    assert trained[-1] == SOURCES[held_out]  # the transfer's own training is the last
    assert {row.held_out for row in rows if row.learned is Learned.OTHERS} == {held_out}


def test_a_model_under_two_names_is_one_model():
    def renamed(p: Point) -> Point:
        return replace(p, model="renamed", domain="renamed on wide")

    given = [renamed(p) if p.domain == "a on wide" else p for p in points()]
    for held_out in (HeldOut.DOMAIN, HeldOut.MODEL, HeldOut.BOTH):
        sources = sources_for(given, "a on even", held_out, None, NONE)
        allowed = held_out is HeldOut.DOMAIN
        assert ("renamed on wide" in at(given, sources, "domain")) == allowed


def test_parts_are_nested_and_seeds_test_different_plans():
    given = points()
    tested: list[set[str]] = []
    for seed in range(3):
        parts = parts_of(given, "b on wide", seed, (5, 10, 1000), 0.3)
        plans = {size: at(given, indices, "plan_id") for size, indices in parts.own.items()}
        assert list(plans) == [5, 10, 28] and [len(indices) for indices in plans.values()] == [
            5,
            10,
            28,
        ]
        assert plans[5] < plans[10] < plans[28]
        tested.append(at(given, parts.test, "plan_id"))
        assert not tested[-1] & plans[28] and len(tested[-1]) == 12
        assert at(given, [*parts.test, *parts.own[28]], "domain") == {"b on wide"}
        # Both campaigns of a plan are on one side.
        assert len(parts.test) + len(parts.own[28]) == PLANS + 10
    assert not tested[0] & tested[1] and not tested[0] & tested[2] and not tested[1] & tested[2]


def test_source_domains_are_cut_to_the_same_plans_for_every_held_out_domain():
    given = points()
    sources = [sources_for(given, name, HeldOut.DOMAIN, 7, NONE) for name in DOMAINS[:3]]
    wide = [[index for index in source if given[index].domain == "b on wide"] for source in sources]
    first, second, third = (at(given, indices, "plan_id") for indices in wide)
    assert first == second == third and len(first) == 7


@pytest.mark.parametrize("held_out", ALL)
def test_a_leak_is_an_error(held_out: HeldOut):
    given = points()
    parts = parts_of(given, "a on even", 0, (), 0.3)
    [training], test = parts.own.values(), parts.test
    sources = sources_for(given, "a on even", held_out, None, test)
    assert_no_leak(given, sources, training, test, held_out)
    unhidden = sources_for(given, "a on even", held_out, None, NONE)
    elsewhere = [index for index in unhidden if index not in sources]
    # The model is measured on other clusters, too.
    assert bool(elsewhere) == (held_out in (HeldOut.DOMAIN, HeldOut.CLUSTER))
    leaks = [
        ("training and in the test part", NONE, np.append(training, test[:1]), None),
        ("among the sources", np.append(sources, training[:1]), NONE, held_out),
        ("another domain", NONE, np.append(training, sources[:1]), None),
    ]
    if elsewhere:
        tested = np.append(sources, elsewhere[:1])
        leaks.append(("a tested plan is among the sources", tested, training, held_out))
    for message, leaking_sources, leaking_own, kind in leaks:
        with pytest.raises(AssertionError, match=message):
            assert_no_leak(given, leaking_sources, leaking_own, test, kind)


def test_too_small_a_domain_is_refused():
    two = [p for p in points() if p.plan_id in ("plan a0", "plan a1")]
    with pytest.raises(InvalidInput, match="has 2"):
        parts_of(two, "a on even", 0, (), 0.3)


def test_the_report_names_every_ranker_and_averages_the_domains_that_have_a_size():
    twelve = {f"plan a{number}" for number in range(12)}
    given = [p for p in points() if p.domain != "a on even" or p.plan_id in twelve]
    rows = studied(given, lambda: FunctionSimulator(lambda item: item.replayed_step_s or 1.0))
    text = report(rows, "data", STUDY.sizes, STUDY.tuned_from or "")
    rankers = ("made", "made without replay", "replay", "random (chance)", "model and cluster")
    assert [name for name in (*rankers, *DOMAINS, "CPU s") if name not in text] == []
    assert len(overview(rows).splitlines()) == 2 + len(UNLEARNED) + 3 + 2 * len(ALL) + 2
    lines = {line.name: line.points for line in curves(rows, STUDY.sizes, HeldOut.BOTH)}
    # The first domain has 6 plans to learn from, not 10.
    replayed = [row for row in rows if row.ranker == REPLAY and row.domain != "a on even"]
    accuracies = []
    for part in itertools.product(DOMAINS[1:], range(3)):
        level = [row for row in replayed if (row.domain, row.seed) == part]
        weights = [row.pairs for row in level]
        accuracies.append(np.average([row.pairwise_accuracy for row in level], weights=weights))
    expected = pytest.approx([np.mean(accuracies)] * 2)
    assert [size for size, _ in lines["made"]] == [5, 10]
    for name in ("replay", "made"):
        assert [value for _, value in lines[name]] == expected
