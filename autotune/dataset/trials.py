"""A domain of a dataset: one model on one cluster under fixed conditions, with all its trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.limits import MAX_COUNT, check_range
from autotune.records import CURRENT_SETUP, Conditions, Failed, Measured, Role, TrialRequest
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.events import TrialFinished
from autotune.tuning.history import History
from autotune.workload import Workload

MAX_TIME_S = 253_402_300_799
"""The last second of the year 9999, the last one with an ISO date."""
REFERENCE = "reference"
"""Source of a trial of the script's own DDP, which has neither strategy nor plan."""
DEVIATION = 0.15
"""Largest relative difference of neighbouring references, as in `JobSpec.deviation`.

The limit is lower where references agree better."""


@dataclass(frozen=True)
class Environment:
    """The environment of a session of trials.

    `software`: name -> version. `source`: commit of this repository, "" where unknown.
    """

    __pydantic_config__ = {"extra": "forbid"}

    conditions: Conditions
    software: dict[str, str]
    cores: int
    machine: str
    kernel: str
    source: str = ""


@dataclass(frozen=True)
class Session:
    """One start of the script on one testbed, or several without a pause between them.

    Its trials follow one another. `began_at`: ISO, UTC.
    """

    __pydantic_config__ = {"extra": "forbid"}

    id: str
    began_at: str
    environment: Environment


@dataclass(frozen=True)
class DatasetTrial:
    """One trial. Numbers count a domain's trials from 0, in order.

    `source` is a kind with its parameters:

    - "reference", "builder:NAME", "random:lossless", "random:lossy";
    - "repeat:NUMBER": the strategy of an earlier trial again;
    - "tuning:JOB:ROUND:ORIGIN" (a proposal of a tuner's round), "tuning:JOB:reference";
    - "sweep:ROUND:NAME": DDP's bucket sizes, each once a round;
    - "closing:ROUND:SIDE", "closing:ROUND:reference": strategies found before, each once a round.

    Repeats are counted by plan, whatever the source.

    - `strategy` and the enacted `plan` are None for a reference.
    - `load`: the machine's load average at the start. `time_s`: Unix time of the end.
    - `disturbed`: the machine changed during the trial, or between the references around it.
    - `stolen`: share of all cores' time that the host gave to other virtual machines meanwhile (man
      5 proc_stat, "steal"); None where it was not recorded.
    """

    __pydantic_config__ = {"extra": "forbid"}

    number: int
    source: str
    strategy: Strategy | None
    plan: Plan | None
    outcome: Measured | Failed
    load: float
    time_s: float
    session: str
    disturbed: bool = False
    stolen: float | None = None

    def __post_init__(self) -> None:
        reference = self.source.rpartition(":")[2] == REFERENCE
        if reference != (self.strategy is None) or (self.strategy is None) != (self.plan is None):
            rule = f"has neither a strategy nor a plan exactly if its source ends in {REFERENCE!r}"
            values = f"its source is {self.source!r} and its plan {self.plan_id!r}"
            raise InvalidInput(f"trial {self.number} {rule}, but {values}")
        if isinstance(self.outcome, Measured):
            slowest_s = self.outcome.slowest_s
            if not np.all(np.isfinite(slowest_s) & (slowest_s > 0)):
                raise InvalidInput(f"trial {self.number} needs finite step times above 0")
        check_range(self.time_s, 0, MAX_TIME_S, f"time of trial {self.number} (Unix seconds)")
        check_range(self.load, 0, MAX_COUNT, f"load average of trial {self.number}")
        if self.stolen is not None and not 0.0 <= self.stolen <= 1.0:
            rule = "stolen must be a share from 0 to 1, or None where it was not recorded"
            raise InvalidInput(f"trial {self.number}: {rule}, but is {self.stolen}")

    @property
    def kind(self) -> str:
        """The kind of the source; "reference" for every reference, also in a tuner's job."""
        return REFERENCE if self.strategy is None else self.source.partition(":")[0]

    @property
    def plan_id(self) -> str | None:
        return self.plan.id if self.plan is not None else None

    @cached_property
    def step_s(self) -> tuple[float, ...]:
        """Seconds of every timed step on its slowest rank; empty for a failure."""
        return tuple(self.outcome.slowest_s.tolist()) if isinstance(self.outcome, Measured) else ()

    @property
    def median_s(self) -> float:
        """Median of the steps; NaN for a failure."""
        return self.outcome.median_s if isinstance(self.outcome, Measured) else math.nan

    @property
    def overrun(self) -> float | None:
        return self.outcome.overrun if isinstance(self.outcome, Measured) else None

    @property
    def failure(self) -> str:
        """Kind and message of a failure, else ""."""
        return (
            f"{self.outcome.kind}: {self.outcome.message}"
            if isinstance(self.outcome, Failed)
            else ""
        )


@dataclass(frozen=True)
class Domain:
    """One model on one cluster.

    `workload` and `cluster` were profiled and probed before the first trial. `costs`: constants of
    the runtime in seconds, as in `RuntimeCosts`. `cores`: of the machine.
    """

    name: str
    model: str
    cluster_name: str
    workload: Workload
    cluster: Cluster
    costs: Mapping[str, float]
    cores: int
    sessions: tuple[Session, ...]
    trials: tuple[DatasetTrial, ...] = field(repr=False)

    @property
    def environment(self) -> Environment:
        """The first session's environment; later ones have equal conditions, cores and machine."""
        return self.sessions[0].environment

    @cached_property
    def candidates(self) -> tuple[DatasetTrial, ...]:
        """Every trial of a strategy, measured or failed."""
        return tuple(trial for trial in self.trials if trial.strategy is not None)

    @cached_property
    def references(self) -> tuple[DatasetTrial, ...]:
        return tuple(trial for trial in self.trials if trial.strategy is None)

    @cached_property
    def steady_s(self) -> dict[int, float]:
        """Number of a measured candidate -> its `History.steady_s` at the machine's usual speed.

        The usual speed is that of the session's references relative to those of all sessions.
        """
        usual_s = _median([trial.median_s for trial in self.references if trial.step_s])
        steady_s = {}
        for history in histories(self.trials):
            scale = usual_s / history.reference_s if usual_s and history.reference_s else 1.0
            for trial in history.candidates:
                if isinstance(trial.outcome, Measured):
                    steady_s[trial.request.number] = history.steady_s(trial) * scale
        return steady_s

    @cached_property
    def plan_steady_s(self) -> dict[str, tuple[float, ...]]:
        """Plan id -> `steady_s` of its undisturbed trials, in order."""
        by_plan: dict[str, tuple[float, ...]] = {}
        for trial in self.candidates:
            if trial.number in self.steady_s and not trial.disturbed and trial.plan_id is not None:
                by_plan[trial.plan_id] = (
                    *by_plan.get(trial.plan_id, ()),
                    self.steady_s[trial.number],
                )
        return by_plan


def histories(trials: Sequence[DatasetTrial]) -> list[History]:
    """The trials of each session as a tuner's history, which has the rules of interference."""
    sessions: dict[str, list[TrialFinished]] = {}
    for trial in trials:
        strategy_id = trial.strategy.id if trial.strategy is not None else CURRENT_SETUP
        role = Role.CANDIDATE if trial.strategy is not None else Role.REFERENCE
        request = TrialRequest(trial.number, strategy_id, role, 0, 0)
        sessions.setdefault(trial.session, []).append(
            TrialFinished(request, trial.outcome, trial.plan_id, trial.time_s)
        )
    return [History(tuple(events), DEVIATION) for events in sessions.values()]


def disturbed_trials(trials: Sequence[DatasetTrial]) -> tuple[DatasetTrial, ...]:
    """The trials with `disturbed` recomputed.

    After its session's last reference, a trial is judged by its own steps alone.
    """
    marked = {number for history in histories(trials) for number in history.disturbed}
    return tuple(
        trial
        if trial.disturbed == (trial.number in marked)
        else replace(trial, disturbed=trial.number in marked)
        for trial in trials
    )


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
