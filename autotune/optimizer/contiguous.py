"""The best messages of consecutive variables, exactly, where one channel sends them in gradient-ready order.

This is the whole chain of Theorem 2 at once: with end(j) the earliest time at which the first j variables can be synchronized,

    end(0) = 0,   end(j) = min over i < j of max(end(i), ready_j) + cost(bytes of variables i .. j-1)

because the channel being free earlier is never worse for what follows. It is a starting point: the closed form knows one channel, and
neither the handshakes nor the threads of the runtime, so the search goes on from here by replay.

| symbol | meaning | shape | unit |
|---|---|---|---|
| G | groups of variables that are never separated | - | - |
| ready | when the last gradient of a group is ready | (G,) | s |
| cost | seconds of messages of these bytes on the channel | as its argument | s |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autotune.arrays import BoolArray, FloatArray
from autotune.costs.timing import ready_times_s
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer, VariableStrategy
from autotune.workload import Workload

Cost = Callable[[FloatArray], FloatArray]

CLOSE = 1e-9
"""Share of the end below which two ways count as equal: the one with the larger last message, and so fewer of them, is taken."""


def best_cuts(
    ready_s: FloatArray, group_bytes: FloatArray, alone: BoolArray, cost_s: Cost
) -> list[int]:
    """Where messages begin, ascending from 0; no other cuts make the last message end earlier.

    All arrays have shape (G,). A group that is `alone` shares its message with no other.
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
    """All variables by messages like `shard`, a collective, merged as `best_cuts` says; `groups` as of `coarsen.tensor_groups`."""
    assert shard.synchronizer in (Synchronizer.ALL_REDUCE, Synchronizer.REDUCE_SCATTER_ALL_GATHER)
    ready = ready_times_s(workload)
    choices: list[VariableStrategy] = []
    message = 0
    for dtype in dict.fromkeys(variable.dtype for variable in workload.variables):
        own = [group for group in groups if workload.variables[group[0]].dtype == dtype]
        sizes = np.array(
            [sum(workload.variables[at].grad_bytes for at in group) for group in own],
            dtype=np.float64,
        )
        alone = np.array([workload.variables[group[0]].sparse for group in own])
        starts = best_cuts(
            np.array([ready[list(group)].max() for group in own]), sizes, alone, cost_s
        )
        for first, behind in zip(starts, [*starts[1:], len(own)], strict=True):
            members = [at for group in own[first:behind] for at in group]
            number = message if len(members) > 1 else None
            message += 1
            merged = Shard(
                shard.synchronizer, shard.compressor, group=number, hierarchical=shard.hierarchical
            )
            choices.extend(
                VariableStrategy(workload.variables[at].name, (merged,)) for at in members
            )
    return Strategy(tuple(choices))
