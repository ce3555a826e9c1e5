"""The fastest strategies of the search, which are measured again before one is compared."""

from __future__ import annotations

from autotune.records import Role
from autotune.tuning.events import TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec


def finalists(spec: JobSpec, history: History) -> list[str]:
    """The fastest strategies of the search. Measuring them again tames the winner's curse."""
    for position, event in enumerate(history.events):
        if isinstance(event, TrialFinished) and is_second_look(history, event):
            history = history.first(position)
            break
    return lossless_first(history, history.ranking(), spec.finalists)


def second_looks(history: History) -> set[str]:
    return {
        trial.request.strategy_id for trial in history.candidates if is_second_look(history, trial)
    }


def is_second_look(history: History, trial: TrialFinished) -> bool:
    """Whether a finalist was measured again: its trial has a round that was never proposed."""
    return trial.request.role is Role.CANDIDATE and trial.request.round == len(history.rounds)


def lossless_first(history: History, ranking: list[tuple[str, float]], count: int) -> list[str]:
    """The first `count` strategies of a ranking.

    Among those that tie with the last one, closer than the noise, lossless ones come first.
    """
    if not ranking:
        return []
    last_s, tie = ranking[:count][-1][1], 1 + history.noise
    ahead = [key for key, value in ranking if value * tie < last_s]
    tied = [key for key, value in ranking if last_s <= value * tie and value <= last_s * tie]
    tied.sort(key=lambda key: not history.proposals[key].strategy.lossless)
    return [*ahead, *tied][:count]


def contender(history: History) -> str | None:
    """The strategy to compare with the current setup; None if none was measured.

    One lucky trial must not beat a finalist that was measured twice.
    """
    ranking, measured_again = history.ranking(), second_looks(history)
    twice = [entry for entry in ranking if entry[0] in measured_again]
    chosen = lossless_first(history, twice or ranking, 1)
    return chosen[0] if chosen else None
