"""What happens at the step boundaries of a launched script.

A `TuningSession` takes its instructions from the supervisor: every rank gets the same ones and executes a
fixed number of steps for each, so all ranks switch plans at the same boundary without a collective of their own.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from autotune.canonical import to_data
from autotune.errors import AutotuneError, InvalidInput, InvalidStrategy
from autotune.parsing import parse
from autotune.records import FailureKind
from autotune.strategy_space.plan import Plan
from autotune.workload import Workload
from runtime_rewriter.control import HEARTBEAT_S, ControlClosed, ControlLine
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.probe.collectives import probe_cluster, probe_links
from runtime_rewriter.pytorch.emulation import EmulatedAccelerator
from runtime_rewriter.pytorch.exchange.ranks import TUNING_TIMEOUTS
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.numerics import GradientGate
from runtime_rewriter.pytorch.profile import WorkloadProfiler
from runtime_rewriter.scheduling import usable_cores
from runtime_rewriter.software import software_versions

RECORDED_STEPS = 1
"""Real steps before emulated ones; batches of other shapes are recorded when they come."""


class Activity(Protocol):
    """A fixed number of steps with something to say at the end."""

    def step_finished(self, step_s: float, clean: bool) -> bool:
        """Take one step; True once it was the last."""

    def answer(self) -> dict[str, Any]:
        """The event that tells the result."""


class NumericsFailure(AutotuneError):
    """A plan's gradients differ from the reference reduction by more than the tolerance."""


class TrialRun:
    """Warm-up steps, the first under the numerics gate (None where there is no plan, or it was checked), then the timed ones."""

    def __init__(
        self,
        gate: GradientGate | None,
        warmup_steps: int,
        timed_steps: int,
        accelerator: EmulatedAccelerator | None = None,
    ) -> None:
        self._gate, self._accelerator = gate, accelerator
        self._warmup_steps, self._timed_steps = warmup_steps, timed_steps
        self._seen = 0
        self._gradient_error: float | None = None
        self._step_s: list[float] = []
        self._clean: list[bool] = []
        self._overrun: list[float] = []
        if self._gate is not None:
            self._gate.arm()

    def step_finished(self, step_s: float, clean: bool) -> bool:
        self._seen += 1
        if self._seen == 1 and self._gate is not None:
            self._check(self._gate)
        if self._seen > self._warmup_steps:
            self._step_s.append(step_s)
            self._clean.append(clean)
            self._overrun += [] if self._accelerator is None else [self._accelerator.overrun]
        return len(self._step_s) == self._timed_steps

    def _check(self, gate: GradientGate) -> None:
        result = gate.error()
        self._gradient_error = result.relative_error
        if not result.ok:
            raise NumericsFailure(
                f"the synchronized gradient of {result.worst_variable!r} differs from the reference reduction by "
                f"{result.relative_error:.2e} (relative), more than the tolerance {result.tolerance:.0e}"
            )

    def answer(self) -> dict[str, Any]:
        told = {
            "step_s": self._step_s,
            "clean": self._clean,
            "overrun": self._overrun,
            "gate": self._gradient_error,
        }
        return {"event": "trial", **told}


class ProfileRun:
    """Probe the links at the first boundary, then profile the following steps; with 0 steps only the links, with 0 s only the steps.

    `alone`: only rank 0 computes, for emulated accelerators.
    """

    def __init__(
        self,
        synchronizer: GradientSynchronizer,
        steps: int,
        probe_deadline_s: float,
        alone: bool,
        devices: tuple[int, ...],
    ) -> None:
        self._cross_step = synchronizer.cross_step
        probed = probe_deadline_s > 0
        self._fits = (
            probe_links(synchronizer.ranks.base, probe_deadline_s, devices, synchronizer.byte_scale)
            if probed
            else ()
        )
        self._profiler = WorkloadProfiler(synchronizer, steps, alone=alone) if steps else None

    def step_finished(self, step_s: float, clean: bool) -> bool:
        return self._profiler is None or self._profiler.done

    def answer(self) -> dict[str, Any]:
        workload = None if self._profiler is None else self._profiler.finish()
        profile = {
            "workload": workload,
            "fits": self._fits,
            "software": software_versions(),
            "cores": usable_cores(),
        }
        refused = (
            self._cross_step.why_not() or ""
        )  # the script has made a step, or nothing could be profiled
        return {"event": "profile", "profile": to_data({**profile, "cross_step_refused": refused})}


class EmulationStart:
    """From now on the accelerators are emulated: the first step is recorded, the second one played."""

    def __init__(self, synchronizer: GradientSynchronizer, workload: Workload) -> None:
        synchronizer.emulate(EmulatedAccelerator(synchronizer, timetable_of(workload)))
        self._seen = 0

    def step_finished(self, step_s: float, clean: bool) -> bool:
        self._seen += 1
        return self._seen == RECORDED_STEPS + 1

    def answer(self) -> dict[str, Any]:
        return {"event": "emulating"}


class TuningSession:
    """Listens to the step boundaries of the model that is tuned.

    `round_robin`: the process runs under round-robin scheduling, which is only told. `byte_scale`: see `GradientSynchronizer.scale_bytes`.
    """

    timeouts = TUNING_TIMEOUTS

    def __init__(
        self, line: ControlLine, round_robin: bool = False, byte_scale: float = 1.0
    ) -> None:
        self._line = line
        self._round_robin, self._byte_scale = round_robin, byte_scale
        self._synchronizer: GradientSynchronizer | None = None
        self._current_plan: Plan | None = None
        self._activity: Activity | None = None
        self._step_started_s = 0.0
        self._said_s = 0.0
        self.steps = 0
        """Steps that the script has made since it started."""

    def model_built(self, synchronizer: GradientSynchronizer) -> None:
        """Take the steps of this model; what it does now is its current setup. Further models keep what they have."""
        if self._synchronizer is None:
            self._synchronizer, self._current_plan = synchronizer, synchronizer.plan
            synchronizer.listeners.append(self)

    def on_backward_end(self) -> None:
        """Nothing to do: a step ends at the next forward pass."""

    def on_boundary(self, now_s: float, clean: bool) -> None:
        """Account for the step that ended; between two instructions this is where the script waits."""
        self.steps += 1
        if self._activity is not None:
            if not self._activity.step_finished(now_s - self._step_started_s, clean):
                self._heartbeat(now_s)
                self._step_started_s = now_s
                return
            self._line.send(self._activity.answer())
        else:
            assert self._synchronizer is not None
            if (
                self._byte_scale != 1
            ):  # now, since the script may have registered a communication hook until its first step
                self._synchronizer.scale_bytes(self._byte_scale)
            self._line.send(
                {
                    "event": "ready",
                    "model_id": self._synchronizer.model_id,
                    "round_robin": self._round_robin,
                }
            )
        self._activity = self._next_activity()
        self._step_started_s = time.perf_counter()

    def _next_activity(self) -> Activity:
        assert self._synchronizer is not None
        while True:
            try:
                message = self._line.receive(None)  # ends when the supervisor does
            except ControlClosed:
                raise SystemExit(0) from None
            assert message is not None
            if message["do"] == "finish":
                raise SystemExit(0)
            if message["do"] == "probe":
                self._line.send(self._probe(message))
                continue
            if message["do"] in ("profile", "emulate"):
                try:
                    return self._profile_or_emulate(message)
                except InvalidInput as refusal:
                    self._refuse(refusal)
                    continue
            if message["do"] == "more":  # further steps of the trial that just paused
                return TrialRun(
                    None,
                    int(message["warmup_steps"]),
                    int(message["timed_steps"]),
                    self._accelerator,
                )
            plan = (
                parse(Plan, message["plan"], "the plan of the trial") if message["plan"] else None
            )
            self._synchronizer.forget_residuals()  # what one trial has not sent must not reach the next one
            try:
                self._synchronizer.load(plan or self._current_plan)
            except (
                InvalidStrategy
            ) as refusal:  # every rank raised it, and the earlier plan is still loaded
                self._refuse(refusal)
                continue
            # With scaled bytes only a part of each message is averaged, so there is nothing to compare with.
            gated = self._synchronizer.plan is not None and self._synchronizer.byte_scale == 1
            gate = GradientGate(self._synchronizer) if gated else None
            return TrialRun(
                gate, int(message["warmup_steps"]), int(message["timed_steps"]), self._accelerator
            )

    def _profile_or_emulate(self, message: dict[str, Any]) -> Activity:
        """Raises `InvalidInput` where the accelerators of this model cannot be emulated."""
        assert self._synchronizer is not None
        if message["do"] == "emulate":
            self._synchronizer.load(self._current_plan)
            return EmulationStart(
                self._synchronizer, parse(Workload, message["workload"], "the profile to emulate")
            )
        steps, deadline_s = int(message["steps"]), float(message["probe_deadline_s"])
        return ProfileRun(
            self._synchronizer, steps, deadline_s, bool(message["alone"]), tuple(message["devices"])
        )

    def _probe(self, message: dict[str, Any]) -> dict[str, Any]:
        """The long probe, here and now: it needs no steps."""
        assert self._synchronizer is not None

        def said(what: str) -> None:
            if time.perf_counter() - self._said_s >= HEARTBEAT_S:
                self._said_s = time.perf_counter()
                self._line.send({"event": "probing", "what": what})

        ranks, scale = self._synchronizer.ranks, self._synchronizer.byte_scale
        devices, computing = tuple(message["devices"]), bool(message["computing"])
        found = probe_cluster(
            ranks.base, float(message["budget_s"]), devices, said, scale, computing
        )
        told = {
            "fits": found.fits,
            "links": found.links,
            "software": software_versions(),
            "cores": usable_cores(),
        }
        return {"event": "probe", "probe": to_data(told)}

    @property
    def _accelerator(self) -> EmulatedAccelerator | None:
        assert self._synchronizer is not None
        emulated = self._synchronizer.accelerator
        return emulated if isinstance(emulated, EmulatedAccelerator) else None

    def _refuse(self, refusal: InvalidInput) -> None:
        self._line.send(
            {"event": "failed", "kind": FailureKind.REFUSED.value, "message": str(refusal)}
        )

    def _heartbeat(self, now_s: float) -> None:
        if now_s - self._said_s >= HEARTBEAT_S:
            self._said_s = now_s
            self._line.send({"event": "step"})
