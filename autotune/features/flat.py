"""A plan as flat arrays: which variable and which message every slice (shard) belongs to.

| symbol | meaning |
|---|---|
| S | slices of the plan, message by message in issue order |
| M | messages |
| V | variables of the workload, in backward order |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.arrays import IntArray
from autotune.errors import InvalidInput
from autotune.strategy_space.plan import Plan
from autotune.workload import Workload


@dataclass(frozen=True)
class FlatPlan:
    """`variable`, `message`, `elements`, `start`: shape (S,).

    `first`: index of each message's first slice, shape (M,).
    """

    variable: IntArray
    message: IntArray
    elements: IntArray
    start: IntArray
    first: IntArray


def flatten(plan: Plan, workload: Workload) -> FlatPlan:
    """Flatten the slices of `plan`. Raises `InvalidInput` if it is for another model."""
    if plan.workload_id != workload.id:
        raise InvalidInput(
            f"the plan is for model {plan.workload_id}, but the workload is {workload.id}; "
            "plan the strategy for this workload"
        )
    index = workload.index
    slices = [
        (index[part.variable], number, part.elements, part.start)
        for number, m in enumerate(plan.messages)
        for part in m.slices
    ]
    columns = np.array(slices, dtype=np.int64)
    counts = [len(message.slices) for message in plan.messages]
    first = np.cumsum([0, *counts[:-1]], dtype=np.int64)
    variable, message, elements, start = columns.T
    return FlatPlan(variable, message, elements, start, first)
