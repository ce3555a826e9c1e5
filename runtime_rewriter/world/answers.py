"""Collects the ranks' events after one instruction: answers, the script's end, or a failure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autotune.records import Failed
from runtime_rewriter.failures import failure_of_exit, is_consequence, root_cause
from runtime_rewriter.protocol import Heartbeat, RankEvent, RankFailed, ScriptFinished
from runtime_rewriter.world.worker import ProcessExited

MAX_NAMED = 8
"""Ranks that a message names."""
SLOW_STEP_S = 4.0
"""Time between two heartbeats that shows a step of at least 2 s: one may arrive 2 s late."""
UNEXPLAINED = 3
"""A lost connection can be seen sooner than the end of the process behind it."""

Answer = TypeVar("Answer", bound=RankEvent)


class ScriptEnded(Exception):
    """The script came to its own end after `steps` steps, or trains `model` from then on."""

    def __init__(self, steps: int, model: int = 1) -> None:
        self.steps = steps
        self.model = model


class Silence(Exception):
    """Ranks sent nothing for too long, not even a heartbeat.

    `steps`: those of each rank since its start, by its last heartbeat; empty: not known.
    """

    def __init__(self, ranks: Sequence[int], silence_s: float, steps: Mapping[int, int]) -> None:
        least, most = (min(steps.values()), max(steps.values())) if steps else (0, 0)
        slow = [rank for rank in ranks if most > least == steps[rank]]
        self.ranks = tuple(ranks)
        self.rank = (slow or ranks)[0]
        """The rank to look at: the first of those behind the others, if any is."""
        behind = ""
        if slow:
            verb = "is" if len(slow) == 1 else "are"
            behind = f"{named_ranks(slow)} {verb} behind ({least} steps, others {most}); "
        super().__init__(
            f"{named_ranks(ranks)} made no step for {silence_s:.0f} s; {behind}the limit is "
            "--step-timeout"
        )


def named_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks in words, the first few of many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:MAX_NAMED]))}{more}"


@dataclass(frozen=True)
class _Beat:
    """A heartbeat at `at_s`; `exact`: the rank has made no step since.

    Heartbeats leave out steps that are shorter than their interval.
    """

    steps: int
    at_s: float
    exact: bool = False

    @staticmethod
    def after(before: _Beat | None, steps: int, now_s: float) -> _Beat:
        """The heartbeat that follows `before`."""
        if before is None:
            return _Beat(steps, now_s)
        slow = now_s - before.at_s >= SLOW_STEP_S
        return _Beat(steps, now_s, exact=slow and steps == before.steps + 1)


class Answers(Generic[Answer]):
    """Collects the events of `ranks` ranks until each has answered by `answer`, failed or ended.

    A rank that sends nothing for `silence_s` is hung; the ranks then have some time to report it
    themselves. Times are of any one clock, in seconds.
    """

    def __init__(self, answer: type[Answer], ranks: int, silence_s: float, now_s: float) -> None:
        self._answer = answer
        self._ranks = ranks
        self._silence_s = silence_s
        self._answers: dict[int, Answer] = {}
        self._failures: dict[int, Failed] = {}
        self._ended: dict[int, ScriptFinished] = {}
        self._heard_s = [now_s] * ranks
        self._beats: dict[int, _Beat] = {}
        """Last heartbeat of each rank."""
        self._first_failure_s: float | None = None

    def take(self, rank: int, events: Iterable[RankEvent | ProcessExited], now_s: float) -> None:
        """Take one rank's new events."""
        for event in events:
            self._heard_s[rank] = now_s
            self._sort(rank, event, now_s)
        if self._failures and self._first_failure_s is None:
            self._first_failure_s = now_s

    def _sort(self, rank: int, event: RankEvent | ProcessExited, now_s: float) -> None:
        if isinstance(event, Heartbeat):
            self._beats[rank] = _Beat.after(self._beats.get(rank), event.steps, now_s)
        elif isinstance(event, self._answer):
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

        They have `UNEXPLAINED` times as long while ranks have only lost another one. Beyond the
        silence that is allowed, all have `straggler_s` to name the message that they miss.
        """
        if all(self._is_settled(rank) for rank in range(self._ranks)):
            return True
        if self._first_failure_s is not None:
            explained = not all(map(is_consequence, self._failures.values()))
            longest_s = straggler_s if explained else UNEXPLAINED * straggler_s
            return now_s - self._first_failure_s > longest_s
        return bool(self._silent(now_s, straggler_s))

    def _silent(self, now_s: float, more_s: float = 0.0) -> list[int]:
        """The ranks that were silent for `more_s` longer than is allowed."""
        return [
            rank
            for rank in range(self._ranks)
            if not self._is_settled(rank) and now_s - self._heard_s[rank] > self._silence_s + more_s
        ]

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
        if silent:
            beats = {rank: beat for rank, beat in self._beats.items() if rank in silent}
            known = len(beats) == len(silent) and all(beat.exact for beat in beats.values())
            steps = {rank: beat.steps for rank, beat in beats.items()} if known else {}
            raise Silence(silent, self._silence_s, steps)
        return [self._answers[rank] for rank in range(self._ranks)]
