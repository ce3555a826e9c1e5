"""The state of a job: a fold over its events, and figures derived from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.records import CURRENT_SETUP, Failed, Measured, Role
from autotune.strategy_space.builders.collectives import bucketed
from autotune.strategy_space.plan import Plan, PlannedStrategy, plan
from autotune.tuning.candidates import CandidateColumns, medians
from autotune.tuning.events import Event, Profiled, Proposal, Proposed, TrialFigures, TrialFinished
from autotune.tuning.figures import JobFigures, first_looks, not_proposed, of_role, references


@dataclass(frozen=True)
class History(JobFigures):
    """All events of a job."""

    events: tuple[Event, ...]
    deviation: float
    _planned: dict[str, PlannedStrategy] = field(default_factory=dict, compare=False, repr=False)
    _numbering: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def then(self, event: Event) -> History:
        """The history with one more event. Parts that are known already are not built again."""
        later = self._with((*self.events, event))
        known, new = self.__dict__, later.__dict__
        for name, part in _PARTS.items():
            if name in known:
                new[name] = (*known[name], *part((event,)))
        if "_columns" in known:
            candidates = of_role(_figures((event,)), Role.CANDIDATE)
            columns = CandidateColumns.of(candidates, self._numbering)
            new["_columns"] = self._columns.then(columns)
        proposed = _rounds((event,))
        if "_proposed" in known:
            new["_proposed"] = np.concatenate([self._proposed, self._numbers(proposed)])
        if "proposals" in known:
            new["proposals"] = self._proposals_with(proposed)
        return later

    def _proposals_with(self, rounds: Sequence[Proposed]) -> dict[str, Proposal]:
        if not rounds:
            return self.proposals
        proposals = dict(self.proposals)
        for strategy_id, proposal in _by_id(rounds).items():
            proposals.setdefault(strategy_id, proposal)
        return proposals

    def first(self, count: int) -> History:
        """The history when it had `count` events."""
        return self._with(self.events[:count])

    def _with(self, events: tuple[Event, ...]) -> History:
        return History(events, self.deviation, self._planned, self._numbering)

    def in_words(self, strategy_id: str) -> str:
        """What a proposed strategy does; empty for the current setup."""
        planned = self.planned(strategy_id)
        if planned is None or self.profiled is None:
            return ""
        return self.profiled.in_words(planned.plan)

    def planned(self, strategy_id: str) -> PlannedStrategy | None:
        """A proposed strategy with its plan; None for the current setup.

        Events store strategies without plans, so each is planned here, once for all histories of
        a job; `keep_plan` hands over the plan that a proposer has already. Raises
        `InvalidInput` for a strategy that was not proposed, as in a damaged store.
        """
        if strategy_id == CURRENT_SETUP:
            return None
        if strategy_id not in self._planned:
            proposal = self.proposals.get(strategy_id)
            if proposal is None or self.profiled is None:
                raise not_proposed(strategy_id)
            workload, ranks = self.profiled.workload, self.profiled.cluster.world_size
            self._planned[strategy_id] = PlannedStrategy.of(proposal.strategy, workload, ranks)
        return self._planned[strategy_id]

    @cached_property
    def current_plan(self) -> Plan | None:
        """The messages of the current setup; None if its buckets are not known."""
        if self.profiled is None or not self.profiled.current_buckets:
            return None
        workload, buckets = self.profiled.workload, self.profiled.current_buckets
        if sorted(name for bucket in buckets for name in bucket) != sorted(workload.index):
            return None
        return plan(bucketed(workload, buckets), workload, self.profiled.cluster.world_size)

    def keep_plan(self, planned: PlannedStrategy) -> None:
        """Let later `planned` calls of this job return this plan."""
        self._planned.setdefault(planned.strategy.id, planned)

    @cached_property
    def profiled(self) -> Profiled | None:
        return next((event for event in self.events if isinstance(event, Profiled)), None)

    @cached_property
    def rounds(self) -> tuple[Proposed, ...]:
        return _rounds(self.events)

    @property
    def round_count(self) -> int:
        return len(self.rounds)

    @cached_property
    def figures(self) -> tuple[TrialFigures, ...]:
        return _figures(self.events)

    @cached_property
    def trials(self) -> tuple[TrialFinished, ...]:
        return _trials(self.events)

    @cached_property
    def candidates(self) -> tuple[TrialFinished, ...]:
        return _candidates(self.events)

    @cached_property
    def ab_trials(self) -> tuple[TrialFinished, ...]:
        return _ab_trials(self.events)

    @cached_property
    def refused(self) -> tuple[TrialFinished, ...]:
        """The candidate trials that the ranks refused."""
        return _refused(self.events)

    @cached_property
    def _failures(self) -> tuple[TrialFinished, ...]:
        return _failures(self.events)

    @cached_property
    def proposals(self) -> dict[str, Proposal]:
        """Every proposed strategy by its id, in the order of the first proposals."""
        return _by_id(self.rounds)

    @cached_property
    def _proposed(self) -> IntArray:
        """The number of every proposal's strategy, in order."""
        return self._numbers(self.rounds)

    def _numbers(self, rounds: Sequence[Proposed]) -> IntArray:
        numbering = self._numbering
        ids = [proposal.strategy.id for event in rounds for proposal in event.proposals]
        return np.array([numbering.setdefault(id_, len(numbering)) for id_ in ids], dtype=np.int64)

    def next_proposal(self, most_repeats: int) -> tuple[Proposed, Proposal, int] | None:
        """The first proposal to try, with its round and the number of its trials so far.

        It has no trial yet, or all of them were measured and useless: at most `most_repeats`
        disturbed ones and a first look.
        """
        proposed_numbers, columns = self._proposed, self._columns
        count = len(self._numbering)
        attempts = np.bincount(columns.strategies, minlength=count)
        useless = columns.strategies[columns.measured & self._is_useless]
        useless_attempts = np.bincount(useless, minlength=count)
        looks = np.bincount(columns.strategies[columns.first_look], minlength=count)
        wanted = (attempts == useless_attempts) & (attempts - looks <= most_repeats)
        positions = np.flatnonzero(wanted[proposed_numbers])
        if len(positions) == 0:
            return None
        position = int(positions[0])
        for proposed in self.rounds:
            if position < len(proposed.proposals):
                proposal = proposed.proposals[position]
                number = self._numbering[proposal.strategy.id]
                return proposed, proposal, int(attempts[number])
            position -= len(proposed.proposals)
        raise AssertionError("a numbered proposal is in a round")

    @property
    def elapsed_s(self) -> float:
        return self.events[-1].elapsed_s if self.events else 0.0

    def steady_s(self, trial: TrialFinished) -> float:
        """A measured trial's median step time, corrected to the machine's usual speed.

        The time is divided by the mean of the references around it and multiplied by the median of
        all references. Other tenants of a machine slow trials and references equally.
        """
        assert isinstance(trial.outcome, Measured)
        numbers, median_s = np.array([trial.request.number]), np.array([trial.outcome.median_s])
        return float(self._corrected_s(numbers, median_s)[0])

    @cached_property
    def steady_by_number(self) -> dict[int, float]:
        """Trial number of every measured candidate -> its `steady_s`."""
        columns = self._columns
        numbers = columns.numbers[columns.measured]
        corrected_s = self._corrected_s(numbers, columns.median_s[columns.measured])
        return dict(zip(numbers.tolist(), corrected_s.tolist(), strict=True))

    def _corrected_s(self, numbers: IntArray, median_s: FloatArray) -> FloatArray:
        if self.reference_s is None:
            return median_s
        return self._reference_columns.corrected_s(numbers, median_s, self.reference_s)

    @cached_property
    def _measured_s(self) -> FloatArray:
        """`measured_s` by the number of the strategy; NaN if it was not measured."""
        columns, count = self._columns, len(self._numbering)
        has_steady = np.zeros(count, dtype=bool)
        steady = columns.measured & ~self._is_useless
        has_steady[columns.strategies[steady]] = True
        used = steady | (columns.measured & ~has_steady[columns.strategies])
        step_s = self._corrected_s(columns.numbers[used], columns.median_s[used])
        return medians(step_s, columns.strategies[used], count)

    @cached_property
    def measured_s(self) -> dict[str, float]:
        """Strategy id -> median of `steady_s` over its undisturbed trials but a first look.

        If there are none, over all of its trials. Blocks of the closing comparison do not
        count: they are compared with their neighbouring blocks of the current setup.
        """
        measured = [trial for trial in self.candidates if isinstance(trial.outcome, Measured)]
        # Strategies with a disturbed trial first: simulators train on them in this order.
        measured.sort(key=lambda trial: trial.request.number not in self.disturbed)
        ids = dict.fromkeys(trial.request.strategy_id for trial in measured)
        return {id_: float(self._measured_s[self._numbering[id_]]) for id_ in ids}

    @cached_property
    def failed(self) -> dict[str, TrialFinished]:
        """Strategy id -> its failed trial."""
        return {trial.request.strategy_id: trial for trial in self._failures}

    @property
    def _ineligible(self) -> set[str]:
        return {CURRENT_SETUP, *self.failed}

    @property
    def fastest_s(self) -> float | None:
        """The first step time of `ranking`."""
        step_s, numbering = self._measured_s.copy(), self._numbering
        step_s[[numbering[id_] for id_ in self._ineligible if id_ in numbering]] = np.nan
        return None if np.isnan(step_s).all() else float(np.nanmin(step_s))

    def ranking(self) -> list[tuple[str, float]]:
        """(strategy id, median step time), fastest first, without strategies that ever failed."""
        left_out = self._ineligible
        pairs = [(key, value) for key, value in self.measured_s.items() if key not in left_out]
        return sorted(pairs, key=lambda pair: (pair[1], pair[0]))


def _by_id(rounds: Sequence[Proposed]) -> dict[str, Proposal]:
    by_id: dict[str, Proposal] = {}
    for proposed in rounds:
        for proposal in proposed.proposals:
            by_id.setdefault(proposal.strategy.id, proposal)
    return by_id


# Parts of a history. Each is a concatenation over the events, so that `History.then` can extend it.


def _rounds(events: Sequence[Event]) -> tuple[Proposed, ...]:
    return tuple(event for event in events if isinstance(event, Proposed))


def _trials(events: Sequence[Event]) -> tuple[TrialFinished, ...]:
    return tuple(event for event in events if isinstance(event, TrialFinished))


def _of_role(events: Sequence[Event], role: Role) -> tuple[TrialFinished, ...]:
    return tuple(trial for trial in _trials(events) if trial.request.role is role)


def _candidates(events: Sequence[Event]) -> tuple[TrialFinished, ...]:
    return _of_role(events, Role.CANDIDATE)


def _ab_trials(events: Sequence[Event]) -> tuple[TrialFinished, ...]:
    return _of_role(events, Role.AB)


def _refused(events: Sequence[Event]) -> tuple[TrialFinished, ...]:
    return tuple(trial for trial in _candidates(events) if trial.refused)


def _failures(events: Sequence[Event]) -> tuple[TrialFinished, ...]:
    return tuple(trial for trial in _trials(events) if isinstance(trial.outcome, Failed))


def _figures(events: Sequence[Event]) -> tuple[TrialFigures, ...]:
    return tuple(trial.figures for trial in _trials(events))


def _references(events: Sequence[Event]) -> tuple[tuple[int, float], ...]:
    return references(_figures(events))


def _first_looks(events: Sequence[Event]) -> tuple[int, ...]:
    return first_looks(_figures(events))


_PARTS: dict[str, Callable[[Sequence[Event]], tuple[Any, ...]]] = {
    "rounds": _rounds,
    "trials": _trials,
    "figures": _figures,
    "candidates": _candidates,
    "ab_trials": _ab_trials,
    "refused": _refused,
    "measured_references": _references,
    "first_looks": _first_looks,
    "_failures": _failures,
}
