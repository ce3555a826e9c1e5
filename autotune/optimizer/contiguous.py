"""The best messages of consecutive variables, sent on one channel in gradient-ready order.

This solves the whole chain of Theorem 2 exactly. With end(j) the earliest time at which the first j
variables can be synchronized,

    end(0) = 0
    end(j) = min over i < j of max(end(i), ready_j) + cost(bytes of variables i .. j-1)

because an earlier free channel never delays later messages. The result is a start of the search:
the closed form ignores the handshakes and threads of the runtime.

| symbol | meaning | shape | unit |
|---|---|---|---|
| G | groups of variables that are never separated | - | - |
| ready | when the last gradient of a group is ready | (G,) | s |
| cost | time of messages of these bytes on the channel | as its argument | s |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autotune.arrays import BoolArray, FloatArray
from autotune.costs.timing import ready_times_s
from autotune.strategy_space.strategy import ROOTED, Shard, Strategy, VariableStrategy
from autotune.workload import Workload

Cost = Callable[[FloatArray], FloatArray]

CLOSE = 1e-9
"""Relative difference below which two ends are equal; the larger last message then wins."""


def best_cuts(
    ready_s: FloatArray, group_bytes: FloatArray, alone: BoolArray, cost_s: Cost
) -> list[int]:
    """Groups that begin messages, ascending from 0; no other cuts end the last message earlier.

    All arrays have shape (G,). A group that is `alone` shares its message with no other group.
    """
    ready_s = np.maximum.accumulate(ready_s)
    total = np.concatenate([[0.0], np.cumsum(group_bytes)])
    count = len(ready_s)
    end_s, begins = np.zeros(count + 1), np.zeros(count + 1, dtype=np.int64)
    earliest = 0  # a message that ends here may begin no earlier
    for last in range(count):
        if alone[last] or (last and alone[last - 1]):
            earliest = last
        starts = np.arange(earliest, last + 1)
        ends = np.maximum(end_s[starts], ready_s[last]) + cost_s(total[last + 1] - total[starts])
        end_s[last + 1] = ends.min()
        begins[last + 1] = starts[int(np.argmax(ends <= end_s[last + 1] * (1 + CLOSE)))]
    cuts: list[int] = []
    at = count
    while at > 0:
        at = int(begins[at])
        cuts.append(at)
    return cuts[::-1]


def contiguous_strategy(
    workload: Workload, groups: Sequence[Sequence[int]], shard: Shard, cost_s: Cost
) -> Strategy:
    """Messages like `shard`, a collective, merged by `best_cuts`; `groups` of `tensor_groups`."""
    assert shard.synchronizer not in ROOTED
    ready = ready_times_s(workload)
    choices: list[VariableStrategy] = []
    message = 0
    for dtype in dict.fromkeys(variable.dtype for variable in workload.variables):
        of_dtype = [group for group in groups if workload.variables[group[0]].dtype == dtype]
        grad_bytes = [
            float(sum(workload.variables[at].grad_bytes for at in group)) for group in of_dtype
        ]
        alone = np.array([workload.variables[group[0]].sparse for group in of_dtype])
        group_ready_s = np.array([ready[list(group)].max() for group in of_dtype])
        starts = best_cuts(group_ready_s, np.array(grad_bytes), alone, cost_s)
        for first, behind in zip(starts, [*starts[1:], len(of_dtype)], strict=True):
            members = [at for group in of_dtype[first:behind] for at in group]
            number = message if len(members) > 1 else None
            message += 1
            merged = replace(shard, group=number)
            choices.extend(
                VariableStrategy(workload.variables[at].name, (merged,)) for at in members
            )
    return Strategy(tuple(choices))
