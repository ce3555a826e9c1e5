"""The state of a job: a fold over its events, and what can be read off them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autotune.events import Event, Profiled, Proposal, Proposed, TrialFinished
from autotune.records import CURRENT_SETUP, Measured, Role

REFERENCE_WINDOW = 5
"""References whose median is the expectation for the next: adapts to a lasting change within three of them."""

LEAST_NOISE = 0.01
"""Two medians closer than this are not told apart, however quiet the references were."""
SMALLEST_SPREAD = 4
"""References below which their spread says nothing."""


@dataclass(frozen=True)
class History:
    """All events of a job. `deviation` is the job's tolerance for the reference (relative)."""

    events: tuple[Event, ...]
    deviation: float

    def then(self, event: Event) -> History:
        return History((*self.events, event), self.deviation)

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

    @property
    def elapsed_s(self) -> float:
        return self.events[-1].elapsed_s if self.events else 0.0

    @cached_property
    def disturbed(self) -> frozenset[int]:
        """Numbers of the candidate trials that were taken while the reference deviated.

        A reference is good if its median is within `deviation` of the (lower) median of the last `REFERENCE_WINDOW`
        references before it. After one that is not, all candidates since the last good one are disturbed.
        """
        marked: set[int] = set()
        since_good: list[int] = []
        medians: list[float] = []
        for trial in self.trials:
            if trial.request.role is Role.CANDIDATE:
                since_good.append(trial.request.number)
            elif trial.request.role is Role.REFERENCE and isinstance(trial.outcome, Measured):
                recent = sorted(medians[-REFERENCE_WINDOW:]) or [trial.outcome.median_s]
                expected = recent[(len(recent) - 1) // 2]  # of two, the faster: disturbances slow down
                if abs(trial.outcome.median_s / expected - 1) > self.deviation:
                    marked.update(since_good)
                since_good = []
                medians.append(trial.outcome.median_s)
        return frozenset(marked)

    @cached_property
    def candidates(self) -> tuple[TrialFinished, ...]:
        return tuple(trial for trial in self.trials if trial.request.role is Role.CANDIDATE)

    @cached_property
    def measured_s(self) -> dict[str, float]:
        """Strategy id -> median step time over its undisturbed trials (all of them, if every one was disturbed).

        Trials of the closing comparison are not among them: they are taken in blocks beside the current setup.
        """
        good: dict[str, list[float]] = {}
        noisy: dict[str, list[float]] = {}
        for trial in self.candidates:
            if isinstance(trial.outcome, Measured):
                target = noisy if trial.request.number in self.disturbed else good
                target.setdefault(trial.request.strategy_id, []).append(trial.outcome.median_s)
        return {key: float(np.median(values)) for key, values in {**noisy, **good}.items()}

    @cached_property
    def failed(self) -> dict[str, TrialFinished]:
        """Strategy id -> its failed trial."""
        return {t.request.strategy_id: t for t in self.trials if not isinstance(t.outcome, Measured)}

    @cached_property
    def reference_s(self) -> float | None:
        """Median step time of the current setup over all its reference trials."""
        medians = [t.outcome.median_s for t in self.trials if t.request.role is Role.REFERENCE and isinstance(t.outcome, Measured)]
        return float(np.median(medians)) if medians else None

    @cached_property
    def noise(self) -> float:
        """Relative spread between repeats of the same plan, from the reference trials (half the interquartile range), at least 1 %."""
        medians = [t.outcome.median_s for t in self.trials if t.request.role is Role.REFERENCE and isinstance(t.outcome, Measured)]
        if len(medians) < SMALLEST_SPREAD:
            return LEAST_NOISE
        low, middle, high = np.quantile(medians, [0.25, 0.5, 0.75])
        return max(LEAST_NOISE, float((high - low) / (2 * middle)))

    @cached_property
    def ab_trials(self) -> tuple[TrialFinished, ...]:
        return tuple(trial for trial in self.trials if trial.request.role is Role.AB)

    def ranking(self) -> list[tuple[str, float]]:
        """(strategy id, median step time), fastest first, without strategies that ever failed."""
        pairs = [(key, value) for key, value in self.measured_s.items() if key not in self.failed and key != CURRENT_SETUP]
        return sorted(pairs, key=lambda pair: (pair[1], pair[0]))
