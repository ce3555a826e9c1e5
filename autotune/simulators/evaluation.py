"""How well a ranker ranks, on strategies it has not learned from. Free of torch.

All figures compare strategies of one domain (workload and cluster) and, with cross-validation, of one fold.

| figure | meaning | best | by chance |
|---|---|---|---|
| `pairwise_accuracy` | share of the pairs beyond the tie band that are ordered as measured; predicted ties count half | 1 | 0.5 |
| `kendall_tau` | tau-b rank correlation | 1 | 0 |
| `regret_top_k` | how much slower the best of the k predicted fastest is than the fastest of all, relative | 0 | - |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from autotune.arrays import FloatArray, IntArray
from autotune.errors import InvalidInput
from autotune.features.extract import StrategyFeatures
from autotune.records import RankingQuality
from autotune.rng import generator
from autotune.simulators.interface import Example, Simulator

ANALYTIC = "analytic"
REPLAY = "replay"
PAPER = "paper"
RANDOM = "random"
UNLEARNED = (ANALYTIC, PAPER, REPLAY, RANDOM)

_SMALLEST_TEST = 2  # fewer points form no pair
_ENOUGH_PAIRS = 30  # fewer may agree by chance, and their scatter then says nothing
_RISK = 0.2
"""How often, at most, a simulator may rank by luck where none is better than the replay."""

Split = tuple[IntArray, IntArray]


@dataclass(frozen=True)
class RankerChoice:
    """Which ranker to use, and why, as a sentence for the report."""

    ranker: str
    reason: str


def ordered_pairs(measured: ArrayLike, tie_band: float) -> tuple[IntArray, IntArray]:
    """Indices (faster, slower) of every pair whose times differ by more than the relative tie band."""
    times = _times(measured)
    faster, slower = np.nonzero(times[:, None] * (1 + tie_band) < times[None, :])
    return faster, slower


def pairwise_accuracy(predicted: ArrayLike, measured: ArrayLike, tie_band: float) -> float:
    """Share of pairs ordered correctly; 0.5 where every pair is a tie. Both inputs in seconds, shape (n,)."""
    guess = _same_length(predicted, measured)
    faster, slower = ordered_pairs(measured, tie_band)
    if len(faster) == 0:
        return 0.5
    return float(np.mean(_in_order(guess, faster, slower)))


def kendall_tau(predicted: ArrayLike, measured: ArrayLike) -> float:
    """tau-b; 0 where one side is constant and so nothing is ranked."""
    from scipy.stats import kendalltau

    guess, times = _same_length(predicted, measured), _times(measured)
    if len(times) < 2 or np.ptp(guess) == 0 or np.ptp(times) == 0:
        return 0.0
    return float(kendalltau(guess, times).statistic)


def best_of_top_k_regret(predicted: ArrayLike, measured: ArrayLike, k: int) -> float:
    """(fastest of the k predicted fastest) / (fastest of all) - 1; 0 means that trying k strategies finds the best."""
    if k < 1:
        raise InvalidInput(f"the best of the top k needs k of at least 1, but k is {k}")
    guess, times = _same_length(predicted, measured), _times(measured)
    return float(times[np.argsort(guess, kind="stable")[:k]].min() / times.min() - 1)


def k_fold(examples: Sequence[Example], folds: int, seed: int) -> list[Split]:
    """(training, test) indices of every fold; each domain is spread evenly over the folds, and no group lies in two."""
    if not 2 <= folds <= len(examples):
        raise InvalidInput(
            f"cross-validation of {len(examples)} examples needs 2 to {len(examples)} folds, but got {folds}"
        )
    group_of = groups(examples)
    folds_of: dict[str, int] = {}
    for members in _by_domain(examples):
        mixed = generator(seed, "folds", examples[members[0]].domain).permutation(members)
        new = dict.fromkeys(group_of[index] for index in mixed if group_of[index] not in folds_of)
        folds_of |= {group: place % folds for place, group in enumerate(new)}
    fold_of = np.array([folds_of[group] for group in group_of], dtype=np.int64)
    return [
        (np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold))
        for fold in range(folds)
        if (fold_of == fold).any()
    ]


def groups(examples: Sequence[Example]) -> list[str]:
    """The group of every example."""
    return [example.group or f"#{index}" for index, example in enumerate(examples)]


def unlearned_step_s(
    ranker: str, features: Sequence[StrategyFeatures], draw: np.random.Generator
) -> FloatArray:
    """What a ranker of `UNLEARNED` predicts, shape (n,): seconds, but for chance, which draws from `draw`."""
    if ranker == RANDOM:
        return draw.random(len(features))
    attribute = {ANALYTIC: "analytic_step_s", PAPER: "paper_step_s", REPLAY: "replayed_step_s"}[
        ranker
    ]
    return np.array([getattr(item, attribute) for item in features], dtype=np.float64)


def evaluate(
    examples: Sequence[Example],
    simulators: Mapping[str, Callable[[], Simulator]],
    splits: Sequence[Split],
    seed: int,
    tie_band: float,
) -> list[RankingQuality]:
    """Quality of the analytic rankers, of the replay where all were replayed, of chance and of every simulator, on the same test parts.

    `simulators` maps a name to a function that makes an untrained one; each split trains a new one, so no test
    strategy is ever learned from. Split number i trains with seed + i.
    """
    replayed = all(example.features.replayed_step_s is not None for example in examples)
    unlearned = [name for name in UNLEARNED if replayed or name != REPLAY]
    predictions: dict[str, list[FloatArray]] = {name: [] for name in unlearned}
    for number, (training, test) in enumerate(splits):
        features = [examples[index].features for index in test]
        for name in unlearned:
            predictions[name].append(
                unlearned_step_s(name, features, generator(seed, "random ranker", number))
            )
        for name, make in simulators.items():
            simulator = make()
            simulator.fit([examples[index] for index in training], seed + number)
            predictions.setdefault(name, []).append(simulator.predict_step_s(features))
    tests = [test for _, test in splits]
    found = [
        _quality(name, examples, tests, guesses, tie_band) for name, guesses in predictions.items()
    ]
    plain = predictions[REPLAY if replayed else ANALYTIC]
    return [
        own
        if own.ranker in UNLEARNED
        else _with_gain(own, examples, tests, predictions[own.ranker], plain, tie_band)
        for own in found
    ]


def choose_ranker(qualities: Sequence[RankingQuality]) -> RankerChoice:
    """The simulator that beats the replay (the analytic ranker, without one) most surely on held-out data, else that.

    The best of several on few pairs looks better than it is. So one has to be ahead by z standard errors: with z = Phi^-1(1 - 0.2 / K) none
    of K simulators that are no better than the replay is chosen more often than once in five looks (Bonferroni).
    """
    known = {quality.ranker: quality for quality in qualities}
    if ANALYTIC not in known:
        raise InvalidInput(
            f"the choice of a ranker needs the quality of {ANALYTIC!r}, but has only {', '.join(known) or 'none'}"
        )
    plain = known.get(REPLAY, known[ANALYTIC])
    called = plain_name(plain.ranker)
    learned = [quality for quality in qualities if quality.ranker not in UNLEARNED]
    if not learned:
        return RankerChoice(plain.ranker, f"{called} ranks: no simulator was trained")
    z = NormalDist().inv_cdf(1 - _RISK / len(learned))
    best = max(
        learned,
        key=lambda quality: (
            _surely_gained(quality, z),
            quality.pairwise_accuracy,
            quality.kendall_tau,
        ),
    )
    figures = (
        f"on {best.pairs} held-out pairs the {best.ranker} simulator orders {best.pairwise_accuracy:.1%} correctly "
        f"and {called} {plain.pairwise_accuracy:.1%}"
    )
    if best.pairs < _ENOUGH_PAIRS:
        return RankerChoice(
            plain.ranker,
            f"{called} ranks: {figures}, but fewer than {_ENOUGH_PAIRS} pairs say little",
        )
    if _surely_gained(best, z) > 0:
        return RankerChoice(best.ranker, f"the {best.ranker} simulator ranks: {figures}")
    if best.pairwise_accuracy > plain.pairwise_accuracy:
        return RankerChoice(plain.ranker, f"{called} ranks: {figures}, which may be luck")
    return RankerChoice(plain.ranker, f"{called} ranks: {figures}")


def _surely_gained(quality: RankingQuality, z: float) -> float:
    if quality.gain is None or quality.gain_error is None:
        return -math.inf
    return quality.gain - z * quality.gain_error


def plain_name(ranker: str) -> str:
    """What people read of a ranker that has not learned anything."""
    return "the replay" if ranker == REPLAY else "the analytic ranker"


def _quality(
    name: str,
    examples: Sequence[Example],
    tests: Sequence[IntArray],
    guesses: Sequence[FloatArray],
    tie_band: float,
) -> RankingQuality:
    """Means over all (test part, domain) groups of at least two points."""
    rows = []
    for test, guess in zip(tests, guesses, strict=True):
        for members in _by_domain([examples[index] for index in test]):
            if len(members) < _SMALLEST_TEST:
                continue
            predicted, measured = (
                guess[members],
                np.array([examples[index].step_s for index in test[members]]),
            )
            rows.append(
                (
                    len(ordered_pairs(measured, tie_band)[0]),
                    len(members),
                    pairwise_accuracy(predicted, measured, tie_band),
                    kendall_tau(predicted, measured),
                    best_of_top_k_regret(predicted, measured, 1),
                    best_of_top_k_regret(predicted, measured, 5),
                )
            )
    if not rows:
        raise InvalidInput(
            f"ranking quality needs at least {_SMALLEST_TEST} test strategies of one domain; run more trials or use fewer folds"
        )
    table = np.array(rows)
    pairs, points = table[:, 0], table[:, 1]
    accuracy = float(np.average(table[:, 2], weights=pairs)) if pairs.sum() > 0 else 0.5
    tau, regret_1, regret_5 = np.average(table[:, 3:], axis=0, weights=points).tolist()
    return RankingQuality(
        name, accuracy, tau, regret_1, regret_5, int(pairs.sum()), int(points.sum())
    )


def _with_gain(
    quality: RankingQuality,
    examples: Sequence[Example],
    tests: Sequence[IntArray],
    guesses: Sequence[FloatArray],
    plain: Sequence[FloatArray],
    tie_band: float,
) -> RankingQuality:
    """With the gain over `plain` and its standard error.

    Pairs share strategies, so strategies are left out one by one (jackknife); folds share what they learned from, which makes the variance
    larger by 1 + k / (k - 1) (Nadeau and Bengio, Inference for the Generalization Error, 2003).
    """
    gained, pairs = np.zeros(len(examples)), np.zeros(len(examples))
    total = count = 0.0
    for test, guess, other in zip(tests, guesses, plain, strict=True):
        for members in _by_domain([examples[index] for index in test]):
            faster, slower = ordered_pairs(
                [examples[index].step_s for index in test[members]], tie_band
            )
            better = _in_order(guess[members], faster, slower) - _in_order(
                other[members], faster, slower
            )
            for side in (test[members][faster], test[members][slower]):
                np.add.at(gained, side, better)
                np.add.at(pairs, side, 1.0)
            total, count = total + float(better.sum()), count + len(better)
    there = pairs > 0
    if not there.any() or float((count - pairs[there]).min()) <= 0:
        return quality
    without = (total - gained[there]) / (count - pairs[there])
    variance = (len(without) - 1) * float(np.var(without))
    folds = len(tests)
    error = math.sqrt(variance * (1 + folds / (folds - 1) if folds > 1 else 1.0))
    return replace(quality, gain=total / count, gain_error=error)


def _in_order(guess: FloatArray, faster: IntArray, slower: IntArray) -> FloatArray:
    """Of every pair: 1 if predicted as measured, half for a tie."""
    found: FloatArray = (guess[faster] < guess[slower]) + 0.5 * (guess[faster] == guess[slower])
    return found


def _by_domain(examples: Sequence[Example]) -> list[IntArray]:
    names = np.array([example.domain for example in examples])
    return [np.flatnonzero(names == name) for name in sorted(set(names.tolist()))]


def _times(values: ArrayLike) -> FloatArray:
    times = np.asarray(values, dtype=np.float64)
    if times.ndim != 1 or len(times) == 0:
        raise InvalidInput(
            f"step times must be a list of at least one number, but have shape {times.shape}"
        )
    return times


def _same_length(predicted: ArrayLike, measured: ArrayLike) -> FloatArray:
    guess, times = _times(predicted), _times(measured)
    if len(guess) != len(times):
        raise InvalidInput(
            f"every measured strategy needs one prediction, but there are {len(guess)} predictions for {len(times)}"
        )
    return guess
