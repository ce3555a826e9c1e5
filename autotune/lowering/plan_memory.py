"""Results by plan, the last used, in bounded memory."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from autotune.lowering.kept import Kept
from autotune.strategy_space.plan import Plan

SLICES = 2**19
"""Most slices of all remembered plans: 0.25 GB, if each is a message of 0.45 kB."""

T = TypeVar("T")


class PlanMemory(Generic[T]):
    """Remembers at most `plans` results, and at most `slices` slices of their plans."""

    def __init__(self, plans: int, slices: int = SLICES) -> None:
        self._kept: Kept[T] = Kept(plans, slices)

    def get(self, key: Hashable) -> T | None:
        return self._kept.get(key)

    def put(self, key: Hashable, plan: Plan, result: T) -> None:
        """`key` holds parts of `plan`; forgets those that were not used for longest."""
        self._kept.put(key, plan.slice_count, result)
