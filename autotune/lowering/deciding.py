"""Which ports and ranks stand for the others in a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray

MAX_PORTS_COMPARED = 64
"""Above it, only equal ports are folded."""


def distinct(owners: Sequence[BoolArray]) -> IntArray:
    """One of the ranks that own parts of the same steps and stages, ascending."""
    if not owners:
        return np.zeros(0, dtype=np.int64)
    _, ranks = np.unique(np.stack(owners), axis=1, return_index=True)
    return np.sort(ranks)


def deciding(loads: Sequence[FloatArray], symmetric: bool) -> IntArray:
    """The ports, or hosts with cores, that decide when a step ends, ascending.

    `loads`: the load of each port, one array for each step. Ports without load never decide. If
    `symmetric`, neither does a port that no step loads more than another port: both serve the same
    ops in the same order, so by induction it never finishes later. So one of n equal hosts is left,
    and the slowest one of a ring through unequal hosts; this is exact.
    """
    if not loads:
        return np.zeros(0, dtype=np.int64)
    distinct = np.stack(list({row.tobytes(): row for row in loads}.values()))
    loaded = np.flatnonzero(distinct.any(axis=0))
    if not symmetric or len(loaded) < 2:
        return loaded
    columns = np.ascontiguousarray(distinct[:, loaded].T)
    lowest: dict[bytes, int] = {}  # of equal ports
    for port, column in zip(loaded.tolist(), columns, strict=True):
        lowest.setdefault(column.tobytes(), port)
    left = np.array(sorted(lowest.values()), dtype=np.int64)
    if len(left) > MAX_PORTS_COMPARED:
        return left
    columns = distinct[:, left]
    # below[p, q]: no step loads p more than q
    below: BoolArray = np.all(columns[:, :, None] <= columns[:, None, :], axis=0)
    np.fill_diagonal(below, False)
    return left[~below.any(axis=1)]
