"""Tune every rival with as many trials as our search: successive halving over its settings.

In the first round each setting is measured once for a few steps, in every later round the faster
half of them, by the median of all trials so far, until the budget is used up. Then the best are
measured once more, as the finalists of our search are. Everything follows from the trials on disk,
so a sweep that was cut off resumes. Source: Jamieson and Talwalkar, AISTATS 2016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from autotune.dataset.trials import DatasetTrial
from autotune.errors import InvalidInput
from autotune.tuning.job import JobSpec
from benchmarks.outcome.kept import SWEEP, rounds_of

FINALISTS = JobSpec.finalists
FEWEST = 2
"""Settings of the last rounds, and of the smallest family that is swept."""


def title_of(family: str, setting: str) -> str:
    """Return the name of a setting in the sources of trials."""
    return f"{family}, {setting}"


def swept(
    trials: Sequence[DatasetTrial], family: str, settings: Sequence[str]
) -> dict[int, dict[str, float]]:
    """Return round -> setting -> median step in seconds, infinite for a failure."""
    names = {title_of(family, setting): setting for setting in settings}
    by_round: dict[int, dict[str, float]] = {}
    for number, of_round in rounds_of(trials, SWEEP).items():
        for trial in of_round:
            title = trial.source.split(":", 2)[2]
            if title in names:
                step_s = math.inf if trial.failure else trial.median_s
                by_round.setdefault(number, {})[names[title]] = step_s
    return by_round


def medians_s(by_round: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return setting -> median over its trials, the fastest first; a failure counts as infinite."""
    of_setting: dict[str, list[float]] = {}
    for measured in by_round.values():
        for setting, step_s in measured.items():
            of_setting.setdefault(setting, []).append(step_s)
    times_s = {setting: median(values) for setting, values in of_setting.items()}
    return dict(sorted(times_s.items(), key=lambda entry: entry[1]))


def round_of(
    by_round: Mapping[int, Mapping[str, float]], settings: Sequence[str], number: int, budget: int
) -> list[str]:
    """Return the settings of round `number`, as far as the budget of all rounds reaches.

    `by_round` has all rounds before it. With more settings than trials only the first are tried.
    """
    used = sum(len(by_round[earlier]) for earlier in range(number))
    left = max(budget - used, 0)
    if number == 0:
        return list(settings)[:left]
    ranked = list(medians_s({earlier: by_round[earlier] for earlier in range(number)}))
    kept = max(FEWEST, -(-len(ranked) // 2**number))
    return ranked[: min(kept, left)]


def missing(
    by_round: Mapping[int, Mapping[str, float]], settings: Sequence[str], budget: int
) -> tuple[int, list[str]] | None:
    """Return the first round with missing trials and its missing settings; None at the end."""
    if len(settings) < FEWEST:
        return None  # there is nothing to choose
    number = 0
    while wanted := round_of(by_round, settings, number, budget):
        measured = by_round.get(number, {})
        left = [setting for setting in wanted if setting not in measured]
        if left:
            return number, left
        number += 1
    finalists = list(medians_s({earlier: by_round[earlier] for earlier in range(number)}))
    left = [one for one in finalists[:FINALISTS] if one not in by_round.get(number, {})]
    return (number, left) if left else None


def best_of(by_round: Mapping[int, Mapping[str, float]], family: str) -> str:
    """Return the setting with the lowest median. Raises `InvalidInput` if every trial failed."""
    times_s = medians_s(by_round)
    best = next(iter(times_s), None)
    if best is None or times_s[best] == math.inf:
        raise InvalidInput(
            f"a rival needs a setting that runs, but every trial of {family} failed; see the "
            "failures in the domain's trials"
        )
    return best
