"""Rankers on synthetic domains with known truth: the right one wins, and no data leaks."""

from __future__ import annotations

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
STUDY = Study(
    seeds=3,
    sizes=(5, 10),
    test_share=0.3,
    transfers=ALL,
    tuned_from=HeldOut.BOTH,
    source_plans=None,
    with_choice=True,
)


def point(
    model: str, cluster: str, number: int, campaign: int, step_s: float, replayed_s: float
) -> Point:
    """Return plan `number` of a model, the same on every cluster; only times differ."""
    strategy = Strategy((VariableStrategy(f"{model}{number}", (Shard(Synchronizer.ALL_REDUCE),)),))
    features = StrategyFeatures(
        strategy,
        np.zeros((1, 1), dtype=np.float32),
        np.zeros(1, dtype=np.int64),
        1,
        np.zeros((0, 2), dtype=np.int64),
        np.zeros(12),
        analytic_step_s=1.0,
        paper_step_s=1.0,
        replayed_step_s=replayed_s,
    )
    domain = f"{model} on {cluster}"
    return Point(
        Example(features, step_s, f"{domain} #{campaign}"),
        domain,
        model,
        f"id of {model}",
        cluster,
        f"plan {model}{number}",
    )


def points() -> list[Point]:
    """Return points whose truth is independent in every domain and noisy in the replay.

    A second campaign tried ten of the plans too.
    """
    found = []
    for model in MODELS:
        for cluster in CLUSTERS:
            draw = generator(0, "truth", model, cluster)
            for number in range(PLANS):
                step_s = float(draw.uniform(1, 2))
                replayed_s = step_s * float(np.exp(0.1 * draw.normal()))
                found.append(point(model, cluster, number, 1, step_s, replayed_s))
                if number < 10:
                    found.append(point(model, cluster, number, 2, 1.2 * step_s, 1.2 * replayed_s))
    return found


def key(features: StrategyFeatures) -> tuple[str, float]:
    """Return the key of a plan in a domain: no two have the same replayed time."""
    return features.strategy_id, features.replayed_step_s or 0.0


class Told:
    """Predicts by `truth`; keeps its training examples and refuses to predict those."""

    name = "told"

    def __init__(
        self, truth: Callable[[StrategyFeatures], float], fitted: list[list[Example]]
    ) -> None:
        self.truth, self.fitted = truth, fitted
        self.seen: list[Example] = []

    def fit(self, examples: Sequence[Example], seed: int, warm_start: bool = False) -> FitReport:
        self.seen = [*(self.seen if warm_start else []), *examples]
        self.fitted.append(list(examples))
        return FitReport(1, 1, 0.0, "")

    def predict_step_s(self, features: Sequence[StrategyFeatures]) -> FloatArray:
        known = {key(example.features) for example in self.seen}
        assert not known & {key(item) for item in features if item.replayed_step_s is not None}
        return np.array([self.truth(item) for item in features])

    def __deepcopy__(self, _: object) -> Told:
        other = Told(self.truth, self.fitted)
        other.seen = list(self.seen)
        return other


class Memory(Told):
    """Remembers the times of trained strategies and guesses the rest."""

    def __init__(self) -> None:
        super().__init__(lambda _: 1.0, [])

    def predict_step_s(self, features: Sequence[StrategyFeatures]) -> FloatArray:
        times = {example.features.strategy_id: example.step_s for example in self.seen}
        draw = generator(1, "guesses", len(self.seen))
        return np.array([times.get(item.strategy_id, draw.uniform(1, 2)) for item in features])

    def __deepcopy__(self, _: object) -> Memory:
        other = Memory()
        other.seen = list(self.seen)
        return other


def studied(
    given: Sequence[Point],
    make: Callable[[], Any],
    study: Study = STUDY,
    domains: Sequence[str] = DOMAINS,
) -> list[RankingRow]:
    return run(given, domains, study, Trainer(given, {"made": make}, lambda *_: None))


def mean(rows: Sequence[RankingRow], figure: str, **wanted: object) -> float:
    chosen = [
        row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())
    ]
    return float(np.mean(by_seed(chosen, figure)))


def test_who_knows_the_truth_wins_everywhere_and_is_chosen() -> None:
    given = points()
    truth = {key(p.example.features): p.example.step_s for p in given}
    rows = studied(given, lambda: Told(lambda item: truth.get(key(item), 1.0), []))
    for learned in (Learned.OWN, Learned.OTHERS, Learned.BOTH):
        assert mean(rows, "pairwise_accuracy", ranker="made", learned=learned) == 1.0
        assert mean(rows, "regret_top_1", ranker="made", learned=learned) == 0.0
        assert (
            mean(rows, "pairwise_accuracy", ranker="made without replay", learned=learned) == 0.5
        )  # the key needs the replayed time
    assert 0.7 < mean(rows, "pairwise_accuracy", ranker=REPLAY) < 0.95
    assert 0.4 < mean(rows, "pairwise_accuracy", ranker=RANDOM) < 0.6
    whole = [row for row in largest_own(rows) if row.ranker == CHOSEN]
    assert {row.note for row in whole} == {"made"} and mean(whole, "pairwise_accuracy") == 1.0


def test_of_many_small_campaigns_the_replay_is_chosen() -> None:
    """No fold of the cross-validation has two strategies to compare."""
    apart = [
        replace(p, example=replace(p.example, domain=f"{p.domain} {number // 3}"))
        for number, p in enumerate(points())
    ]
    rows = studied(
        apart,
        lambda: Told(lambda item: 1.0, []),
        replace(STUDY, transfers=(), seeds=1),
        DOMAINS[:1],
    )
    assert {row.note for row in rows if row.ranker == CHOSEN} == {REPLAY}


def test_who_only_remembers_is_no_better_than_chance_on_shuffled_times() -> None:
    """This holds for any training; one plan on both sides of a split would show."""
    given = points()
    times = generator(2, "shuffled").permutation([p.example.step_s for p in given])
    shuffled = [
        replace(p, example=replace(p.example, step_s=float(time_s)))
        for p, time_s in zip(given, times, strict=True)
    ]
    rows = studied(shuffled, Memory, replace(STUDY, with_choice=False))
    for learned in (Learned.OWN, Learned.OTHERS, Learned.BOTH):
        assert mean(rows, "pairwise_accuracy", ranker="made", learned=learned) == pytest.approx(
            0.5, abs=0.06
        )
        assert mean(rows, "kendall_tau", ranker="made", learned=learned) == pytest.approx(
            0.0, abs=0.12
        )


def test_what_is_held_out_is_never_trained_on() -> None:
    """Check every training of every kind of transfer, as the simulator itself saw it."""
    given = points()
    target = "a on even"
    for held_out in ALL:
        fitted: list[list[Example]] = []
        study = replace(STUDY, seeds=1, transfers=(held_out,), tuned_from=None, with_choice=False)
        rows = studied(given, partial(Told, lambda _: 1.0, fitted), study, [target])
        sources = {
            example.domain.partition(" #")[0] for examples in fitted for example in examples
        } - {target}
        others = {name for name in DOMAINS if name != target}
        expected = {
            HeldOut.DOMAIN: others,
            HeldOut.MODEL: {name for name in others if not name.startswith("a ")},
            HeldOut.CLUSTER: {name for name in others if not name.endswith(" even")},
            HeldOut.BOTH: {"b on uneven", "b on wide"},
        }[held_out]
        assert sources == expected
        assert {
            example.domain.partition(" #")[0] for example in fitted[-1]
        } == expected  # the transfer's own training is the last
        assert {row.held_out for row in rows if row.learned is Learned.OTHERS} == {held_out}


def test_a_model_under_two_names_is_one_model() -> None:
    given = [
        replace(p, model="renamed", domain=p.domain.replace("a on wide", "renamed on wide"))
        if p.domain == "a on wide"
        else p
        for p in points()
    ]
    assert "renamed on wide" in {
        given[index].domain for index in sources_for(given, "a on even", HeldOut.DOMAIN, None, NONE)
    }
    for held_out in (HeldOut.MODEL, HeldOut.BOTH):
        assert "renamed on wide" not in {
            given[index].domain for index in sources_for(given, "a on even", held_out, None, NONE)
        }


def test_parts_are_nested_the_test_part_is_the_same_for_all_and_seeds_test_different_plans() -> (
    None
):
    given = points()
    tested: list[set[str]] = []
    for seed in range(3):
        parts = parts_of(given, "b on wide", seed, (5, 10, 1000), 0.3)
        plans = {size: {given[index].plan_id for index in own} for size, own in parts.own.items()}
        assert list(plans) == [5, 10, 28] and [len(own) for own in plans.values()] == [5, 10, 28]
        assert plans[5] < plans[10] < plans[28]
        tested.append({given[index].plan_id for index in parts.test})
        assert not tested[-1] & plans[28] and len(tested[-1]) == 12
        assert {given[index].domain for index in [*parts.test, *parts.own[28]]} == {"b on wide"}
        assert (
            len(parts.test) + len(parts.own[28]) == PLANS + 10
        )  # both campaigns of a plan lie on one side
    assert not tested[0] & tested[1] and not tested[0] & tested[2] and not tested[1] & tested[2]


def test_source_domains_are_cut_to_the_same_plans_whoever_is_held_out() -> None:
    given = points()
    sources = [sources_for(given, name, HeldOut.DOMAIN, 7, NONE) for name in DOMAINS[:3]]
    found = [{given[i].plan_id for i in own if given[i].domain == "b on wide"} for own in sources]
    assert found[0] == found[1] == found[2] and len(found[0]) == 7


@pytest.mark.parametrize("held_out", ALL)
def test_a_leak_is_an_error(held_out: HeldOut) -> None:
    given = points()
    parts = parts_of(given, "a on even", 0, (), 0.3)
    [own] = parts.own.values()
    sources = sources_for(given, "a on even", held_out, None, parts.test)
    assert_no_leak(given, sources, own, parts.test, held_out)
    elsewhere = [
        p for p in sources_for(given, "a on even", held_out, None, NONE) if p not in sources
    ]
    assert bool(elsewhere) == (
        held_out in (HeldOut.DOMAIN, HeldOut.CLUSTER)
    )  # the model is measured on other clusters, too
    if elsewhere:
        with pytest.raises(AssertionError, match="a tested plan is among the sources"):
            assert_no_leak(given, np.append(sources, elsewhere[:1]), own, parts.test, held_out)
    with pytest.raises(AssertionError, match="training and in the test part"):
        assert_no_leak(given, NONE, np.append(own, parts.test[:1]), parts.test, None)
    with pytest.raises(AssertionError, match="among the sources"):
        assert_no_leak(given, np.append(sources, own[:1]), NONE, parts.test, held_out)
    with pytest.raises(AssertionError, match="another domain"):
        assert_no_leak(given, NONE, np.append(own, sources[:1]), parts.test, None)


def test_too_small_a_domain_is_refused() -> None:
    with pytest.raises(InvalidInput, match="has 2"):
        parts_of(
            [p for p in points() if p.plan_id in ("plan a0", "plan a1")], "a on even", 0, (), 0.3
        )


def test_the_report_names_every_ranker_and_averages_the_domains_that_have_a_size() -> None:
    given = [
        p
        for p in points()
        if p.domain != "a on even" or p.plan_id[6:] in {str(number) for number in range(12)}
    ]
    rows = studied(given, lambda: Told(lambda item: item.replayed_step_s or 1.0, []))
    text = report(rows, "data", STUDY.sizes, STUDY.tuned_from or "")
    for name in (
        "made",
        "made without replay",
        "replay",
        "random (chance)",
        "model and cluster",
        *DOMAINS,
        "CPU s",
    ):
        assert name in text
    assert len(overview(rows).splitlines()) == 2 + len(UNLEARNED) + 3 + 2 * len(ALL) + 2
    lines = {line.name: line.points for line in curves(rows, STUDY.sizes, HeldOut.BOTH)}
    level = [
        row for row in rows if row.ranker == REPLAY and row.domain != "a on even"
    ]  # it has 6 plans to learn from, not 10
    accuracy = [
        np.average(
            [r.pairwise_accuracy for r in level if (r.domain, r.seed) == (d, s)],
            weights=[r.pairs for r in level if (r.domain, r.seed) == (d, s)],
        )
        for d in DOMAINS[1:]
        for s in range(3)
    ]
    assert [size for size, _ in lines["made"]] == [5, 10]
    assert [value for _, value in lines["replay"]] == pytest.approx([np.mean(accuracy)] * 2)
    assert [value for _, value in lines["made"]] == pytest.approx([np.mean(accuracy)] * 2)
