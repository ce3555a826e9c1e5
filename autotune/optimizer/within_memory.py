"""Line 1 of dPRO's Alg. 1: what is optimized is first made to fit into the memory of a device, and every plan that is tried stays in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.lowering.lower import Lowering
from autotune.memory.choice import MemoryFit, fit_memory
from autotune.memory.peak import MemoryEstimate, peak_memory
from autotune.optimizer.state import Problem
from autotune.recordings.memory_file import RecordedMemory
from autotune.recordings.memory_profile import PROPORTIONAL, MemoryProfile
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.plan import Plan, plan
from autotune.workload import Workload


class WithinMemory:
    """`memory` and `allowed` of `optimize` for one recorded replica and a budget; afterwards `fit` is the pass that was chosen.

    The passes are chosen by the replayed step of DDP's default buckets, under which every replica needs the same.
    """

    def __init__(self, memory: RecordedMemory, cluster: Cluster, budget_bytes: int) -> None:
        self.memory, self.cluster, self.budget_bytes = memory, cluster, budget_bytes
        self.fit: MemoryFit | None = None

    def __call__(self, problem: Problem) -> Problem:
        """The problem with the times of a step that fits. Raises `InvalidInput` where none does, with the least that is possible."""
        if problem.graph is not None:
            raise InvalidInput(
                "memory is known of recorded variables and not of an op graph; leave out the op graph or the budget"
            )
        workload, cluster = problem.workload, self.cluster
        start = plan(ddp_default(workload), workload, cluster.world_size)
        self.fit = fit_memory(
            workload,
            cluster,
            start,
            self.memory.profile,
            self.budget_bytes,
            replica=self.memory.replica(0, cluster.host_of_rank),
            step_s=lambda trained: Lowering(trained, cluster).step_s(start),
            batch=self.memory.batch,
            fixed=self.memory.fixed or PROPORTIONAL,
        )
        return replace(problem, workload=self.fit.workload)

    def allows(self, tried: Plan) -> bool:
        """Whether the plan's buffers fit in, too."""
        assert self.fit is not None, "a search begins with its problem"
        return self.peak(tried).peak_bytes <= self.budget_bytes

    def peak(self, tried: Plan) -> MemoryEstimate:
        """Of the replica that needs the most, with the pass that was chosen."""
        assert self.fit is not None, "a search begins with its problem"
        return highest_peak(self.memory, self.fit.profile, self.fit.workload, tried, self.cluster)


def highest_peak(
    memory: RecordedMemory,
    profile: MemoryProfile,
    workload: Workload,
    tried: Plan | None,
    cluster: Cluster,
) -> MemoryEstimate:
    """Of all replicas: the first rank is like most others, and one that owns messages holds what it sums."""
    owned: Counter[int] = Counter()
    for message in tried.messages if tried is not None else ():
        if message.owner is not None:
            owned[message.owner] += message.grad_bytes
    ranks = {0, *(rank for rank, _ in owned.most_common(1))}
    replicas = [memory.replica(rank, cluster.host_of_rank) for rank in sorted(ranks)]
    found = [
        peak_memory(profile, workload, tried, cluster, replica=replica) for replica in replicas
    ]
    return max(found, key=lambda one: one.peak_bytes)
