"""Figures of the closing comparison: ratios with intervals, distance to the bound, trials needed.

A ratio is time(rival) / time(ours): above 1, ours is faster. It is the Hodges-Lehmann estimate over
the rounds with the exact interval of the signed-rank test, both on logarithms
(`autotune.tuning.statistics.compare`).

Among several rivals, the one with the lowest ratio by all rounds counts, so the luck of the best of
many favours the rivals. The lower limit is the lowest of all of them: whichever rival is really the
best, its own interval reaches at least as low. The upper limit is that of the named rival.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from autotune.dataset.trials import DatasetTrial
from autotune.errors import InvalidInput
from autotune.records import Comparison, Measured
from autotune.tuning.statistics import CONFIDENCE, compare, fewest_values
from benchmarks.outcome.kept import Side, Stop, key_of

Round = Mapping[str, Measured]
"""Plan -> its block of this round."""
FAILURES = 2
"""Failures after which a side is left out; one may be the machine's fault."""
WITHIN = 0.02
"""A time within this of the best known counts as having found it."""


@dataclass(frozen=True)
class Ratio:
    """time(rival) / time(ours); `rival`: the best of the rivals."""

    value: float
    low: float
    high: float
    rounds: int
    rival: str


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean of at least one value above 0."""
    if not values or min(values) <= 0:
        raise InvalidInput(
            f"a geometric mean needs one or more values above 0, but got {list(values)}"
        )
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def failures_of(rounds: Mapping[int, Sequence[DatasetTrial]]) -> dict[str, str]:
    """Return plan -> reason for plans that failed `FAILURES` times.

    The current setup is not among them: a round without it is repeated.
    """
    failed = [
        trial
        for trials in rounds.values()
        for trial in trials
        if trial.failure and trial.strategy is not None
    ]
    times = Counter(key_of(trial) for trial in failed)
    return {key_of(trial): trial.failure for trial in failed if times[key_of(trial)] >= FAILURES}


def whole_rounds(
    rounds: Mapping[int, Sequence[DatasetTrial]], sides: Sequence[Side]
) -> list[Round]:
    """Return the rounds in which every side was measured, except for sides that are left out."""
    wanted = {side.plan for side in sides} - failures_of(rounds).keys()
    by_side = (
        {key_of(trial): trial.outcome for trial in outcomes if isinstance(trial.outcome, Measured)}
        for outcomes in rounds.values()
    )
    complete = (
        {key: outcome for key, outcome in outcomes.items() if key in wanted} for outcomes in by_side
    )
    return [outcomes for outcomes in complete if outcomes.keys() == wanted]


def median_s(rounds: Sequence[Round], key: str) -> float:
    """Return the median over the rounds of a plan's median step."""
    return median(measured[key].median_s for measured in rounds)


def ratio_to_best(
    rounds: Sequence[Round], rivals: Sequence[Side], ours: str, confidence: float = CONFIDENCE
) -> Ratio:
    """Return the ratio of the best rival to the plan `ours`, without sides that are in no round."""
    if len(rounds) < fewest_values(confidence):
        raise InvalidInput(
            f"an interval of {confidence:.0%} needs at least {fewest_values(confidence)} "
            f"whole rounds, but there are {len(rounds)}"
        )
    mine = [measured[ours] for measured in rounds]
    there = [side for side in rivals if side.plan in rounds[0]]
    comparisons = [
        _ratio(compare([measured[side.plan] for measured in rounds], mine, confidence), side.name)
        for side in there
    ]
    best = min(comparisons, key=lambda ratio: ratio.value)
    return replace(best, low=min(ratio.low for ratio in comparisons))


def ratio_to_bound(
    rounds: Sequence[Round], ours: str, bound_s: float, confidence: float = CONFIDENCE
) -> Ratio:
    """Return time(ours) / bound, which is at least 1 but for errors of the fitted rate."""
    bound = Measured(((bound_s,),))
    comparison = compare([measured[ours] for measured in rounds], [bound] * len(rounds), confidence)
    return _ratio(comparison, "bound")


def _ratio(comparison: Comparison, name: str) -> Ratio:
    return Ratio(comparison.ratio, comparison.low, comparison.high, comparison.pairs, name)


def first_within(
    stops: Sequence[Stop], times_s: Mapping[str, float], best_s: float, within: float = WITHIN
) -> Stop | None:
    """Return the first best of a search whose time, measured again, is near the best known."""
    ordered = sorted(stops, key=lambda stop: stop.trials)
    return next(
        (stop for stop in ordered if times_s.get(stop.side, math.inf) <= (1 + within) * best_s),
        None,
    )
