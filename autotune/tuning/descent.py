"""The end of a search: a descent from the fastest strategy through its whole neighbourhood.

Rounds of a descent propose neighbours of one strategy, the incumbent. Each neighbour is measured
right before or after the incumbent, so that a machine whose speed drifts slows both. A neighbour
that was faster is measured again, until it wins or loses; a winner is the next incumbent. The
incumbent's time becomes the median of more and more trials, so that it cannot stay by luck.

symbol   meaning                                                               unit
d        ln(time of the neighbour / time of the incumbent) of adjacent trials  1
noise    relative standard deviation of a trial's median                       1
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    neighbour. `left`: proposed neighbours without a verdict, in order.
    """

    incumbent: str
    trials: tuple[str, ...]
    d: Mapping[str, tuple[float, ...]]
    winner: str | None
    left: tuple[str, ...]

    @property
    def next_trial(self) -> str | None:
        """The strategy to measure next; None if every proposed neighbour has a verdict."""
        if self.trials and not self._paired(len(self.trials) - 1):
            return self.incumbent
        if not self.left:
            return None
        if not self.trials:
            return self.incumbent
        begun = next((neighbour for neighbour in self.left if self.d.get(neighbour)), None)
        if begun is None:
            return self.left[0]
        return begun if self.trials[-1] == self.incumbent else self.incumbent

    def _paired(self, place: int) -> bool:
        beside = self.trials[max(place - 1, 0) : place + 2]
        return self.incumbent in beside


def descent(history: History) -> Descent | None:
    """The descent under way; None before it begins, and after its incumbent failed."""
    incumbent = history.rounds[-1].incumbent if history.rounds else ""
    if not incumbent or incumbent in history.failed:
        return None
    first = len(history.rounds)
    while first and history.rounds[first - 1].incumbent == incumbent:
        first -= 1
    rounds = history.rounds[first:]
    began = next(at for at, event in enumerate(history.events) if event is rounds[0])
    measured = _measured(history, began)
    d = pairs_of([(t.request.strategy_id, _median_s(t)) for t in measured], incumbent)
    trials = tuple(trial.request.strategy_id for trial in measured)
    proposals: list[Proposal] = [one for proposed in rounds for one in proposed.proposals]
    ids = dict.fromkeys(proposal.strategy.id for proposal in proposals)
    verdicts = {
        id_: Verdict.LOST
        if id_ in history.failed or trials.count(id_) > PAIRS
        else verdict(d.get(id_, ()), history.noise)
        for id_ in ids
    }
    winner = next((id_ for id_, found in verdicts.items() if found is Verdict.WON), None)
    unpaired = {id_ for id_ in trials if not d.get(id_)}
    left = tuple(id_ for id_ in ids if verdicts[id_] is Verdict.OPEN and id_ not in unpaired)
    return Descent(incumbent, trials, d, winner, left)


def pairs_of(trials: Sequence[tuple[str, float]], incumbent: str) -> dict[str, tuple[float, ...]]:
    """d of every neighbour's trials next to one of the incumbent; `trials`: (id, median) in order.

    If the incumbent ran before and after, d is the mean of both.
    """
    d: dict[str, tuple[float, ...]] = {}
    for place, (id_, median_s) in enumerate(trials):
        beside = [*trials[max(place - 1, 0) : place], *trials[place + 1 : place + 2]]
        ratios = [math.log(median_s / other_s) for other, other_s in beside if other == incumbent]
        if id_ != incumbent and ratios:
            d[id_] = (*d.get(id_, ()), fmean(ratios))
    return d


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


def _measured(history: History, began: int) -> list[TrialFinished]:
    """Measured candidate trials since event `began`, but those in which the machine changed.

    References need not agree around them, since each is compared with the trial next to it.
    """
    return [
        event
        for event in history.events[began:]
        if isinstance(event, TrialFinished)
        and event.request.role is Role.CANDIDATE
        and isinstance(event.outcome, Measured)
        and not event.unsteady
    ]


def _median_s(trial: TrialFinished) -> float:
    assert isinstance(trial.outcome, Measured)
    return trial.outcome.median_s
