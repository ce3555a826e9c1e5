"""Figures of `benchmarks.profile_overhead` for a known overhead and known disturbances."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from benchmarks.profile_overhead.__main__ import compared, figures, pseudo_median


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
    overhead = compared(took_s[:, 0], [(1, took_s[:, 1])])
    low, high = overhead["interval"]
    assert low < 0.05 < high and high - low < 0.06
    for name in ("median", "quiet"):
        assert overhead[name] == pytest.approx(0.05, abs=0.02)


def test_a_stretch_is_the_weighted_mean_of_recorded_and_ordinary_steps() -> None:
    plain_s = np.full((6, 4), 0.1)
    measured = figures(
        {
            "between": 3,
            "plain_s": np.stack([plain_s, plain_s], axis=1),
            "recorded_s": np.full((6, 2, 2), 0.111),
            "ordinary_s": np.full((6, 2, 6), 0.1005),
            "spans": 1000.0,
            "event_s": 1e-6,
            "outside_s": {},
        }
    )
    assert measured["recorded"]["cpu"]["median"] == pytest.approx(0.11)
    assert measured["beside"]["wall"]["median"] == pytest.approx(0.111 / 0.1005 - 1)
    assert measured["ordinary"]["wall"]["median"] == pytest.approx(0.005)
    assert measured["stretch"]["wall"]["median"] == pytest.approx((10 * 0.11 + 27 * 0.005) / 37)
    assert measured["stretch"]["wall"]["quiet"] == pytest.approx((10 * 0.11 + 27 * 0.005) / 37)
