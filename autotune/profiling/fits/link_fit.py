"""Fit of measured transfer times to the alpha-beta model, in pieces where one line does not do.

| symbol | meaning | unit |
|---|---|---|
| s_i | size of probe i, shape (P,), distinct in a curve | bytes |
| t_i | measured duration, shape (P,) | s |
| alpha | cost per message | s |
| beta | cost per byte | s/byte |
| sigma_i | relative error that t_i is allowed: `TOLERANCE`, more where the repeats of the probe leave it less certain | - |
| k | number of bends | - |

Model: t = alpha + beta s (Hockney's; Eq. 2 and 3 of the AutoSync supplement use the same two terms). A curve is continuous, its
slope changes at probed sizes, and no slope is negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.optimize import nnls

from autotune.arrays import FloatArray
from autotune.cluster import Bend
from autotune.errors import InvalidInput

TOLERANCE = 0.03
"""Relative error up to which a line is good enough: what repeated probes of an unchanged link differ by (GROUNDWORK: 0-4 %)."""
MOST_BENDS = 3
PENALTY = 3.0
"""A bend (its size, its slope, and having searched for it) must lower the misfit by this times ln P, as in Schwarz's criterion."""
LEAST_SLOPE = 0.25
"""Of the largest probe's time per byte: a last piece that is flatter comes from noise, and messages beyond it would be free."""
LARGE_BYTES = 2**20
INDEPENDENT_REPEATS = 4
"""Repeats follow each other within milliseconds, so what disturbs one disturbs the next: more of them tell no more."""


@dataclass(frozen=True)
class Curve:
    """Piecewise linear cost of a message: see `CollectiveFit`. `misfit` is the sum of squared errors, each over its sigma."""

    alpha_s: float
    beta_s_per_byte: float
    bends: tuple[Bend, ...]
    misfit: float
    relative_error: float
    large_error: float | None


def fit_alpha_beta(
    sizes_bytes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float, float]:
    """(alpha_s, beta_s_per_byte, relative_error), both costs >= 0.

    Minimizes sum_i ((alpha + beta s_i - t_i) / t_i)^2: the error relative to each duration, for otherwise
    the largest messages alone decide and alpha is noise.  `relative_error` is the median of
    |fitted - measured| / measured.  Raises `InvalidInput` for fewer than two sizes or durations <= 0.
    """
    s, t = _checked(sizes_bytes, seconds)
    costs, _ = _solve(s, t, np.ones_like(t), ())
    return float(costs[0]), float(costs[1]), float(np.median(_errors(s, t, costs, ())))


def fit_curve(
    sizes_bytes: Sequence[float],
    seconds: Sequence[float],
    uncertainty: Sequence[float] | None = None,
) -> Curve:
    """The least sum_i ((t(s_i) - t_i) / (t_i sigma_i))^2 + `PENALTY` k ln P over all curves with k <= `MOST_BENDS` bends.

    `uncertainty` (P,): relative standard error of each duration. Every piece but the last ends at a probe, and the first and
    the last one hold two probes or more, so that what is extrapolated rests on more than one. Raises `InvalidInput`.
    """
    s, t = _checked(sizes_bytes, seconds)
    order = np.argsort(s)
    s, t = s[order], t[order]
    sigma = np.full(len(s), TOLERANCE)
    if uncertainty is not None:
        sigma = np.maximum(sigma, np.asarray(uncertainty, dtype=np.float64)[order])
    price = PENALTY * math.log(len(s))
    best: tuple[float, tuple[float, ...], FloatArray, float] | None = None
    for count in range(MOST_BENDS + 1):
        if (
            best is not None and best[0] <= count * price
        ):  # even a perfect fit with so many bends is no better
            break
        for places in combinations(s[1:-2].tolist(), count):
            costs, misfit = _solve(s, t, sigma, places)
            if places and costs[-1] < LEAST_SLOPE * t[-1] / s[-1]:
                continue
            if best is None or misfit + count * price < best[0]:
                best = (misfit + count * price, places, costs, misfit)
    assert best is not None
    _, places, costs, misfit = best
    errors = _errors(s, t, costs, places)
    large = errors[s >= LARGE_BYTES]
    bends = tuple(
        Bend(place, slope) for place, slope in zip(places, costs[1:-1].tolist(), strict=True)
    )
    large_error = float(large.max()) if len(large) else None
    return Curve(
        float(costs[0]), float(costs[-1]), bends, misfit, float(np.median(errors)), large_error
    )


def uncertainty_of(spread: float, repeats: int) -> float:
    """Relative standard error of a median: 1.253 standard deviations over the root of n; an interquartile range is 1.349 of them."""
    return 1.253 / 1.349 * spread / math.sqrt(min(repeats, INDEPENDENT_REPEATS))


def _checked(
    sizes_bytes: Sequence[float], seconds: Sequence[float]
) -> tuple[FloatArray, FloatArray]:
    s, t = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if s.ndim != 1 or s.shape != t.shape:
        raise InvalidInput(
            f"a link fit needs as many durations as sizes, but the shapes are {t.shape} and {s.shape}"
        )
    if len(np.unique(s)) < 2:
        raise InvalidInput(
            f"a link fit needs at least two different sizes, but got {sorted(set(s.tolist()))}; probe more sizes"
        )
    if not (np.isfinite(s).all() and np.isfinite(t).all() and (s >= 0).all() and (t > 0).all()):
        raise InvalidInput(
            "a link fit needs finite sizes of at least 0 bytes and finite durations above 0 s"
        )
    return s, t


def _design(s: FloatArray, places: tuple[float, ...]) -> FloatArray:
    """Column 0 belongs to alpha, column j to the slope of piece j: how many bytes of each message fall into it. Shape (P, k + 2)."""
    starts = np.array([0.0, *places])
    widths = np.diff([0.0, *places, np.inf])
    return np.column_stack([np.ones_like(s), np.clip(s[:, None] - starts, 0.0, widths)])


def _solve(
    s: FloatArray, t: FloatArray, sigma: FloatArray, places: tuple[float, ...]
) -> tuple[FloatArray, float]:
    """(alpha and the slopes, shape (k + 2,), all >= 0; the weighted sum of squares)."""
    weighted = _design(s, places) / (t * sigma)[:, None]
    scale = weighted.max(
        axis=0
    )  # all columns of the same magnitude, else the fit is badly conditioned
    costs, residual = nnls(weighted / scale, 1.0 / sigma)
    return costs / scale, float(residual**2)


def _errors(
    s: FloatArray, t: FloatArray, costs: FloatArray, places: tuple[float, ...]
) -> FloatArray:
    errors: FloatArray = np.abs(_design(s, places) @ costs - t) / t
    return errors
