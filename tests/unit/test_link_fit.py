"""The alpha-beta fit against exact lines, a grid search, and bad input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InvalidInput
from autotune.profiling.link_fit import fit_alpha_beta
from autotune.rng import generator

SIZES = [2.0**power for power in range(12, 25, 2)]


@given(alpha_s=st.floats(1e-6, 1e-1), beta=st.floats(1e-11, 1e-6))
def test_an_exact_line_is_recovered(alpha_s: float, beta: float) -> None:
    fitted_alpha_s, fitted_beta, error = fit_alpha_beta(SIZES, [alpha_s + beta * size for size in SIZES])
    smallest_s, largest_s = alpha_s + beta * SIZES[0], alpha_s + beta * SIZES[-1]
    assert abs(fitted_alpha_s - alpha_s) <= 1e-6 * smallest_s
    assert abs(fitted_beta - beta) * SIZES[-1] <= 1e-6 * largest_s
    assert error < 1e-6


def relative_squares(alpha_s: float, beta: float, sizes: list[float], seconds: list[float]) -> float:
    return sum(((alpha_s + beta * size - second) / second) ** 2 for size, second in zip(sizes, seconds, strict=True))


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
    assert error == pytest.approx(float(np.median([abs(f - s) / s for f, s in zip(fitted, seconds, strict=True)])))


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
def test_bad_probes_are_refused_by_rule(sizes: list[float], seconds: list[float], rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule):
        fit_alpha_beta(sizes, seconds)
