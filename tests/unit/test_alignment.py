"""Known clock offsets are found within the allowed interval, and unknown ones are reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from synthetic_traces import Job

from autotune.dfg.graph import Kind
from autotune.dfg.replay import replay
from autotune.errors import InvalidInput
from autotune.profiling.alignment import align
from autotune.profiling.alignment.align import align_observations
from autotune.profiling.alignment.intervals import feasible_intervals
from autotune.profiling.alignment.observations import Observations, observe
from autotune.profiling.graph.traced_steps import TracedSteps


def observations(
    starts_s: np.ndarray, ends_s: np.ndarray, hosts: tuple[int, ...] = ()
) -> Observations:
    """Of (collectives, ranks) times; NaN where a rank takes no part."""
    count, ranks = starts_s.shape
    of, rank = np.nonzero(np.isfinite(starts_s))
    first = np.concatenate([[0], np.cumsum(np.bincount(of, minlength=count))])
    host = np.array(hosts) if hosts else np.full(ranks, -1)
    names = tuple(f"c{k}" for k in range(count))
    members = (starts_s[of, rank], ends_s[of, rank], of, rank, first)
    family = np.zeros(count, dtype=np.int64)
    return Observations(ranks, *members, family, np.arange(count), names, host)


@pytest.mark.parametrize("scale_s", [1e-4, 5e-2, 3.0])
def test_injected_offsets_are_recovered_to_microseconds_and_lie_in_the_interval(
    tmp_path: Path, scale_s: float
) -> None:
    offsets = np.concatenate([[0.0], np.random.default_rng(5).normal(size=3) * scale_s])
    job = Job(ranks=4, steps=5, jitter_us=4.0, offsets_s=tuple(offsets)).read(tmp_path)
    found = align(job, samples=4)
    np.testing.assert_allclose(found.offset_s, offsets, atol=3e-6)
    assert np.all(found.low_s - 1e-6 <= offsets) and np.all(offsets <= found.high_s + 1e-6)
    assert found.worst_slack_s == 0 and np.all(found.spread_s[1:] < 3e-6) and found.offset_s[0] == 0
    assert found.end_spread_s[1] < 5e-6


def test_the_replay_of_aligned_traces_errs_by_a_fraction_of_that_of_raw_ones(
    tmp_path: Path,
) -> None:
    truth = Job(ranks=4, steps=4, spread_us=400.0, jitter_us=4.0)
    true_s = [TracedSteps(truth.read(tmp_path)).measured_s(step) for step in range(4)]
    job = Job(
        ranks=4, steps=4, spread_us=400.0, jitter_us=4.0, offsets_s=(0.0, 2e-3, -1e-3, 4e-3)
    ).read(tmp_path)
    aligned = align(job, samples=2)
    errors = [
        [
            abs(replay(TracedSteps(job, how).dfg(step)).makespan_s / true_s[step] - 1)
            for step in range(4)
        ]
        for how in (None, aligned)
    ]
    assert np.mean(errors[1]) < 0.01 and np.mean(errors[0]) > 20 * np.mean(errors[1])
    sent_s = [
        dfg.duration_s[dfg.kind == Kind.COLLECTIVE]
        for dfg in (TracedSteps(job, how).dfg(1) for how in (None, aligned))
    ]
    assert (
        np.abs(sent_s[1] - 200e-6).max() < 20e-6 < 150e-6 < np.abs(sent_s[0] - 200e-6).max()
    )  # `transfer_us`


def test_descheduled_ranks_do_not_move_the_clocks() -> None:
    rng = np.random.default_rng(2)
    starts = rng.uniform(0, 1e-3, (40, 3)) + np.arange(40)[:, None]
    ends = starts.max(axis=1, keepdims=True) + 1e-3 + rng.uniform(0, 5e-6, (40, 3))
    late = rng.random((40, 3)) < 0.2
    ends[late] += rng.exponential(5e-3, int(late.sum()))
    offset = np.array([0.0, 0.3, -0.1])
    found = align_observations(observations(starts - offset, ends - offset), samples=2)
    np.testing.assert_allclose(found.offset_s, offset, atol=5e-6)


def test_ranks_of_one_host_share_a_clock_even_where_their_links_differ() -> None:
    rng = np.random.default_rng(3)
    starts = rng.uniform(0, 1e-3, (20, 4)) + np.arange(20)[:, None]
    ends = (
        starts.max(axis=1, keepdims=True)
        + 1e-3
        + rng.normal(size=(20, 4)) * 5e-5
        + np.array([0, 6e-5, 0, 6e-5])
    )
    apart, tied = (
        align_observations(observations(starts, ends, hosts), samples=0)
        for hosts in ((), (0, 0, 1, 1))
    )
    assert abs(apart.offset_s[1]) > 2e-5 and abs(tied.offset_s[1]) < 2e-6
    assert abs(tied.offset_s[2] - tied.offset_s[3]) < 2e-6
    assert any("hosts" in note for note in apart.notes) and not tied.notes


def test_an_order_that_no_offset_explains_is_met_with_slack_and_told() -> None:
    starts = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    ends = starts + 0.5
    for step, late in (
        (1, 0),
        (2, 1),
    ):  # begins 0.2 s after the other has ended: once the one, once the other
        starts[step, late] += 0.7
        ends[step, late] += 0.7
    found = align_observations(observations(starts, ends), samples=0)
    assert found.slack_s.sum() == pytest.approx(0.4, abs=1e-4) and found.slack_s[0] == 0
    assert set(found.residuals) <= {"c1", "c2"} and any(
        "break the order" in note for note in found.notes
    )
    assert np.all(found.low_s <= found.offset_s) and np.all(found.offset_s <= found.high_s)


def test_the_order_of_events_limits_what_the_ends_alone_would_say() -> None:
    starts = np.arange(6.0)[:, None] + np.zeros((6, 2))
    ends = starts + np.array(
        [0.1, 0.11]
    )  # the second rank's link is slower: its ends are 10 ms late on clocks that agree
    starts[5, 0] = (
        ends[5, 1] - 2e-3
    )  # it ended this one 2 ms after the first had begun, so its clock is at most 2 ms late
    ends[5, 0] = ends[5, 1]
    found = align_observations(observations(starts, ends), samples=0)
    assert found.offset_s[1] == pytest.approx(-2e-3, abs=1e-6) and found.worst_slack_s < 1e-6


def test_what_cannot_be_aligned_is_said(tmp_path: Path) -> None:
    alone = Job(ranks=1).read(tmp_path)
    assert align(alone).offset_s.tolist() == [0.0]
    with pytest.raises(InvalidInput, match="no collective was matched"):
        align(Job(ranks=2, collectives=False).read(tmp_path))
    nan = np.nan
    starts = np.array([[0.0, 0.0, nan], [1.0, 1.0, nan], [nan, 3.0, nan]])
    starts = np.vstack([starts[:2], [[nan, nan, 3.0]]])
    apart = align_observations(replace(observations(starts, starts + 0.5)), samples=0)
    assert apart.offset_s[2] == 0 and np.isinf(apart.low_s[2]) and np.isinf(apart.high_s[2])
    assert any("share no collective" in note for note in apart.notes)


def test_thousands_of_ranks_have_constraints_per_member_not_per_pair(tmp_path: Path) -> None:
    job = Job(ranks=3, steps=2).read(tmp_path)
    seen = observe(job)
    assert seen.members == 3 * seen.collectives == 3 * 2 * 4
    ranks = 1000
    starts = np.random.default_rng(0).uniform(0, 1e-3, (4, ranks)) + np.arange(4)[:, None]
    ends = np.broadcast_to(starts.max(axis=1, keepdims=True) + 1e-3, starts.shape)
    offset = np.concatenate([[0.0], np.random.default_rng(1).normal(size=ranks - 1)])
    low_s, high_s = feasible_intervals(observations(starts - offset, ends - offset), np.zeros(4))
    assert (
        np.all(low_s <= offset + 1e-9)
        and np.all(offset <= high_s + 1e-9)
        and np.all(high_s - low_s < 5e-3)
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(1, 4), st.integers(0, 10**6))
def test_intervals_equal_the_linear_programs(ranks: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    offset = np.concatenate([[0.0], rng.normal(size=ranks - 1)])
    starts = rng.uniform(0, 1, (count, ranks))
    ends = starts.max(axis=1, keepdims=True) + rng.uniform(0, 1, (count, ranks))
    absent = rng.random((count, ranks)) < 0.2
    absent[:, rng.integers(ranks)] = False
    absent[0] = False
    starts[absent] = np.nan
    seen = observations(starts - offset, ends - offset)
    low_s, high_s = feasible_intervals(seen, np.zeros(count))
    rows, bounds = [], []
    for a in range(seen.members):
        for b in range(seen.members):
            if seen.of[a] == seen.of[b]:  # start_a + theta_a <= end_b + theta_b
                row = np.zeros(ranks)
                row[seen.rank[a]] += 1
                row[seen.rank[b]] -= 1
                rows.append(row)
                bounds.append(seen.end_s[b] - seen.start_s[a])
    free = [(0.0, 0.0)] + [(None, None)] * (ranks - 1)
    for rank in range(ranks):
        for sign, found in ((1, low_s[rank]), (-1, high_s[rank])):
            solved = linprog(
                sign * np.eye(ranks)[rank], A_ub=np.array(rows), b_ub=bounds, bounds=free
            )
            assert found == pytest.approx(solved.x[rank], abs=1e-6)
