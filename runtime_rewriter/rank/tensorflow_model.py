"""A TensorFlow training step under a session: its activities.

Rank 0 is the only client. It measures for all ranks, which repeat its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

import numpy as np
import tensorflow as tf

from autotune.errors import InvalidInput, InvalidStrategy
from autotune.export import Export, check_model
from autotune.recordings.probe import ProbedLinks, ProbeSeries
from autotune.records import FailureKind
from autotune.strategy_space.builders.collectives import single_bucket
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.plan import plan as planned
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.probe.tensorflow_collectives import probe_tensorflow
from runtime_rewriter.protocol import (
    PROFILE_WARMUP_STEPS,
    ContinueTrial,
    EmulationAnswer,
    ProbeAnswer,
    ProfileAnswer,
    RankEvent,
    RankFailed,
    RankInstruction,
    StartEmulation,
    StartProbe,
    StartProfile,
    StartTrial,
    TrainOn,
)
from runtime_rewriter.rank.activities import FurtherTraining, TrialRun
from runtime_rewriter.rank.tuned_model import Activity
from runtime_rewriter.scheduling import usable_cores
from runtime_rewriter.tensorflow.emulation import LATE, emulated, recorded_tensors
from runtime_rewriter.tensorflow.fusion_choices import FusionProposal, propose_fusions
from runtime_rewriter.tensorflow.gate_tensors import GraphGate
from runtime_rewriter.tensorflow.graph_workload import workload_of
from runtime_rewriter.tensorflow.measured import (
    ReplicaTimes,
    client_time,
    replica_times,
    workload_of_steps,
)
from runtime_rewriter.tensorflow.op_fusion import compilation_error, seen_options
from runtime_rewriter.tensorflow.recording.recorder import StepRecording
from runtime_rewriter.tensorflow.recording.step_events import step_events
from runtime_rewriter.tensorflow.refusals import CROSSING_REFUSED, DIRECT_REFUSED, PLUGINS_REFUSED
from runtime_rewriter.tensorflow.running import RunningGraph
from runtime_rewriter.tensorflow.script_recorder import ScriptRecorder
from runtime_rewriter.tensorflow.servers import session_config, versions

Batch = Mapping[str, np.ndarray]


def current_strategy(workload: Workload) -> Strategy:
    """One message of all gradients, but for rows that the program must get as rows."""
    return with_rows(single_bucket(workload), workload, every=False)


class TensorflowModel:
    """Implements `TunedModel`. Its current setup: see `current_strategy`."""

    def __init__(self, running: RunningGraph, name: str) -> None:
        self.running, self.name = running, name
        self.workload = workload_of(running.training, name)
        strategy = current_strategy(self.workload)
        self.current_plan = planned(strategy, self.workload, len(running.servers.devices))
        self.overrun = 0.0
        """See `Accelerator`."""
        self.note = ""
        """Differences of its steps from the script's own, for people."""
        self._compute_s: float | None = None  # of emulated accelerators
        self._profile: ProfileRun | None = None
        self.recorder: ScriptRecorder | None = None
        self._gate: GraphGate | None = None
        self._unseen_sets = False
        self._trial: TensorflowTrial | None = None
        self._results: dict[str, np.ndarray] = {}
        self._batch: Batch = {}
        running.load(self.current_plan)

    @property
    def id(self) -> str:
        return self.workload.id

    @property
    def software(self) -> dict[str, str]:
        """Versions that a measurement depends on."""
        return software()

    def scale_bytes(self, byte_scale: float) -> None:
        raise InvalidInput(
            f"TensorFlow sends whole messages, but --byte-scale is {byte_scale:g}; leave it out"
        )

    def load_export(self, export: Export) -> None:
        """Train by an export from now on. Raises `ModelMismatch` if it is for another model."""
        variables = {one.name: (one.shape, one.dtype) for one in self.workload.variables}
        check_model(export, variables, len(self.running.servers.devices))
        if export.strategy is not None:
            self._load(export.plan())

    def step(self, batch: Batch) -> dict[str, np.ndarray]:
        """Train one step; return its results by the names of the fetches."""
        self._batch = batch
        names = list(self.running.training.fetches)
        if self._profile is not None:
            values = self._profile.step(batch)
        elif self.recorder is not None:
            values = self.recorder.step(batch)
        elif self._gate is not None and self._gate.armed:
            values, compared = self.running.observed_step(batch, None, self._gate.fetches)
            self._gate.take(compared)
        elif self._unseen_sets:
            values = self._fused_step(batch)
        else:
            values = self.running.step(batch)
        results = dict(zip(names, values, strict=True))
        late_s = results.pop(LATE, None)
        if late_s is not None and self._compute_s is not None:
            self.overrun = float(late_s) / self._compute_s
        self._results = results
        return results

    def _fused_step(self, batch: Batch) -> list[np.ndarray]:
        """Check that exactly the plan's sets of ops are kernels.

        The numerics gate's step comes before: it runs other tensors, for which XLA compiles anew.
        """
        metadata = tf.compat.v1.RunMetadata()
        values, _ = self.running.observed_step(batch, metadata, options=seen_options())
        assert self.running.graph is not None
        error = compilation_error(self.running.graph.graph_def, metadata)
        self._unseen_sets = error is not None  # a refused plan is checked again
        if error is not None:
            if self._trial is None:
                raise InvalidStrategy(error)
            self._trial.refusal = error
        return values

    def start(self, instruction: RankInstruction) -> Activity:
        self._profile = self._gate = self._trial = None
        if isinstance(instruction, StartProfile):
            self._profile = ProfileRun(self, instruction)
            return self._profile
        if isinstance(instruction, StartEmulation):
            self._emulate(instruction.workload)
            return _Emulated()
        if isinstance(instruction, TrainOn):
            self._load(instruction.plan)
            return FurtherTraining()
        assert isinstance(instruction, StartTrial | ContinueTrial)
        if isinstance(instruction, StartTrial):
            # one trial's residuals must not reach the next one
            self.running.forget_residuals()
            self._load(instruction.plan)
            self._gate = self.running.gate()
        accelerator = None if self._compute_s is None else self
        warmup_steps = instruction.warmup_steps + self._unseen_sets  # to check sets takes a step
        self._trial = TensorflowTrial(
            self._gate, warmup_steps, instruction.timed_steps, accelerator
        )
        return self._trial

    def _load(self, plan: Plan | None) -> None:
        plan = plan or self.current_plan
        loaded = self.running.graph
        if loaded is None or loaded.plan.id != plan.id:
            self.running.load(plan)
            self._unseen_sets = bool(plan.op_fusion)

    def _emulate(self, workload: Workload) -> None:
        """Raises `InvalidInput` for a workload without the times of a profile."""
        timetable = timetable_of(workload)
        self._compute_s = timetable.compute_s
        wanted = recorded_tensors(self.running.training, 0)
        _, recorded = self.running.observed_step(self._batch, None, wanted)
        training = emulated(self.running.training, timetable, recorded, self._first_results())
        self.running.load(self.current_plan, training)

    def _first_results(self) -> dict[str, np.ndarray]:
        """What the first replica returned in the last step."""
        if self.running.combine is None:
            return self._results
        ranks = len(self.running.servers.devices)
        return {
            name: value[: len(value) // ranks] if value.ndim else value
            for name, value in self._results.items()
        }

    def probe(self, request: StartProbe, report: Callable[[str], None]) -> ProbeAnswer:
        series = probe_tensorflow(
            self.running, request.budget_s, request.devices, self.workload.grad_bytes, report
        )
        return ProbeAnswer(series, ProbedLinks(), software(), usable_cores())


class TensorflowTrial(TrialRun):
    """A trial that ends early if the kernels of a step are not those of the plan.

    `refusal`: how they differ.
    """

    refusal: str | None = None

    def step_finished(self, step_s: float, clean: bool) -> bool:
        return super().step_finished(step_s, clean) or self.refusal is not None

    def answer(self) -> RankEvent:
        if self.refusal is not None:
            return RankFailed(FailureKind.REFUSED, self.refusal)
        return super().answer()


class _Emulated:
    """The first emulated step."""

    def step_finished(self, step_s: float, clean: bool) -> bool:
        return True

    def answer(self) -> RankEvent:
        return EmulationAnswer()


class ProfileRun:
    """Records steps of all replicas, or of the first one alone."""

    def __init__(self, model: TensorflowModel, request: StartProfile) -> None:
        model._load(None)
        self._model, self._request = model, request
        self._ranks = range(1 if request.alone else len(model.running.servers.devices))
        self._series: tuple[ProbeSeries, ...] = ()
        if request.probe_s > 0:
            self._series = probe_tensorflow(
                model.running, request.probe_s, request.devices, model.workload.grad_bytes
            )
        self._recording: StepRecording | None = None
        if request.steps:
            self._recording = StepRecording(request.steps, PROFILE_WARMUP_STEPS, partitions=False)
        self._alone: list[ReplicaTimes] = []
        self._touched: dict[str, list[np.ndarray]] = {}

    def step(self, batch: Batch) -> list[np.ndarray]:
        running, recording = self._model.running, self._recording
        if recording is None:
            return running.step(batch)
        recorded, rows = recording.recorded, running.training.row_indices(0)
        results, indices = recording.step(
            lambda options, metadata: running.observed_step(batch, metadata, rows, options)
        )
        if recording.recorded == recorded:
            return results
        if self._request.alone:
            alone = tf.compat.v1.RunMetadata()
            gradients = [f"replica_0/{one.values.node}" for one in running.training.gradients]
            running.only(gradients, batch, alone)
            events = step_events(alone.step_stats)
            self._alone.append(replica_times(running.training, events, 0))
        for variable, value in indices.items():
            self._touched.setdefault(variable, []).append(value)
        return results

    def step_finished(self, step_s: float, clean: bool) -> bool:
        return self._recording is None or self._recording.done

    def answer(self) -> ProfileAnswer:
        model = self._model
        workload = None if self._recording is None else self._workload(self._recording)
        model._profile = None
        fusions = FusionProposal((), "")
        if workload is not None and not self._request.alone:  # emulated accelerators run no ops
            fusions = propose_fusions(model.running, model._batch, workload)
        return ProfileAnswer(
            workload,
            self._series,
            software(),
            usable_cores(),
            CROSSING_REFUSED,
            (),
            fusions.choices,
            "; ".join(filter(None, (model.note, fusions.report))),
            direct_refused=DIRECT_REFUSED,
            plugins_refused=PLUGINS_REFUSED,
            rows_only=tuple(one.name for one in model.workload.variables if one.rows_only),
        )

    def _workload(self, recording: StepRecording) -> Workload:
        """An emulated accelerator does not wait for the client, whose calls are real there, too."""
        training, records = self._model.running.training, recording.records
        times = [
            replica_times(training, events, rank)
            for events in records.steps
            for rank in self._ranks
        ]
        update_s = median(step.update_s for step in times)
        if not self._request.alone:
            plain_s = median(records.plain_s)
            update_s += median(client_time(plain_s, events) for events in records.steps)
        return workload_of_steps(
            training,
            self._model.name,
            self._alone or times,
            update_s,
            self._touched,
            session_config().intra_op_parallelism_threads,
        )


def software() -> dict[str, str]:
    return {name.lower(): str(version) for name, version in versions().items()}
