"""The session of a tuned rank: carries out the driver's instructions at step boundaries.

Every rank gets the same instructions and makes a fixed number of steps for each. So all ranks
switch plans at the same boundary, without a collective of their own.
"""

from __future__ import annotations

import time

from autotune.errors import InvalidInput, InvalidStrategy
from autotune.records import FailureKind
from autotune.strategy_space.plan import Plan
from runtime_rewriter.control import ControlClosed, ControlLine
from runtime_rewriter.probe.collectives import probe_cluster
from runtime_rewriter.protocol import (
    HEARTBEAT_S,
    ContinueTrial,
    EndScript,
    Heartbeat,
    ProbeAnswer,
    Probing,
    RankEvent,
    RankFailed,
    RankInstruction,
    Ready,
    StartEmulation,
    StartProbe,
    StartProfile,
    StartTrial,
    TrainOn,
    decode_instruction,
    encode,
)
from runtime_rewriter.pytorch.emulation import EmulatedAccelerator
from runtime_rewriter.pytorch.exchange.ranks import TRAINING_TIMEOUTS, TUNING_TIMEOUTS
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.numerics import GradientGate
from runtime_rewriter.rank.activities import (
    Activity,
    EmulationRun,
    FurtherTraining,
    ProfileRun,
    TrialRun,
)
from runtime_rewriter.rank.without_ddp import StepsWithoutDdp
from runtime_rewriter.scheduling import usable_cores
from runtime_rewriter.software import software_versions


class TuningSession:
    """Listens to the step boundaries of the model that is tuned.

    `round_robin`: whether the process runs under round-robin scheduling, for the driver.
    `byte_scale`: see `GradientSynchronizer.scale_bytes`. `kept`: the training goes on after the
    trials.
    """

    def __init__(
        self,
        line: ControlLine,
        round_robin: bool = False,
        byte_scale: float = 1.0,
        kept: bool = False,
    ) -> None:
        self.timeouts = TRAINING_TIMEOUTS if kept else TUNING_TIMEOUTS
        self._line = line
        self._round_robin = round_robin
        self._byte_scale = byte_scale
        self._synchronizer: GradientSynchronizer | None = None
        self._current_plan: Plan | None = None
        self._activity: Activity | None = None
        self._step_started_s = 0.0
        self._heartbeat_s = 0.0
        self._without_ddp = StepsWithoutDdp()
        self.steps = 0
        """Steps that the script has made since it started."""

    def model_built(self, synchronizer: GradientSynchronizer) -> None:
        """Tune the first model; its present plan is its current setup.

        Further models keep theirs.
        """
        self._without_ddp.stop()
        if self._synchronizer is None:
            self._synchronizer, self._current_plan = synchronizer, synchronizer.plan
            synchronizer.listeners.append(self)

    def on_backward_end(self) -> None:
        """Nothing to do: a step ends at the next forward pass."""

    def on_boundary(self, now_s: float, clean: bool) -> None:
        """Account for the step that ended. Between two instructions the script waits here."""
        self.steps += 1
        if self._activity is None:
            # The script may have registered a communication hook until its first step.
            if self._byte_scale != 1:
                self._model.scale_bytes(self._byte_scale)
            self._send(Ready(self._model.model_id, self._round_robin))
        elif self._activity.step_finished(now_s - self._step_started_s, clean):
            self._send(self._activity.answer())
        else:
            self._pulse(Heartbeat(self.steps), now_s)
            self._step_started_s = now_s
            return
        self._activity = self._next_activity()
        self._step_started_s = time.perf_counter()

    @property
    def _model(self) -> GradientSynchronizer:
        assert self._synchronizer is not None
        return self._synchronizer

    def _next_activity(self) -> Activity:
        while True:
            try:
                line = self._line.receive(None)  # ends when the supervisor does
            except ControlClosed:
                raise SystemExit(0) from None
            assert line is not None
            instruction = decode_instruction(line)
            if isinstance(instruction, EndScript):
                raise SystemExit(0)
            if isinstance(instruction, StartProbe):  # needs no steps
                self._send(self._probe(instruction))
                continue
            refusals = InvalidStrategy if isinstance(instruction, StartTrial) else InvalidInput
            try:
                return self._activity_of(instruction)
            except (
                refusals
            ) as refusal:  # every rank raised it, and the earlier plan is still loaded
                self._send(RankFailed(FailureKind.REFUSED, str(refusal)))

    def _activity_of(self, instruction: RankInstruction) -> Activity:
        """Raises `InvalidInput` if this model cannot be emulated or the plan not enacted."""
        model = self._model
        if isinstance(instruction, StartProfile):
            return ProfileRun(model, instruction)
        if isinstance(instruction, StartEmulation):
            model.load(self._current_plan)
            return EmulationRun(model, instruction.workload)
        if isinstance(instruction, TrainOn):
            model.cross_step.gate = None
            model.load(instruction.plan or self._current_plan)
            return FurtherTraining()
        assert isinstance(instruction, StartTrial | ContinueTrial)
        gate = crossing = None
        model.cross_step.gate = None
        accelerator = model.accelerator
        emulated = accelerator if isinstance(accelerator, EmulatedAccelerator) else None
        if isinstance(instruction, StartTrial):
            # one trial's residuals must not reach the next one
            model.forget_residuals()
            model.load(instruction.plan or self._current_plan)
            # With scaled bytes only a part of each message is averaged, so there is no reference.
            if model.plan is not None and model.byte_scale == 1:
                gate = GradientGate(model)
            # An emulated accelerator plays the updates: there is nothing to compare.
            if model.plan is not None and model.plan.cross_step and emulated is None:
                crossing = model
        return TrialRun(gate, instruction.warmup_steps, instruction.timed_steps, emulated, crossing)

    def _probe(self, request: StartProbe) -> ProbeAnswer:
        def report(description: str) -> None:
            self._pulse(Probing(description), time.perf_counter())

        result = probe_cluster(
            self._model.ranks.base,
            request.budget_s,
            request.devices,
            report,
            self._model.byte_scale,
            request.computing,
        )
        return ProbeAnswer(result.series, result.links, software_versions(), usable_cores())

    def _pulse(self, event: Heartbeat | Probing, now_s: float) -> None:
        """Send a sign of life, at most one per heartbeat."""
        if now_s - self._heartbeat_s >= HEARTBEAT_S:
            self._heartbeat_s = now_s
            self._send(event)

    def _send(self, event: RankEvent) -> None:
        self._line.send(encode(event))
