"""The numerics gate of a loaded graph: its tensors, and the judgement of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autotune.strategy_space.plan import Plan
from runtime_rewriter.tolerances import GateResult, judge_differences

ERROR, LARGEST, PRINT, TERMS = "error", "largest", "print", "terms"


@dataclass(frozen=True)
class GateTensors:
    """The tensors of a graph's gate, each with a number per variable of `names`.

    `tensors`: names by kind and rank. `shared`: variables that rank 0 compares for all.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    tensors: Mapping[str, str] = field(repr=False)
    shared: frozenset[str] = frozenset()

    def result(self, values: Mapping[str, Any], plan: Plan) -> GateResult:
        """Judge the `values` of the tensors, in a step under `plan`."""
        ranks = range(plan.world_size)

        def of(kind: str) -> np.ndarray:
            return np.stack([np.asarray(values[f"{kind}/{rank}"]) for rank in ranks])

        errors, largest, prints = of(ERROR).max(0), of(LARGEST).max(0), of(PRINT)
        terms = of(TERMS).max(0)
        for place, name in enumerate(self.names):
            if name not in self.shared and len(set(prints[:, place].tolist())) > 1:
                errors[place] = math.inf
        return judge_differences(self.names, self.dtypes, errors, largest, terms, plan)


class GraphGate:
    """Checks the next step of a loaded graph."""

    def __init__(self, tensors: GateTensors, plan: Plan) -> None:
        self._tensors, self._plan = tensors, plan
        self.armed = False
        self._result: GateResult | None = None

    def arm(self) -> None:
        self.armed, self._result = True, None

    @property
    def fetches(self) -> Mapping[str, str]:
        """What the step must fetch."""
        return self._tensors.tensors

    def take(self, values: Mapping[str, np.ndarray]) -> None:
        self.armed, self._result = False, self._tensors.result(values, self._plan)

    def error(self) -> GateResult:
        assert self._result is not None, "a step must be made between arm() and error()"
        return self._result
