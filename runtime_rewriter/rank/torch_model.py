"""A model of PyTorch under a session: its activities."""

from __future__ import annotations

from collections.abc import Callable

from runtime_rewriter.probe.collectives import probe_cluster
from runtime_rewriter.protocol import (
    ContinueTrial,
    ProbeAnswer,
    RankInstruction,
    StartEmulation,
    StartProbe,
    StartProfile,
    StartTrial,
    TrainOn,
)
from runtime_rewriter.pytorch.emulation import EmulatedAccelerator
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.numerics import GradientGate
from runtime_rewriter.rank.activities import EmulationRun, FurtherTraining, ProfileRun, TrialRun
from runtime_rewriter.rank.tuned_model import Activity
from runtime_rewriter.scheduling import usable_cores
from runtime_rewriter.software import software_versions


class TorchModel:
    """Implements `TunedModel`. The plan that is loaded now is the script's current setup.

    `further_models`: see `Profiled`.
    """

    def __init__(self, synchronizer: GradientSynchronizer) -> None:
        self._model = synchronizer
        self._current_plan = synchronizer.plan
        self.further_models = 0

    @property
    def id(self) -> str:
        return self._model.model_id

    def scale_bytes(self, byte_scale: float) -> None:
        self._model.scale_bytes(byte_scale)

    def start(self, instruction: RankInstruction) -> Activity:
        """Raises `InvalidInput` if this model cannot be emulated or the plan not enacted."""
        model = self._model
        if isinstance(instruction, StartProfile):
            return ProfileRun(model, instruction, self.further_models)
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

    def probe(self, request: StartProbe, report: Callable[[str], None]) -> ProbeAnswer:
        result = probe_cluster(
            self._model.ranks.base,
            request.budget_s,
            request.devices,
            report,
            self._model.byte_scale,
            request.computing,
        )
        return ProbeAnswer(result.series, result.links, software_versions(), usable_cores())
