"""A step of MultiWorkerMirroredStrategy under a session: its activities.

Every rank runs its own copy of the script, with its own input, and answers for itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median

from autotune.errors import InvalidInput
from autotune.export import check_model
from autotune.strategy_space.plan import Plan
from autotune.workload import Variable, Workload, model_id
from runtime_rewriter.active import Session
from runtime_rewriter.mirrored.observed import Observation
from runtime_rewriter.mirrored.steps import Steps
from runtime_rewriter.mirrored.summed import STRATEGY, refuse
from runtime_rewriter.protocol import (
    ContinueTrial,
    ProbeAnswer,
    ProfileAnswer,
    RankInstruction,
    StartEmulation,
    StartProbe,
    StartProfile,
    StartTrial,
    TrainOn,
)
from runtime_rewriter.rank.activities import FurtherTraining, TrialRun
from runtime_rewriter.rank.exported import ExportSession
from runtime_rewriter.rank.session import TuningSession
from runtime_rewriter.rank.tensorflow_model import CROSSING_REFUSED, software
from runtime_rewriter.rank.tuned_model import Activity
from runtime_rewriter.scheduling import usable_cores

MODEL = "train_step"
WARMUP_STEPS = 1
"""The first observed step is traced."""
_SHORTEST_S = 1e-6
_REAL_ONLY = (
    f"a script of {STRATEGY} computes for real, but the accelerators of this job are emulated; "
    "tune it without --testbed, or train by `train_step = autotune.distribute(train_step)`"
)


def steer_mirrored(session: Session, until_end: ExitStack) -> None:
    """Let `session` steer the steps of the strategy that the script has built."""
    if not isinstance(session, TuningSession | ExportSession):
        raise InvalidInput(
            f"steps of {STRATEGY} cannot be recorded this way; use `autotune tune`, which profiles "
            "them"
        )
    model = MirroredModel(session, int(os.environ["WORLD_SIZE"]))
    until_end.enter_context(model.steps.steered())


class MirroredModel:
    """Implements `TunedModel` and `StepObserver`. Its current setup is the script's own."""

    def __init__(self, session: TuningSession | ExportSession, world_size: int) -> None:
        self.steps = Steps(self)
        self.variables: Sequence[Variable] = ()
        self.buckets: Sequence[Sequence[str]] = ()
        self._session, self._world_size = session, world_size
        self._profile: ProfileRun | None = None

    @property
    def id(self) -> str:
        return model_id((one.name, one.shape, one.dtype) for one in self.variables)

    def found(self, variables: Sequence[Variable], buckets: Sequence[Sequence[str]]) -> Plan | None:
        self.variables, self.buckets = variables, buckets
        if isinstance(self._session, TuningSession):
            self._session.tune(self)
            return None
        export = self._session.export
        check_model(
            export, {one.name: (one.shape, one.dtype) for one in variables}, self._world_size
        )
        plan = None if export.strategy is None else export.plan()
        return None if plan is None else self._checked(plan)

    def boundary(self, now_s: float, clean: bool) -> None:
        if isinstance(self._session, TuningSession):
            self._session.on_boundary(now_s, clean)

    def stepped(self, observation: Observation | None) -> None:
        if self._profile is not None and observation is not None:
            self._profile.observations.append(observation)

    def scale_bytes(self, byte_scale: float) -> None:
        raise InvalidInput(
            f"TensorFlow sends whole messages, but --byte-scale is {byte_scale:g}; leave it out"
        )

    def start(self, instruction: RankInstruction) -> Activity:
        self.steps.observed, self._profile = False, None
        if isinstance(instruction, StartEmulation):
            raise InvalidInput(_REAL_ONLY)
        if isinstance(instruction, StartProfile):
            if instruction.alone:
                raise InvalidInput(_REAL_ONLY)
            self._load(None)
            self.steps.observed = instruction.steps > 0
            self._profile = ProfileRun(self, instruction.steps)
            return self._profile
        if isinstance(instruction, TrainOn):
            self._load(instruction.plan)
            return FurtherTraining()
        assert isinstance(instruction, StartTrial | ContinueTrial)
        if isinstance(instruction, StartTrial):
            self._load(instruction.plan)
        return TrialRun(None, instruction.warmup_steps, instruction.timed_steps)

    def _load(self, plan: Plan | None) -> None:
        self.steps.plan = None if plan is None else self._checked(plan)

    def _checked(self, plan: Plan) -> Plan:
        refuse(plan, self.variables, self._world_size)
        return plan

    def probe(self, request: StartProbe, report: Callable[[str], None]) -> ProbeAnswer:
        raise InvalidInput(
            f"a script of {STRATEGY} cannot probe links; leave out its command, and `autotune "
            "probe` probes them with PyTorch"
        )


class ProfileRun:
    """Observes steps of the current setup."""

    def __init__(self, model: MirroredModel, steps: int) -> None:
        self._model, self._steps = model, steps
        self.observations: list[Observation] = []

    def step_finished(self, step_s: float, clean: bool) -> bool:
        return not self._steps or len(self.observations) >= WARMUP_STEPS + self._steps

    def answer(self) -> ProfileAnswer:
        model = self._model
        model.steps.observed = False
        workload = None
        if self._steps:
            workload = workload_of(model.variables, self.observations[WARMUP_STEPS:])
        buckets = tuple(tuple(bucket) for bucket in model.buckets)
        return ProfileAnswer(workload, (), software(), usable_cores(), CROSSING_REFUSED, buckets)


def workload_of(variables: Sequence[Variable], steps: Sequence[Observation]) -> Workload:
    """The workload with medians over observed steps."""
    ready_s = {one.name: median(step.ready_s[one.name] for step in steps) for one in variables}
    backward_s = max(*ready_s.values(), _SHORTEST_S)
    return Workload(
        MODEL,
        tuple(
            Variable(
                one.name,
                one.shape,
                one.dtype,
                one.sparse,
                ready_s[one.name],
                0.0,
                median(step.touched_rows[one.name] for step in steps) if one.sparse else None,
            )
            for one in sorted(variables, key=lambda one: ready_s[one.name])
        ),
        forward_s=median(step.forward_s for step in steps),
        backward_s=backward_s,
        update_s=median(step.update_s for step in steps),
        source="measured",
    )
