"""The state of a job: a fold over its events, and figures derived from them."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autotune.records import CURRENT_SETUP, Conditions, Measured, Role
from autotune.strategy_space.plan import PlannedStrategy
from autotune.tuning.events import Event, Profiled, Proposal, Proposed, TrialFinished
from autotune.tuning.statistics import neighbour_noise, reference_tolerance

LEAST_NOISE = 0.01
"""Two medians closer than this count as equal, however quiet the references were."""
SMALLEST_SPREAD = 4
"""Number of references from which on their spread is meaningful."""


@dataclass(frozen=True)
class History:
    """All events of a job. `deviation` is the job's relative tolerance for the reference."""

    events: tuple[Event, ...]
    deviation: float
    _planned: dict[str, PlannedStrategy] = field(default_factory=dict, compare=False, repr=False)

    def then(self, event: Event) -> History:
        return History((*self.events, event), self.deviation, self._planned)

    def first(self, count: int) -> History:
        """The history when it had `count` events."""
        return History(self.events[:count], self.deviation, self._planned)

    def planned(self, strategy_id: str) -> PlannedStrategy | None:
        """A proposed strategy with its plan; None for the current setup.

        Events store strategies without plans, so each is planned here, once for all histories of
        a job; `keep_plan` hands over the plan that a proposer has already.
        """
        if strategy_id == CURRENT_SETUP:
            return None
        if strategy_id not in self._planned:
            assert self.profiled is not None
            self._planned[strategy_id] = PlannedStrategy.of(
                self.proposals[strategy_id].strategy,
                self.profiled.workload,
                self.profiled.cluster.world_size,
            )
        return self._planned[strategy_id]

    def keep_plan(self, planned: PlannedStrategy) -> None:
        """Let later `planned` calls of this job return this plan."""
        self._planned.setdefault(planned.strategy.id, planned)

    @cached_property
    def profiled(self) -> Profiled | None:
        return next((event for event in self.events if isinstance(event, Profiled)), None)

    @cached_property
    def rounds(self) -> tuple[Proposed, ...]:
        return tuple(event for event in self.events if isinstance(event, Proposed))

    @cached_property
    def trials(self) -> tuple[TrialFinished, ...]:
        return tuple(event for event in self.events if isinstance(event, TrialFinished))

    def of_role(self, role: Role) -> tuple[TrialFinished, ...]:
        return tuple(trial for trial in self.trials if trial.request.role is role)

    @cached_property
    def candidates(self) -> tuple[TrialFinished, ...]:
        return self.of_role(Role.CANDIDATE)

    @cached_property
    def ab_trials(self) -> tuple[TrialFinished, ...]:
        return self.of_role(Role.AB)

    @cached_property
    def refused(self) -> tuple[TrialFinished, ...]:
        """The candidate trials that the ranks refused."""
        return tuple(trial for trial in self.candidates if trial.refused)

    @cached_property
    def proposals(self) -> dict[str, Proposal]:
        """Every proposed strategy by its id, in the order of the first proposals."""
        by_id: dict[str, Proposal] = {}
        for proposed in self.rounds:
            for proposal in proposed.proposals:
                by_id.setdefault(proposal.strategy.id, proposal)
        return by_id

    def conditions(self, requested: Conditions) -> Conditions:
        """The conditions of the trials; `requested`, the job's own, before the first trial.

        Round-robin scheduling counts only if every trial had it: a restarted script may not get it
        again.
        """
        if not self.trials:
            return requested
        round_robin = all(trial.conditions.round_robin for trial in self.trials)
        return replace(self.trials[-1].conditions, round_robin=round_robin)

    @property
    def elapsed_s(self) -> float:
        return self.events[-1].elapsed_s if self.events else 0.0

    @cached_property
    def references(self) -> tuple[tuple[int, float], ...]:
        """(trial number, median step time) of every measured reference, in order."""
        return tuple(
            (trial.request.number, trial.outcome.median_s)
            for trial in self.of_role(Role.REFERENCE)
            if isinstance(trial.outcome, Measured)
        )

    @property
    def _reference_times_s(self) -> list[float]:
        return [median_s for _, median_s in self.references]

    def bracket_s(self, number: int) -> tuple[float | None, float | None]:
        """Median step time of the references before and after a trial; None if there is none."""
        at = bisect(self.references, (number, 0.0))
        before = self.references[at - 1][1] if at > 0 else None
        after = self.references[at][1] if at < len(self.references) else None
        return before, after

    @cached_property
    def tolerance(self) -> float:
        """Maximum relative difference of two neighbouring references on a steady machine.

        It is `deviation`, or less if the references agree better.
        """
        return reference_tolerance(self._reference_times_s, self.deviation)

    @cached_property
    def disturbed(self) -> frozenset[int]:
        """Numbers of the candidate trials during which the machine changed.

        Either the trial's own steps show the change, or the two references around it differ by
        more than the tolerance; then the moment is unknown. A machine that is slower for long
        disturbs no trial once it is steady: see `measured_s`.
        """
        marked = set()
        for trial in self.candidates:
            before, after = self.bracket_s(trial.request.number)
            changed = trial.unsteady
            if before is not None and after is not None:
                changed |= max(before, after) > (1 + self.tolerance) * min(before, after)
            if changed:
                marked.add(trial.request.number)
        return frozenset(marked)

    @cached_property
    def repeated(self) -> int:
        """Number of trials in the search that repeat a disturbed one."""
        return sum(
            trial.request.attempt > 0 and trial.request.round < len(self.rounds)
            for trial in self.candidates
        )

    def steady_s(self, trial: TrialFinished) -> float:
        """A measured trial's median step time, corrected to the machine's usual speed.

        The time is divided by the mean of the references around it and multiplied by the median of
        all references. Other tenants of a machine slow trials and references equally.
        """
        assert isinstance(trial.outcome, Measured)
        around = [value for value in self.bracket_s(trial.request.number) if value is not None]
        if self.reference_s is None or not around:
            return trial.outcome.median_s
        return trial.outcome.median_s * self.reference_s / float(np.mean(around))

    @cached_property
    def measured_s(self) -> dict[str, float]:
        """Strategy id -> median of `steady_s` over its undisturbed trials.

        If every trial was disturbed, over all of them. Blocks of the closing comparison do not
        count: they are compared with their neighbouring blocks of the current setup.
        """
        steady: dict[str, list[float]] = {}
        disturbed: dict[str, list[float]] = {}
        for trial in self.candidates:
            if isinstance(trial.outcome, Measured):
                target = disturbed if trial.request.number in self.disturbed else steady
                target.setdefault(trial.request.strategy_id, []).append(self.steady_s(trial))
        return {key: float(np.median(times)) for key, times in {**disturbed, **steady}.items()}

    @cached_property
    def failed(self) -> dict[str, TrialFinished]:
        """Strategy id -> its failed trial."""
        failures = (trial for trial in self.trials if not isinstance(trial.outcome, Measured))
        return {trial.request.strategy_id: trial for trial in failures}

    @cached_property
    def reference_s(self) -> float | None:
        """Median step time of the current setup over all its reference trials."""
        return float(np.median(self._reference_times_s)) if self.references else None

    @cached_property
    def noise(self) -> float:
        """Relative standard deviation of a trial median on a steady machine, or `LEAST_NOISE`."""
        return max(LEAST_NOISE, self.reference_noise or 0.0)

    @cached_property
    def reference_noise(self) -> float | None:
        """The noise that the references show; None if there are too few."""
        if len(self.references) < SMALLEST_SPREAD:
            return None
        return neighbour_noise(self._reference_times_s)

    @property
    def quality(self) -> str:
        """The quality of the search's measurements, for people."""
        noise = "unknown" if self.reference_noise is None else f"{self.reference_noise:.1%}"
        return (
            f"noise between runs of the current setup {noise}, {len(self.disturbed)} of "
            f"{len(self.candidates)} trials disturbed, {self.repeated} repeated"
        )

    def ranking(self) -> list[tuple[str, float]]:
        """(strategy id, median step time), fastest first, without strategies that ever failed."""
        pairs = [
            (key, value)
            for key, value in self.measured_s.items()
            if key not in self.failed and key != CURRENT_SETUP
        ]
        return sorted(pairs, key=lambda pair: (pair[1], pair[0]))
