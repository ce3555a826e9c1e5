"""A builder: two all-reduces of about the same size."""

from __future__ import annotations

from autotune.cluster import Cluster
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer, VariableStrategy
from autotune.workload import Workload


def two_halves(workload: Workload, cluster: Cluster) -> Strategy:
    """Send the first and the second half of the gradient bytes in one all-reduce each."""
    half_bytes = sum(variable.grad_bytes for variable in workload.variables) / 2
    choices = []
    bytes_before = 0
    for variable in workload.variables:  # in the order in which gradients become ready
        group = int(bytes_before >= half_bytes)
        shard = Shard(Synchronizer.ALL_REDUCE, group=group, priority=group)
        choices.append(VariableStrategy(variable.name, (shard,)))
        bytes_before += variable.grad_bytes
    return Strategy(tuple(choices))
