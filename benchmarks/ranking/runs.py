"""Train rankers on the parts of `tasks` and test them: a row per ranker, part and campaign."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.features.extract import StrategyFeatures
from autotune.rng import generator
from autotune.sampler.scoring import FOLDS, SMALLEST_TRAINING
from autotune.simulators.evaluation import (
    REPLAY,
    UNLEARNED,
    best_of_top_k_regret,
    choose_ranker,
    evaluate,
    k_fold,
    kendall_tau,
    ordered_pairs,
    pairwise_accuracy,
    unlearned_step_s,
)
from autotune.simulators.interface import Example, Simulator
from benchmarks.ranking.tasks import HeldOut, Parts, assert_no_leak, parts_of, sources_for
from benchmarks.ranking.trials import Point

TIE_BAND = 0.01
"""Measured times that differ by less, relatively, count as equal in training and figures."""
CHOSEN = "chosen"
"""The tuner's choice: the best in cross-validation on the training part, or else the replay."""
WITHOUT_REPLAY = " without replay"

Maker = Callable[[], Simulator]
Variant = tuple[str, bool]
"""A kind of simulator, and whether it has the replayed time."""


class Learned(StrEnum):
    NOTHING = "nothing"
    OWN = "own trials"
    OTHERS = "other domains"
    BOTH = "other domains, then own trials"


@dataclass(frozen=True)
class RankingRow:
    """Figures (`autotune.simulators.evaluation`) of one ranker on one campaign.

    `plans`: of the domain's own in the training part; `held_out`: of a transfer; `train_cpu_s`: CPU
    time of its training; `pairs` and `points`: of the campaign under test.
    """

    domain: str
    campaign: str
    seed: int
    ranker: str
    learned: Learned
    held_out: str
    plans: int
    pairs: int
    points: int
    pairwise_accuracy: float
    kendall_tau: float
    regret_top_1: float
    regret_top_5: float
    regret_top_10: float
    train_cpu_s: float = 0.0
    train_examples: int = 0
    note: str = ""


@dataclass(frozen=True)
class Study:
    """The settings of a run.

    `sizes`: own plans of the learning curve; `transfers`: kinds of transfer without own trials;
    `tuned_from`: the kind whose simulators continue to learn from own trials, or None.
    """

    seeds: int
    sizes: tuple[int, ...]
    test_share: float
    transfers: tuple[HeldOut, ...]
    tuned_from: HeldOut | None
    source_plans: int | None
    with_choice: bool


class Trainer:
    """Fits simulators with or without the replayed time, and announces each training."""

    def __init__(
        self,
        points: Sequence[Point],
        makers: Mapping[str, Maker],
        began: Callable[[str, int], None],
    ) -> None:
        bare = [
            replace(p.example, features=replace(p.example.features, replayed_step_s=None))
            for p in points
        ]
        self._examples = {True: [point.example for point in points], False: bare}
        self.makers, self._began = makers, began

    def variants(self) -> list[Variant]:
        return [(name, replayed) for name in self.makers for replayed in (True, False)]

    def examples(self, indices: IntArray, replayed: bool = True) -> list[Example]:
        return [self._examples[replayed][index] for index in indices]

    def features(self, indices: IntArray, replayed: bool = True) -> list[StrategyFeatures]:
        return [example.features for example in self.examples(indices, replayed)]

    def fit(
        self, variant: Variant, indices: IntArray, seed: int, start: Simulator | None = None
    ) -> tuple[Simulator, float, str]:
        """Return (simulator, CPU seconds, report); a copy of `start` continues to learn."""
        name, replayed = variant
        self._began(called(variant), len(indices))
        simulator = copy.deepcopy(start) if start is not None else self.makers[name]()
        began_s = time.process_time()
        report = simulator.fit(self.examples(indices, replayed), seed, warm_start=start is not None)
        return (
            simulator,
            time.process_time() - began_s,
            f"best epoch {report.best_epoch} of {report.epochs}",
        )

    def announced(self, examples: int) -> dict[str, Maker]:
        """Return the makers; each announces a training on `examples` examples."""

        def maker(name: str) -> Simulator:
            self._began(name, examples)
            return self.makers[name]()

        return {name: partial(maker, name) for name in self.makers}


def called(variant: Variant) -> str:
    """Return the simulator's name in the report."""
    name, replayed = variant
    return name if replayed else name + WITHOUT_REPLAY


def run(
    points: Sequence[Point], domains: Sequence[str], study: Study, trainer: Trainer
) -> list[RankingRow]:
    """Return every row of the study on these domains; the points of other domains are sources."""
    rows: list[RankingRow] = []
    for seed in range(study.seeds):
        parts = {
            name: parts_of(points, name, seed, study.sizes, study.test_share) for name in domains
        }
        for of_domain in parts.values():
            rows += _unlearned(points, of_domain, trainer)
            rows += _own(points, of_domain, study, trainer)
        for held_out in study.transfers:
            rows += _transfers(points, list(parts.values()), held_out, study, trainer)
    return rows


def _unlearned(points: Sequence[Point], parts: Parts, trainer: Trainer) -> list[RankingRow]:
    features = trainer.features(parts.test)
    draw = generator(parts.seed, "random ranker", parts.domain)
    rows = []
    for name in UNLEARNED:
        rows += _rows(points, parts, name, unlearned_step_s(name, features, draw), Learned.NOTHING)
    return rows


def _own(points: Sequence[Point], parts: Parts, study: Study, trainer: Trainer) -> list[RankingRow]:
    """Return the learning curve on own trials; a simulator needs at least two of them."""
    rows = []
    for plans, training in parts.own.items():
        if len(training) < 2:
            continue
        assert_no_leak(points, np.zeros(0, dtype=np.int64), training, parts.test, None)
        predicted: dict[str, FloatArray] = {}
        for variant in trainer.variants():
            simulator, cpu_s, note = trainer.fit(variant, training, parts.seed)
            guess = simulator.predict_step_s(trainer.features(parts.test, variant[1]))
            predicted[called(variant)] = guess
            rows += _rows(
                points,
                parts,
                called(variant),
                guess,
                Learned.OWN,
                "",
                plans,
                cpu_s,
                len(training),
                note,
            )
        if study.with_choice:
            choice, cpu_s = _chosen(trainer, training, parts.seed)
            if choice in predicted:
                guess = predicted[choice]
            else:
                guess = unlearned_step_s(
                    choice, trainer.features(parts.test), generator(parts.seed, "not drawn from")
                )
            rows += _rows(
                points, parts, CHOSEN, guess, Learned.OWN, "", plans, cpu_s, len(training), choice
            )
    return rows


def _chosen(trainer: Trainer, indices: IntArray, seed: int) -> tuple[str, float]:
    """Return (ranker that the tuner's cross-validation chooses, CPU seconds)."""
    examples = trainer.examples(indices)
    splits = k_fold(examples, FOLDS, seed) if len(examples) >= SMALLEST_TRAINING else []
    if (
        not all(_has_pair(examples, test) and len(training) > 1 for training, test in splits)
        or not splits
    ):
        return REPLAY, 0.0  # too few, or of many small campaigns
    began_s = time.process_time()
    quality = evaluate(examples, trainer.announced(len(splits[0][0])), splits, seed, TIE_BAND)
    return choose_ranker(quality).ranker, time.process_time() - began_s


def _has_pair(examples: Sequence[Example], indices: IntArray) -> bool:
    """Return whether two of them are of one campaign."""
    campaigns = [examples[index].domain for index in indices]
    return len(set(campaigns)) < len(campaigns)


def _transfers(
    points: Sequence[Point],
    parts: Sequence[Parts],
    held_out: HeldOut,
    study: Study,
    trainer: Trainer,
) -> list[RankingRow]:
    """Return transfers without own trials and, where asked, with them. Equal sources train once."""
    by_sources: dict[tuple[int, ...], list[Parts]] = {}
    for target in parts:
        tested = np.concatenate(
            [
                other.test
                for other in parts
                if other is target or _share_sources(points, target, other, held_out)
            ]
        )
        sources = sources_for(points, target.domain, held_out, study.source_plans, tested)
        if len(sources) >= 2:
            by_sources.setdefault(tuple(sources.tolist()), []).append(target)
    rows = []
    for key, targets in by_sources.items():
        sources = np.array(key, dtype=np.int64)
        for variant in trainer.variants():
            simulator, cpu_s, note = trainer.fit(variant, sources, targets[0].seed)
            for target in targets:
                assert_no_leak(points, sources, np.zeros(0, dtype=np.int64), target.test, held_out)
                guess = simulator.predict_step_s(trainer.features(target.test, variant[1]))
                rows += _rows(
                    points,
                    target,
                    called(variant),
                    guess,
                    Learned.OTHERS,
                    held_out,
                    0,
                    cpu_s,
                    len(sources),
                    note,
                )
                if study.tuned_from == held_out:
                    rows += _tuned(points, target, sources, held_out, variant, simulator, trainer)
    return rows


def _share_sources(points: Sequence[Point], target: Parts, other: Parts, held_out: HeldOut) -> bool:
    """Return whether one simulator can test both domains: it has seen the test part of neither."""
    return (
        held_out is HeldOut.CLUSTER
        and points[target.test[0]].cluster == points[other.test[0]].cluster
    )


def _tuned(
    points: Sequence[Point],
    parts: Parts,
    sources: IntArray,
    held_out: HeldOut,
    variant: Variant,
    start: Simulator,
    trainer: Trainer,
) -> list[RankingRow]:
    rows = []
    for plans, training in parts.own.items():
        if len(training) < 2:
            continue
        assert_no_leak(points, sources, training, parts.test, held_out)
        simulator, cpu_s, note = trainer.fit(variant, training, parts.seed, start)
        guess = simulator.predict_step_s(trainer.features(parts.test, variant[1]))
        rows += _rows(
            points,
            parts,
            called(variant),
            guess,
            Learned.BOTH,
            held_out,
            plans,
            cpu_s,
            len(training),
            note,
        )
    return rows


def _rows(
    points: Sequence[Point],
    parts: Parts,
    ranker: str,
    guess: FloatArray,
    learned: Learned,
    held_out: str = "",
    plans: int = 0,
    cpu_s: float = 0.0,
    examples: int = 0,
    note: str = "",
) -> list[RankingRow]:
    """Return a row per campaign with at least two points; times compare within a campaign only."""
    campaigns = np.array([points[index].example.domain for index in parts.test])
    measured = np.array([points[index].example.step_s for index in parts.test])
    rows = []
    for campaign in sorted(set(campaigns.tolist())):
        here = campaigns == campaign
        if here.sum() < 2:
            continue
        predicted, times = guess[here], measured[here]
        regrets = [best_of_top_k_regret(predicted, times, k) for k in (1, 5, 10)]
        rows.append(
            RankingRow(
                parts.domain,
                campaign,
                parts.seed,
                ranker,
                learned,
                held_out,
                plans,
                len(ordered_pairs(times, TIE_BAND)[0]),
                len(times),
                pairwise_accuracy(predicted, times, TIE_BAND),
                kendall_tau(predicted, times),
                regret_top_1=regrets[0],
                regret_top_5=regrets[1],
                regret_top_10=regrets[2],
                train_cpu_s=cpu_s,
                train_examples=examples,
                note=note,
            )
        )
    return rows
