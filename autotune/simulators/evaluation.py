"""Ranking quality on strategies that simulators did not learn from. Free of torch.

The replay's constants may be fitted to them: in a job they are fitted to all trials.

Each figure compares strategies of one domain (workload and cluster) and, with cross-validation, of
one fold.

| figure | meaning | best | by chance |
|---|---|---|---|
| `pairwise_accuracy` | share of pairs beyond the tie band in the right order; ties half | 1 | 0.5 |
| `kendall_tau` | tau-b rank correlation | 1 | 0 |
| `regret_top_k` | relative: best of the k predicted fastest against the fastest of all | 0 | - |

A regret is that of parts with more than k strategies; in smaller ones it is 0 for every ranker.
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
_TOP = (1, 5)
_ENOUGH_PAIRS = 30  # fewer may agree by chance
_RISK = 0.2
"""The most often that luck may choose a simulator if none is better than the replay."""

Split = tuple[IntArray, IntArray]


@dataclass(frozen=True)
class RankerChoice:
    """The ranker to use, and the reason as a sentence for the report."""

    ranker: str
    reason: str


def ordered_pairs(measured: ArrayLike, tie_band: float) -> tuple[IntArray, IntArray]:
    """Return (faster, slower): the pairs whose times differ by more than the relative tie band."""
    times = _times(measured)
    faster, slower = np.nonzero(times[:, None] * (1 + tie_band) < times[None, :])
    return faster, slower


def pairwise_accuracy(predicted: ArrayLike, measured: ArrayLike, tie_band: float) -> float:
    """Return the share of pairs in the right order; 0.5 if all are ties. Seconds, shape (n,)."""
    guess = _same_length(predicted, measured)
    faster, slower = ordered_pairs(measured, tie_band)
    if len(faster) == 0:
        return 0.5
    return float(np.mean(_in_order(guess, faster, slower)))


def kendall_tau(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Return tau-b; 0 if one side is constant, so that nothing is ranked."""
    from scipy.stats import kendalltau

    guess, times = _same_length(predicted, measured), _times(measured)
    if len(times) < 2 or np.ptp(guess) == 0 or np.ptp(times) == 0:
        return 0.0
    return float(kendalltau(guess, times).statistic)


def best_of_top_k_regret(predicted: ArrayLike, measured: ArrayLike, k: int) -> float:
    """Return (fastest of the k predicted fastest) / (fastest of all) - 1; 0 is best."""
    if k < 1:
        raise InvalidInput(f"the best of the top k needs k of at least 1, but k is {k}")
    guess, times = _same_length(predicted, measured), _times(measured)
    return float(times[np.argsort(guess, kind="stable")[:k]].min() / times.min() - 1)


def k_fold(examples: Sequence[Example], folds: int, seed: int) -> list[Split]:
    """Return (training, test) indices per fold.

    Folds share domains evenly, and no group is in two. Raises `InvalidInput` if all examples are in
    one fold.
    """
    if not 2 <= folds <= len(examples):
        raise InvalidInput(
            f"cross-validation of {len(examples)} examples needs 2 to {len(examples)} folds, "
            f"but got {folds}"
        )
    group_of = groups(examples)
    folds_of: dict[str, int] = {}
    for members in _by_domain(examples):
        mixed = generator(seed, "folds", examples[members[0]].domain).permutation(members)
        new = dict.fromkeys(group_of[index] for index in mixed if group_of[index] not in folds_of)
        folds_of |= {group: place % folds for place, group in enumerate(new)}
    if len(set(folds_of.values())) < 2:
        raise InvalidInput(
            "cross-validation needs a training and a test part, but all "
            f"{len(examples)} examples are in one fold, as they are of too few strategies; "
            "measure more of them"
        )
    fold_of = np.array([folds_of[group] for group in group_of], dtype=np.int64)
    return [
        (np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold))
        for fold in range(folds)
        if (fold_of == fold).any()
    ]


def groups(examples: Sequence[Example]) -> list[str]:
    """Return the group of every example."""
    return [example.group or f"#{index}" for index, example in enumerate(examples)]


def unlearned_step_s(
    ranker: str, features: Sequence[StrategyFeatures], draw: np.random.Generator
) -> FloatArray:
    """Return the seconds (n,) that a ranker of `UNLEARNED` predicts; `RANDOM` draws from `draw`."""
    if ranker == RANDOM:
        return draw.random(len(features))
    attributes = {ANALYTIC: "analytic_step_s", PAPER: "paper_step_s", REPLAY: "replayed_step_s"}
    attribute = attributes[ranker]
    return np.array([getattr(item, attribute) for item in features], dtype=np.float64)


def evaluate(
    examples: Sequence[Example],
    simulators: Mapping[str, Callable[[], Simulator]],
    splits: Sequence[Split],
    seed: int,
    tie_band: float,
) -> list[RankingQuality]:
    """Return the quality of every ranker on the same test parts.

    Rankers are the analytic ones, the replay if all examples were replayed, chance, and every
    simulator. `simulators` maps a name to a function that builds an untrained one. Each split
    trains a new one, with seed + its number.
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
    plain = predictions[REPLAY if replayed else ANALYTIC]
    qualities = []
    for name, guesses in predictions.items():
        quality = _quality(name, examples, tests, guesses, tie_band)
        if name not in UNLEARNED:
            quality = _with_gain(quality, examples, tests, guesses, plain, tie_band)
        qualities.append(quality)
    return qualities


def choose_ranker(qualities: Sequence[RankingQuality]) -> RankerChoice:
    """Return the simulator that beats the replay most surely in the tests, or else the replay.

    Without a replay the analytic ranker takes its place. The best of several on few pairs looks
    better than it is, so it must lead by z standard errors. With z = Phi^-1(1 - 0.2 / K), K
    simulators that are no better than the replay are chosen at most once in five times
    (Bonferroni).
    """
    known = {quality.ranker: quality for quality in qualities}
    if ANALYTIC not in known:
        raise InvalidInput(
            f"the choice of a ranker needs the quality of {ANALYTIC!r}, "
            f"but has only {', '.join(known) or 'none'}"
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
        f"on {best.pairs} cross-validated pairs the {best.ranker} simulator orders "
        f"{best.pairwise_accuracy:.1%} correctly and {called} {plain.pairwise_accuracy:.1%}"
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
    """Return the name that reports use for a ranker that learns nothing."""
    return "the replay" if ranker == REPLAY else "the analytic ranker"


def _quality(
    name: str,
    examples: Sequence[Example],
    tests: Sequence[IntArray],
    guesses: Sequence[FloatArray],
    tie_band: float,
) -> RankingQuality:
    """Return the means over all (test part, domain) groups of at least two points."""
    rows = []
    for test, guess in zip(tests, guesses, strict=True):
        for members in _by_domain([examples[index] for index in test]):
            if len(members) < _SMALLEST_TEST:
                continue
            predicted = guess[members]
            measured = np.array([examples[index].step_s for index in test[members]])
            row = (
                len(ordered_pairs(measured, tie_band)[0]),
                len(members),
                pairwise_accuracy(predicted, measured, tie_band),
                kendall_tau(predicted, measured),
                *(best_of_top_k_regret(predicted, measured, k) for k in _TOP),
            )
            rows.append(row)
    if not rows:
        raise InvalidInput(
            f"ranking quality needs at least {_SMALLEST_TEST} test strategies of one domain; "
            "run more trials or use fewer folds"
        )
    table = np.array(rows)
    pairs, points = table[:, 0], table[:, 1]
    accuracy = float(np.average(table[:, 2], weights=pairs)) if pairs.sum() > 0 else 0.5
    tau = float(np.average(table[:, 3], weights=points))
    regret_1, regret_5 = (
        _mean_regret(regrets, points, k) for k, regrets in zip(_TOP, table[:, 4:].T, strict=True)
    )
    assert regret_1 is not None, "every part has two strategies"
    return RankingQuality(
        name, accuracy, tau, regret_1, regret_5, int(pairs.sum()), int(points.sum())
    )


def _mean_regret(regrets: FloatArray, points: FloatArray, k: int) -> float | None:
    """Return the mean over the parts with more than k strategies; None without one."""
    larger = points > k
    if not larger.any():
        return None
    return float(np.average(regrets[larger], weights=points[larger]))


def _with_gain(
    quality: RankingQuality,
    examples: Sequence[Example],
    tests: Sequence[IntArray],
    guesses: Sequence[FloatArray],
    plain: Sequence[FloatArray],
    tie_band: float,
) -> RankingQuality:
    """Return the quality with its gain over `plain` and the gain's standard error.

    Pairs share strategies, so a jackknife leaves out one strategy at a time. Folds share training
    data, which increases the variance by 1 + k / (k - 1) (Nadeau and Bengio, Inference for the
    Generalization Error, 2003).
    """
    gained, pairs = np.zeros(len(examples)), np.zeros(len(examples))
    total = count = 0.0
    for test, guess, other in zip(tests, guesses, plain, strict=True):
        for members in _by_domain([examples[index] for index in test]):
            faster, slower = ordered_pairs(
                [examples[index].step_s for index in test[members]], tie_band
            )
            better = _in_order(guess[members], faster, slower)
            better -= _in_order(other[members], faster, slower)
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
    """Return 1 for every pair in the right order, and half for a tie."""
    ordered: FloatArray = (guess[faster] < guess[slower]) + 0.5 * (guess[faster] == guess[slower])
    return ordered


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
            "every measured strategy needs one prediction, "
            f"but there are {len(guess)} predictions for {len(times)}"
        )
    return guess
