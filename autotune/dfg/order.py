"""The topological order of a directed graph in CSR form, compiled.

| symbol | meaning |
|---|---|
| n, E | ops, edges |
| `start` (n + 1,), `child` (E,) | the children of op o are `child[start[o]:start[o + 1]]` |
"""

from __future__ import annotations

import numpy as np

from autotune.arrays import Int32Array, IntArray
from autotune.dfg.compiled import compiled


@compiled(allocates=True)
def topological(start: IntArray, child: Int32Array, parents: Int32Array) -> Int32Array:
    """Ops behind all their parents (Kahn); ops without parents come first, in ascending order.

    `parents` (n,): number of parents. The result is shorter than n if there is a cycle.
    """
    ops = len(start) - 1
    left = parents.copy()
    order = np.empty(ops, dtype=np.int32)
    ordered = 0
    for op in range(ops):
        if left[op] == 0:
            order[ordered] = op
            ordered += 1
    done = 0
    while done < ordered:
        op = order[done]
        done += 1
        for edge in range(start[op], start[op + 1]):
            left[child[edge]] -= 1
            if left[child[edge]] == 0:
                order[ordered] = child[edge]
                ordered += 1
    return order[:ordered]
