"""Figures of a job that follow from one small row per trial, without step times and strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autotune.arrays import BoolArray
from autotune.errors import InvalidInput
from autotune.records import CURRENT_SETUP, Conditions, FailureKind, Measured, Role, Stopped
from autotune.tuning.candidates import CandidateColumns, ReferenceColumns
from autotune.tuning.events import Profiled, TrialFigures, TrialFinished
from autotune.tuning.statistics import Interval, neighbour_noise, reference_tolerance

LEAST_NOISE = 0.01
"""Two medians closer than this count as equal, however quiet the references were."""
SMALLEST_SPREAD = 4
"""Number of references from which on their spread is meaningful."""


class JobFigures(ABC):
    """The figures of a job. A subclass has the rows of its trials, in order.

    `deviation` is the job's relative tolerance for the reference.
    """

    deviation: float
    _numbering: dict[str, int]
    """Strategy id -> its number in the columns."""

    @property
    @abstractmethod
    def figures(self) -> tuple[TrialFigures, ...]: ...

    @property
    @abstractmethod
    def round_count(self) -> int:
        """The number of rounds of proposals."""

    @cached_property
    def measured_references(self) -> tuple[tuple[int, float], ...]:
        """(trial number, median step time) of every measured reference, in order."""
        return references(self.figures)

    @cached_property
    def first_looks(self) -> tuple[int, ...]:
        """Numbers of the references that were first looks; at most one in the tuner's jobs."""
        return first_looks(self.figures)

    @property
    def looked_only(self) -> bool:
        """Whether the only reference so far was a first look."""
        return len(self.measured_references) == len(self.first_looks) == 1

    @cached_property
    def references(self) -> tuple[tuple[int, float], ...]:
        """The measured references; without a first look once there is another one."""
        measured = self.measured_references
        looked = len(measured) > 1 and measured[0][0] in self.first_looks[:1]
        return measured[1:] if looked else measured

    @cached_property
    def _columns(self) -> CandidateColumns:
        return CandidateColumns.of(of_role(self.figures, Role.CANDIDATE), self._numbering)

    def conditions(self, requested: Conditions) -> Conditions:
        """The conditions of the trials; `requested`, the job's own, before the first trial.

        Round-robin scheduling counts only if every trial had it: a restarted script may not get it
        again.
        """
        if not self.figures:
            return requested
        round_robin = all(trial.conditions.round_robin for trial in self.figures)
        return replace(self.figures[-1].conditions, round_robin=round_robin)

    @cached_property
    def _reference_columns(self) -> ReferenceColumns:
        return ReferenceColumns.of(self.references)

    @cached_property
    def tolerance(self) -> float:
        """Maximum relative difference of two neighbouring references on a steady machine.

        It is `deviation`, or less if the references agree better.
        """
        return reference_tolerance(self._reference_columns.median_s, self.deviation)

    @cached_property
    def disturbed(self) -> frozenset[int]:
        """Numbers of the candidate trials during which the machine changed.

        Either the trial's own steps show the change, or the two references around it differ by
        more than the tolerance; then the moment is unknown. A first look only tells a difference of
        `deviation`. A machine that is slower for long disturbs no trial once it is steady: see
        `History.measured_s`.
        """
        return frozenset(self._columns.numbers[self._is_disturbed].tolist())

    @cached_property
    def _is_disturbed(self) -> BoolArray:
        columns = self._columns
        measured = ReferenceColumns.of(self.measured_references)
        before_s, after_s = measured.around_s(columns.numbers)
        slower_s, faster_s = np.maximum(before_s, after_s), np.minimum(before_s, after_s)
        first = self.references[0][0] if self.references else 0
        tolerance = np.where(columns.numbers < first, self.deviation, self.tolerance)
        # A comparison with NaN is false.
        return columns.unsteady | (slower_s > (1 + tolerance) * faster_s)

    @cached_property
    def _is_useless(self) -> BoolArray:
        """Whether another trial of the same strategy replaces this one."""
        return self._is_disturbed | self._columns.first_look

    @cached_property
    def repeated(self) -> int:
        """Number of trials that repeat a disturbed one or a first look.

        After the search, the first trial of a finalist has attempt 1.
        """
        return sum(
            trial.attempt > (0 if trial.round < self.round_count else 1)
            for trial in of_role(self.figures, Role.CANDIDATE)
        )

    @cached_property
    def overruns(self) -> dict[str, float]:
        """Strategy id -> median overrun of its trials; empty where accelerators are real."""
        overruns: dict[str, list[float]] = {}
        for trial in self.figures:
            if trial.overrun is not None:
                overruns.setdefault(trial.strategy_id, []).append(trial.overrun)
        return {strategy_id: float(np.median(values)) for strategy_id, values in overruns.items()}

    @cached_property
    def reference_s(self) -> float | None:
        """Median step time of the current setup over all its reference trials."""
        return float(np.median(self._reference_columns.median_s)) if self.references else None

    @cached_property
    def noise(self) -> float:
        """Relative standard deviation of a trial median on a steady machine, or `LEAST_NOISE`."""
        return max(LEAST_NOISE, self.reference_noise or 0.0)

    @cached_property
    def reference_noise(self) -> float | None:
        """The noise that the references show; None if there are too few."""
        if len(self.references) < SMALLEST_SPREAD:
            return None
        return neighbour_noise(self._reference_columns.median_s)

    @property
    def counts(self) -> str:
        """The number of trials in all, and of each role."""
        candidates = len(self._columns.numbers)
        compared = len(of_role(self.figures, Role.AB))
        references = len(self.figures) - candidates - compared
        return (
            f"{len(self.figures)} ({candidates} of candidates, {references} of the current setup, "
            f"{compared} in the closing comparison)"
        )

    @property
    def overrun_range(self) -> str:
        """The overrun of emulated accelerators in words; empty where they are real."""
        if not self.overruns:
            return ""
        low, high = min(self.overruns.values()), max(self.overruns.values())
        return f"{low:.1%} to {high:.1%} of the profile's step"

    @property
    def quality(self) -> str:
        """The quality of the search's measurements, for people."""
        noise = "unknown" if self.reference_noise is None else f"{self.reference_noise:.1%}"
        return (
            f"noise between runs of the current setup {noise}, {len(self.disturbed)} of "
            f"{len(self._columns.numbers)} candidate trials disturbed, {self.repeated} repeated"
        )


def of_role(trials: Sequence[TrialFigures], role: Role) -> tuple[TrialFigures, ...]:
    return tuple(trial for trial in trials if trial.role is role)


def references(trials: Sequence[TrialFigures]) -> tuple[tuple[int, float], ...]:
    """(trial number, median step time) of the measured references."""
    return tuple(
        (trial.number, trial.median_s)
        for trial in of_role(trials, Role.REFERENCE)
        if trial.median_s is not None
    )


def first_looks(trials: Sequence[TrialFigures]) -> tuple[int, ...]:
    return tuple(trial.number for trial in of_role(trials, Role.REFERENCE) if trial.first_look)


@dataclass(frozen=True)
class TrialSummary:
    """A trial in a list. `steps` were timed; those of a failure are 0, and its message is given."""

    figures: TrialFigures
    predicted_s: float | None
    quartiles_s: tuple[float, float] | None = None
    interval: Interval | None = None
    steps: int = 0
    stopped: Stopped | None = None
    failure: FailureKind | None = None
    message: str = ""

    @staticmethod
    def of(trial: TrialFinished) -> TrialSummary:
        outcome, predicted_s = trial.outcome, trial.request.predicted_s
        if not isinstance(outcome, Measured):
            return TrialSummary(
                trial.figures, predicted_s, failure=outcome.kind, message=outcome.message
            )
        return TrialSummary(
            trial.figures,
            predicted_s,
            outcome.quartiles_s,
            trial.interval,
            len(outcome.slowest_s),
            outcome.stopped,
        )


@dataclass(frozen=True)
class ProposalSummary:
    """A proposed strategy: the proposal's origin, and the effect in words."""

    origin: str
    words: str


@dataclass(frozen=True)
class JobSummary(JobFigures):
    """A job in a list of its trials: as a history, without step times and strategies."""

    trials: tuple[TrialSummary, ...]
    proposals: dict[str, ProposalSummary]
    profiled: Profiled | None
    proposed_rounds: int
    deviation: float
    _numbering: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def figures(self) -> tuple[TrialFigures, ...]:
        return tuple(trial.figures for trial in self.trials)

    @property
    def round_count(self) -> int:
        return self.proposed_rounds

    def in_words(self, strategy_id: str) -> str:
        """As `History.in_words`."""
        return "" if strategy_id == CURRENT_SETUP else self._proposal(strategy_id).words

    def origin(self, strategy_id: str) -> str:
        """The origin of a proposed strategy; empty for the current setup."""
        return "" if strategy_id == CURRENT_SETUP else self._proposal(strategy_id).origin

    def _proposal(self, strategy_id: str) -> ProposalSummary:
        if strategy_id not in self.proposals:
            raise not_proposed(strategy_id)
        return self.proposals[strategy_id]


def not_proposed(strategy_id: str) -> InvalidInput:
    return InvalidInput(
        f"a trial's strategy must be proposed after a profile, but the job's events "
        f"do not do so for {strategy_id!r}; the store is damaged, restore it"
    )
