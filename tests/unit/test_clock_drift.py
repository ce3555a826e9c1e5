"""Known drifts of clocks are estimated if they matter; others change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic_traces import Job
from test_alignment import observations

from autotune.dfg.replay import replay
from autotune.profiling.alignment import align
from autotune.profiling.alignment.align import align_observations
from autotune.profiling.alignment.drift import MOST_DRIFT
from autotune.profiling.graph.traced_steps import TracedSteps

STEP_S = 0.5


def times(steps: int, ranks: int, noise_s: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """True starts and ends of a collective per step, (steps, ranks)."""
    rng = np.random.default_rng(seed)
    starts = rng.uniform(0, 1e-3, (steps, ranks)) + STEP_S * np.arange(steps)[:, None]
    noises_s = np.abs(rng.normal(size=(steps, ranks))) * noise_s
    return starts, starts.max(axis=1, keepdims=True) + 1e-3 + noises_s


def shown(true_s: np.ndarray, offset_s: np.ndarray, drift: np.ndarray) -> np.ndarray:
    """The times on the ranks' clocks: plus `offset_s` and `drift` per second, they are true."""
    return (true_s - offset_s) / (1 + drift)


def test_offsets_and_drifts_are_found_together_and_shared_within_a_machine() -> None:
    offset, drift = np.array([0.0, 0.2, -0.1, -0.1]), np.array([0.0, 0.0, 6e-5, 6e-5])
    starts, ends = (shown(true_s, offset, drift) for true_s in times(60, 4, 4e-6))
    result = align_observations(observations(starts, ends, (0, 1, 2, 2)), samples=4)
    assert result.drift[[0, 1]].tolist() == [0.0, 0.0] and result.drift[2] == result.drift[3]
    np.testing.assert_allclose(result.drift, drift, atol=2e-7)
    assert 0 < result.drift_spread[2] < 2e-7 and result.drift_spread[1] < 2e-7
    at_middle = offset + drift * result.middle_s
    np.testing.assert_allclose(result.correction_s(result.middle_s), at_middle, atol=4e-6)
    for step in (0, 59):
        corrected_s = ends[step] + result.correction_s(ends[step])
        np.testing.assert_allclose(corrected_s, STEP_S * step, atol=3e-3)
        assert np.ptp(corrected_s) < 2e-5 < 1e-3 < np.ptp(ends[step])
    assert np.all(result.low_s - 1e-6 <= at_middle) and np.all(at_middle <= result.high_s + 1e-6)


@pytest.mark.parametrize("steps", [6, 60, 400])
def test_clocks_that_do_not_drift_are_aligned_as_without_any_drift(steps: int) -> None:
    offset = np.array([0.0, 0.2, -0.1])
    starts, ends = (true_s - offset for true_s in times(steps, 3, 2e-5, seed=steps))
    ends[::7, 1] += 3e-3  # a rank that is descheduled now and then
    result = align_observations(observations(starts, ends), samples=0)
    assert result.drift.tolist() == [0.0] * 3
    np.testing.assert_allclose(result.offset_s, offset, atol=4e-4)


def test_a_drift_that_changes_less_than_the_noise_is_left_alone() -> None:
    drift = np.array([0.0, 1e-7])
    starts, ends = (shown(true_s, np.zeros(2), drift) for true_s in times(400, 2, 5e-4))
    assert align_observations(observations(starts, ends), samples=0).drift.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("moved_s", "note"),
    [
        (np.where(np.arange(60) < 30, 0, 0.5), "break the order"),
        (np.arange(60) * 1e-3, "was it set"),
    ],
)
def test_a_clock_that_was_set_or_runs_away_is_reported(moved_s: np.ndarray, note: str) -> None:
    error_s = moved_s[:, None] * np.array([0.0, 1.0])
    starts, ends = (true_s + error_s for true_s in times(60, 2, 4e-6))
    result = align_observations(observations(starts, ends), samples=0)
    assert abs(result.drift[1]) <= MOST_DRIFT * 1.001
    assert any(note in each for each in result.notes)


def test_a_drift_is_inferred_through_a_machine_between() -> None:
    drift = np.array([0.0, -8e-5, 5e-5])
    starts, ends = (shown(true_s, np.zeros(3), drift) for true_s in times(80, 3, 4e-6))
    starts[::2, 2] = np.nan
    starts[1::2, 0] = np.nan
    result = align_observations(observations(starts, ends), samples=0)
    np.testing.assert_allclose(result.drift, drift, atol=3e-7)


def test_the_steps_of_drifting_traces_replay_as_those_of_true_ones(tmp_path: Path) -> None:
    true_job = Job(ranks=2, steps=60, layers=2, jitter_us=2.0, spread_us=400.0)
    truth = TracedSteps(true_job.read(tmp_path))
    job = replace(true_job, offsets_s=(0.0, 0.1), drifts=(0.0, 4e-4)).read(tmp_path)
    result = align(job, samples=0)
    assert result.drift[1] == pytest.approx(4e-4, rel=0.02)
    steps = TracedSteps(job, result)
    for step in (0, 59):
        true_s = pytest.approx(truth.measured_s(step), abs=8e-6)
        assert steps.measured_s(step) == true_s
        assert replay(steps.dfg(step)).makespan_s == true_s
    assert np.ptp([steps.shifts_s(step)[1] for step in (0, 59)]) > 20e-6
