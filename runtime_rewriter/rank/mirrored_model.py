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
from autotune.recordings.probe import ProbedLinks, ProbeSeries
from autotune.strategy_space.plan import Plan
from autotune.workload import Variable, Workload, model_id
from runtime_rewriter.active import Session
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.mirrored.accelerator import MirroredAccelerator
from runtime_rewriter.mirrored.observed import Observation
from runtime_rewriter.mirrored.scripts import START_S
from runtime_rewriter.mirrored.steps import Steps
from runtime_rewriter.mirrored.summed import refuse, refuse_model
from runtime_rewriter.mirrored.turns import Turns
from runtime_rewriter.probe.mirrored_collectives import probe_mirrored
from runtime_rewriter.protocol import (
    EMULATION_STEPS,
    PROFILE_WARMUP_STEPS,
    ContinueTrial,
    EmulationAnswer,
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
from runtime_rewriter.rank.exported import ExportSession, agree_on_plan
from runtime_rewriter.rank.mirrored_recorder import MirroredRecorder
from runtime_rewriter.rank.session import TuningSession
from runtime_rewriter.rank.tensorflow_model import software
from runtime_rewriter.rank.tuned_model import Activity
from runtime_rewriter.recording.session import RecordingSession
from runtime_rewriter.rendezvous import Peers
from runtime_rewriter.scheduling import usable_cores
from runtime_rewriter.tensorflow.refusals import CROSSING_REFUSED
from runtime_rewriter.tolerances import GateResult

MODEL = "train_step"
TURN_S = 300.0
"""Longest time that the first worker computes alone: its first step is traced."""
_SHORTEST_S = 1e-6


def steer_mirrored(session: Session, until_end: ExitStack, peers: Peers) -> None:
    """Let `session` steer the steps of the strategy that the script has built.

    Raises `PlanMismatch` on every rank if the exports of `peers` have other plans.
    """
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if isinstance(session, RecordingSession):
        until_end.enter_context(MirroredRecorder(session, rank).script_steps.steered())
        return
    assert isinstance(session, TuningSession | ExportSession)
    if isinstance(session, ExportSession):
        agree_on_plan(peers, lambda: session.export, START_S)
    model = MirroredModel(session, world_size, rank)
    until_end.enter_context(model.steps.steered())


class MirroredModel:
    """Implements `TunedModel`, `StepObserver`, `Gate` and `Accelerator`.

    Its current setup is the script's own.
    """

    def __init__(
        self, session: TuningSession | ExportSession, world_size: int, worker: int
    ) -> None:
        self.steps = Steps(self)
        self.variables: Sequence[Variable] = ()
        self.buckets: Sequence[Sequence[str]] = ()
        self._session, self._world_size = session, world_size
        self._turns = Turns(worker, TURN_S)
        self._profile: ProfileRun | None = None

    @property
    def id(self) -> str:
        return model_id((one.name, one.shape, one.dtype) for one in self.variables)

    @property
    def overrun(self) -> float:
        accelerator = self.steps.accelerator
        return 0.0 if accelerator is None else accelerator.overrun

    def found(self, variables: Sequence[Variable], buckets: Sequence[Sequence[str]]) -> Plan | None:
        self.variables, self.buckets = variables, buckets
        if isinstance(self._session, TuningSession):
            refuse_model(variables)
            self._session.tune(self)
            return None
        export = self._session.export
        check_model(
            export, {one.name: (one.shape, one.dtype) for one in variables}, self._world_size
        )
        plan = None if export.strategy is None else export.plan()
        if plan is not None:
            self._checked(plan)
        self._session.applied_in_graph()
        return plan

    def between_steps(self, now_s: float, clean: bool) -> None:
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
        steps = self.steps
        steps.observed, steps.turns, steps.gated, self._profile = False, None, False, None
        if isinstance(instruction, StartEmulation):
            self._load(None)
            assert steps.script_sums is not None
            timetable = timetable_of(instruction.workload)
            steps.accelerator = MirroredAccelerator(timetable, steps.script_sums)
            return FirstSteps()
        if isinstance(instruction, StartProfile):
            self._load(None)
            self._profile = ProfileRun(self, instruction)
            return self._profile
        if isinstance(instruction, TrainOn):
            self._load(instruction.plan)
            return FurtherTraining()
        assert isinstance(instruction, StartTrial | ContinueTrial)
        starts = isinstance(instruction, StartTrial)
        if isinstance(instruction, StartTrial):
            self._load(instruction.plan)
        gate = self if starts and steps.plan is not None else None
        # the first two steps are traced: under the gate, and without it
        warmup_steps = instruction.warmup_steps + (gate is not None)
        accelerator = None if steps.accelerator is None else self
        return TrialRun(gate, warmup_steps, instruction.timed_steps, accelerator)

    def arm(self) -> None:
        self.steps.gated = True

    def error(self) -> GateResult:
        self.steps.gated = False
        assert self.steps.compared is not None and self.steps.plan is not None
        return self.steps.compared.result(self.steps.plan)

    def profiled(self, steps: int, alone: bool) -> None:
        """Observe further steps, in which only the first worker computes if `alone`."""
        self.steps.observed = steps > 0
        self.steps.turns = self._turns if steps and alone else None

    def probed(
        self, budget_s: float, report: Callable[[str], None] = lambda description: None
    ) -> tuple[ProbeSeries, ...]:
        """Time the collectives between all workers."""
        assert self.steps.script_sums is not None
        grad_bytes = sum(one.grad_bytes for one in self.variables)
        return probe_mirrored(self.steps.script_sums, budget_s, grad_bytes, report)

    def _load(self, plan: Plan | None) -> None:
        self.steps.plan = None if plan is None else self._checked(plan)

    def _checked(self, plan: Plan) -> Plan:
        refuse(plan, self.variables, self._world_size)
        return plan

    def probe(self, request: StartProbe, report: Callable[[str], None]) -> ProbeAnswer:
        series = self.probed(request.budget_s, report)
        return ProbeAnswer(series, ProbedLinks(), software(), usable_cores())


class FirstSteps:
    """The first steps of emulated accelerators: the recorded one, and one that is played."""

    def __init__(self) -> None:
        self._steps = 0

    def step_finished(self, step_s: float, clean: bool) -> bool:
        self._steps += 1
        return self._steps == EMULATION_STEPS

    def answer(self) -> EmulationAnswer:
        return EmulationAnswer()


class ProfileRun:
    """Probes the collectives at first; then observes steps of the current setup."""

    def __init__(self, model: MirroredModel, request: StartProfile) -> None:
        self._model, self._steps = model, request.steps
        self.observations: list[Observation] = []
        self._series: tuple[ProbeSeries, ...] = ()
        if request.probe_s > 0:
            self._series = model.probed(request.probe_s)
        model.profiled(request.steps, request.alone)

    def step_finished(self, step_s: float, clean: bool) -> bool:
        return not self._steps or len(self.observations) >= PROFILE_WARMUP_STEPS + self._steps

    def answer(self) -> ProfileAnswer:
        model = self._model
        workload = None
        if self._steps:
            workload = workload_of(model.variables, self.observations[PROFILE_WARMUP_STEPS:])
        return ProfileAnswer(
            workload,
            self._series,
            software(),
            usable_cores(),
            CROSSING_REFUSED,
            tuple(tuple(bucket) for bucket in model.buckets),
            mirrored=True,
        )


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
