"""The weight of fitted constants next to stated ones."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.rng import generator
from autotune.simulators.combination import fitted_weight

ERRORS = 0.05 * generator(0, "errors").standard_normal(40)


def test_equal_errors_weigh_the_same_apart_from_the_parameters() -> None:
    assert fitted_weight(ERRORS, ERRORS, 0.0) == pytest.approx(0.5)
    assert fitted_weight(ERRORS, ERRORS, 20.0) == pytest.approx(0.2)  # (40 / 20)^2 = 4


def test_weights_are_inverse_to_squared_errors() -> None:
    assert fitted_weight(3 * ERRORS, ERRORS, 0.0) == pytest.approx(0.9, abs=0.001)


def test_a_common_error_counts() -> None:
    assert fitted_weight(ERRORS + 0.7, ERRORS, 5.0) > 0.98


def test_one_outlier_barely_changes_the_weight() -> None:
    stated, fitted = 3 * ERRORS, ERRORS.copy()
    fitted[7] = 2.0
    assert fitted_weight(stated, fitted, 0.0) == pytest.approx(0.9, abs=0.03)


def test_replays_that_agree_with_all_trials_weigh_the_same() -> None:
    assert fitted_weight(np.zeros(5), np.zeros(5), 0.0) == 0.5
