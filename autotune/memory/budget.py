"""The memory budget of a search: fit the step first, then refuse plans above it (dPRO, Alg. 1)."""

from __future__ import annotations

from autotune.cluster import Cluster
from autotune.lowering.costs import RuntimeCosts
from autotune.memory.fitting import MemoryFit, fit_memory
from autotune.memory.peak import MemoryEstimate, highest_peak
from autotune.recordings.memory_file import RecordedMemory
from autotune.recordings.memory_profile import PROPORTIONAL
from autotune.strategy_space.builders.rows import ddp_with_rows
from autotune.strategy_space.plan import Plan, plan
from autotune.workload import Workload


class MemoryBudget:
    """The budget of one recorded replica; its methods are `memory` and `allowed` of `optimize`.

    `fit` is the chosen pass, after `fit_workload`. The pass is chosen by the replayed step of DDP's
    default buckets with rows of sparse gradients, with which all replicas need the same memory.
    `costs`: of the runtime, as in `optimize`.
    """

    def __init__(
        self,
        memory: RecordedMemory,
        cluster: Cluster,
        budget_bytes: int,
        costs: RuntimeCosts | None = None,
    ) -> None:
        self.memory = memory
        self.costs = costs
        self.cluster = cluster
        self.budget_bytes = budget_bytes
        self.fit: MemoryFit | None = None

    def fit_workload(self, workload: Workload) -> Workload:
        """The workload of a step that fits. Raises `InvalidInput` if none does."""
        cluster = self.cluster
        start = plan(ddp_with_rows(workload), workload, cluster.world_size)
        self.fit = fit_memory(
            workload,
            cluster,
            start,
            self.memory.profile,
            self.budget_bytes,
            replica=self.memory.replica(0, cluster.host_of_rank),
            batch=self.memory.batch,
            fixed=self.memory.fixed or PROPORTIONAL,
            costs=self.costs,
        )
        return self.fit.workload

    def allows(self, candidate: Plan) -> bool:
        """Whether the step fits with the plan's buffers."""
        return self.peak(candidate).peak_bytes <= self.budget_bytes

    def peak(self, candidate: Plan) -> MemoryEstimate:
        """The peak of the replica that needs the most, with the chosen pass."""
        assert self.fit is not None, "a search fits the workload first"
        fit = self.fit
        return highest_peak(self.memory, fit.profile, fit.workload, candidate, self.cluster)
