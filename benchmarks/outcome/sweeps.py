"""Tune every rival with as many trials as our search.

- A family whose settings fit into the budget: successive halving. In the first round each setting
  is measured once for a few steps, in every later round the faster half of them, by the median of
  all trials so far, until the budget is used up. Source: Jamieson and Talwalkar, AISTATS 2016.
- A larger family: the first round takes most of the budget, in the order of the settings. Each
  later round measures the fastest setting again that has neighbors which were not measured, and
  these: settings whose names differ in one number only, and have the next smaller or larger one.

Then the best are measured once more, as the finalists of our search are, and the best of these is
chosen. Everything follows from the trials on disk, so a sweep that was cut off resumes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import median

from autotune.dataset.trials import DatasetTrial
from autotune.errors import InvalidInput
from autotune.tuning.job import JobSpec
from benchmarks.outcome.kept import SWEEP, rounds_of

FINALISTS = JobSpec.finalists
FEWEST = 2
"""Settings of the last rounds, and of the smallest family that is swept."""
BROAD = 0.72
"""Share of the budget for the first round of a family that is larger than the budget: of 25 trials
18, which try all sizes of parameter servers and of BytePS once."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


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

    `by_round` has all rounds before it.
    """
    used = sum(len(by_round[earlier]) for earlier in range(number))
    left = max(budget - used, 0)
    if number == 0:
        return list(settings)[: left if len(settings) <= left else round(BROAD * left)]
    ranked = list(medians_s({earlier: by_round[earlier] for earlier in range(number)}))
    for fast in ranked[:FINALISTS]:
        beside = [one for one in neighbors(fast, settings) if one not in ranked]
        if beside:
            return [fast, *beside][:left]
    kept = max(FEWEST, -(-len(ranked) // 2**number))
    return ranked[: min(kept, left)]


def neighbors(setting: str, settings: Sequence[str]) -> list[str]:
    """Return the settings whose names differ from it in one number only, by the smallest step."""
    words, own_numbers = _words_and_numbers(setting)
    read = {one: _words_and_numbers(one) for one in settings}
    places = {one: numbers for one, (text, numbers) in read.items() if text == words}
    adjacent = []
    for axis in range(len(own_numbers)):
        along = sorted(
            (numbers[axis], one)
            for one, numbers in places.items()
            if numbers[:axis] == own_numbers[:axis]
            and numbers[axis + 1 :] == own_numbers[axis + 1 :]
        )
        at = along.index((own_numbers[axis], setting))
        adjacent += [one for _, one in along[max(at - 1, 0) : at + 2] if one != setting]
    return adjacent


def _words_and_numbers(setting: str) -> tuple[str, tuple[float, ...]]:
    """Return the words of a setting's name, and its numbers."""
    return _NUMBER.sub("#", setting), tuple(map(float, _NUMBER.findall(setting)))


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
    """Return the finalist with the lowest median: a setting that was lucky once is none.

    If each fails, any other setting counts. Raises `InvalidInput` if every trial failed.
    """
    times_s = medians_s(by_round)
    finalists = by_round[max(by_round)] if by_round else {}
    ran = [setting for setting in times_s if times_s[setting] < math.inf]
    best = next((setting for setting in ran if setting in finalists), next(iter(ran), None))
    if best is None:
        raise InvalidInput(
            f"a rival needs a setting that runs, but every trial of {family} failed; see the "
            "failures in the domain's trials"
        )
    return best
