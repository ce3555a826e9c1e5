"""Statistics of step times: how precisely a median is known, when to stop measuring, what was disturbed, which side is faster.

Pure functions of what was measured; the tuner and the runtime ask the same ones.

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
"""Of the interval of a trial's median step time."""
RESAMPLES = 1000
NORMAL_MEDIAN = 0.6745
"""The median of |z| of a standard normal z: turns a median of absolute values into a standard deviation."""
MEDIAN_ERROR = 1.2533
"""Standard error of the median of n normal values is sqrt(pi / 2) standard deviations / sqrt(n)."""
LARGEST_CORRELATION = 0.8
"""More correlated steps than this are not measured any better by more steps; it also bounds the factor for short trials."""
SMALLEST_CHANGE = 0.05
"""A change of the machine within a trial that is smaller (relative) leaves the trial's median useful."""
CHANGE_FACTOR = 6.0
"""So many standard errors: below 2 % false alarms also where steps are correlated (AR(1), 0.5) or heavy-tailed."""
SHORTEST_WINDOW = 3
"""Steps that a change must last; a single slow step does not move the median of three."""
HALF_NORMAL = 0.603
"""Standard deviation of |z| of a standard normal z, sqrt(1 - 2 / pi)."""
LEAST_DEVIATION = 0.02
"""References that agree this well never mark the trials between them, however quiet the machine is."""
ENOUGH_REFERENCES = 6
"""Until then their spread is too uncertain to tighten the tolerance by it."""
DEVIATION_FACTOR = 3.0
"""Standard deviations of the difference of two references: up to 2 % of the pairs on a steady machine are further apart."""


@dataclass(frozen=True)
class Interval:
    """Where the median lies, with its confidence. `low` is never below 0: times are positive."""

    middle: float
    low: float
    high: float
    confidence: float

    @property
    def half_width(self) -> float:
        """Relative to the median."""
        return (self.high - self.low) / 2 / self.middle


def fewest_values(confidence: float) -> int:
    """Values, or pairs, below which not even the smallest to the largest is an interval: 2^(1 - n) <= 1 - confidence."""
    return math.ceil(1 - math.log2(1 - confidence))


def median_interval(
    values: Sequence[float] | FloatArray, confidence: float = CONFIDENCE, seed: int = 0
) -> Interval | None:
    """Bootstrap interval of the median of successive step times, shape (n,); None below `fewest_values`.

    Percentiles of the medians of resampled steps. Two corrections keep it honest for a few, dependent steps:
    the percentiles are those of Student's t, as the bootstrap of few values is too narrow (Hesterberg, What Teachers Should
    Know about the Bootstrap, 2015, sec. 5.3, "expanded percentiles"); and the distances from the median are multiplied by
    sqrt((1 + r) / (1 - r)) for neighbours correlated by r, as their mean then varies more. Resampling whole blocks instead,
    the usual remedy, needs more blocks than a trial of 8 to 40 steps has: it covered 82 % where this covers 91 % (8 steps, r = 0.5).
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
    return Interval(
        middle,
        max(0.0, middle - wider * (middle - float(low))),
        middle + wider * (float(high) - middle),
        confidence,
    )


@lru_cache(maxsize=128)
def _middle_ranks(seed: int, n: int) -> IntArray:
    """Which of n sorted values the median of each resample lies between, shape (RESAMPLES, 2): the same for all values."""
    picks = np.sort(generator(seed, "median interval").integers(0, n, (RESAMPLES, n)), axis=1)
    middle: IntArray = picks[:, [(n - 1) // 2, n // 2]]
    middle.flags.writeable = False
    return middle


def expanded_tail(n: int, tail: float) -> float:
    """The normal tail beyond sqrt(n / (n - 1)) t, where t is the quantile of Student's t with n - 1 degrees of freedom."""
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
    """Correlation of neighbouring steps, between 0 and `LARGEST_CORRELATION`, from their ranks: one slow step decides nothing.

    The estimate from n values is too low by (1 + 3 r) / n on average (Kendall, Note on Bias in the Estimation of
    Autocorrelation, 1954), which is added.
    """
    n = len(x)
    if float(np.ptp(x)) == 0:
        return 0.0
    ranks = np.argsort(np.argsort(x, kind="stable"), kind="stable") - (n - 1) / 2
    r = float(ranks[1:] @ ranks[:-1]) / float(ranks @ ranks)
    return min(LARGEST_CORRELATION, max(0.0, r + (1 + 3 * r) / n))


def trial_interval(measured: Measured) -> Interval | None:
    """Of the trial's median step time."""
    return median_interval(measured.slowest_s)


def stop_reason(request: TrialRequest, measured: Measured) -> Stopped | None:
    """Why the trial needs no more steps; None if it does, or if their number was fixed.

    The interval is looked at after every batch, and it ends the trial when it happens to be narrow. It still covers 95 % of
    independent steps then, and 87 % or more of correlated ones (r = 0.5); simulated in the tests.
    """
    if request.most_steps == 0:
        return None
    interval = trial_interval(measured)
    if interval is not None and interval.half_width <= request.precision:
        return Stopped.PRECISE
    if interval is not None and request.losing_s is not None and interval.low > request.losing_s:
        return Stopped.LOSING
    return Stopped.CAP if _steps_taken(measured) >= request.most_steps else None


def further_steps(request: TrialRequest, measured: Measured) -> int:
    """Timed steps that the trial should go on for, 0 when it is done: as many as in its first batch, up to the cap."""
    if stop_reason(request, measured) is not None:
        return 0
    return max(0, min(request.timed_steps, request.most_steps - _steps_taken(measured)))


def _steps_taken(measured: Measured) -> int:
    """A step that an evaluation interrupted took its time as well."""
    return len(measured.slowest_s) + measured.left_out


def neighbour_noise(values: Sequence[float] | FloatArray) -> float:
    """Relative standard deviation of positive values in order, from the differences of neighbours; 0 for fewer than two.

    Their median is not moved by a few changes of the machine.
    """
    logs = np.log(np.asarray(values, dtype=np.float64))
    if len(logs) < 2:
        return 0.0
    return float(np.median(np.abs(np.diff(logs)))) / (NORMAL_MEDIAN * math.sqrt(2))


def changed_within(measured: Measured) -> bool:
    """Whether the machine changed while the trial ran: a run of its steps took another time than the rest.

    Windows of a quarter, a half and three quarters of the trial are compared with what is outside by their medians. The
    difference must exceed `SMALLEST_CHANGE` and `CHANGE_FACTOR` standard errors of the noise between neighbouring steps.
    """
    logs = np.log(np.maximum(measured.slowest_s, np.finfo(np.float64).tiny))
    n, noise = len(logs), neighbour_noise(np.maximum(measured.slowest_s, np.finfo(np.float64).tiny))
    edges = [round(n * quarter / 4) for quarter in range(5)]
    # Windows that begin later and reach the end are what lies outside of others.
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


def reference_tolerance(references_s: Sequence[float], deviation: float) -> float:
    """How far (relative) two neighbouring references may differ on an unchanged machine, at most `deviation`.

    `references_s`: median step times of all of them, in order.
    """
    if len(references_s) < ENOUGH_REFERENCES:
        return deviation
    return min(
        deviation,
        max(LEAST_DEVIATION, DEVIATION_FACTOR * math.sqrt(2) * neighbour_noise(references_s)),
    )


class Ended(StrEnum):
    """Why a closing comparison has enough pairs."""

    PRECISE = "as precise as asked for"
    LOSING = "clearly slower"
    CAP = "no more pairs allowed"


@dataclass(frozen=True)
class PairRule:
    """From `fewest` to `most` pairs of blocks, until the relative half width of the ratio's interval is about `precision`."""

    confidence: float
    precision: float
    fewest: int
    most: int


def enough_pairs(
    mine: Sequence[Measured], current: Sequence[Measured], rule: PairRule
) -> Ended | None:
    """Why the comparison needs no further pair; None if it does. To be asked after every pair.

    Looking after every pair must not raise the error rate. If both sides are the same, the sign of a difference d says nothing
    about its size; so precision is judged by the sizes |d| alone (`size_half_width`), and the interval at the end has its full
    confidence, as if the number of pairs had been fixed. Ending because of a clear loss can only keep the current setup; the
    chance that this happens to an equal strategy is shared out over all looks (Bonferroni). A clear win ends nothing early.
    """
    d = _log_ratios(mine, current)
    if len(d) < rule.fewest:
        return None
    tail = (1 - rule.confidence) / 2
    if size_half_width(d, tail) <= rule.precision:
        return Ended.PRECISE
    if _signed_rank_interval(d, tail / (rule.most - rule.fewest + 1))[0] > 0:
        return Ended.LOSING
    return Ended.CAP if len(d) >= rule.most else None


def size_half_width(d: FloatArray, tail: float) -> float:
    """Half width of the interval of the differences d, shape (pairs,), judged without their signs.

    Where the sizes keep away from 0 (their lower quartile exceeds their quartile range) all differences have one sign, and
    those of the sizes have the same interval. Around 0 the sizes are folded and spread less: `HALF_NORMAL` as much.
    """
    sizes = np.abs(d)
    low, high = _signed_rank_interval(sizes, tail)
    lower, upper = np.quantile(sizes, [0.25, 0.75])
    half = (high - low) / 2
    return half if lower > upper - lower else half / HALF_NORMAL


def compare(mine: Sequence[Measured], current: Sequence[Measured], confidence: float) -> Comparison:
    """The interval of the time ratio from paired blocks; see `Comparison`. Needs `fewest_values(confidence)` pairs."""
    d = _log_ratios(mine, current)
    low, high = _signed_rank_interval(d, (1 - confidence) / 2)
    middle = float(np.median(_walsh_averages(d)))
    return Comparison(math.exp(middle), math.exp(low), math.exp(high), len(d), confidence)


def _log_ratios(mine: Sequence[Measured], current: Sequence[Measured]) -> FloatArray:
    return np.array(
        [math.log(a.median_s / b.median_s) for a, b in zip(mine, current, strict=False)],
        dtype=np.float64,
    )


def _walsh_averages(d: FloatArray) -> FloatArray:
    """Means of all pairs of differences, each with itself too, sorted."""
    first, second = np.triu_indices(len(d))
    averages: FloatArray = np.sort((d[first] + d[second]) / 2)
    return averages


def _signed_rank_interval(d: FloatArray, tail: float) -> tuple[float, float]:
    """Of the middle of the differences; unbounded where so few cannot be that certain."""
    bound = signed_rank_bound(len(d), tail)
    if bound == 0:
        return -math.inf, math.inf
    walsh = _walsh_averages(d)
    return float(walsh[bound - 1]), float(walsh[-bound])


@lru_cache(maxsize=1024)
def signed_rank_bound(pairs: int, tail: float) -> int:
    """The interval reaches from the k-th smallest to the k-th largest Walsh average: the largest k with P(W < k) <= tail.

    W is the signed-rank statistic of `pairs` differences: every subset of the ranks 1..n is equally likely.
    """
    ways = np.zeros(pairs * (pairs + 1) // 2 + 1)
    ways[0] = 1.0
    for rank in range(1, pairs + 1):
        ways[rank:] = ways[rank:] + ways[:-rank]
    below = np.cumsum(ways) / 2.0**pairs
    return int(np.searchsorted(below, tail, side="right"))
