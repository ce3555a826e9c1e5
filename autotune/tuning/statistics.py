"""Statistics of step times: intervals of medians, stopping rules, disturbances, comparisons.

Pure functions of measurements. The tuner and the world use the same ones.

symbol   meaning                                                            unit
x        step times of a trial on the rank that was slowest in each, (n,)   s
d        ln(time tuned / time current) of each pair of blocks, (pairs,)     1
tail     probability outside an interval on one side, (1 - confidence) / 2  1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.records import Comparison, Measured, Stopped, TrialRequest
from autotune.rng import generator

CONFIDENCE = 0.95
"""Confidence of the interval of a trial's median step time."""
RESAMPLES = 1000
NORMAL_MEDIAN = 0.6745
"""Median of |z| for a standard normal z: median of absolute values -> standard deviation."""
LARGEST_SPREAD = 3.0
"""Quartile ranges that an interval may reach on either side of the median. One slow step among few,
or a correlation estimated from few, would widen it beyond all that the steps show."""
MEDIAN_ERROR = 1.2533
"""Standard error of the median of n normal values is sqrt(pi / 2) standard deviations / sqrt(n)."""
LARGEST_CORRELATION = 0.8
"""Upper bound of the correlation, which bounds the widening of the interval of short trials."""
SMALLEST_CHANGE = 0.05
"""Smallest relative change of the machine within a trial that spoils the trial's median."""
CHANGE_FACTOR = 6.0
"""Standard errors of a change: below 2 % false alarms, also for AR(1) 0.5 and heavy tails."""
SHORTEST_WINDOW = 3
"""Minimum length of a change in steps; one slow step does not move the median of three."""
HALF_NORMAL = 0.603
"""Standard deviation of |z| of a standard normal z, sqrt(1 - 2 / pi)."""
LEAST_DEVIATION = 0.02
"""Lower bound of the tolerance of references, however quiet the machine is."""
ENOUGH_REFERENCES = 6
"""Number of references from which on their spread tightens the tolerance."""
DEVIATION_FACTOR = 3.0
"""Standard deviations of the difference of two references: up to 2 % false alarms."""
EXACT_PAIRS = 300
"""Most pairs whose signed ranks are counted, which takes 20 ms and grows with their cube."""


@dataclass(frozen=True)
class Interval:
    """An interval of a median. `low` is at least 0: times are positive."""

    middle: float
    low: float
    high: float
    confidence: float

    @property
    def half_width(self) -> float:
        """Relative to the median."""
        return (self.high - self.low) / 2 / self.middle


def fewest_values(confidence: float) -> int:
    """Smallest n whose range (smallest to largest) is an interval: 2^(1 - n) <= 1 - confidence."""
    return math.ceil(1 - math.log2(1 - confidence))


def median_interval(
    values: Sequence[float] | FloatArray, confidence: float = CONFIDENCE, seed: int = 0
) -> Interval | None:
    """Bootstrap interval of the median of step times, shape (n,); None below `fewest_values`.

    Percentiles of the medians of resampled steps, with two corrections for few, dependent steps.
    The percentiles are those of Student's t, since the bootstrap of few values is too narrow
    (Hesterberg, What Teachers Should Know about the Bootstrap, 2015, sec. 5.3, "expanded
    percentiles"). The distances from the median are multiplied by sqrt((1 + r) / (1 - r)) for
    neighbours of correlation r, since their mean varies more. Resampling whole blocks, the usual
    remedy, needs more blocks than 8 to 40 steps have: with 8 steps and r = 0.5 it covered 82 %,
    this method 91 %. Neither side is longer than `LARGEST_SPREAD` quartile ranges.
    """
    x = np.asarray(values, dtype=np.float64)
    n = len(x)
    if n < fewest_values(confidence):
        return None
    medians = np.sort(x)[_middle_ranks(seed, n)].mean(axis=1)
    tail = expanded_tail(n, (1 - confidence) / 2)
    low, high = np.quantile(medians, [tail, 1 - tail])
    r = step_correlation(x)
    wider, middle = math.sqrt((1 + r) / (1 - r)), float(np.median(x))
    lower, upper = np.quantile(x, [0.25, 0.75])
    longest = LARGEST_SPREAD * float(upper - lower)
    return Interval(
        middle,
        max(0.0, middle - min(longest, wider * (middle - float(low)))),
        middle + min(longest, wider * (float(high) - middle)),
        confidence,
    )


@lru_cache(maxsize=128)
def _middle_ranks(seed: int, n: int) -> IntArray:
    """Ranks, among n sorted values, of the two middle values of each resample: (RESAMPLES, 2)."""
    picks = np.sort(generator(seed, "median interval").integers(0, n, (RESAMPLES, n)), axis=1)
    middle: IntArray = picks[:, [(n - 1) // 2, n // 2]]
    middle.flags.writeable = False
    return middle


def expanded_tail(n: int, tail: float) -> float:
    """The normal tail beyond sqrt(n / (n - 1)) t; t: quantile of Student's t with n - 1 dof."""
    normal, v = NormalDist(), n - 1
    z = normal.inv_cdf(1 - tail)
    # Cornish-Fisher expansion of the quantile of t; Abramowitz and Stegun 26.7.5
    t = (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
    return normal.cdf(-math.sqrt(n / v) * t)


def step_correlation(x: FloatArray) -> float:
    """Rank correlation of neighbouring steps, between 0 and `LARGEST_CORRELATION`.

    The estimate from n values is too low by (1 + 3 r) / n on average (Kendall, Note on Bias in the
    Estimation of Autocorrelation, 1954), which is added. Ranks keep one slow step from dominating.
    """
    n = len(x)
    if float(np.ptp(x)) == 0:
        return 0.0
    ranks = np.argsort(np.argsort(x, kind="stable"), kind="stable") - (n - 1) / 2
    r = float(ranks[1:] @ ranks[:-1]) / float(ranks @ ranks)
    return min(LARGEST_CORRELATION, max(0.0, r + (1 + 3 * r) / n))


def trial_interval(measured: Measured) -> Interval | None:
    """Interval of the trial's median step time."""
    return median_interval(measured.slowest_s)


def stop_reason(request: TrialRequest, measured: Measured) -> Stopped | None:
    """Why the trial needs no more steps; None if it does, or if their number was fixed.

    Checking the interval after every batch ends a trial when the interval happens to be narrow. It
    still covers the median in 95 % of trials with independent steps, and in at least 87 % with
    correlated ones (r = 0.5); the tests simulate both.
    """
    if request.most_steps == 0:
        return None
    interval = trial_interval(measured)
    precision = max(request.precision, request.first_look)
    if interval is not None and interval.half_width <= precision:
        return Stopped.PRECISE
    if interval is not None and request.losing_s is not None and interval.low > request.losing_s:
        return Stopped.LOSING
    return Stopped.CAP if _steps_taken(measured) >= request.most_steps else None


def further_steps(request: TrialRequest, measured: Measured) -> int:
    """Timed steps of the next batch, as many as in the first one up to the cap; 0: done."""
    if stop_reason(request, measured) is not None:
        return 0
    return max(0, min(request.timed_steps, request.most_steps - _steps_taken(measured)))


def _steps_taken(measured: Measured) -> int:
    """Steps so far, including those that an evaluation interrupted."""
    return len(measured.slowest_s) + measured.left_out


def neighbour_noise(values: Sequence[float] | FloatArray) -> float:
    """Relative standard deviation of positive values, from the differences of neighbours.

    0 for fewer than two values. The median ignores a few changes of the machine.
    """
    logs = np.log(np.asarray(values, dtype=np.float64))
    if len(logs) < 2:
        return 0.0
    return float(np.median(np.abs(np.diff(logs)))) / (NORMAL_MEDIAN * math.sqrt(2))


def changed_within(measured: Measured) -> bool:
    """Whether a run of the trial's steps took another time than the rest.

    Compares the median of every window of one, two or three quarters with the median outside it.
    The difference must exceed `SMALLEST_CHANGE` and `CHANGE_FACTOR` standard errors of the noise
    between neighbouring steps.
    """
    logs = np.log(np.maximum(measured.slowest_s, np.finfo(np.float64).tiny))
    n, noise = len(logs), neighbour_noise(np.maximum(measured.slowest_s, np.finfo(np.float64).tiny))
    edges = [round(n * quarter / 4) for quarter in range(5)]
    # A window that begins later and reaches the end is the outside of another one.
    for begin, end in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        window = slice(edges[begin], edges[end])
        inside, outside = logs[window], np.delete(logs, window)
        if min(len(inside), len(outside)) < SHORTEST_WINDOW:
            continue
        difference = abs(float(np.median(inside)) - float(np.median(outside)))
        error = noise * MEDIAN_ERROR * math.sqrt(1 / len(inside) + 1 / len(outside))
        if difference > max(SMALLEST_CHANGE, CHANGE_FACTOR * error):
            return True
    return False


def reference_tolerance(references_s: Sequence[float] | FloatArray, deviation: float) -> float:
    """Maximum relative difference of neighbouring references on a steady machine.

    `references_s`: their median step times, in order. The result is at most `deviation`.
    """
    if len(references_s) < ENOUGH_REFERENCES:
        return deviation
    return min(
        deviation,
        max(LEAST_DEVIATION, DEVIATION_FACTOR * math.sqrt(2) * neighbour_noise(references_s)),
    )


class Ended(StrEnum):
    """Why a closing comparison has enough pairs."""

    PRECISE = "the sizes of the differences are known well enough"
    LOSING = "clearly slower"
    CAP = "no more pairs allowed"


@dataclass(frozen=True)
class PairRule:
    """Ends a comparison after `fewest` to `most` pairs of blocks.

    It ends when the relative half width of the ratio's interval is about `precision`.
    """

    confidence: float
    precision: float
    fewest: int
    most: int


def enough_pairs(
    tuned: Sequence[Measured], current: Sequence[Measured], rule: PairRule
) -> Ended | None:
    """Why the comparison needs no further pair; None if it does. Call it after every pair.

    Checking after every pair must not raise the error rate. If both sides are equal, the sign of a
    difference d is independent of its size. So precision is judged by the sizes |d| alone
    (`size_half_width`), and the final interval has its full confidence, as with a fixed number of
    pairs. Ending on a clear loss can only keep the current setup; its chance for an equal strategy
    is divided over all checks (Bonferroni). A clear win ends nothing early.
    """
    d = _log_ratios(tuned, current)
    if len(d) < rule.fewest:
        return None
    tail = (1 - rule.confidence) / 2
    if size_half_width(d, tail) <= rule.precision:
        return Ended.PRECISE
    if _signed_rank_interval(d, tail / (rule.most - rule.fewest + 1))[0] > 0:
        return Ended.LOSING
    return Ended.CAP if len(d) >= rule.most else None


def size_half_width(d: FloatArray, tail: float) -> float:
    """Half width of the interval of the differences d, shape (pairs,), without their signs.

    If the lower quartile of the sizes exceeds their quartile range, all differences have one sign
    and the sizes have the same interval. Around 0 the sizes are folded and spread less, by
    `HALF_NORMAL`.
    """
    sizes = np.abs(d)
    low, high = _signed_rank_interval(sizes, tail)
    lower, upper = np.quantile(sizes, [0.25, 0.75])
    half = (high - low) / 2
    return half if lower > upper - lower else half / HALF_NORMAL


def compare(
    tuned: Sequence[Measured], current: Sequence[Measured], confidence: float
) -> Comparison:
    """Interval of the time ratio from paired blocks. Needs `fewest_values(confidence)` pairs."""
    return compare_pairs(_log_ratios(tuned, current), confidence)


def compare_pairs(d: FloatArray, confidence: float) -> Comparison:
    """Interval of the time ratio from log ratios of pairs; unbounded if there are too few."""
    low, high = _signed_rank_interval(d, (1 - confidence) / 2)
    middle = float(np.median(_walsh_averages(d)))
    return Comparison(math.exp(middle), math.exp(low), math.exp(high), len(d), confidence)


def _log_ratios(tuned: Sequence[Measured], current: Sequence[Measured]) -> FloatArray:
    return np.array(
        [math.log(a.median_s / b.median_s) for a, b in zip(tuned, current, strict=False)],
        dtype=np.float64,
    )


def _walsh_averages(d: FloatArray) -> FloatArray:
    """Sorted means of all pairs of differences, including each with itself."""
    first, second = np.triu_indices(len(d))
    averages: FloatArray = np.sort((d[first] + d[second]) / 2)
    return averages


def _signed_rank_interval(d: FloatArray, tail: float) -> tuple[float, float]:
    """Interval of the median difference; unbounded if there are too few for this confidence."""
    bound = signed_rank_bound(len(d), tail)
    if bound == 0:
        return -math.inf, math.inf
    walsh = _walsh_averages(d)
    return float(walsh[bound - 1]), float(walsh[-bound])


@lru_cache(maxsize=1024)
def signed_rank_bound(pairs: int, tail: float) -> int:
    """The largest k with P(W < k) <= tail.

    The interval reaches from the k-th smallest to the k-th largest Walsh average. W is the
    signed-rank statistic of `pairs` differences: every subset of the ranks 1..n is equally likely.
    Above `EXACT_PAIRS` it is taken as normal, whose tails are longer: the interval is no narrower.
    """
    if pairs > EXACT_PAIRS:
        mean, variance = pairs * (pairs + 1) / 4, pairs * (pairs + 1) * (2 * pairs + 1) / 24
        return math.floor(mean + NormalDist().inv_cdf(tail) * math.sqrt(variance) + 0.5)
    chances = np.zeros(pairs * (pairs + 1) // 2 + 1)  # of every value of W
    chances[0] = 1.0
    for rank in range(1, pairs + 1):
        chances /= 2
        chances[rank:] = chances[rank:] + chances[:-rank]
    return int(np.searchsorted(np.cumsum(chances), tail, side="right"))
