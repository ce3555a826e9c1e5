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


def test_an_overhead_is_found_despite_drift_and_disturbed_steps():
    random = np.random.default_rng(5)
    # A machine that gets slower.
    took_s = np.linspace(0.2, 0.3, 40)[:, None, None] * random.normal(1, 0.01, (40, 2, 4))
    took_s[:, 1] *= 1.05
    took_s[random.random(took_s.shape) < 0.05] *= 3
    figures = compared(took_s)
    low, high = figures["interval"]
    assert low < 0.05 < high and high - low < 0.06
    for name in ("median", "quiet"):
        assert figures[name] == pytest.approx(0.05, abs=0.02)
