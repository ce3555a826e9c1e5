"""What the ranks say to one instruction, and what that amounts to: all answered, the script ended, or a failure."""

from __future__ import annotations

from typing import Any

from autotune.records import Failed, FailureKind
from runtime_rewriter.failures import failure_of_exit, is_consequence, root_cause


class ScriptEnded(Exception):
    """The script came to its own end after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps


class Silence(Exception):
    """Nothing was heard from a rank for too long, no heartbeat either."""

    def __init__(self, rank: int, silence_s: float) -> None:
        super().__init__(
            f"rank {rank} made no step for {silence_s:.0f} s; the limit is --step-timeout"
        )
        self.rank = rank


class Answers:
    """Collects the events of `ranks` ranks until each has said `answer`, failed or ended. Times are of any one clock, in seconds.

    A rank that says nothing for `silence_s` is hung.
    """

    def __init__(self, answer: str, ranks: int, silence_s: float, now_s: float) -> None:
        self._answer, self._ranks, self._silence_s = answer, ranks, silence_s
        self._answers: dict[int, dict[str, Any]] = {}
        self._failures: dict[int, Failed] = {}
        self._ended: dict[int, int] = {}
        self._heard_s = [now_s] * ranks
        self._first_failure_s: float | None = None

    def take(self, rank: int, events: list[dict[str, Any]], now_s: float) -> None:
        """What one rank said since the last time."""
        if events:
            self._heard_s[rank] = now_s
        for event in events:
            self._sort(rank, event)
        if self._failures and self._first_failure_s is None:
            self._first_failure_s = now_s

    def _sort(self, rank: int, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == self._answer:
            self._answers[rank] = event
        elif kind == "failed":
            self._failures.setdefault(
                rank, Failed(FailureKind(event["kind"]), event["message"], rank)
            )
        elif kind == "ended":
            self._ended[rank] = int(event["steps"])
        elif kind == "exited" and not self._has_spoken(rank):
            self._failures[rank] = failure_of_exit(int(event["code"]), rank, event["log"])

    def _has_spoken(self, rank: int) -> bool:
        return rank in self._answers or rank in self._failures or rank in self._ended

    def complete(self, now_s: float, straggler_s: float) -> bool:
        """Nothing more is worth waiting for; after a failure the others have `straggler_s` to tell their side."""
        if all(self._has_spoken(rank) for rank in range(self._ranks)):
            return True
        if self._first_failure_s is not None:
            return now_s - self._first_failure_s > straggler_s
        return self._silent(now_s) is not None

    def _silent(self, now_s: float) -> int | None:
        quiet = (
            r
            for r in range(self._ranks)
            if not self._has_spoken(r) and now_s - self._heard_s[r] > self._silence_s
        )
        return next(quiet, None)

    def outcome(self, now_s: float) -> list[dict[str, Any]] | Failed:
        """The answers by rank, or why there are none; raises `ScriptEnded` or `Silence`.

        Where one rank came to its end, a rank that lost its peer or waits for it in vain is at the script's end
        too: ranks with unequal shares of the data end so.
        """
        told = list(self._failures.values())
        if self._ended and all(is_consequence(failure) for failure in told):
            raise ScriptEnded(max(self._ended.values()))
        if told:
            return root_cause(told)
        silent = self._silent(now_s)
        if silent is not None:
            raise Silence(silent, self._silence_s)
        return [self._answers[rank] for rank in range(self._ranks)]
