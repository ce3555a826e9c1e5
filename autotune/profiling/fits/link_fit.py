"""Fits measured transfer times to the alpha-beta model, in pieces where one line does not fit.

| symbol | meaning | unit |
|---|---|---|
| s_i | size of probe i, shape (P,), distinct in a curve | bytes |
| t_i | measured duration, shape (P,) | s |
| alpha | cost per message | s |
| beta | cost per byte | s/byte |
| sigma_i | allowed relative error of t_i: `TOLERANCE`, more for uncertain repeats | - |
| k | number of bends | - |

Model: t = alpha + beta s (Hockney's; Eq. 2 and 3 of the AutoSync supplement use the same terms). A
curve is continuous, its slope changes at probed sizes, and no slope is negative.
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
"""Relative error of a good line: the difference of repeated probes of an unchanged link (0-4 %)."""
MOST_BENDS = 3
PENALTY = 3.0
"""A bend must lower the misfit by this times ln P, as in Schwarz's criterion.

It counts for its size, its slope and the search for it."""
LEAST_SLOPE = 0.25
"""Least slope of the last piece, as a share of the largest probe's time per byte.

A flatter one comes from noise, and larger messages would be free."""
LARGE_BYTES = 2**20
INDEPENDENT_REPEATS = 4
"""Repeats are milliseconds apart, so a disturbance of one affects the next: more add nothing."""


@dataclass(frozen=True)
class Curve:
    """Piecewise linear cost of a message, as in `CollectiveFit`.

    `misfit`: the sum of squared errors, each over its sigma.
    """

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

    Minimizes sum_i ((alpha + beta s_i - t_i) / t_i)^2. The error is relative to each duration;
    otherwise the largest messages alone decide and alpha is noise. `relative_error` is the median
    of |fitted - measured| / measured. Raises `InvalidInput` for fewer than two sizes and for
    durations <= 0.
    """
    s, t = _checked(sizes_bytes, seconds)
    costs, _ = _solve(s, t, np.ones_like(t), ())
    return float(costs[0]), float(costs[1]), float(np.median(_errors(s, t, costs, ())))


def fit_curve(
    sizes_bytes: Sequence[float],
    seconds: Sequence[float],
    uncertainty: Sequence[float] | None = None,
) -> Curve:
    """The curve with k <= `MOST_BENDS` bends that minimizes

    sum_i ((t(s_i) - t_i) / (t_i sigma_i))^2 + `PENALTY` k ln P.

    `uncertainty` (P,): relative standard error of each duration. Every piece but the last ends at a
    probe. The first and the last piece contain at least two probes, so an extrapolation rests on
    more than one. Raises `InvalidInput`, also for two durations of one size.
    """
    s, t = _checked(sizes_bytes, seconds)
    if len(np.unique(s)) < len(s):
        raise InvalidInput(
            f"a curve needs different sizes, but got {np.sort(s)[:20].tolist()}; pass the median "
            "of the durations of a size"
        )
    order = np.argsort(s)
    s, t = s[order], t[order]
    sigma = np.full(len(s), TOLERANCE)
    if uncertainty is not None:
        sigma = np.maximum(sigma, np.asarray(uncertainty, dtype=np.float64)[order])
    price = PENALTY * math.log(len(s))
    best: tuple[float, tuple[float, ...], FloatArray, float] | None = None
    for count in range(MOST_BENDS + 1):
        if best is not None and best[0] <= count * price:
            break  # even a perfect fit with this many bends is no better
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
    """Relative standard error of a median: 1.253 standard deviations over the root of n.

    An interquartile range is 1.349 standard deviations.
    """
    return 1.253 / 1.349 * spread / math.sqrt(min(repeats, INDEPENDENT_REPEATS))


def _checked(
    sizes_bytes: Sequence[float], seconds: Sequence[float]
) -> tuple[FloatArray, FloatArray]:
    s, t = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if s.ndim != 1 or s.shape != t.shape:
        shapes = f"{t.shape} and {s.shape}"
        raise InvalidInput(
            f"a link fit needs as many durations as sizes, but the shapes are {shapes}"
        )
    if len(np.unique(s)) < 2:
        sizes = sorted(set(s.tolist()))
        raise InvalidInput(
            f"a link fit needs at least two different sizes, but got {sizes}; probe more sizes"
        )
    if not (np.isfinite(s).all() and np.isfinite(t).all() and (s >= 0).all() and (t > 0).all()):
        raise InvalidInput(
            "a link fit needs finite sizes of at least 0 bytes and finite durations above 0 s"
        )
    return s, t


def _design(s: FloatArray, places: tuple[float, ...]) -> FloatArray:
    """(P, k + 2): 1 for alpha, then the bytes of each message that fall into each piece."""
    starts = np.array([0.0, *places])
    widths = np.diff([0.0, *places, np.inf])
    return np.column_stack([np.ones_like(s), np.clip(s[:, None] - starts, 0.0, widths)])


def _solve(
    s: FloatArray, t: FloatArray, sigma: FloatArray, places: tuple[float, ...]
) -> tuple[FloatArray, float]:
    """(alpha and the slopes, shape (k + 2,), all >= 0; the weighted sum of squares)."""
    weighted = _design(s, places) / (t * sigma)[:, None]
    # columns of the same magnitude: otherwise the fit is badly conditioned
    scale = weighted.max(axis=0)
    costs, residual = nnls(weighted / scale, 1.0 / sigma)
    return costs / scale, float(residual**2)


def _errors(
    s: FloatArray, t: FloatArray, costs: FloatArray, places: tuple[float, ...]
) -> FloatArray:
    errors: FloatArray = np.abs(_design(s, places) @ costs - t) / t
    return errors
