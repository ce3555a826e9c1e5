"""A domain of a dataset: one model on one cluster under fixed conditions, and every trial that was taken there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.records import CURRENT_SETUP, Conditions, Failed, Measured, Role, TrialRequest
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.events import TrialFinished
from autotune.tuning.history import History
from autotune.workload import Workload

REFERENCE = "reference"
"""Source of a trial of the script's own DDP; it has neither strategy nor plan."""
DEVIATION = 0.15
"""Two neighbouring references may differ by at most so much (relative), by less where they agree better: `JobSpec.deviation`."""


@dataclass(frozen=True)
class Environment:
    """What a session of trials ran on. `software`: name -> version. `source`: the commit of this repository, "" where unknown."""

    __pydantic_config__ = {"extra": "forbid"}

    conditions: Conditions
    software: dict[str, str]
    cores: int
    machine: str
    kernel: str
    source: str = ""


@dataclass(frozen=True)
class Session:
    """One start of the script on one testbed, or a row of them without a pause; its trials follow one another. `began_at`: ISO, UTC."""

    __pydantic_config__ = {"extra": "forbid"}

    id: str
    began_at: str
    environment: Environment


@dataclass(frozen=True)
class DatasetTrial:
    """One trial. Numbers count from 0 in the order in which a domain's trials were taken.

    `source` is a kind and what belongs to it: "reference", "builder:NAME", "random:lossless", "random:lossy", "repeat:NUMBER" (an
    earlier trial's strategy once more), "tuning:JOB:ROUND:ORIGIN" (what a tuner's round proposed), "tuning:JOB:reference",
    "sweep:ROUND:NAME" (DDP's bucket sizes, each once a round), "closing:ROUND:SIDE" or "closing:ROUND:reference" (strategies that were
    found before, each once a round: repeats of their plans). What counts repeats goes by plan, whatever the source.
    `strategy` and the `plan` that was enacted are None for a reference. `load`: the machine's load average when it began. `time_s`: Unix
    time of its end. `disturbed`: the machine changed during it, or between the references around it (`disturbed_trials`). `stolen`: the
    share of all cores' time that the host gave to other virtual machines meanwhile (man 5 proc_stat, "steal"); None where it was not
    noted.
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
            raise InvalidInput(
                f"trial {self.number} {rule}, but its source is {self.source!r} and its plan {self.plan_id!r}"
            )
        if isinstance(self.outcome, Measured) and not np.all(
            np.isfinite(self.outcome.slowest_s) & (self.outcome.slowest_s > 0)
        ):
            raise InvalidInput(f"trial {self.number} needs finite step times above 0")
        if self.stolen is not None and not 0.0 <= self.stolen <= 1.0:
            raise InvalidInput(
                f"trial {self.number}: stolen must be a share from 0 to 1, or None where it was not noted, but is {self.stolen}"
            )

    @property
    def kind(self) -> str:
        """What the source begins with; "reference" for every reference, also for those of a tuner's job."""
        return REFERENCE if self.strategy is None else self.source.partition(":")[0]

    @property
    def plan_id(self) -> str | None:
        return self.plan.id if self.plan is not None else None

    @cached_property
    def step_s(self) -> tuple[float, ...]:
        """Every timed step on the rank that was slowest in it, seconds; empty for a failure."""
        return tuple(self.outcome.slowest_s.tolist()) if isinstance(self.outcome, Measured) else ()

    @property
    def median_s(self) -> float:
        """Of the steps; NaN for a failure."""
        return self.outcome.median_s if isinstance(self.outcome, Measured) else math.nan

    @property
    def overrun(self) -> float | None:
        return self.outcome.overrun if isinstance(self.outcome, Measured) else None

    @property
    def failure(self) -> str:
        """Kind and message; "" where it was measured."""
        return (
            f"{self.outcome.kind}: {self.outcome.message}"
            if isinstance(self.outcome, Failed)
            else ""
        )


@dataclass(frozen=True)
class Domain:
    """`workload` and `cluster` as they were profiled and probed before the first trial; `costs`: the runtime's constants (seconds),
    for `benchmarks.runtime_costs.costs_of`; `cores`: of the machine."""

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
        """Of the first session; a collection refuses to go on where its conditions, cores or machine are others."""
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
        """Number of a measured candidate -> its median step time at the machine's usual speed (`History.steady_s`), seconds.

        The usual speed is that of the session's references relative to those of all sessions.
        """
        usual_s = _median([trial.median_s for trial in self.references if trial.step_s])
        found = {}
        for history in histories(self.trials):
            scale = usual_s / history.reference_s if usual_s and history.reference_s else 1.0
            for trial in history.candidates:
                if isinstance(trial.outcome, Measured):
                    found[trial.request.number] = history.steady_s(trial) * scale
        return found

    @cached_property
    def plan_steady_s(self) -> dict[str, tuple[float, ...]]:
        """Plan id -> `steady_s` of its undisturbed trials, in order."""
        found: dict[str, tuple[float, ...]] = {}
        for trial in self.candidates:
            if trial.number in self.steady_s and not trial.disturbed and trial.plan_id is not None:
                found[trial.plan_id] = (*found.get(trial.plan_id, ()), self.steady_s[trial.number])
        return found


def histories(trials: Sequence[DatasetTrial]) -> list[History]:
    """The trials of each session as the tuner's history, which knows the rules of interference."""
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
    """The same trials, each marked anew; a trial behind its session's last reference is judged by its own steps alone."""
    marked = {number for history in histories(trials) for number in history.disturbed}
    return tuple(
        trial
        if trial.disturbed == (trial.number in marked)
        else replace(trial, disturbed=trial.number in marked)
        for trial in trials
    )


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
