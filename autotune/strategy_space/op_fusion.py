"""Choices of op fusion: measured sets of ops, and the computation of a step with them.

| symbol | meaning | unit |
|---|---|---|
| saved_s | time that the sets save in one replica's step, measured one by one | s |
| forward_s, backward_s, update_s, ready_s | the workload's, if these sets are kernels | s |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune.limits import check_seconds
from autotune.strategy_space.strategy import OpFusionSets, checked_fusion
from autotune.workload import Workload


@dataclass(frozen=True)
class OpFusionChoice:
    """Sets of ops of the model's graph, each one kernel, and the step's computation with them.

    `ready_s`: by variable. A gradient is ready once the whole set that computes it has ended, which
    delays some gradients (DisCo, sec. 2.4).
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    sets: OpFusionSets
    saved_s: float
    forward_s: float
    backward_s: float
    update_s: float
    ready_s: Mapping[str, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sets", checked_fusion(self.sets))
        for what in ("forward_s", "backward_s", "update_s"):
            check_seconds(getattr(self, what), f"{what} of the op fusion {self.name!r}")

    def workload(self, workload: Workload) -> Workload:
        """Return the workload with these sets; its variables keep their order, as in plans."""
        shorter = self.forward_s / workload.forward_s if workload.forward_s else 1.0
        variables = tuple(
            replace(
                variable,
                ready_s=self.ready_s.get(variable.name, variable.ready_s),
                needed_s=None if variable.needed_s is None else variable.needed_s * shorter,
            )
            for variable in workload.variables
        )
        return replace(
            workload,
            variables=variables,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            update_s=self.update_s,
        )
