"""The traces of a step: those of the current setup, and those of the plans that were used last.

Each holds a graph as large as the step's, and a search tries hundreds of plans.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from autotune.strategy_space.plan import Plan

MOST_PLANS = 8
"""More than the final comparison alternates between. A plan that returns after this many others is
traced again."""


class KeptTraces:
    """Traces by plan, and by what else a trace depends on. All workers drop the same ones."""

    def __init__(self) -> None:
        self._of_current: dict[Hashable, Any] = {}
        self._of_plans: dict[str, dict[Hashable, Any]] = {}

    def put(self, plan: Plan | None, kind: Hashable, trace: Any) -> None:
        self._used(plan)[kind] = trace

    def get(self, plan: Plan | None, kind: Hashable, build: Callable[[], Any]) -> Any:
        """The trace of a plan (None: the current setup), which `build` makes if it is needed."""
        traces = self._used(plan)
        if kind not in traces:
            traces[kind] = build()
        return traces[kind]

    def _used(self, plan: Plan | None) -> dict[Hashable, Any]:
        if plan is None:
            return self._of_current
        traces = self._of_plans.pop(plan.id, {})
        while len(self._of_plans) >= MOST_PLANS:
            del self._of_plans[next(iter(self._of_plans))]
        self._of_plans[plan.id] = traces
        return traces
