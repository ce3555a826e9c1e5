"""Properties that hold for any step times."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autotune.records import Measured, Role, TrialRequest
from autotune.tuning.statistics import (
    PairRule,
    changed_within,
    enough_pairs,
    further_steps,
    median_interval,
    neighbour_noise,
    reference_tolerance,
    size_half_width,
    stop_reason,
)

SECONDS = st.floats(1e-4, 100.0)
TIMES = st.lists(SECONDS, min_size=6, max_size=40)
SIZES = st.integers(0, 40)
sixty = settings(max_examples=60, deadline=None)


@sixty
@given(TIMES, st.sampled_from([0.5, 2.0, 1024.0]))
def test_the_relative_interval_does_not_depend_on_the_unit_of_time(times, factor):
    interval, scaled = median_interval(times), median_interval([factor * value for value in times])
    assert interval is not None and scaled is not None
    assert interval.low <= interval.middle <= interval.high
    assert interval.middle == float(np.median(times))
    assert scaled.half_width == pytest.approx(interval.half_width, rel=1e-6, abs=1e-12)


@sixty
@given(TIMES, st.integers(1, 12), SIZES, st.floats(0.001, 1.0), st.none() | SECONDS, SIZES)
def test_a_trial_stays_within_its_cap(times, batch, most, precision, losing_s, left_out):
    limits = {"most_steps": most, "precision": precision, "losing_s": losing_s}
    request = TrialRequest(0, "strategy", Role.CANDIDATE, 2, batch, **limits)
    outcome = Measured((tuple(times),), left_out=left_out)
    steps = further_steps(request, outcome)
    assert 0 <= steps <= batch
    assert steps == 0 or len(times) + left_out + steps <= most
    assert (steps == 0) == (stop_reason(request, outcome) is not None or most == 0)


@sixty
@given(TIMES)
def test_a_change_looks_the_same_backwards_when_the_trial_has_whole_quarters(times):
    times = times[: len(times) // 4 * 4]
    forward, backward = (Measured((tuple(each),)) for each in (times, times[::-1]))
    assert changed_within(forward) == changed_within(backward)
    assert neighbour_noise(times) == pytest.approx(neighbour_noise(times[::-1]))


@sixty
@given(st.lists(SECONDS, max_size=20), st.floats(0.001, 1.0))
def test_the_tolerance_never_exceeds_the_deviation_that_was_asked_for(references_s, deviation):
    assert 0 < reference_tolerance(references_s, deviation) <= deviation


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-0.04, 0.04), min_size=6, max_size=20), st.data())
def test_swapping_the_sides_of_any_pair_never_makes_a_comparison_precise(logs, data):
    rule = PairRule(0.95, 0.02, 6, 10_000)  # with this cap, no look shows a clear loss
    signs = data.draw(st.lists(st.sampled_from([-1, 1]), min_size=len(logs), max_size=len(logs)))
    sides = [0 * np.array(logs), np.array(logs), np.array(logs) * signs]
    current, first, second = ([Measured(((math.exp(x),),)) for x in side] for side in sides)
    # At equality, the last bit of a logarithm decides.
    assume(abs(size_half_width(np.array(logs), 0.025) - 0.02) > 1e-9)
    assert enough_pairs(first, current, rule) == enough_pairs(second, current, rule)
