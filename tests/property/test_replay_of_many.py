"""Incremental and batched replays match the full replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dfg_twin import graphs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from known_examples import examples

from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Dfg, Kind
from autotune.dfg.replay import Timeline, replay
from autotune.errors import InvalidInput
from benchmarks.replay_throughput.batched import WIDTH, FixedOrder, replay_many
from benchmarks.replay_throughput.execution_graph import ExecutionGraph, execution_graph
from benchmarks.replay_throughput.incremental import IncrementalReplay

MANY = settings(max_examples=examples(60), deadline=None)
ANY_GRAPH = st.one_of(graphs(ops=30), graphs(plain=True, ops=30))


def assert_same(one: Timeline, other: Timeline) -> None:
    for name in ("duration_s", "start_s", "end_s", "cause"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@MANY
@given(ANY_GRAPH, st.integers(1, 12), st.data())
def test_replay_after_a_local_change_equals_a_full_one_to_the_bit(
    dfg: Dfg, snapshots: int, data: st.DataObject
) -> None:
    base_s = dfg.duration_s * 1.5
    base = IncrementalReplay(dfg, base_s, snapshots)
    assert_same(base.timeline, replay(dfg, base_s))
    for _ in range(3):
        changed_s = base_s.copy()
        ops = data.draw(st.lists(st.integers(0, dfg.ops - 1), max_size=3)) if dfg.ops else []
        changed_s[ops] = [data.draw(st.floats(0, 5)) for _ in ops]
        local = (np.array(ops, dtype=np.int64), changed_s[ops])
        for resumed in (base.replay(changed_s), base.replay_changed(*local)):
            assert_same(resumed.timeline, replay(dfg, changed_s))
            assert 0 <= resumed.replayed_ops <= dfg.ops


def test_a_late_change_saves_the_work_before_it(chain: Dfg) -> None:
    resumed = IncrementalReplay(chain, snapshots=10).replay_changed(np.array([95]), np.array([3.0]))
    assert resumed.replayed_ops == 10
    assert resumed.timeline.makespan_s == 102.0


def test_an_initial_op_without_duration_may_get_one() -> None:
    builder = DfgBuilder()
    queue = builder.queue("device")
    first = builder.op("first", NONE, 0.0, Kind.VIRTUAL)
    for _ in range(9):
        builder.op("later", queue, 1.0, Kind.FORWARD, [first])
    incremental = IncrementalReplay(builder.build(), snapshots=10)
    resumed = incremental.replay_changed(np.array([first]), np.array([5.0]))
    assert resumed.timeline.makespan_s == 14.0


def ends_in_order_s(graph: ExecutionGraph, duration_s: np.ndarray) -> np.ndarray:
    """End of every op (N,) by a walk over the execution graph."""
    ends_s = np.zeros(len(graph.order))
    for place, op in enumerate(graph.order):
        before = slice(graph.start[place], graph.start[place + 1])
        starts_s = ends_s[graph.predecessor[before]] + graph.lag_s[before]
        ends_s[place] = starts_s.max(initial=0.0) + duration_s[op]
    by_op = np.zeros(len(ends_s))
    by_op[graph.order] = ends_s
    return by_op


@MANY
@given(ANY_GRAPH)
def test_longest_path_of_the_execution_graph_is_the_replay(dfg: Dfg) -> None:
    timeline = replay(dfg)
    graph = execution_graph(timeline)
    np.testing.assert_array_equal(ends_in_order_s(graph, dfg.duration_s), timeline.end_s)
    place = np.argsort(graph.order)
    assert (np.repeat(place, np.diff(dfg.child_start)) < place[dfg.child]).all()
    assert (np.diff(timeline.start_s[graph.order]) >= 0).all()


def served(timeline: Timeline) -> list[list[int]]:
    """The ops that take every queue, channel and lock, in order."""
    dfg = timeline.dfg
    queues = [(dfg.queue == q) | (dfg.channel == q) for q in range(dfg.queues)]
    users = [*queues, *(dfg.acquires == lock for lock in range(dfg.locks))]
    order = np.argsort(timeline.start_s, kind="stable")
    return [order[uses[order]].tolist() for uses in users]


FACTORS = st.sampled_from([0.3, 0.7, 1.5, 4.0])


@settings(max_examples=examples(150), deadline=None)
@given(ANY_GRAPH, st.lists(st.tuples(st.integers(0, 29), FACTORS), min_size=1, max_size=3))
def test_the_execution_graph_holds_for_durations_with_the_same_order(dfg: Dfg, changes) -> None:
    """Starts do not show the order of locks with several holders, or held for no time."""
    instant = (dfg.acquires >= 0) & (dfg.duration_s == 0)
    assume(dfg.ops and (dfg.lock_capacity == 1).all() and not instant.any())
    duration_s = dfg.duration_s.copy()
    for op, factor in changes:
        duration_s[op % dfg.ops] *= factor
    timeline, other = replay(dfg), replay(dfg, duration_s)
    assume(served(timeline) == served(other))
    ends_s = ends_in_order_s(execution_graph(timeline), duration_s)
    np.testing.assert_allclose(ends_s, other.end_s, rtol=1e-12)


def test_a_lock_binds_under_other_durations() -> None:
    """In the timeline no op waits for the lock, and its first taker has the higher number."""
    builder = DfgBuilder()
    lock = builder.lock()
    for number, ready_s in enumerate((10.0, 5.0, 0.5)):
        queue, taken = builder.queue(f"q{number}"), {"acquires": lock, "releases": lock}
        before = builder.op(f"before {number}", queue, ready_s, Kind.FORWARD)
        builder.op(f"holder {number}", queue, 1.0, Kind.SEND, [before], **taken)
    dfg = builder.build()
    duration_s = np.where(dfg.duration_s == 1.0, 6.0, dfg.duration_s)
    other = replay(dfg, duration_s)
    assert other.start_s[1::2].tolist() == [12.5, 6.5, 0.5]
    ends_s = ends_in_order_s(execution_graph(replay(dfg)), duration_s)
    np.testing.assert_array_equal(ends_s, other.end_s)


DTYPES = st.sampled_from(["float32", "float64"])


@MANY
@given(ANY_GRAPH, st.integers(1, 3 * WIDTH), st.booleans(), DTYPES, st.integers(0, 2**32 - 1))
def test_many_sets_at_once_equal_a_walk_over_the_execution_graph(
    dfg: Dfg, sets: int, columns: bool, dtype: str, seed: int
) -> None:
    timeline = replay(dfg)
    factor = np.random.default_rng(seed).uniform(0.5, 2, (sets, dfg.ops))
    factor[0] = 1
    durations_s = (dfg.duration_s * factor).astype(dtype)
    graph = execution_graph(timeline)
    expected = [ends_in_order_s(graph, one_set_s).max(initial=0.0) for one_set_s in durations_s]
    given_s = np.ascontiguousarray(durations_s.T).T if columns else durations_s
    makespans_s = replay_many(timeline, given_s)
    np.testing.assert_allclose(makespans_s, expected, rtol=1e-5)
    np.testing.assert_allclose(makespans_s[0], timeline.makespan_s, rtol=1e-5)


@MANY
@given(ANY_GRAPH, st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_many_sets_match_the_replay_if_the_order_stays(dfg: Dfg, factor: float) -> None:
    """Scaling by a power of two is exact and keeps the order; unscaled gaps are removed."""
    dfg = replace(dfg, gap_s=np.zeros(dfg.ops))
    durations_s = np.repeat(dfg.duration_s[None] * factor, 2, axis=0)
    makespan_s = replay(dfg, dfg.duration_s * factor).makespan_s
    np.testing.assert_allclose(replay_many(replay(dfg), durations_s), makespan_s, rtol=1e-5)


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf, 1e39])
def test_invalid_durations_are_refused(chain: Dfg, wrong: float) -> None:
    durations_s = np.ones((2, chain.ops))
    durations_s[1, 7] = wrong
    with pytest.raises(InvalidInput, match="finite"):
        FixedOrder(replay(chain)).makespans_s(durations_s)
    if wrong != 1e39:
        with pytest.raises(InvalidInput, match="finite"):
            IncrementalReplay(chain).replay(durations_s[1])


def test_durations_of_another_graph_are_refused(chain: Dfg) -> None:
    for wrong in (np.ones((2, chain.ops + 1)), np.ones(chain.ops)):
        with pytest.raises(InvalidInput, match=r"\(sets, 100\)"):
            FixedOrder(replay(chain)).makespans_s(wrong)
