"""The choices that a move leaves open: drawn at random, or every one of them in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
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


class _Question:
    """A question after the same answers; `left`: options that have more combinations, in turn."""

    def __init__(self, order: Sequence[int]) -> None:
        self.count = len(order)
        self.left = deque(order)
        self.following: dict[int, _Question] = {}
        """Option -> the next question of the run, if it has been asked."""


class InTurn:
    """Every combination of choices in turn: iterate, and run the move anew each time.

    The options of a question take turns, in an order that `rng` draws, until they have no further
    combination. So the first combinations are a fair sample: every option of the first question
    comes once before one comes twice.

    The choices of a run may depend on earlier ones of the same run and on nothing else. Shares,
    pairs of many items and rings are samples of what could be drawn.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._first: _Question | None = None
        self._asked: list[_Question] = []  # the questions of the present run

    def __iter__(self) -> Iterator[InTurn]:
        """Yield itself once for each combination."""
        while True:
            self._asked = []
            yield self
            if self._is_over():
                return

    def _is_over(self) -> bool:
        """Let the options of the run's questions take turns; return whether none is left."""
        exhausted = True
        for question in reversed(self._asked):
            option = question.left.popleft()
            if exhausted:
                question.following.pop(option, None)
            else:
                question.left.append(option)
            exhausted = not question.left
        return exhausted

    def pick(self, count: int) -> int:
        question = self._next(count)
        assert question.count == count, "a move asked something else in the same situation"
        self._asked.append(question)
        return question.left[0]

    def _next(self, count: int) -> _Question:
        """Return the question after the answers of this run so far."""
        if not self._asked:
            self._first = self._first or self._new(count)
            return self._first
        before = self._asked[-1]
        option = before.left[0]
        if option not in before.following:
            before.following[option] = self._new(count)
        return before.following[option]

    def _new(self, count: int) -> _Question:
        return _Question(self._rng.permutation(count).tolist())

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
