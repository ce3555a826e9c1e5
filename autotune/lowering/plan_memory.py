"""Results by plan, the last used, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from autotune.strategy_space.plan import Plan

SLICES = 2**19
"""Most slices of all remembered plans: 0.25 GB, if each is a message of 0.45 kB."""

T = TypeVar("T")


class PlanMemory(Generic[T]):
    """Remembers at most `plans` results, and at most `slices` slices of their plans."""

    def __init__(self, plans: int, slices: int = SLICES) -> None:
        self._plans, self._most_slices = plans, slices
        self._slices = 0
        self._results: OrderedDict[object, tuple[T, int]] = OrderedDict()

    def get(self, key: object) -> T | None:
        remembered = self._results.pop(key, None)
        if remembered is None:
            return None
        self._results[key] = remembered
        return remembered[0]

    def put(self, key: object, plan: Plan, result: T) -> None:
        """`key` holds parts of `plan`; forgets those that were not used for longest."""
        _, before = self._results.pop(key, (result, 0))
        self._results[key] = result, plan.slice_count
        self._slices += plan.slice_count - before
        while len(self._results) > self._plans or self._slices > self._most_slices:
            self._slices -= self._results.popitem(last=False)[1][1]
