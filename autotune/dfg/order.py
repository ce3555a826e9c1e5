"""Orders of a directed graph in CSR form, compiled: a chain of a million ops costs as much as a million ops side by side.

| symbol | meaning |
|---|---|
| n, E | ops, edges |
| `start` (n + 1,), `child` (E,) | the children of op o are `child[start[o]:start[o + 1]]` |
"""

from __future__ import annotations

import numpy as np

from autotune.arrays import Int32Array, IntArray
from autotune.dfg.compiled import compiled


@compiled()
def topological(start: IntArray, child: Int32Array, parents: Int32Array) -> Int32Array:
    """Ops behind all their `parents` (n,), a number each; first those without any, in ascending order (Kahn). Shorter than n: a cycle."""
    ops = len(start) - 1
    left = parents.copy()
    order = np.empty(ops, dtype=np.int32)
    found = 0
    for op in range(ops):
        if left[op] == 0:
            order[found] = op
            found += 1
    done = 0
    while done < found:
        op = order[done]
        done += 1
        for edge in range(start[op], start[op + 1]):
            left[child[edge]] -= 1
            if left[child[edge]] == 0:
                order[found] = child[edge]
                found += 1
    return order[:found]


@compiled()
def reversed_csr(start: IntArray, child: Int32Array) -> tuple[IntArray, Int32Array]:
    """The same edges from the other end; the parents of an op in ascending order."""
    ops = len(start) - 1
    parent_start = np.zeros(ops + 1, dtype=np.int64)
    for edge in range(len(child)):
        parent_start[child[edge] + 1] += 1
    for op in range(ops):
        parent_start[op + 1] += parent_start[op]
    place = parent_start[:-1].copy()
    parent = np.empty(len(child), dtype=np.int32)
    for op in range(ops):
        for edge in range(start[op], start[op + 1]):
            parent[place[child[edge]]] = op
            place[child[edge]] += 1
    return parent_start, parent
