"""How well rankers order the plans among which the tuner decides, and the most that noise allows.

| figure | meaning | best |
|---|---|---|
| `all_pairs` | share of pairs of tested plans in the right order | 1 |
| `fastest_quarter` | the same among the quarter that was measured fastest | 1 |
| `lossless_quarter` | the same among the lossless plans of that quarter | 1 |
| `regret_top_1` | relative: predicted fastest against measured fastest | 0 |

Pairs within the tie band do not count. A figure is NaN if no pair is left.

The ceiling of a figure is what the measured times themselves would reach if every plan were
measured once more with the same noise. It is NaN if the noise is unknown. The measured times
already spread by the noise, so the ceiling is slightly too high.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.arrays import BoolArray, FloatArray
from autotune.simulators.evaluation import best_of_top_k_regret, ordered_pairs, pairwise_accuracy

TIE_BAND = 0.01
FIGURES = {
    "all_pairs": "all pairs",
    "fastest_quarter": "fastest quarter",
    "lossless_quarter": "lossless there",
    "regret_top_1": "regret top 1",
}
QUARTER = 0.25
REPEATS = 200
"""Simulated repeats of the measurements of a ceiling."""

Figures = Mapping[str, float]


@dataclass(frozen=True, eq=False)
class TestedPlans:
    """The tested plans of a domain, each of shape (n,).

    `measured_s`: medians; `noise`: their relative standard deviations, NaN: unknown; `searched`:
    proposed by the tuner's optimizer.
    """

    measured_s: FloatArray
    noise: FloatArray
    lossless: BoolArray
    searched: BoolArray


@dataclass(frozen=True)
class DecisionRow:
    """A ranker on one test part of a domain, after `own` trials of its own.

    `bias`: mean of ln(measured / predicted) over the searched plans; NaN without any, and for
    rankers that predict no time.
    """

    domain: str
    seed: int
    ranker: str
    own: int
    figures: Figures
    ceilings: Figures
    bias: float = math.nan
    case: str = field(default="")


def decision_figures(predicted: FloatArray, tested: TestedPlans) -> dict[str, float]:
    """Return the figures of predictions of shape (n,), of which only the order counts."""
    return _figures(predicted, tested.measured_s, tested.lossless)


def ceilings(tested: TestedPlans, draw: np.random.Generator) -> dict[str, float]:
    """Return the mean figures of the measured times over simulated repeats.

    NaN if the noise of a plan is unknown.
    """
    if np.isnan(tested.noise).any():
        return dict.fromkeys(FIGURES, math.nan)
    repeated = [
        _figures(
            tested.measured_s,
            tested.measured_s * np.exp(tested.noise * draw.standard_normal(len(tested.noise))),
            tested.lossless,
        )
        for _ in range(REPEATS)
    ]
    return {name: _mean(row[name] for row in repeated) for name in FIGURES}


def mean_and_worst(
    rows: Sequence[DecisionRow], ranker: str, own: int, figure: str
) -> tuple[float, float, float]:
    """Return (mean over domains, worst domain, mean ceiling); each domain has equal weight.

    The ceiling is NaN if that of a domain is unknown.
    """
    values: dict[str, list[float]] = {}
    limits: dict[str, list[float]] = {}
    for row in rows:
        if (row.ranker, row.own) == (ranker, own) and not math.isnan(row.figures[figure]):
            values.setdefault(row.domain, []).append(row.figures[figure])
            limits.setdefault(row.domain, []).append(row.ceilings[figure])
    means = [_mean(of_domain) for of_domain in values.values()]
    if not means:
        return math.nan, math.nan, math.nan
    worst = max(means) if figure.startswith("regret") else min(means)
    ceiling = float(np.mean([np.mean(of_domain) for of_domain in limits.values()]))
    return _mean(means), worst, ceiling


def mean_bias(rows: Sequence[DecisionRow], ranker: str, own: int) -> float:
    """Return the mean over the domains of the residual of the search's own proposals."""
    of_domain: dict[str, list[float]] = {}
    for row in rows:
        if (row.ranker, row.own) == (ranker, own) and not math.isnan(row.bias):
            of_domain.setdefault(row.domain, []).append(row.bias)
    return _mean(_mean(values) for values in of_domain.values())


def _figures(
    predicted: FloatArray, measured_s: FloatArray, lossless: BoolArray
) -> dict[str, float]:
    quarter = np.argsort(measured_s, kind="stable")[: math.ceil(QUARTER * len(measured_s))]
    inside = quarter[lossless[quarter]]
    return {
        "all_pairs": _accuracy(predicted, measured_s),
        "fastest_quarter": _accuracy(predicted[quarter], measured_s[quarter]),
        "lossless_quarter": _accuracy(predicted[inside], measured_s[inside]),
        "regret_top_1": best_of_top_k_regret(predicted, measured_s, 1),
    }


def _accuracy(predicted: FloatArray, measured_s: FloatArray) -> float:
    if len(measured_s) < 2 or not len(ordered_pairs(measured_s, TIE_BAND)[0]):
        return math.nan
    return pairwise_accuracy(predicted, measured_s, TIE_BAND)


def _mean(values: Iterable[float]) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    return float(np.mean(numbers)) if numbers else math.nan
