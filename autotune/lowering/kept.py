"""The results that were used last, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """Keeps at most `count` results with at most `most_parts` parts in all."""

    def __init__(self, count: int, most_parts: int) -> None:
        self._count, self._most_parts = count, most_parts
        self._parts = 0
        self._results: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def get(self, key: Hashable) -> T | None:
        entry = self._results.pop(key, None)
        if entry is None:
            return None
        self._results[key] = entry
        return entry[0]

    def put(self, key: Hashable, parts: int, result: T) -> None:
        """Forgets the results that were not used for longest."""
        _, before = self._results.pop(key, (result, 0))
        self._results[key] = result, parts
        self._parts += parts - before
        while len(self._results) > self._count or self._parts > self._most_parts:
            self._parts -= self._results.popitem(last=False)[1][1]
