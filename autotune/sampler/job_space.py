"""The strategies that a job may propose: those that its conditions and its script allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autotune.strategy_space.enactable import (
    dense_rows_refusal,
    refusal_reason,
    scaled_refusal_reason,
    scaled_space,
)
from autotune.strategy_space.mirrored import mirrored_space
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.space import SearchSpace
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.workload import Workload


@dataclass(frozen=True)
class JobSpace:
    """`narrow` returns the part of the allowed space to search."""

    spec: JobSpec
    narrow: Callable[[SearchSpace], SearchSpace] = lambda space: space

    def space(self, history: History) -> SearchSpace:
        """The strategies that the job, its conditions and its script allow."""
        assert history.profiled is not None
        space = scaled_space(
            SearchSpace.default(lossy=self.spec.lossy), self.spec.conditions.byte_scale
        )
        fusions = tuple(choice.sets for choice in history.profiled.op_fusions)
        space = replace(space, op_fusions=fusions)
        if history.profiled.mirrored:
            space = mirrored_space(space)
        if history.profiled.direct_refused:
            space = space.without_direct()
        if history.profiled.plugins_refused:
            space = space.without_plugins()
        refused = history.profiled.cross_step_refused
        return self.narrow(space.without_cross_step(refused) if refused else space)

    def refusal_reason(self, plan: Plan, workload: Workload) -> str | None:
        """Why the job cannot enact a plan of `workload`; None if it can."""
        # only scripts whose graph is rewritten have choices of op fusion
        return (
            refusal_reason(plan, rewrites_graph=bool(plan.op_fusion))
            or scaled_refusal_reason(plan, self.spec.conditions.byte_scale)
            or dense_rows_refusal(plan, workload)
        )
