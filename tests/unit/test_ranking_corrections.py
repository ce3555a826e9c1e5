"""The corrections that the ranking benchmark judges: no leak, and the tuner's own ranker."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from autotune.arrays import IntArray
from autotune.features.extract import StrategyFeatures
from autotune.features.timeline import TimelineFeatures
from autotune.jobs.past_jobs import NEWEST
from autotune.rng import generator
from autotune.sampler.correction import KERNEL, corrected_times, experience
from autotune.sampler.past_jobs import MOST_TRIALS
from autotune.sampler.scoring import MOST_CALIBRATED
from autotune.simulators.interface import Example
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer, VariableStrategy
from benchmarks.ranking.corrections import (
    OWN,
    TUNER,
    Kernels,
    as_the_tuner,
    earlier_trials,
    held_out,
    judged,
    kernel_sources,
    other_domains,
    own_part,
    residuals_of,
    supported_strength,
)
from benchmarks.ranking.decision_report import decision_keys, decision_page
from benchmarks.ranking.decisions import mean_and_worst, mean_bias
from benchmarks.ranking.runs import Trainer
from benchmarks.ranking.tasks import HeldOut, assert_unseen
from benchmarks.ranking.trials import Point

MODELS, CLUSTERS, PLANS = ("a", "b", "c"), ("even", "wide"), 130
TWIN = "clipped a on even"
"""The model `a` under another name, on the same cluster."""


def point(model: str, cluster: str, number: int, model_id: str) -> Point:
    strategy = Strategy((VariableStrategy(f"{model}{number}", (Shard(Synchronizer.ALL_REDUCE),)),))
    shards, places = np.zeros((1, 1), dtype=np.float32), np.zeros(1, dtype=np.int64)
    draw = generator(0, "point", model, cluster, number)
    replayed_s, numbers = float(draw.uniform(1, 2)), draw.normal(size=5).tolist()
    features = StrategyFeatures(
        strategy,
        shards,
        places,
        1,
        np.zeros((0, 2), dtype=np.int64),
        np.zeros(12),
        1.0,
        1.0,
        replayed_step_s=replayed_s,
        timeline=TimelineFeatures(*numbers),
    )
    step_s = replayed_s * float(np.exp(0.1 * numbers[0] + 0.02 * draw.normal()))
    domain, plan = f"{model} on {cluster}", f"plan {model}{number}"
    example = Example(features, step_s, f"{domain} #1")
    return Point(example, domain, model, model_id, cluster, plan, 0.01, number % 2 == 0)


def points(plans: int = PLANS) -> list[Point]:
    known = [
        point(model, cluster, number, f"id of {model}")
        for model, cluster in itertools.product(MODELS, CLUSTERS)
        for number in range(plans)
    ]
    return known + [point("clipped a", "even", number, "id of a") for number in range(plans)]


class Recorded:
    """A calibration that changes nothing and keeps what it was given."""

    def __init__(self, given: Sequence[Point]) -> None:
        self.given = given
        self.calls: list[tuple[str, set[str]]] = []

    def of(self, domain: str, training: IntArray) -> list[Point]:
        self.calls.append((domain, {self.given[index].plan_id for index in training}))
        return [point for point in self.given if point.domain == domain]


def names(given: Sequence[Point], indices: IntArray) -> set[str]:
    return {given[index].domain for index in indices}


def test_a_strength_is_chosen_without_the_held_out_model_on_its_cluster() -> None:
    given = points(12)
    others = {"a on wide", "b on even", "b on wide", "c on even", "c on wide"}
    assert set(other_domains(given, "a on even")) == others
    held = held_out(given, "b on even", 0, KERNEL, also="a on even")
    assert names(given, held.sources) == others - {"b on even"}


def test_a_kernel_is_learned_on_other_models_than_those_that_are_held_out() -> None:
    given = points(12)
    sources = kernel_sources(given, ("a on even", "b on wide"))
    assert names(given, sources) == {"c on even", "c on wide"}
    for held, domain in ((HeldOut.MODEL, "c on even"), (HeldOut.DOMAIN, "c on wide")):
        with pytest.raises(AssertionError, match="among the sources"):
            assert_unseen(given, sources, domain, held)


def test_the_tuners_ranker_is_its_own_code_and_knows_others_until_it_is_calibrated() -> None:
    given = points()
    calibration = Recorded(given)
    held = held_out(given, "b on even", 0, KERNEL)
    for own in OWN:
        training = own_part(held.parts, own)
        times = as_the_tuner(given, held, own, calibration.of)
        earlier = earlier_trials(given, held.sources, "b on even")
        others = earlier if own == 0 else earlier[:0]
        direct = corrected_times(
            [given[index].example for index in training],
            [given[index].example.features for index in held.parts.test],
            experience(residuals_of(given, others)),
        )
        np.testing.assert_array_equal(times.ranking_s, direct.ranking_s)
        np.testing.assert_array_equal(times.shown_s, direct.shown_s)
        domain, calibrated = calibration.calls[-1]
        assert domain == "b on even" and len(calibrated) == min(own, MOST_CALIBRATED)
        assert calibrated <= {given[index].plan_id for index in training}
        if own == 50:
            ends = sorted(training, key=lambda index: given[index].example.step_s)
            assert {given[ends[place]].plan_id for place in (0, -1)} <= calibrated


def test_the_tuner_learns_from_as_many_earlier_trials_as_a_job_does() -> None:
    of_job = [point("own", "even", number, "id of own") for number in range(3)]
    jobs = [f"m{number}" for number in range(NEWEST + 3)]
    others = [point(name, "even", number, name) for name in jobs for number in range(40)]
    other_runtime = [
        replace(point("tf", "even", number, "tf"), runtime="tensorflow") for number in range(40)
    ]
    given = of_job + others + other_runtime
    sources = np.arange(len(of_job), len(given))
    chosen = earlier_trials(given, sources, "own on even")
    names_of = [given[index].domain for index in chosen]
    assert len(set(names_of)) == NEWEST and "tf on even" not in names_of
    for name in set(names_of):
        times_s = sorted(each.example.step_s for each in others if each.domain == name)
        learned_s = [given[index].example.step_s for index in chosen if given[index].domain == name]
        assert len(learned_s) == MOST_TRIALS
        assert (min(learned_s), max(learned_s)) == (times_s[0], times_s[-1])
    assert earlier_trials(given, sources[:0], "own on even").tolist() == []


def test_domains_of_one_or_two_plans_are_sources_that_nothing_is_calibrated_on() -> None:
    small = [point("b", "narrow", number, "id of b") for number in range(2)]
    small += [point("d", "even", 0, "id of d")]
    given = points(40) + small
    calibration = Recorded(given)
    trainer = Trainer(given, {}, lambda *_: None)
    rows, _ = judged(given, ["a on even"], 1, trainer, 20, calibration.of)
    assert rows and not {"b on narrow", "d on even"} & {name for name, _ in calibration.calls}
    with_small = held_out(given, "a on even", 0, KERNEL)
    assert {"b on narrow", "d on even"} <= names(given, with_small.sources)


def test_no_strength_is_supported_if_no_other_domain_can_be_split() -> None:
    given = [point("a", "even", number, "id of a") for number in range(40)]
    given += [point(name, "wide", number, name) for name in "bc" for number in range(2)]
    calibrate = Recorded(given).of
    assert supported_strength(given, "a on even", Kernels(given), calibrate) == 0.0


def test_the_interval_of_a_shown_time_covers_measurements() -> None:
    known, draw = point("a", "even", 0, "id of a").example, generator(0, "measurements")
    replayed_s = known.features.replayed_step_s
    assert replayed_s is not None
    measured_s = replayed_s * np.exp(0.1 + KERNEL.noise_sd * draw.normal(size=1100))
    trials = [replace(known, step_s=float(step_s)) for step_s in measured_s[:100]]
    times = corrected_times(trials, [known.features])
    half_width = NormalDist().inv_cdf(0.975) * times.sd[0]
    covered = np.abs(np.log(measured_s[100:] / times.shown_s[0])) < half_width
    assert 0.92 < covered.mean() < 0.98


def test_the_keys_of_the_aims_are_those_of_the_tuners_ranker() -> None:
    given = points(40)
    trainer = Trainer(given, {}, lambda *_: None)
    rows, strengths = judged(given, ["a on even"], 1, trainer, 20, Recorded(given).of)
    keys = decision_keys(rows, strengths)
    assert keys["all_pairs"] == round(mean_and_worst(rows, TUNER, 25, "all_pairs")[0], 4)
    assert keys["proposal_bias"] == round(mean_bias(rows, TUNER, 25), 4)
    assert TUNER in decision_page(rows, strengths)
    # Times of other domains change other rankers, and the tuner's only without own trials.
    slower = [
        p
        if p.domain == "a on even"
        else replace(p, example=replace(p.example, step_s=p.example.step_s**2))
        for p in given
    ]
    others, _ = judged(slower, ["a on even"], 1, trainer, 20, Recorded(slower).of)
    changed = {
        (row.ranker, row.own)
        for row, other in zip(rows, others, strict=True)
        if row.bias != other.bias
    }
    assert {own for ranker, own in changed if ranker == TUNER} == {0}
