"""The state of a job: a fold over its events, and what can be read off them."""

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
"""Two medians closer than this are not told apart, however quiet the references were."""
SMALLEST_SPREAD = 4
"""References below which their spread says nothing."""


@dataclass(frozen=True)
class History:
    """All events of a job. `deviation` is the job's tolerance for the reference (relative)."""

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

    @cached_property
    def proposals(self) -> dict[str, Proposal]:
        """Every proposed strategy by its id, first proposal first."""
        found: dict[str, Proposal] = {}
        for proposed in self.rounds:
            for proposal in proposed.proposals:
                found.setdefault(proposal.strategy.id, proposal)
        return found

    def conditions(self, wanted: Conditions) -> Conditions:
        """Under which the trials were taken; `wanted`, the job's, before there is any.

        Round-robin scheduling counts only where every trial had it: a restarted script may not have been given it again.
        """
        if not self.trials:
            return wanted
        return replace(
            self.trials[-1].conditions,
            round_robin=all(trial.conditions.round_robin for trial in self.trials),
        )

    @property
    def elapsed_s(self) -> float:
        return self.events[-1].elapsed_s if self.events else 0.0

    @cached_property
    def references(self) -> tuple[tuple[int, float], ...]:
        """(trial number, median step time) of every measured reference, in order."""
        found = [trial for trial in self.trials if trial.request.role is Role.REFERENCE]
        return tuple(
            (t.request.number, t.outcome.median_s) for t in found if isinstance(t.outcome, Measured)
        )

    def bracket_s(self, number: int) -> tuple[float | None, float | None]:
        """Median step time of the current setup right before and right after a trial; None where there was none (yet)."""
        at = bisect(self.references, (number, 0.0))
        before = self.references[at - 1][1] if at > 0 else None
        after = self.references[at][1] if at < len(self.references) else None
        return before, after

    @cached_property
    def tolerance(self) -> float:
        """How far (relative) two neighbouring references may differ: `deviation`, or less where they agree better."""
        return reference_tolerance([median_s for _, median_s in self.references], self.deviation)

    @cached_property
    def disturbed(self) -> frozenset[int]:
        """Numbers of the candidate trials during which the machine changed, or between two references that differ by too much.

        There the machine changed, at a moment that nobody knows. A machine that is slower for long enough disturbs
        nothing once it stays so: its trials are compared with the references around them, see `measured_s`.
        """
        marked = set()
        for trial in self.candidates:
            before, after = self.bracket_s(trial.request.number)
            moved = (
                before is not None
                and after is not None
                and max(before, after) > (1 + self.tolerance) * min(before, after)
            )
            if moved or trial.unsteady:
                marked.add(trial.request.number)
        return frozenset(marked)

    @cached_property
    def repeated(self) -> int:
        """Disturbed trials that were followed by another one of their strategy in the search."""
        return sum(
            trial.request.attempt > 0 and trial.request.round < len(self.rounds)
            for trial in self.candidates
        )

    @cached_property
    def candidates(self) -> tuple[TrialFinished, ...]:
        return tuple(trial for trial in self.trials if trial.request.role is Role.CANDIDATE)

    @cached_property
    def refused(self) -> tuple[TrialFinished, ...]:
        """The candidate trials that the ranks refused."""
        return tuple(trial for trial in self.candidates if trial.refused)

    def steady_s(self, trial: TrialFinished) -> float:
        """A measured trial's median step time as it would be on the machine's usual speed.

        The time is divided by the mean of the references around it and multiplied by the median of all references:
        other tenants of a machine come and go for minutes and slow the references as they slow the trial.
        """
        assert isinstance(trial.outcome, Measured)
        around = [value for value in self.bracket_s(trial.request.number) if value is not None]
        if self.reference_s is None or not around:
            return trial.outcome.median_s
        return trial.outcome.median_s * self.reference_s / float(np.mean(around))

    @cached_property
    def measured_s(self) -> dict[str, float]:
        """Strategy id -> median of `steady_s` over its undisturbed trials (over all, if every one was disturbed).

        Trials of the closing comparison are not among them: they are taken in blocks beside the current setup.
        """
        good: dict[str, list[float]] = {}
        noisy: dict[str, list[float]] = {}
        for trial in self.candidates:
            if isinstance(trial.outcome, Measured):
                target = noisy if trial.request.number in self.disturbed else good
                target.setdefault(trial.request.strategy_id, []).append(self.steady_s(trial))
        return {key: float(np.median(values)) for key, values in {**noisy, **good}.items()}

    @cached_property
    def failed(self) -> dict[str, TrialFinished]:
        """Strategy id -> its failed trial."""
        return {
            t.request.strategy_id: t for t in self.trials if not isinstance(t.outcome, Measured)
        }

    @cached_property
    def reference_s(self) -> float | None:
        """Median step time of the current setup over all its reference trials."""
        return (
            float(np.median([median_s for _, median_s in self.references]))
            if self.references
            else None
        )

    @cached_property
    def noise(self) -> float:
        """Relative standard deviation of a trial's median step time on a steady machine, at least `LEAST_NOISE`."""
        return max(LEAST_NOISE, self.reference_noise or 0.0)

    @cached_property
    def reference_noise(self) -> float | None:
        """What the references themselves say of it; None where they are too few."""
        if len(self.references) < SMALLEST_SPREAD:
            return None
        return neighbour_noise([median_s for _, median_s in self.references])

    @property
    def quality(self) -> str:
        """For people: how good the measurements of the search were."""
        noise = "unknown" if self.reference_noise is None else f"{self.reference_noise:.1%}"
        disturbed = f"{len(self.disturbed)} of {len(self.candidates)} trials disturbed, {self.repeated} repeated"
        return f"noise between runs of the current setup {noise}, {disturbed}"

    @cached_property
    def ab_trials(self) -> tuple[TrialFinished, ...]:
        return tuple(trial for trial in self.trials if trial.request.role is Role.AB)

    def ranking(self) -> list[tuple[str, float]]:
        """(strategy id, median step time), fastest first, without strategies that ever failed."""
        pairs = [
            (key, value)
            for key, value in self.measured_s.items()
            if key not in self.failed and key != CURRENT_SETUP
        ]
        return sorted(pairs, key=lambda pair: (pair[1], pair[0]))
