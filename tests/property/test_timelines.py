"""Properties of every timeline: no overlap, no early op, and the critical path is the makespan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
from dfg_twin import graphs, relabelled
from hypothesis import given, settings
from hypothesis import strategies as st
from known_examples import examples

from autotune.dfg.critical_path import critical_path
from autotune.dfg.graph import COMMUNICATION, COMPUTATION, NONE, Dfg, Kind, Names
from autotune.dfg.replay import Timeline, replay
from autotune.dfg.utilisation import (
    busy_share,
    covered_s,
    exposed_communication_s,
    iteration_summary,
)
from benchmarks.replay_throughput.execution_graph import parent_csr

MANY = settings(max_examples=examples(100), deadline=None)
ANY_GRAPH = st.one_of(graphs(ops=25), graphs(plain=True, ops=25))


def longest_chain_s(dfg: Dfg) -> float:
    start, parent = parent_csr(dfg)
    ends_s = np.zeros(dfg.ops)
    for op in dfg.topological_order:
        ends_s[op] = ends_s[parent[start[op] : start[op + 1]]].max(initial=0.0) + dfg.duration_s[op]
    return float(ends_s.max(initial=0.0))


def assert_one_at_a_time(timeline: Timeline, queue: int) -> None:
    dfg = timeline.dfg
    users = [op for op in range(dfg.ops) if queue in (dfg.queue[op], dfg.channel[op])]
    users.sort(key=lambda op: timeline.start_s[op])
    for one, two in pairwise(users):
        gap_s = dfg.gap_s[one] if dfg.queue[one] == queue else 0.0
        assert timeline.end_s[one] + gap_s <= timeline.start_s[two]


@MANY
@given(ANY_GRAPH)
def test_no_op_is_early_and_no_resource_is_overused(dfg: Dfg) -> None:
    timeline = replay(dfg)
    np.testing.assert_array_equal(timeline.end_s, timeline.start_s + dfg.duration_s)
    start, parent = parent_csr(dfg)
    for op in range(dfg.ops):
        assert np.all(timeline.end_s[parent[start[op] : start[op + 1]]] <= timeline.start_s[op])
    for queue in range(dfg.queues):
        assert_one_at_a_time(timeline, queue)
    for op in np.flatnonzero(dfg.acquires >= 0).tolist():
        # one op each holds every lock of these graphs
        at_s = timeline.start_s[op]
        runs = (timeline.start_s <= at_s) & (timeline.end_s > at_s)
        holders = (dfg.acquires == dfg.acquires[op]) & runs
        assert holders.sum() <= dfg.lock_capacity[dfg.acquires[op]]


@MANY
@given(st.one_of(ANY_GRAPH, graphs(shared=True, ops=25)))
def test_critical_path_explains_the_makespan(dfg: Dfg) -> None:
    timeline = replay(dfg, 1.5 * dfg.duration_s)
    path = critical_path(timeline)
    assert timeline.makespan_s >= 1.5 * longest_chain_s(dfg) * (1 - 1e-12)
    assert timeline.makespan_s >= timeline.duration_s[path.ops].sum() * (1 - 1e-12)
    parts = path.computation_s + path.communication_s + path.other_s + path.total_wait_s
    np.testing.assert_allclose(parts, timeline.makespan_s)
    np.testing.assert_allclose(sum(path.by_layer.values()), sum(path.by_kind.values()))
    if dfg.ops:
        last = path.ops[-1]
        earlier_s = timeline.end_s[:last].max(initial=-1.0)
        assert timeline.end_s[last] == timeline.makespan_s > earlier_s
        assert path.wait_s.min() >= 0
        waits = path.wait_s[1:]
        assert set(waits[waits > 1e-9].round(9)) <= set(dfg.gap_s[path.ops[:-1]].round(9))


@MANY
@given(ANY_GRAPH, st.integers(0, 2**32 - 1))
def test_without_contention_faster_ops_are_never_slower(dfg: Dfg, seed: int) -> None:
    """With a queue per op the makespan is the longest chain, so it must fall with the durations."""
    queue = np.arange(dfg.ops, dtype=np.int32)
    none = np.full(dfg.ops, NONE, dtype=np.int32)
    names = Names(dfg.names.ops, tuple(f"q{op}" for op in queue))
    fifo = np.zeros(dfg.ops, np.int8)
    queues = replace(dfg, queue=queue, discipline=fifo, names=names, channel=none)
    free = replace(queues, acquires=none, releases=none)
    timeline = replay(free)
    np.testing.assert_allclose(timeline.makespan_s, longest_chain_s(free))
    faster = replay(free, free.duration_s * np.random.default_rng(seed).uniform(0, 1, dfg.ops))
    assert np.all(faster.end_s <= timeline.end_s)


@MANY
@given(ANY_GRAPH, st.integers(0, 2**32 - 1))
def test_relabelling_ops_changes_nothing(dfg: Dfg, seed: int) -> None:
    """Ops of one queue keep their order, since the lowest index goes first; all others mix."""
    rng = np.random.default_rng(seed)
    priority = rng.permutation(dfg.ops).astype(np.int32)
    dfg = replace(dfg, priority=priority, duration_s=rng.uniform(0.1, 1, dfg.ops))
    number = rng.permutation(dfg.ops)  # of each op
    for queue in range(dfg.queues):
        number[dfg.queue == queue] = np.sort(number[dfg.queue == queue])
    one, two = replay(dfg), replay(relabelled(dfg, number))
    np.testing.assert_array_equal(one.start_s, two.start_s[number])


@MANY
@given(ANY_GRAPH)
def test_busy_and_exposed_times_match_a_fine_clock(dfg: Dfg) -> None:
    timeline = replay(dfg, 1.5 * dfg.duration_s)
    edges = np.unique(np.concatenate([timeline.start_s, timeline.end_s, [0.0]]))
    middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    runs = (timeline.start_s[:, None] < middle) & (timeline.end_s[:, None] > middle)

    def of(kinds: Iterable[int], worker: int | None) -> np.ndarray:
        selected = np.isin(dfg.kind, list(kinds))
        if worker is not None:
            selected &= (dfg.worker == worker) | (dfg.worker == NONE)
        return runs[selected].any(axis=0)

    for worker in (0, 1, None):
        exposed = of(COMMUNICATION, worker) & ~of(COMPUTATION, worker)
        exposed_s = exposed_communication_s(timeline, worker)
        np.testing.assert_allclose(exposed_s, width[exposed].sum(), atol=1e-9)
    share = busy_share(timeline)
    for queue in range(dfg.queues):
        used = runs[(dfg.queue == queue) | (dfg.channel == queue)].any(axis=0)
        np.testing.assert_allclose(share[queue] * timeline.makespan_s, width[used].sum(), atol=1e-9)
    summary = iteration_summary(timeline)
    assert summary.exposed_communication_s == exposed_communication_s(timeline, summary.worker)
    counted: dict[str, Iterable[Kind]] = {
        "forward_s": {Kind.FORWARD},
        "backward_s": {Kind.BACKWARD},
    }
    counted |= {"update_s": {Kind.UPDATE}, "communication_s": COMMUNICATION}
    for name, kinds in counted.items():
        busy_s = width[of(kinds, summary.worker)].sum()
        np.testing.assert_allclose(getattr(summary, name), busy_s, atol=1e-9, err_msg=name)
    computes, sends = (of(kinds, summary.worker) for kinds in (COMPUTATION, COMMUNICATION))
    np.testing.assert_allclose(summary.computation_s, width[computes].sum(), atol=1e-9)
    np.testing.assert_allclose(summary.idle_s, width[~computes & ~sends].sum(), atol=1e-9)
    ranked = dfg.worker != NONE
    training = dfg.worker[ranked & (dfg.kind == Kind.BACKWARD)]
    if training.size:  # a server does not count beside workers that train
        ranked &= np.isin(dfg.worker, training)
    ends_s = timeline.end_s[dfg.worker == summary.worker]
    if ranked.any():
        assert summary.worker != NONE and ends_s.max() == timeline.end_s[ranked].max()
    assert summary.bottleneck_share == share.max()


def test_covered_time_counts_overlaps_once() -> None:
    starts_s = np.array([4.0, 0.0, 1.0, 6.0, -2.0])
    assert covered_s(starts_s, np.array([5.0, 3.0, 2.0, 6.0, -1.0])) == 5.0
