"""Replay many sets of durations at once in the order of one timeline, by longest paths.

Every queue, channel and lock serves its ops in the order of the base timeline. If other durations
would change that order, the result is the time of a run in the old order, not that of `replay`.
Otherwise it is that of `replay` up to the rounding of float32.

| symbol | meaning |
|---|---|
| N | ops |
| B | sets of durations |
| WIDTH | sets in one walk: a row of an op's times fills whole vector registers and cache lines |
"""

from __future__ import annotations

import numpy as np

from autotune.arrays import Float32Array, FloatArray, Int32Array, IntArray
from autotune.dfg.compiled import compiled
from autotune.dfg.replay import Timeline
from autotune.errors import InvalidInput
from benchmarks.replay_throughput.execution_graph import execution_graph

WIDTH = 32
TILE = 16  # durations in one cache line of float32


class FixedOrder:
    """The execution graph of a timeline, prepared once for many sets of durations."""

    def __init__(self, timeline: Timeline) -> None:
        graph = execution_graph(timeline)
        self.ops = len(graph.order)
        self._order = graph.order
        self._in_place = np.arange(self.ops, dtype=np.int32)
        self._position = np.empty(self.ops, dtype=np.int32)
        self._position[self._order] = self._in_place
        self._start = graph.start
        self._predecessor = graph.predecessor
        self._lag_s = graph.lag_s.astype(np.float32) if graph.lag_s.any() else None
        last = np.ones(self.ops, dtype=np.bool_)
        last[graph.predecessor] = False
        self._last = np.flatnonzero(last).astype(np.int32)

    def makespans_s(self, durations_s: FloatArray | Float32Array) -> FloatArray:
        """Time of the last end for every set, shape (B,), of `durations_s` (B, N) in seconds.

        The transpose of an array of shape (N, B) is read fastest. Raises `InvalidInput` for a wrong
        shape, and for durations below 0 or not finite.
        """
        if durations_s.ndim != 2 or durations_s.shape[1] != self.ops:
            raise InvalidInput(
                f"durations must have shape (sets, {self.ops}), but have {durations_s.shape}"
            )
        if durations_s.size and not (
            durations_s.min() >= 0 and durations_s.max() <= np.finfo(np.float32).max
        ):
            raise InvalidInput(
                "durations must be finite and at least 0, "
                f"but go from {durations_s.min()} to {durations_s.max()}"
            )
        singles = durations_s.astype(np.float32, copy=False).view()
        singles.flags.writeable = False
        sets = len(singles)
        makespans_s = np.zeros(-(-sets // WIDTH) * WIDTH, dtype=np.float32)
        ends_s = np.empty((self.ops, WIDTH), dtype=np.float32)
        for first in range(0, sets, WIDTH):
            some = singles[first : first + WIDTH]
            if len(some) == WIDTH and singles.T.flags.c_contiguous:
                walked = (singles.T, first, self._order)
            else:
                walked = (self._in_order(some), 0, self._in_place)
            _walk(
                *walked,
                self._start,
                self._predecessor,
                self._lag_s,
                self._last,
                ends_s,
                makespans_s[first : first + WIDTH],
            )
        return makespans_s[:sets].astype(np.float64)

    def _in_order(self, durations_s: Float32Array) -> Float32Array:
        """Durations of at most WIDTH sets as (N, WIDTH) in the order of execution."""
        columns = np.zeros((self.ops, WIDTH), dtype=np.float32)
        rows = np.ascontiguousarray(durations_s).view()
        rows.flags.writeable = False
        _transpose(rows, self._position, columns)
        columns.flags.writeable = False
        return columns


def replay_many(timeline: Timeline, durations_s: FloatArray | Float32Array) -> FloatArray:
    """Makespans (B,) of `durations_s` (B, N) in the timeline's order; see `FixedOrder`."""
    return FixedOrder(timeline).makespans_s(durations_s)


@compiled(allocates=False)
def _transpose(rows: Float32Array, position: Int32Array, columns: Float32Array) -> None:
    """Write durations (at most WIDTH, N) as (N, WIDTH), op o at `position[o]`, by tiles."""
    ops = rows.shape[1]
    for low in range(0, ops, TILE):
        for k in range(len(rows)):
            for op in range(low, min(low + TILE, ops)):
                columns[position[op], k] = rows[k, op]


@compiled(allocates=False)
def _walk(  # noqa: C901 one branch for each number of predecessors
    columns: Float32Array,
    first: int,
    row: Int32Array,
    start: IntArray,
    predecessor: Int32Array,
    lag_s: Float32Array | None,
    last: Int32Array,
    ends_s: Float32Array,
    makespans_s: Float32Array,
) -> None:
    """Ends (N, WIDTH) of WIDTH sets of durations (N, B) from `first` on; `row` (N,) by position.

    Every loop over k is one vector operation. Most ops have one to three predecessors, which need
    no intermediate storage.
    """
    for place in range(len(row)):
        op = row[place]
        low, high = start[place], start[place + 1]
        if high == low:
            for k in range(WIDTH):
                ends_s[place, k] = columns[op, first + k]
        elif lag_s is not None or high > low + 3:
            for k in range(WIDTH):
                ends_s[place, k] = 0
            for edge in range(low, high):
                one = predecessor[edge]
                lag = np.float32(0) if lag_s is None else lag_s[edge]
                for k in range(WIDTH):
                    ends_s[place, k] = max(ends_s[place, k], ends_s[one, k] + lag)
            for k in range(WIDTH):
                ends_s[place, k] += columns[op, first + k]
        elif high == low + 1:
            one = predecessor[low]
            for k in range(WIDTH):
                ends_s[place, k] = columns[op, first + k] + ends_s[one, k]
        elif high == low + 2:
            one, two = predecessor[low], predecessor[low + 1]
            for k in range(WIDTH):
                ends_s[place, k] = columns[op, first + k] + max(ends_s[one, k], ends_s[two, k])
        else:
            one, two, three = predecessor[low], predecessor[low + 1], predecessor[low + 2]
            for k in range(WIDTH):
                ends_s[place, k] = columns[op, first + k] + max(
                    max(ends_s[one, k], ends_s[two, k]), ends_s[three, k]
                )
    for place in last:
        for k in range(WIDTH):
            makespans_s[k] = max(makespans_s[k], ends_s[place, k])
