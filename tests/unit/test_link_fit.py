"""The alpha-beta fit and its pieces against exact curves, plain searches, and bad input."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from autotune.cluster import Bend, CollectiveFit
from autotune.errors import InvalidInput
from autotune.profiling.fits.link_fit import (
    LEAST_SLOPE,
    PENALTY,
    TOLERANCE,
    Curve,
    fit_alpha_beta,
    fit_curve,
    uncertainty_of,
)
from autotune.rng import generator

SIZES = [2.0**power for power in range(12, 25, 2)]


@given(alpha_s=st.floats(1e-6, 1e-1), beta=st.floats(1e-11, 1e-6))
def test_an_exact_line_is_recovered(alpha_s: float, beta: float) -> None:
    fitted_alpha_s, fitted_beta, error = fit_alpha_beta(
        SIZES, [alpha_s + beta * size for size in SIZES]
    )
    smallest_s, largest_s = alpha_s + beta * SIZES[0], alpha_s + beta * SIZES[-1]
    assert abs(fitted_alpha_s - alpha_s) <= 1e-6 * smallest_s
    assert abs(fitted_beta - beta) * SIZES[-1] <= 1e-6 * largest_s
    assert error < 1e-6


def relative_squares(
    alpha_s: float, beta: float, sizes: list[float], seconds: list[float]
) -> float:
    return sum(
        ((alpha_s + beta * size - second) / second) ** 2
        for size, second in zip(sizes, seconds, strict=True)
    )


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_no_point_of_a_grid_fits_noisy_times_better(seed: int) -> None:
    rng = generator(seed, "link fit")
    seconds = [float((1e-4 + 1e-9 * size) * rng.uniform(0.5, 2.0)) for size in SIZES]
    alpha_s, beta, error = fit_alpha_beta(SIZES, seconds)
    best = relative_squares(alpha_s, beta, SIZES, seconds)
    for factor_a in np.linspace(0, 3, 31):
        for factor_b in np.linspace(0, 3, 31):
            assert best <= relative_squares(factor_a * 1e-4, factor_b * 1e-9, SIZES, seconds) + 1e-9
    fitted = [alpha_s + beta * size for size in SIZES]
    assert error == pytest.approx(
        float(np.median([abs(f - s) / s for f, s in zip(fitted, seconds, strict=True)]))
    )


def test_costs_are_never_negative() -> None:
    alpha_s, beta, _ = fit_alpha_beta([1e3, 1e4, 1e5], [3e-3, 2e-3, 1e-3])
    assert alpha_s > 0 and beta == 0.0


@pytest.mark.parametrize(
    ("sizes", "seconds", "rule"),
    [
        ([1.0, 2.0], [1.0], "as many durations"),
        ([4.0, 4.0], [1.0, 1.1], "two different sizes"),
        ([1.0, 2.0], [1.0, 0.0], "durations above 0"),
        ([1.0, 2.0], [1.0, float("nan")], "finite"),
    ],
)
def test_bad_probes_are_refused_by_rule(
    sizes: list[float], seconds: list[float], rule: str
) -> None:
    with pytest.raises(InvalidInput, match=rule):
        fit_alpha_beta(sizes, seconds)


def test_a_curve_is_of_different_sizes() -> None:
    """Two bends at one size made the design infinite."""
    with pytest.raises(InvalidInput, match=r"different sizes, but got \[1.0, 2.0, 2.0, 3.0"):
        fit_curve([1, 2, 2, 3, 4, 5], [1.0, 2.0, 5.0, 5.5, 6.0, 6.5])


LINE = (1e-3, 1e-8)


def curve_s(alpha_s: float, slopes: list[float], places: list[float], size: float) -> float:
    """Byte ranges one after the other."""
    total, reached = alpha_s, 0.0
    for slope, place in zip(slopes, [*places, math.inf], strict=True):
        if size > reached:
            total += slope * (min(size, place) - reached)
        reached = place
    return total


def test_an_exact_bend_is_found_where_it_is() -> None:
    seconds = [curve_s(5e-4, [4e-9, 1.2e-8], [2.0**18], size) for size in SIZES]
    curve = fit_curve(SIZES, seconds)
    assert [bend.until_bytes for bend in curve.bends] == [2.0**18]
    assert (curve.alpha_s, curve.bends[0].s_per_byte, curve.beta_s_per_byte) == pytest.approx(
        (5e-4, 4e-9, 1.2e-8), rel=1e-6
    )
    assert (
        curve.relative_error < 1e-6 and curve.large_error is not None and curve.large_error < 1e-6
    )
    line = fit_alpha_beta(SIZES, seconds)
    assert (
        max(
            abs(line[0] + line[1] * size - second) / second
            for size, second in zip(SIZES, seconds, strict=True)
        )
        > 0.1
    )


def slow_best(sizes: list[float], seconds: list[float]) -> float:
    """The least objective over every set of places, each solved by another solver."""
    s, t = np.array(sizes), np.array(seconds)
    best = math.inf
    for count in range(4):
        for places in combinations(sizes[1:-2], count):
            # Unknowns: the time of an empty message, and the rise over each piece.
            ends = [0.0, *places, s[-1]]
            shares = [np.clip((s - low) / (high - low), 0, 1) for low, high in pairwise(ends)]
            matrix = np.stack([np.ones_like(s), *shares], axis=1) / (t * TOLERANCE)[:, None]
            solved = lsq_linear(
                matrix, np.full(len(s), 1 / TOLERANCE), bounds=(0, np.inf), method="bvls", tol=1e-14
            )
            last_slope = solved.x[-1] / (ends[-1] - ends[-2])
            if not places or last_slope >= LEAST_SLOPE * t[-1] / s[-1]:
                best = min(best, 2 * solved.cost + PENALTY * math.log(len(s)) * count)
    return best


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_no_other_set_of_bends_is_better(seed: int) -> None:
    rng = generator(seed, "bends")
    place = SIZES[int(rng.integers(1, len(SIZES) - 2))]
    slopes = [float(10 ** rng.uniform(-9.5, -7.5)) for _ in range(2)]
    seconds = [
        curve_s(1e-4, slopes, [place], size) * float(rng.uniform(0.9, 1.1)) for size in SIZES
    ]
    curve = fit_curve(SIZES, seconds)
    objective = curve.misfit + PENALTY * math.log(len(SIZES)) * len(curve.bends)
    assert objective == pytest.approx(slow_best(SIZES, seconds), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("count", [7, 15])
def test_a_noisy_line_stays_one_line(count: int) -> None:
    sizes = list(np.geomspace(2**12, 2**26, count))
    rng = generator(0, "line", count)
    bent = 0
    for _ in range(100):
        seconds = [
            (LINE[0] + LINE[1] * size) * math.exp(rng.normal(0, TOLERANCE)) for size in sizes
        ]
        bent += bool(fit_curve(sizes, seconds).bends)
    assert bent <= 10
    rough = [(LINE[0] + LINE[1] * size) * math.exp(rng.normal(0, 0.2)) for size in sizes]
    assert not fit_curve(sizes, rough, [0.2] * count).bends


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-6, 10.0), min_size=7, max_size=7))
def test_whatever_was_measured_the_cost_is_positive_and_never_falls(seconds: list[float]) -> None:
    curve = fit_curve(SIZES, seconds)
    sizes = np.concatenate([[0.0], np.geomspace(1, 2**30, 200)])
    cost = as_fit(curve).seconds_each(sizes)
    assert (cost >= 0).all() and (np.diff(cost) >= 0).all() and np.isfinite(cost).all()


def as_fit(curve: Curve) -> CollectiveFit:
    return CollectiveFit(
        "all_reduce",
        2,
        curve.alpha_s,
        curve.beta_s_per_byte,
        curve.relative_error,
        1,
        2**24,
        bends=curve.bends,
    )


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0, 1e-2),
    st.lists(st.floats(0, 1e-7), min_size=4, max_size=4),
    st.lists(st.floats(0, 2**30), min_size=1, max_size=20),
)
def test_the_cost_of_a_message_equals_the_walk_over_the_pieces(
    alpha_s: float, slopes: list[float], sizes: list[float]
) -> None:
    places = [2.0**14, 2.0**20, 2.0**22]
    bends = tuple(Bend(place, slope) for place, slope in zip(places, slopes, strict=False))
    fit = CollectiveFit("all_reduce", 2, alpha_s, slopes[-1], 0.0, 1, 2**24, bends=bends)
    expected = [curve_s(alpha_s, slopes, places, size) for size in sizes]
    np.testing.assert_allclose(fit.seconds_each(np.array(sizes)), expected, rtol=1e-9, atol=1e-15)
    assert fit.seconds(sizes[0]) == pytest.approx(expected[0], rel=1e-9, abs=1e-15)


def test_a_message_beyond_the_largest_probe_is_never_free() -> None:
    seconds = [1e-3 + 1e-8 * size for size in SIZES]
    seconds[-1] = seconds[-2] * 1.01  # the largest ones hardly differ
    assert fit_curve(SIZES, seconds).beta_s_per_byte > 0


def test_the_uncertainty_of_a_median_counts_at_most_four_repeats() -> None:
    assert uncertainty_of(0.1, 4) == pytest.approx(0.0464, rel=0.01)
    assert uncertainty_of(0.1, 400) == uncertainty_of(0.1, 4)
