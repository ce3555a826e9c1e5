"""Activities of a tuned rank: a fixed number of steps, and an answer at the end."""

from __future__ import annotations

from typing import Protocol

from autotune.errors import AutotuneError
from autotune.recordings.probe import ProbeSeries
from autotune.workload import Workload
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.probe.collectives import probe_links
from runtime_rewriter.protocol import (
    EMULATION_STEPS,
    EmulationAnswer,
    ProfileAnswer,
    RankEvent,
    StartProfile,
    TrialAnswer,
)
from runtime_rewriter.pytorch.emulation import accelerator_of
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.profile import WorkloadProfiler
from runtime_rewriter.pytorch.update_gate import UpdateGate
from runtime_rewriter.scheduling import usable_cores
from runtime_rewriter.software import software_versions
from runtime_rewriter.tolerances import GateResult


class Accelerator(Protocol):
    """`overrun`: the excess of real work over the emulated in the last step, as a share of it."""

    @property
    def overrun(self) -> float: ...


GATED_UPDATES = 3
"""Steps whose deferred updates are compared with updates within the step."""


class NumericsFailure(AutotuneError):
    """A plan's gradients differ from the reference reduction by more than the tolerance, or its
    deferred updates from updates within the step."""


class Gate(Protocol):
    """Compares the averaged gradients of a step with a reference, from `arm` on."""

    def arm(self) -> None: ...

    def error(self) -> GateResult: ...


class TrialRun:
    """Warm-up steps, then timed steps.

    The first step runs under the numerics `gate` (None: no plan, or already checked). With
    `crossing`, updates that cross the step are compared in the next ones, all of which are untimed.
    """

    def __init__(
        self,
        gate: Gate | None,
        warmup_steps: int,
        timed_steps: int,
        accelerator: Accelerator | None = None,
        crossing: GradientSynchronizer | None = None,
    ) -> None:
        self._gate = gate
        self._crossing = crossing
        if crossing is not None:
            # The last one's updates are due in the step after it.
            warmup_steps = max(warmup_steps, 1 + GATED_UPDATES + 1)
        self._accelerator = accelerator
        self._warmup_steps = warmup_steps
        self._timed_steps = timed_steps
        self._steps = 0
        self._gradient_error: float | None = None
        self._step_s: list[float] = []
        self._clean: list[bool] = []
        self._overrun: list[float] = []
        if gate is not None:
            gate.arm()

    def step_finished(self, step_s: float, clean: bool) -> bool:
        self._steps += 1
        if self._steps == 1 and self._gate is not None:
            self._check(self._gate)
        if self._crossing is not None:
            self._check_updates(self._crossing)
        if self._steps > self._warmup_steps:
            self._step_s.append(step_s)
            self._clean.append(clean)
            if self._accelerator is not None:
                self._overrun.append(self._accelerator.overrun)
        return len(self._step_s) == self._timed_steps

    def _check(self, gate: Gate) -> None:
        result = gate.error()
        self._gradient_error = result.relative_error
        if not result.ok:
            raise NumericsFailure(
                f"the synchronized gradient of {result.worst_variable!r} differs from the "
                "reference reduction by "
                f"{result.relative_error:.2e} (relative), more than the tolerance "
                f"{result.tolerance:.0e}"
            )

    def _check_updates(self, synchronizer: GradientSynchronizer) -> None:
        cross_step = synchronizer.cross_step
        if self._steps == 1:  # under the gradient gate nothing crosses the step
            cross_step.gate = UpdateGate(
                synchronizer.names, lambda: list(synchronizer.module.buffers()), GATED_UPDATES
            )
            return
        gate = cross_step.gate
        if gate is not None and gate.mismatch is not None:
            raise NumericsFailure(f"the plan's updates across the step are wrong: {gate.mismatch}")
        if self._steps == self._warmup_steps:
            cross_step.gate = self._crossing = None

    def answer(self) -> RankEvent:
        return TrialAnswer(
            tuple(self._step_s), tuple(self._clean), tuple(self._overrun), self._gradient_error
        )


class ProfileRun:
    """Probe the links at the first boundary, then profile the following steps.

    `further_models`: see `Profiled`.
    """

    def __init__(
        self, synchronizer: GradientSynchronizer, request: StartProfile, further_models: int
    ) -> None:
        self._synchronizer = synchronizer
        self._further_models = further_models
        ranks, scale = synchronizer.ranks, synchronizer.byte_scale
        self._series: tuple[ProbeSeries, ...] = ()
        if request.probe_s > 0:
            gradients_bytes = sum(
                one.numel() * one.element_size() for one in synchronizer.parameters
            )
            self._series = probe_links(
                ranks.base, request.probe_s, request.devices, scale, gradients_bytes
            )
        self._profiler = (
            WorkloadProfiler(synchronizer, request.steps, alone=request.alone)
            if request.steps
            else None
        )

    def step_finished(self, step_s: float, clean: bool) -> bool:
        return self._profiler is None or self._profiler.done

    def answer(self) -> ProfileAnswer:
        workload = None if self._profiler is None else self._profiler.finish()
        # the script has made a step, or nothing could be profiled
        refused, reads_norms = self._synchronizer.cross_step.conditions.limits()
        synchronizer = self._synchronizer
        buckets = None if synchronizer.plan is not None else synchronizer.backend.own_buckets()
        if buckets and workload is not None:  # the script's own reducer has made few steps so far
            ready = [variable.name for variable in workload.variables]
            buckets = synchronizer.backend.rebuilt_buckets(ready)
        return ProfileAnswer(
            workload,
            self._series,
            software_versions(),
            usable_cores(),
            refused,
            buckets or (),
            reads_norms=reads_norms,
            direct_refused=synchronizer.direct_refused,
            further_models=self._further_models,
        )


class FurtherTraining:
    """The rest of the training, under the plan that is loaded."""

    def step_finished(self, step_s: float, clean: bool) -> bool:
        return False

    def answer(self) -> RankEvent:
        raise AssertionError("it ends with the script")


class EmulationRun:
    """Emulate the accelerators from now on: the first step is recorded, the second one replayed."""

    def __init__(self, synchronizer: GradientSynchronizer, workload: Workload) -> None:
        synchronizer.emulate(accelerator_of(synchronizer, timetable_of(workload)))
        self._steps = 0

    def step_finished(self, step_s: float, clean: bool) -> bool:
        self._steps += 1
        return self._steps == EMULATION_STEPS

    def answer(self) -> EmulationAnswer:
        return EmulationAnswer()
