"""The events of a job in order; the whole state of the job is a fold over them.

`elapsed_s` is the tuning time of the job when the event was recorded. A resumed job continues it.
A rank's measurement keeps one type from the rank to the report: `records.Measured` or `Failed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autotune.canonical import LATER, to_data
from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.parsing import parse
from autotune.records import (
    REAL_CONDITIONS,
    Conditions,
    Constants,
    Failed,
    FailureKind,
    Measured,
    RankingQuality,
    Role,
    Stopped,
    TrialRequest,
)
from autotune.strategy_space.describe import plan_text
from autotune.strategy_space.mirrored import MIRRORED_LIMITS
from autotune.strategy_space.op_fusion import OpFusionChoice
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.statistics import Interval, changed_within, trial_interval
from autotune.workload import Workload


@dataclass(frozen=True)
class Proposal:
    """A strategy worth a trial. `origin` is a builder's name, "sampled", "mutated", ...

    `predicted_sd`: relative standard deviation of a measurement around `predicted_s`, where it is
    known; the noise of trials is in it.
    """

    __pydantic_config__ = {"extra": "forbid"}

    strategy: Strategy
    origin: str
    predicted_s: float | None = None
    predicted_sd: float | None = field(default=None, metadata=LATER)


@dataclass(frozen=True)
class Profiled:
    """The workload of one replica and the costs of the links, measured on the running script.

    `cross_step_refused`: why this script cannot synchronize across steps; empty if it can.
    `current_buckets`: variables of each bucket of the current setup, in its order; empty: not
    known. `op_fusions`: choices of sets of ops that the script's model can enact;
    `op_fusion_report`: what was measured of them, for people. `mirrored`: whether the script uses
    MultiWorkerMirroredStrategy, see `strategy_space.mirrored`. `direct_refused`: why ranks cannot
    exchange directly; empty if they can. `further_models`: models that the script synchronizes too,
    without plans (the second one of a GAN). `plugins_refused`: why compressors of plugins cannot be
    used; empty if they can.
    """

    __pydantic_config__ = {"extra": "forbid"}

    workload: Workload
    cluster: Cluster
    elapsed_s: float
    software: dict[str, str]
    cross_step_refused: str = ""
    current_buckets: tuple[tuple[str, ...], ...] = ()
    op_fusions: tuple[OpFusionChoice, ...] = field(default=(), metadata=LATER)
    op_fusion_report: str = field(default="", metadata=LATER)
    mirrored: bool = field(default=False, metadata=LATER)
    direct_refused: str = field(default="", metadata=LATER)
    further_models: int = field(default=0, metadata=LATER)
    plugins_refused: str = field(default="", metadata=LATER)

    def in_words(self, plan: Plan) -> str:
        """The effect of a plan compared with the current setup."""
        return plan_text(plan, len(self.current_buckets))

    @property
    def limits(self) -> str:
        """The strategies that this script rules out or slows down, for people; empty if none."""
        if self.mirrored:
            return MIRRORED_LIMITS
        refused = {
            "synchronization cannot cross the step": self.cross_step_refused,
            "no direct exchanges": self.direct_refused,
            "no compressors of plugins": self.plugins_refused,
        }
        limits = [f"{what}: {reason}" for what, reason in refused.items() if reason]
        read, count = self.workload.script_reads, len(self.workload.variables)
        if read and not limits:
            limits = [
                f"the script itself reads {read} of {count} variables between two steps, so "
                "synchronization that crosses the step waits there for them"
            ]
        if rows_only := sum(variable.rows_only for variable in self.workload.variables):
            limits.append(
                f"sparse gradients of {rows_only} of {count} variables travel as rows only: the "
                "script's updates take each row for itself, or change each row that they get"
            )
        if self.further_models:
            limits.append(
                f"only the first of the script's {1 + self.further_models} models is tuned; the "
                "others keep their own synchronization"
            )
        return "; ".join(limits)


@dataclass(frozen=True)
class Proposed:
    """A round of proposals. `ranker` scored `considered` strategies; `reason`: why this ranker.

    `incumbent`: the strategy whose neighbours a round of the descent proposes, else "".
    `passed_over`: found by the optimizer and not proposed; later rounds may propose them.
    `contradicted`: constants of the replay that the trials so far contradict, a line each.
    `constants`: those of the replays that predicted the proposals; None: the stated ones.
    """

    __pydantic_config__ = {"extra": "forbid"}

    round: int
    proposals: tuple[Proposal, ...]
    ranker: str
    reason: str
    considered: int
    quality: tuple[RankingQuality, ...]
    elapsed_s: float
    incumbent: str = field(default="", metadata=LATER)
    passed_over: tuple[Proposal, ...] = field(default=(), metadata=LATER)
    contradicted: tuple[str, ...] = field(default=(), metadata=LATER)
    constants: Constants | None = field(default=None, metadata=LATER)


@dataclass(frozen=True)
class TrialFigures:
    """A trial as the figures of its job need it.

    `median_s` is None for a failure, and `overrun` for real accelerators. `unsteady`: the steps of
    a candidate show that the machine changed. `first_look`: see `TrialFinished`.
    """

    number: int
    role: Role
    strategy_id: str
    round: int
    attempt: int
    median_s: float | None
    overrun: float | None
    unsteady: bool
    conditions: Conditions
    first_look: bool = field(default=False, metadata=LATER)


@dataclass(frozen=True)
class TrialFinished:
    """A trial and its outcome. `plan_id` is None for the current setup.

    `conditions` repeat the job's, so that a single trial states its own. `restarted`: since the
    trial before, the script was started again after a failure or an interruption of the job. Its
    own end does not count, which short scripts reach in every trial.
    """

    __pydantic_config__ = {"extra": "forbid"}

    request: TrialRequest
    outcome: Measured | Failed
    plan_id: str | None
    elapsed_s: float
    conditions: Conditions = REAL_CONDITIONS
    restarted: bool = field(default=False, metadata=LATER)

    @cached_property
    def interval(self) -> Interval | None:
        """Interval of the median step time; None for a failure or too few steps."""
        return trial_interval(self.outcome) if isinstance(self.outcome, Measured) else None

    @cached_property
    def figures(self) -> TrialFigures:
        request = self.request
        measured = self.outcome if isinstance(self.outcome, Measured) else None
        return TrialFigures(
            request.number,
            request.role,
            request.strategy_id,
            request.round,
            request.attempt,
            measured.median_s if measured else None,
            measured.overrun if measured else None,
            request.role is Role.CANDIDATE and self.unsteady,
            self.conditions,
            self.first_look,
        )

    @property
    def first_look(self) -> bool:
        """Whether the trial ended as a first look, before its median was precise."""
        request, outcome, interval = self.request, self.outcome, self.interval
        if interval is None or not isinstance(outcome, Measured):
            return False
        ended = request.first_look > 0 and outcome.stopped is Stopped.PRECISE
        return ended and interval.half_width > request.precision

    @property
    def refused(self) -> bool:
        """Whether the ranks could not enact the strategy, so that no step ran."""
        return isinstance(self.outcome, Failed) and self.outcome.kind is FailureKind.REFUSED

    @cached_property
    def unsteady(self) -> bool:
        """Whether the trial's own steps show that the machine changed."""
        return isinstance(self.outcome, Measured) and changed_within(self.outcome)


Event = Profiled | Proposed | TrialFinished

_KINDS: dict[str, type[Profiled] | type[Proposed] | type[TrialFinished]] = {
    "profiled": Profiled,
    "proposed": Proposed,
    "trial_finished": TrialFinished,
}


def event_to_data(event: Event) -> dict[str, Any]:
    """The event as JSON types, with its kind as a further key."""
    return {"kind": kind_of(event), **to_data(event)}


def kind_of(event: Event) -> str:
    """The name of the event's class in stored events."""
    return next(name for name, cls in _KINDS.items() if isinstance(event, cls))


def event_from_data(data: Any, where: str = "event") -> Event:
    """The inverse of `event_to_data`; raises `InvalidInput`."""
    if not isinstance(data, dict):
        raise InvalidInput(f"{where} must be an object, but is {str(data)[:40]!r}")
    fields = dict(data)
    kind = fields.pop("kind", None)
    fields.pop("current_messages", None)  # profiles of a short time stored only the number
    outcome = fields.get("outcome")
    if isinstance(outcome, dict):  # trials of a short time counted restarts of Horovod
        fields["outcome"] = {key: outcome[key] for key in outcome if key != "restarts"}
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidInput(f"{where}: kind must be one of {', '.join(_KINDS)}, but is {kind!r}")
    return parse(_KINDS[kind], fields, where)
