"""The CPU time of a plan's messages by the probed fits of their collectives."""

from __future__ import annotations

import numpy as np

from autotune.arrays import FloatArray
from autotune.cluster import Cluster
from autotune.costs.row_traffic import RowTraffic
from autotune.lowering.steps import pieces_of
from autotune.strategy_space.plan import Plan


def message_cpu_s(plan: Plan, cluster: Cluster, traffic: RowTraffic) -> FloatArray:
    """CPU time of each message on one rank, shape (M,); 0 without a fit.

    Each piece of a direct exchange costs what a message of its size does.
    """
    fits = {
        synchronizer: cluster.fit(synchronizer.operation, plan.world_size)
        for synchronizer in {message.synchronizer for message in plan.messages}
    }
    sizes_bytes = traffic.collective_bytes(plan.messages, plan.world_size).tolist()
    seconds = []
    for message, size_bytes in zip(plan.messages, sizes_bytes, strict=True):
        fit = fits[message.synchronizer]
        pieces = pieces_of(message)
        seconds.append(pieces * fit.cpu_s(size_bytes / pieces) if fit else 0.0)
    return np.array(seconds)
