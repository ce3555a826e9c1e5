"""Figures of `benchmarks.profile_overhead` for a known overhead and known disturbances."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from benchmarks.profile_overhead.__main__ import compared, pseudo_median


def test_the_pseudo_median_is_the_median_of_the_means_of_all_pairs() -> None:
    values = np.random.default_rng(3).normal(size=12)
    means = [(a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2)]
    assert pseudo_median(values) == pytest.approx(statistics.median(means))


def test_an_overhead_is_found_beside_drift_and_steps_that_others_disturb() -> None:
    random = np.random.default_rng(5)
    took_s = np.linspace(0.2, 0.3, 40)[:, None, None] * random.normal(
        1, 0.01, (40, 2, 4)
    )  # a machine that gets slower
    took_s[:, 1] *= 1.05
    disturbed = random.random(took_s.shape) < 0.05
    took_s[disturbed] *= 3
    found = compared(took_s)
    low, high = found["interval"]
    assert low < 0.05 < high and high - low < 0.06
    assert found["median"] == pytest.approx(0.05, abs=0.02)
    assert found["quiet"] == pytest.approx(0.05, abs=0.02)
