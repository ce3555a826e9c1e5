"""The choices that a move leaves open: drawn at random, or every one of them in turn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Protocol, TypeVar

import numpy as np

from autotune.cluster import Cluster
from autotune.strategy_space.moves.ring import greedy_ring, random_ring

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The shares that are tried in turn: numbers of shards from 2 to the most, in equal ratios."""
MOST_PAIRS = 40
"""Items up to which every pair is tried; of more, pairs of consecutive ones."""

T = TypeVar("T")


class Choices(Protocol):
    """Answers the questions of a move.

    `pick(count)` is at least 0 and below `count`; `pick_two(count)` are two different such numbers.
    `pick_share()` is between 0 and 1. `pick_ring` is a ring order of all hosts, or None.
    """

    def pick(self, count: int) -> int: ...
    def pick_two(self, count: int) -> tuple[int, int]: ...
    def pick_share(self) -> float: ...
    def pick_ring(self, cluster: Cluster) -> tuple[int, ...] | None: ...


class Drawn:
    """Uniformly random choices."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def pick(self, count: int) -> int:
        return int(self._rng.integers(count))

    def pick_two(self, count: int) -> tuple[int, int]:
        one, other = self._rng.choice(count, size=2, replace=False).tolist()
        return one, other

    def pick_share(self) -> float:
        return float(self._rng.random())

    def pick_ring(self, cluster: Cluster) -> tuple[int, ...] | None:
        return random_ring(cluster, self._rng)


class InTurn:
    """Every combination of choices in turn: iterate, and run the move anew each time.

    The choices of a run may depend on earlier ones of the same run and on nothing else. Shares,
    pairs of many items and rings are samples of what could be drawn.
    """

    def __init__(self) -> None:
        self._path: list[tuple[int, int]] = []  # (chosen, options) of each question of the run
        self._asked = 0

    def __iter__(self) -> Iterator[InTurn]:
        """Yield itself once for each combination."""
        while True:
            self._asked = 0
            yield self
            del self._path[self._asked :]
            while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return
            chosen, options = self._path[-1]
            self._path[-1] = chosen + 1, options

    def pick(self, count: int) -> int:
        if self._asked == len(self._path):
            self._path.append((0, count))
        chosen, options = self._path[self._asked]
        assert options == count, "a move asked something else in the same situation"
        self._asked += 1
        return chosen

    def pick_two(self, count: int) -> tuple[int, int]:
        if count > MOST_PAIRS:
            first = self.pick(count - 1)
            return first, first + 1
        return self._one_of(list(combinations(range(count), 2)))

    def pick_share(self) -> float:
        return self._one_of(SHARES)

    def pick_ring(self, cluster: Cluster) -> tuple[int, ...] | None:
        return greedy_ring(cluster, self.pick(len(cluster.hosts)), lambda widest: 0)

    def _one_of(self, options: tuple[T, ...] | list[T]) -> T:
        return options[self.pick(len(options))]
