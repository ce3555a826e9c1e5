"""Known clock offsets are estimated within the allowed interval, and unknown ones are reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_examples import examples
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
    starts_s: np.ndarray,
    ends_s: np.ndarray,
    hosts: tuple[int, ...] = (),
    senders: np.ndarray | None = None,
) -> Observations:
    """Build them from (collectives, ranks) times; NaN for a rank that takes no part.

    `senders` (collectives,): the rank that sends, -1 for a collective in which all wait.
    """
    count, ranks = starts_s.shape
    of, rank = np.nonzero(np.isfinite(starts_s))
    first = np.concatenate([[0], np.cumsum(np.bincount(of, minlength=count))])
    host = np.array(hosts) if hosts else np.full(ranks, -1)
    names = tuple(f"c{k}" for k in range(count))
    waits = np.ones(len(of), dtype=np.bool_) if senders is None else senders[of] != rank
    members = (starts_s[of, rank], ends_s[of, rank], of, rank, waits, first)
    family = np.zeros(count, dtype=np.int64)
    return Observations(ranks, *members, family, np.arange(count), names, host)


@pytest.mark.parametrize("scale_s", [1e-4, 5e-2, 3.0])
def test_injected_offsets_are_recovered_to_microseconds_and_lie_in_the_interval(
    tmp_path: Path, scale_s: float
) -> None:
    offsets = np.concatenate([[0.0], np.random.default_rng(5).normal(size=3) * scale_s])
    job = Job(ranks=4, steps=5, jitter_us=4.0, offsets_s=tuple(offsets)).read(tmp_path)
    result = align(job, samples=4)
    np.testing.assert_allclose(result.offset_s, offsets, atol=3e-6)
    assert np.all(result.low_s - 1e-6 <= offsets) and np.all(offsets <= result.high_s + 1e-6)
    assert result.worst_slack_s == 0 and result.offset_s[0] == 0
    assert np.all(result.spread_s[1:] < 3e-6) and result.end_spread_s[1] < 5e-6


def test_aligned_traces_replay_with_a_fraction_of_the_error_of_raw_ones(tmp_path: Path) -> None:
    truth = Job(ranks=4, steps=4, spread_us=400.0, jitter_us=4.0)
    true_s = [TracedSteps(truth.read(tmp_path)).measured_s(step) for step in range(4)]
    job = replace(truth, offsets_s=(0.0, 2e-3, -1e-3, 4e-3)).read(tmp_path)
    errors, transfer_errors_s = [], []
    for alignment in (None, align(job, samples=2)):
        graphs = [TracedSteps(job, alignment).dfg(step) for step in range(4)]
        replayed_s = np.array([replay(dfg).makespan_s for dfg in graphs])
        errors.append(np.mean(np.abs(replayed_s / true_s - 1)))
        sent_s = graphs[1].duration_s[graphs[1].kind == Kind.COLLECTIVE]
        transfer_errors_s.append(np.abs(sent_s - 200e-6).max())  # `transfer_us`
    assert errors[1] < 0.01 and errors[0] > 20 * errors[1]
    assert transfer_errors_s[1] < 20e-6 < 150e-6 < transfer_errors_s[0]


def test_descheduled_ranks_do_not_move_the_clocks() -> None:
    rng = np.random.default_rng(2)
    starts = rng.uniform(0, 1e-3, (40, 3)) + np.arange(40)[:, None]
    ends = starts.max(axis=1, keepdims=True) + 1e-3 + rng.uniform(0, 5e-6, (40, 3))
    late = rng.random((40, 3)) < 0.2
    ends[late] += rng.exponential(5e-3, int(late.sum()))
    offset = np.array([0.0, 0.3, -0.1])
    result = align_observations(observations(starts - offset, ends - offset), samples=2)
    np.testing.assert_allclose(result.offset_s, offset, atol=5e-6)


def test_ranks_of_one_host_share_a_clock_even_where_their_links_differ() -> None:
    rng = np.random.default_rng(3)
    starts = rng.uniform(0, 1e-3, (20, 4)) + np.arange(20)[:, None]
    ends = starts.max(axis=1, keepdims=True) + 1e-3 + rng.normal(size=(20, 4)) * 5e-5
    ends += np.array([0, 6e-5, 0, 6e-5])
    apart, tied = (
        align_observations(observations(starts, ends, hosts), samples=0)
        for hosts in ((), (0, 0, 1, 1))
    )
    assert abs(apart.offset_s[1]) > 2e-5 and abs(tied.offset_s[1]) < 2e-6
    assert abs(tied.offset_s[2] - tied.offset_s[3]) < 2e-6
    assert any("hosts" in note for note in apart.notes) and not tied.notes


def test_an_order_that_no_offset_explains_is_met_with_slack_and_reported() -> None:
    starts = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    ends = starts + 0.5
    for times in (starts, ends):  # each rank once begins 0.2 s after the other has ended
        times[[1, 2], [0, 1]] += 0.7
    result = align_observations(observations(starts, ends), samples=0)
    assert result.slack_s.sum() == pytest.approx(0.4, abs=1e-4) and result.slack_s[0] == 0
    assert set(result.residuals) <= {"c1", "c2"}
    assert any("break the order" in note for note in result.notes)
    assert np.all(result.low_s <= result.offset_s) and np.all(result.offset_s <= result.high_s)


def test_the_order_of_events_limits_the_offsets_that_the_ends_suggest() -> None:
    """The second rank's link is slower: its ends are 10 ms late on clocks that agree.

    It ended the last one 2 ms after the first had begun, so its clock is at most 2 ms late. The
    many ends before pull harder together than a price of slack did.
    """
    starts = np.arange(600.0)[:, None] + np.zeros((600, 2))
    ends = starts + np.array([0.1, 0.11])
    starts[-1, 0] = ends[-1, 1] - 2e-3
    ends[-1, 0] = ends[-1, 1]
    result = align_observations(observations(starts, ends), samples=0)
    assert result.offset_s[1] == pytest.approx(-2e-3, abs=1e-6) and result.worst_slack_s < 1e-6


def test_thinning_keeps_the_few_collectives_that_tie_hosts_together() -> None:
    """Two hosts share 6 of 66,000 collectives, at places that an even spacing over all misses."""
    rng = np.random.default_rng(4)
    count, shared = 66_000, np.arange(5_002, 66_000, 11_000)
    starts = rng.uniform(0, 1e-4, (count, 4)) + np.arange(count)[:, None] * 1e-3
    ends = starts.max(axis=1, keepdims=True) + 1e-4 + rng.uniform(0, 2e-6, (count, 4))
    alone = np.setdiff1d(np.arange(count), shared)
    starts[alone[::2], 2:] = np.nan
    starts[alone[1::2], :2] = np.nan
    offset = np.array([0.0, 1e-3, 0.4, 0.401])
    family = np.arange(count) % 2
    family[shared] = 2
    observed = observations(starts - offset, np.where(np.isnan(starts), np.nan, ends) - offset)
    result = align_observations(replace(observed, family=family), samples=0)
    np.testing.assert_allclose(result.offset_s, offset, atol=5e-6)
    assert any("used to find the offsets" in note for note in result.notes)


def test_traces_that_cannot_be_aligned_are_reported(tmp_path: Path) -> None:
    alone = Job(ranks=1).read(tmp_path)
    assert align(alone).offset_s.tolist() == [0.0]
    with pytest.raises(InvalidInput, match="no collective was matched"):
        align(Job(ranks=2, collectives=False).read(tmp_path))
    nan = np.nan
    starts = np.array([[0.0, 0.0, nan], [1.0, 1.0, nan], [nan, nan, 3.0]])
    apart = align_observations(observations(starts, starts + 0.5), samples=0)
    assert apart.offset_s[2] == 0 and np.isinf(apart.low_s[2]) and np.isinf(apart.high_s[2])
    assert any("share no collective" in note for note in apart.notes)


def test_thousands_of_ranks_have_constraints_per_member_not_per_pair(tmp_path: Path) -> None:
    job = Job(ranks=3, steps=2).read(tmp_path)
    times = observe(job)
    assert times.members == 3 * times.collectives == 3 * 2 * 4
    ranks = 1000
    starts = np.random.default_rng(0).uniform(0, 1e-3, (4, ranks)) + np.arange(4)[:, None]
    ends = np.broadcast_to(starts.max(axis=1, keepdims=True) + 1e-3, starts.shape)
    offset = np.concatenate([[0.0], np.random.default_rng(1).normal(size=ranks - 1)])
    low_s, high_s = feasible_intervals(observations(starts - offset, ends - offset), np.zeros(4))
    assert np.all(low_s <= offset + 1e-9) and np.all(offset <= high_s + 1e-9)
    assert np.all(high_s - low_s < 5e-3)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(2, 4), st.integers(1, 4), st.integers(0, 10**6))
def test_intervals_equal_the_linear_programs(ranks: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    offset = np.concatenate([[0.0], rng.normal(size=ranks - 1)])
    starts = rng.uniform(0, 1, (count, ranks))
    ends = starts.max(axis=1, keepdims=True) + rng.uniform(0, 1, (count, ranks))
    absent = rng.random((count, ranks)) < 0.2
    absent[:, rng.integers(ranks)] = False
    senders = np.full(count, -1)
    for k in np.flatnonzero(rng.random(count) < 0.4):  # a send and its receive
        ends_of = rng.permutation(ranks)[:2]
        senders[k], receiver = ends_of
        absent[k] = ~np.isin(np.arange(ranks), ends_of)
        ends[k, senders[k]] = starts[k, senders[k]] + rng.uniform(0, 0.1)
        ends[k, receiver] = np.nanmax(starts[k, ends_of]) + rng.uniform(0, 1)
    absent[0], senders[0] = False, -1
    ends[0] = starts[0].max() + rng.uniform(0, 1, ranks)
    starts[absent] = np.nan
    times = observations(starts - offset, ends - offset, senders=senders)
    low_s, high_s = feasible_intervals(times, np.zeros(count))
    # of each two members, the second of which waits: start_a + theta_a <= end_b + theta_b
    pairs = np.argwhere((times.of[:, None] == times.of[None, :]) & times.waits[None, :])
    rank = np.eye(ranks)[times.rank]
    rows = rank[pairs[:, 0]] - rank[pairs[:, 1]]
    gaps_s = times.end_s[pairs[:, 1]] - times.start_s[pairs[:, 0]]
    free = [(0.0, 0.0)] + [(None, None)] * (ranks - 1)
    for member in range(ranks):
        for sign, bound_s in ((1, low_s), (-1, high_s)):
            cost = sign * np.eye(ranks)[member]
            solved = linprog(cost, A_ub=rows, b_ub=gaps_s, bounds=free)
            assert bound_s[member] == pytest.approx(solved.x[member], abs=1e-6)
