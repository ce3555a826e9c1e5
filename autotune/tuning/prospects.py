"""Whether further trials can be expected to win anything.

symbol   meaning                                                                 unit
g        ln(step time of a strategy / that of the current setup), measured, (n,)  1
front    the faster half of g, (f,)                                              1
noise    relative standard deviation of a trial's median on a steady machine     1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from autotune.arrays import FloatArray
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec

RARE = 0.1
"""Share of fast strategies that the search must not miss: so many are tried that one of them was
among these with the confidence, as the fronts of tried strategies say nothing about others."""


@dataclass(frozen=True)
class Prospects:
    """The gain that further trials can be expected to find, with the job's confidence.

    `bound`: lower bound of g of the fastest of all strategies, tried or among `further` ones.
    """

    g: tuple[float, ...]
    further: int
    bound: float

    def at_most(self, gain: float) -> bool:
        """Whether no strategy is expected to save more than this share of the step time."""
        return self.bound >= math.log(1 - gain)

    def in_words(self, confidence: float, gain: str) -> str:
        """`gain`: what the expected gain is compared with."""
        best = math.exp(self.g[0]) - 1
        fastest = f"{abs(best):.1%} {'slower' if best > 0 else 'faster'} than the current setup"
        possible = max(0.0, 1 - math.exp(self.bound))
        if -best > possible:
            fastest += ", which noise explains"
        return (
            f"nothing to win: the fastest of {len(self.g)} strategies is {fastest}, and with "
            f"{confidence:.0%} confidence {self.further} more trials would find a gain of at most "
            f"{possible:.1%}, but {gain}"
        )


def prospects(spec: JobSpec, history: History, most_trials: int) -> Prospects:
    """The prospects of `most_trials` further trials, or as many as there is time for."""
    assert history.reference_s is not None
    trial_s = history.elapsed_s / len(history.trials)
    further = min(most_trials, int((spec.max_seconds - history.elapsed_s) / trial_s))
    g = tuple(math.log(step_s / history.reference_s) for _, step_s in history.ranking())
    bound = best_expected(g, history.noise, len(history.references), further, spec.confidence)
    return Prospects(g, further, bound)


def nothing_to_win(spec: JobSpec, history: History, most_trials: int) -> str:
    """Why no strategy is expected to beat the current setup by more than `ab_precision`.

    Empty if one may.
    """
    expected = prospects(spec, history, most_trials)
    if not expected.at_most(spec.ab_precision):
        return ""
    words = expected.in_words(
        spec.confidence, f"{spec.ab_precision:.1%} is the precision asked for"
    )
    return f"{words}; so the current setup stays; {history.quality}"


def nothing_to_prove(spec: JobSpec, history: History, most_trials: int) -> str:
    """Why no strategy is expected to win more than the closing comparison could prove.

    Empty if one may. Then the closing comparison may as well begin: it judges the strategies that
    were tried, so that a gain which it can prove is not lost.
    """
    expected = prospects(spec, history, most_trials)
    needed = provable_gain(history.noise, spec)
    if not expected.at_most(needed):
        return ""
    return expected.in_words(
        spec.confidence,
        f"with noise of {history.noise:.1%} a closing comparison of {spec.ab_pairs} pairs proves "
        f"{needed:.1%} at best",
    )


def provable_gain(noise: float, spec: JobSpec) -> float:
    """The gain that the closing comparison can tell from none: the half width of its interval.

    Each of its pairs has the noise of two trials. At least `ab_precision`.
    """
    two_sided = NormalDist().inv_cdf((1 + spec.confidence) / 2)
    half_width = two_sided * noise * math.sqrt(2 / spec.ab_pairs)  # of ln(time ratio)
    return max(spec.ab_precision, 1 - math.exp(-half_width))


def best_expected(
    g: Sequence[float], noise: float, references: int, further: int, confidence: float
) -> float:
    """Lower bound of g of the fastest strategy, measured or among `further` ones; -inf: unknown.

    Differences that noise alone explains are removed first, among all and then within the front:
    every g moves towards the median by the share noise^2 / variance (James and Stein, 1961), with
    the largest variance that the confidence allows. Further strategies are taken to be like the
    front, as the search proposes what looks fast. The bound of their smallest g is Student's
    prediction limit, with the error probability divided by their number (Bonferroni); the error of
    the front's own mean and of `references` runs of the current setup is subtracted.
    """
    from scipy.special import stdtrit  # a third of the start of commands that need no bound

    values = np.asarray(g, dtype=np.float64)
    f = (len(values) + 1) // 2
    tail = 1 - confidence
    if len(values) < math.log(tail) / math.log(1 - RARE) or references == 0:
        return -math.inf
    share = _share_beside(noise, values, tail)
    front = np.sort(_towards_median(values, share))[:f]
    front = _towards_median(front, _share_beside(share * noise, front, tail))
    limit = float(stdtrit(f - 1, 1 - tail / max(1, further)))
    spread = float(np.std(front, ddof=1)) * math.sqrt(1 + 1 / f)
    error = NormalDist().inv_cdf(1 - tail) * noise * math.sqrt(1 / f + 1 / references)
    return min(float(front[0]), float(front.mean()) - limit * spread) - error


def _share_beside(noise: float, values: FloatArray, tail: float) -> float:
    """The share of the values' variance that noise leaves, at most at this confidence."""
    from scipy.special import chdtri

    variance = float(np.var(values, ddof=1))
    largest = variance * (len(values) - 1) / float(chdtri(len(values) - 1, 1 - tail))
    return max(0.0, 1 - noise**2 / largest) if largest > 0 else 0.0


def _towards_median(values: FloatArray, share: float) -> FloatArray:
    median = float(np.median(values))
    moved: FloatArray = median + share * (values - median)
    return moved
