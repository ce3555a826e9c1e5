"""Fits of collectives from tables that others measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from autotune.cluster import CollectiveFit
from autotune.errors import InvalidInput
from autotune.profiling.fits.link_fit import LARGE_BYTES, fit_curve

MOST_SIZES = 24
"""Sizes that choose a curve's bends; the search is cubic in them. Errors are of all sizes."""


@dataclass(frozen=True)
class TableRow:
    """One measured collective.

    `size_bytes`: of the whole tensor; for a gather or scatter, of one rank's, as plans look it up.
    """

    primitive: str
    ranks: int
    size_bytes: int
    seconds: float


def table_fits(rows: Iterable[TableRow]) -> tuple[CollectiveFit, ...]:
    """One fit for each collective and number of ranks.

    A size's time is the median of its rows. Raises `InvalidInput` for fewer than two sizes.
    """
    seconds_of: dict[tuple[str, int], dict[int, list[float]]] = {}
    for row in rows:
        by_size = seconds_of.setdefault((row.primitive, row.ranks), {})
        by_size.setdefault(row.size_bytes, []).append(row.seconds)
    return tuple(_fit(*key, by_size) for key, by_size in seconds_of.items())


def _fit(primitive: str, ranks: int, by_size: dict[int, list[float]]) -> CollectiveFit:
    sizes = sorted(by_size)
    if len(sizes) < 2:
        raise InvalidInput(
            f"a fit of {primitive} on {ranks} ranks needs at least two sizes, but has {sizes}"
        )
    seconds = np.array([median(by_size[size]) for size in sizes])
    chosen = _spread(sizes)
    curve = fit_curve([sizes[at] for at in chosen], [float(seconds[at]) for at in chosen])
    fit = CollectiveFit(
        primitive,
        ranks,
        curve.alpha_s,
        curve.beta_s_per_byte,
        curve.relative_error,
        sizes[0],
        sizes[-1],
        bends=curve.bends,
        sizes=len(sizes),
    )
    as_bytes = np.array(sizes, dtype=np.float64)
    errors = np.abs(fit.seconds_each(as_bytes) - seconds) / seconds
    large = errors[as_bytes >= LARGE_BYTES]
    spreads = [_spread_of(by_size[size]) for size in sizes]
    return replace(
        fit,
        relative_error=float(np.median(errors)),
        large_error=float(large.max()) if len(large) else None,
        spread=median(spreads),
    )


def _spread(sizes: list[int]) -> list[int]:
    """Places of at most `MOST_SIZES` sizes, evenly spaced by their logarithm, with both ends."""
    if len(sizes) <= MOST_SIZES:
        return list(range(len(sizes)))
    logs = np.log(np.maximum(sizes, 1))
    wanted = np.linspace(logs[0], logs[-1], MOST_SIZES)
    return sorted({int(np.argmin(np.abs(logs - at))) for at in wanted})


def _spread_of(values: list[float]) -> float:
    """Interquartile range over the median; 0 for fewer than four values."""
    if len(values) < 4:
        return 0.0
    low, high = np.quantile(values, [0.25, 0.75])
    return float((high - low) / median(values))
