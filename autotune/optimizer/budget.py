"""The budget of a search; importing it does not load the compiled replay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from autotune.errors import InvalidInput


class TimeUp(Exception):
    """The deadline of a search has passed; what was found until then counts."""


@dataclass(frozen=True)
class Deadline:
    """When a search must end, in seconds of `clock`.

    Work that grows with the number of variables calls `check` between its parts, which are short:
    one strategy, plan, replay, or message of a pass.
    """

    end_s: float = math.inf
    clock: Callable[[], float] = time.monotonic

    @staticmethod
    def after(seconds: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        return Deadline(clock() + seconds, clock)

    def share(self, share: float) -> Deadline:
        """The deadline at which this share of the time that is left from now has passed."""
        now_s = self.clock()
        return Deadline(now_s + share * (self.end_s - now_s), self.clock)

    @property
    def left_s(self) -> float:
        return max(0.0, self.end_s - self.clock())

    def passed(self) -> bool:
        return self.clock() > self.end_s

    def check(self) -> None:
        """Raise `TimeUp` if the deadline has passed."""
        if self.passed():
            raise TimeUp


NO_DEADLINE = Deadline()


@dataclass(frozen=True)
class Budget:
    """Limits of a whole search: replayed steps, ops of all replayed graphs, seconds of wall clock.

    `stale`: climbs from neighbors without a gain after which the search ends.

    Replays and ops are equal on every machine, so they decide; remembered replays count, too. The
    seconds hold for any number of variables. They are a distant safety net by default, and a search
    that they end reports it.
    """

    replays: int = 250
    ops: int = 4_700_000
    seconds: float = 600.0
    stale: int = 4

    def __post_init__(self) -> None:
        if min(self.replays, self.ops, self.stale) < 1 or self.seconds <= 0:
            raise InvalidInput(
                "a search needs a budget of at least 1 replay, 1 op, 1 stale climb and more than "
                f"0 s, but has {self.replays} replays, {self.ops} ops, {self.stale} stale climbs "
                f"and {self.seconds} s"
            )
