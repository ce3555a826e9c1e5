"""The end of a search: a descent from the fastest strategy to neighbours that are faster.

Rounds of a descent propose neighbours of one strategy, the incumbent. Each neighbour is measured
right before or after the incumbent, so that a machine whose speed drifts slows both. A neighbour
that was faster is measured again, until it wins or loses; a winner is the next incumbent. The
incumbent's time becomes the median of more and more trials, so that it cannot stay by luck.

Trials before and after an interruption of the job, or a failure, are in no pair.

A trial during which the machine changed is unusable, and repeated as often as a job's `max_repeats`
allows. After that a neighbour has lost, and the incumbent's next trial is used all the same.

symbol   meaning                                                               unit
d        ln(time of the neighbour / time of the incumbent) of adjacent trials  1
noise    relative standard deviation of a trial's median                       1
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

from autotune.records import Measured, Role
from autotune.tuning.events import Proposal, TrialFinished
from autotune.tuning.history import History

PAIRS = 3
"""Most pairs of one neighbour; without a win until then, it has lost."""
FEWEST_TO_WIN = 2
"""One lucky trial must not replace the incumbent."""


class Verdict(Enum):
    """The result of a neighbour's pairs so far."""

    OPEN = "open"
    WON = "won"
    LOST = "lost"


@dataclass(frozen=True)
class Descent:
    """The part of a descent that began with its present incumbent.

    `trials`: measured trials since then, in order, as strategy ids. `d`: the pairs of each
    neighbour. `left`: proposed neighbours without a verdict, in order. `unusable`: places in
    `trials` that are in no pair. `begins`: places whose trials are in no pair with the one
    before, since the script was started again (`TrialFinished.restarted`).
    """

    incumbent: str
    trials: tuple[str, ...]
    d: Mapping[str, tuple[float, ...]]
    winner: str | None
    left: tuple[str, ...]
    unusable: frozenset[int] = frozenset()
    begins: frozenset[int] = frozenset()

    @property
    def next_trial(self) -> str | None:
        """The strategy to measure next; None if every proposed neighbour has a verdict."""
        last = len(self.trials) - 1
        if self.trials and not self._paired(last):
            return self.incumbent
        if not self.left:
            return None
        if not self.trials or (self.trials[last] == self.incumbent and last in self.unusable):
            return self.incumbent
        begun = next((neighbour for neighbour in self.left if self.d.get(neighbour)), None)
        if begun is None:
            return self.left[0]
        return begun if self.trials[last] == self.incumbent else self.incumbent

    def _paired(self, place: int) -> bool:
        """Whether a trial needs none of the incumbent next to it."""
        if place in self.unusable or self.trials[place] == self.incumbent:
            return True
        return bool(_beside(self.trials, place, self.incumbent, self.unusable, self.begins))


def descent(history: History, max_repeats: int) -> Descent | None:
    """The descent under way; None before it begins, and after its incumbent failed.

    `max_repeats`: of a trial during which the machine changed.
    """
    incumbent = history.rounds[-1].incumbent if history.rounds else ""
    if not incumbent or incumbent in history.failed:
        return None
    first = len(history.rounds)
    while first and history.rounds[first - 1].incumbent == incumbent:
        first -= 1
    rounds = history.rounds[first:]
    began = next(at for at, event in enumerate(history.events) if event is rounds[0])
    measured, begins = _measured(history, began)
    trials = tuple(trial.request.strategy_id for trial in measured)
    unsteady = frozenset(place for place, trial in enumerate(measured) if trial.unsteady)
    unusable = unsteady - _used_anyway(trials, unsteady, incumbent, max_repeats)
    medians_s = [(trial.request.strategy_id, _median_s(trial)) for trial in measured]
    d = pairs_of(medians_s, incumbent, unusable, begins)
    disturbed = Counter(trials[place] for place in unusable)
    used = Counter(id_ for place, id_ in enumerate(trials) if place not in unusable)
    proposals: list[Proposal] = [one for proposed in rounds for one in proposed.proposals]
    ids = dict.fromkeys(proposal.strategy.id for proposal in proposals)
    verdicts = {
        id_: Verdict.LOST
        if id_ in history.failed or used[id_] > PAIRS or disturbed[id_] > max_repeats
        else verdict(d.get(id_, ()), history.noise)
        for id_ in ids
    }
    winner = next((id_ for id_, found in verdicts.items() if found is Verdict.WON), None)
    left = tuple(id_ for id_ in ids if verdicts[id_] is Verdict.OPEN)
    return Descent(incumbent, trials, d, winner, left, unusable, begins)


def pairs_of(
    trials: Sequence[tuple[str, float]],
    incumbent: str,
    unusable: Collection[int] = (),
    begins: Collection[int] = (),
) -> dict[str, tuple[float, ...]]:
    """d of every neighbour's trials next to one of the incumbent; `trials`: (id, median) in order.

    If the incumbent ran before and after, d is the mean of both. Trials at places in `unusable` are
    in no pair, and separate those around them. Those in `begins` are separate from the ones before.
    """
    ids = [id_ for id_, _ in trials]
    d: dict[str, tuple[float, ...]] = {}
    for place, (id_, median_s) in enumerate(trials):
        if id_ == incumbent or place in unusable:
            continue
        beside = _beside(ids, place, incumbent, unusable, begins)
        if beside:
            ratios = [math.log(median_s / trials[other][1]) for other in beside]
            d[id_] = (*d.get(id_, ()), fmean(ratios))
    return d


def _beside(
    ids: Sequence[str],
    place: int,
    incumbent: str,
    unusable: Collection[int],
    begins: Collection[int],
) -> list[int]:
    """The places right before and after `place` with a usable trial of the incumbent."""
    before = [] if place in begins else [place - 1]
    after = [] if place + 1 in begins else [place + 1]
    return [
        other
        for other in (*before, *after)
        if 0 <= other < len(ids) and ids[other] == incumbent and other not in unusable
    ]


def _used_anyway(
    ids: Sequence[str], unsteady: Collection[int], incumbent: str, max_repeats: int
) -> frozenset[int]:
    """The places of the incumbent's unsteady trials that its repeats have not replaced."""
    used, repeats = set(), 0
    for place, id_ in enumerate(ids):
        if id_ != incumbent:
            continue
        if place not in unsteady:
            repeats = 0
        elif repeats >= max_repeats:
            used.add(place)
        else:
            repeats += 1
    return frozenset(used)


def verdict(d: Sequence[float], noise: float) -> Verdict:
    """Whether a neighbour wins: faster on average by one standard error, in two pairs or more."""
    if not d:
        return Verdict.OPEN
    mean = fmean(d)
    if mean >= 0:
        return Verdict.LOST
    if len(d) >= FEWEST_TO_WIN and mean + noise * math.sqrt(2 / len(d)) < 0:
        return Verdict.WON
    return Verdict.LOST if len(d) >= PAIRS else Verdict.OPEN


def _measured(history: History, began: int) -> tuple[list[TrialFinished], frozenset[int]]:
    """Measured candidate trials since event `began`, and `Descent.begins`.

    References need not agree around them, since each is compared with the trial next to it.
    """
    measured: list[TrialFinished] = []
    begins: set[int] = set()
    for event in history.events[began:]:
        if not isinstance(event, TrialFinished):
            continue
        if event.restarted:
            begins.add(len(measured))
        if event.request.role is Role.CANDIDATE and isinstance(event.outcome, Measured):
            measured.append(event)
    return measured, frozenset(begins)


def _median_s(trial: TrialFinished) -> float:
    assert isinstance(trial.outcome, Measured)
    return trial.outcome.median_s
