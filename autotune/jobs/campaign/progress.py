"""The time that a series of trials still takes, at the pace of this run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

LINE_EVERY_S = 15.0


@dataclass
class Progress:
    """`wanted` trials in all, of which `there` existed before this run.

    `what`: the name of a trial in the lines for people, which `say` gets now and then.
    """

    wanted: int
    there: int
    say: Callable[[str], None]
    what: str = "trial"
    clock_s: Callable[[], float] = time.monotonic
    taken: int = 0
    began_s: float = field(init=False)
    logged_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_s = self.logged_s = self.clock_s()

    def count(self, line: str, trials: int = 1) -> None:
        """Count trials that have ended; `line` describes the last one."""
        self.taken += trials
        now_s = self.clock_s()
        if self.taken and now_s - self.logged_s >= LINE_EVERY_S:
            self.logged_s = now_s
            self.say(f"{line} | {self.remaining(now_s)}")

    def remaining(self, now_s: float) -> str:
        pace_s = (now_s - self.began_s) / max(self.taken, 1)
        left = max(self.wanted - self.there - self.taken, 0)
        return (
            f"{pace_s:.2f} s a {self.what} with all around it, "
            f"about {left} left (ETA {timedelta(seconds=round(left * pace_s))})"
        )
