"""Whether further trials can be expected to win anything.

symbol   meaning                                                                 unit
g        ln(step time of a strategy / that of the current setup), measured, (n,)  1
front    the faster half of g, (f,)                                              1
noise    relative standard deviation of a trial's median on a steady machine     1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from autotune.arrays import FloatArray
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec

RARE = 0.1
"""Share of fast strategies that the search must not miss: so many are tried that one of them was
among these with the confidence, as the fronts of tried strategies say nothing about others."""


def nothing_to_win(spec: JobSpec, history: History, most_trials: int) -> str:
    """Why no strategy is expected to beat the current setup by more than `ab_precision`.

    Empty if one may. No more than `most_trials` are left, or as many as there is time for.
    """
    assert history.reference_s is not None
    ranking = history.ranking()
    trial_s = history.elapsed_s / len(history.trials)
    further = min(most_trials, int((spec.max_seconds - history.elapsed_s) / trial_s))
    g = [math.log(step_s / history.reference_s) for _, step_s in ranking]
    bound = best_expected(g, history.noise, len(history.references), further, spec.confidence)
    if bound < math.log(1 - spec.ab_precision):
        return ""
    best = math.exp(g[0]) - 1
    fastest = f"{abs(best):.1%} {'slower' if best > 0 else 'faster'} than the current setup"
    if best < -spec.ab_precision:
        fastest += ", which noise explains"
    possible = max(0.0, 1 - math.exp(bound))
    return (
        f"nothing to win: the fastest of {len(g)} strategies is {fastest}, and with "
        f"{spec.confidence:.0%} confidence {further} more trials would find a gain of at most "
        f"{possible:.1%}, but {spec.ab_precision:.1%} is the precision asked for; so the current "
        f"setup stays; {history.quality}"
    )


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
