"""Collects the ranks' events after one instruction: answers, the script's end, or a failure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from autotune.records import Failed
from runtime_rewriter.failures import failure_of_exit, is_consequence, root_cause
from runtime_rewriter.protocol import RankEvent, RankFailed, ScriptFinished
from runtime_rewriter.world.worker import ProcessExited

UNEXPLAINED = 3
"""A lost connection can be seen sooner than the end of the process behind it."""

Answer = TypeVar("Answer", bound=RankEvent)


class ScriptEnded(Exception):
    """The script came to its own end after `steps` steps, or trains `model` from then on."""

    def __init__(self, steps: int, model: int = 1) -> None:
        self.steps = steps
        self.model = model


class Silence(Exception):
    """A rank sent nothing for too long, not even a heartbeat."""

    def __init__(self, rank: int, silence_s: float) -> None:
        super().__init__(
            f"rank {rank} made no step for {silence_s:.0f} s; the limit is --step-timeout"
        )
        self.rank = rank


class Answers(Generic[Answer]):
    """Collects the events of `ranks` ranks until each has answered by `answer`, failed or ended.

    A rank that sends nothing for `silence_s` is hung. Times are of any one clock, in seconds.
    """

    def __init__(self, answer: type[Answer], ranks: int, silence_s: float, now_s: float) -> None:
        self._answer = answer
        self._ranks = ranks
        self._silence_s = silence_s
        self._answers: dict[int, Answer] = {}
        self._failures: dict[int, Failed] = {}
        self._ended: dict[int, ScriptFinished] = {}
        self._heard_s = [now_s] * ranks
        self._first_failure_s: float | None = None

    def take(self, rank: int, events: Iterable[RankEvent | ProcessExited], now_s: float) -> None:
        """Take one rank's new events."""
        for event in events:
            self._heard_s[rank] = now_s
            self._sort(rank, event)
        if self._failures and self._first_failure_s is None:
            self._first_failure_s = now_s

    def _sort(self, rank: int, event: RankEvent | ProcessExited) -> None:
        if isinstance(event, self._answer):
            self._answers[rank] = event
        elif isinstance(event, RankFailed):
            self._failures.setdefault(rank, Failed(event.kind, event.message, rank))
        elif isinstance(event, ScriptFinished):
            self._ended[rank] = event
        elif isinstance(event, ProcessExited) and not self._is_settled(rank):
            self._failures[rank] = failure_of_exit(event.code, rank, event.log_tail)

    def _is_settled(self, rank: int) -> bool:
        return rank in self._answers or rank in self._failures or rank in self._ended

    def complete(self, now_s: float, straggler_s: float) -> bool:
        """Whether the outcome is known; after a failure, others have `straggler_s` to report.

        They have `UNEXPLAINED` times as long while ranks have only lost another one.
        """
        if all(self._is_settled(rank) for rank in range(self._ranks)):
            return True
        if self._first_failure_s is not None:
            explained = not all(map(is_consequence, self._failures.values()))
            longest_s = straggler_s if explained else UNEXPLAINED * straggler_s
            return now_s - self._first_failure_s > longest_s
        return self._silent(now_s) is not None

    def _silent(self, now_s: float) -> int | None:
        for rank in range(self._ranks):
            if not self._is_settled(rank) and now_s - self._heard_s[rank] > self._silence_s:
                return rank
        return None

    def outcome(self, now_s: float) -> list[Answer] | Failed:
        """The answers by rank, or the failure; raises `ScriptEnded` or `Silence`.

        If one rank came to its end, a rank that lost its peer or waits for it is at the script's
        end too: ranks with unequal shares of the data end like this.
        """
        failures = list(self._failures.values())
        if self._ended and all(is_consequence(failure) for failure in failures):
            last = max(self._ended.values(), key=lambda event: (event.model, event.steps))
            raise ScriptEnded(last.steps, last.model)
        if failures:
            return root_cause(failures)
        silent = self._silent(now_s)
        if silent is not None:
            raise Silence(silent, self._silence_s)
        return [self._answers[rank] for rank in range(self._ranks)]
