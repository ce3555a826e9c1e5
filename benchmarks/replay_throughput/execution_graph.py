"""The execution graph of a timeline (dPRO, sec. 4.3): the data-flow graph plus resource orders.

If every queue, channel and lock keeps its order, an op starts when the last of its predecessors has
ended, for some after a gap. So a longest path replaces queues, clocks and events.

| symbol | meaning |
|---|---|
| N | ops, renumbered in the order of execution |
| P | predecessors of all ops together |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray, Int32Array, IntArray
from autotune.dfg.graph import Dfg
from autotune.dfg.replay import Timeline


@dataclass(frozen=True, eq=False)
class ExecutionGraph:
    """`order` (N,): the op at each position, every op behind its predecessors.

    `start` (N + 1,), `predecessor` (P,): CSR of positions, predecessors in ascending order. `lag_s`
    (P,): time between the end of the predecessor and the earliest start, the gap of a queue.
    """

    order: Int32Array
    start: IntArray
    predecessor: Int32Array
    lag_s: FloatArray


def execution_graph(timeline: Timeline) -> ExecutionGraph:
    """The graph whose longest paths, with the timeline's durations, are its starts and ends.

    Simultaneous ops without duration are in an order that the graph allows, which may differ from
    that of the replay.
    """
    dfg = timeline.dfg
    depth = np.empty(dfg.ops, dtype=np.int64)
    depth[dfg.topological_order] = np.arange(dfg.ops)
    order = np.lexsort((depth, timeline.end_s, timeline.start_s)).astype(np.int32)
    position = np.empty(dfg.ops, dtype=np.int64)
    position[order] = np.arange(dfg.ops)
    parent_start, parent = parent_csr(dfg)
    child = np.repeat(np.arange(dfg.ops), np.diff(parent_start))
    caused = np.flatnonzero(timeline.cause >= 0)
    edges = [
        (parent.astype(np.int64), child, np.zeros(len(parent))),
        (timeline.cause[caused].astype(np.int64), caused, np.zeros(len(caused))),
        _queue_edges(timeline, position),
        *(_lock_edges(timeline, position, lock) for lock in range(dfg.locks)),
    ]
    before, behind = (position[np.concatenate([edge[side] for edge in edges])] for side in (0, 1))
    lag_s = np.concatenate([edge[2] for edge in edges])
    keep = before < behind
    return ExecutionGraph(order, *_csr_of_longest(dfg.ops, before[keep], behind[keep], lag_s[keep]))


def parent_csr(dfg: Dfg) -> tuple[IntArray, Int32Array]:
    """(parent_start (N + 1,), parent (E,)): the reversed edges; parents in ascending order."""
    start = np.concatenate([[0], np.cumsum(dfg.parents_left, dtype=np.int64)])
    parent = np.repeat(np.arange(dfg.ops, dtype=np.int32), np.diff(dfg.child_start))
    return start, parent[np.argsort(dfg.child, kind="stable")]


def _queue_edges(timeline: Timeline, position: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
    """(before, behind, lag_s) of every two ops that follow each other on a queue or channel."""
    dfg = timeline.dfg
    ops = np.concatenate([np.flatnonzero(dfg.queue >= 0), np.flatnonzero(dfg.channel >= 0)])
    takes = np.concatenate([dfg.queue[dfg.queue >= 0], dfg.channel[dfg.channel >= 0]])
    by_queue = np.lexsort((position[ops], takes))
    ops, takes = ops[by_queue], takes[by_queue]
    same = np.flatnonzero(takes[1:] == takes[:-1])
    before = ops[same]
    return before, ops[same + 1], np.where(dfg.queue[before] == takes[same], dfg.gap_s[before], 0.0)


def _lock_edges(
    timeline: Timeline, position: IntArray, lock: int
) -> tuple[IntArray, IntArray, FloatArray]:
    """(before, behind, lag_s): with capacity c the k-th taker waits for the (k - c)-th release."""
    dfg = timeline.dfg
    takers = np.flatnonzero(dfg.acquires == lock)
    takers = takers[np.argsort(position[takers])]
    givers = np.flatnonzero(dfg.releases == lock)
    givers = givers[np.lexsort((position[givers], timeline.end_s[givers]))]
    behind = takers[dfg.lock_capacity[lock] :]
    before = givers[: len(behind)]
    return before, behind[: len(before)], np.zeros(len(before))


def _csr_of_longest(
    ops: int, before: IntArray, behind: IntArray, lag_s: FloatArray
) -> tuple[IntArray, Int32Array, FloatArray]:
    """(start, predecessor, lag_s), with the longest lag between the same two ops."""
    by_lag = np.lexsort((-lag_s, before, behind))
    before, behind, lag_s = before[by_lag], behind[by_lag], lag_s[by_lag]
    first = np.ones(len(before), dtype=np.bool_)
    first[1:] = (before[1:] != before[:-1]) | (behind[1:] != behind[:-1])
    start = np.concatenate([[0], np.cumsum(np.bincount(behind[first], minlength=ops))])
    return start, before[first].astype(np.int32), lag_s[first]
