"""The results that were used last, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

KEPT_SLICES = 2**19
"""Most slices of the plans behind results: 0.25 GB, if each is a message of 0.45 kB."""
KEPT_LOADS = 1024
"""Loads of collectives, and as many traffics and factors: a job proposes owners and rings for
hours. Loads have 10 MB on 64 hosts, with 20 numbers for each port."""

T = TypeVar("T")


class _Key:
    """A key that is hashed once: those of plans hold hundreds of messages."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: Hashable) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._parts == other._parts


class Kept(Generic[T]):
    """Keeps at most `count` results with at most `most_parts` parts in all."""

    def __init__(self, count: int, most_parts: int) -> None:
        self._count, self._most_parts = count, most_parts
        self._parts = 0
        self._results: OrderedDict[_Key, tuple[T, int]] = OrderedDict()

    def get(self, key: Hashable) -> T | None:
        hashed = _Key(key)
        entry = self._results.get(hashed)
        if entry is None:
            return None
        self._results.move_to_end(hashed)
        return entry[0]

    def put(self, key: Hashable, parts: int, result: T) -> None:
        """Keep a result that is not too large, and forget those that were not used for longest."""
        if parts > self._most_parts:
            return
        hashed = _Key(key)
        _, before = self._results.pop(hashed, (result, 0))
        self._results[hashed] = result, parts
        self._parts += parts - before
        while len(self._results) > self._count or self._parts > self._most_parts:
            self._parts -= self._results.popitem(last=False)[1][1]
