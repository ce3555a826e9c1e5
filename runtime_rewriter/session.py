"""What happens at the step boundaries of a launched script.

A `TuningSession` takes its instructions from the supervisor: every rank gets the same ones and executes a
fixed number of steps for each, so all ranks switch plans at the same boundary without a collective of their own.
"""

from __future__ import annotations

import os
import platform
import time
from typing import Any, Protocol

import torch

from autotune.canonical import to_data
from autotune.errors import AutotuneError, InvalidStrategy
from autotune.parsing import parse
from autotune.records import FailureKind
from autotune.strategy_space.plan import Plan
from runtime_rewriter.control import HEARTBEAT_S, ControlClosed, ControlLine
from runtime_rewriter.numerics import GradientGate
from runtime_rewriter.torch_collectives import TUNING_TIMEOUTS
from runtime_rewriter.torch_hooks import GradientSynchronizer
from runtime_rewriter.torch_probe import probe_links
from runtime_rewriter.torch_profile import WorkloadProfiler


class Activity(Protocol):
    """A fixed number of steps with something to say at the end."""

    def step_finished(self, step_s: float, clean: bool) -> bool:
        """Take one step; True once it was the last."""

    def answer(self) -> dict[str, Any]:
        """The event that tells the result."""


class NumericsFailure(AutotuneError):
    """A plan's gradients differ from the reference reduction by more than the tolerance."""


class TrialRun:
    """Warm-up steps, the first under the numerics gate, then the timed ones."""

    def __init__(self, synchronizer: GradientSynchronizer, warmup_steps: int, timed_steps: int) -> None:
        self._gate = GradientGate(synchronizer) if synchronizer.plan is not None else None
        self._warmup_steps, self._timed_steps = warmup_steps, timed_steps
        self._seen = 0
        self._gradient_error: float | None = None
        self._step_s: list[float] = []
        self._clean: list[bool] = []
        if self._gate is not None:
            self._gate.arm()

    def step_finished(self, step_s: float, clean: bool) -> bool:
        self._seen += 1
        if self._seen == 1 and self._gate is not None:
            self._check(self._gate)
        if self._seen > self._warmup_steps:
            self._step_s.append(step_s)
            self._clean.append(clean)
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
        return {"event": "trial", "step_s": self._step_s, "clean": self._clean, "gate": self._gradient_error}


class ProfileRun:
    """Probe the links at the first boundary, then profile the following steps."""

    def __init__(self, synchronizer: GradientSynchronizer, steps: int, probe_deadline_s: float) -> None:
        self._fits = probe_links(synchronizer.ranks.base, deadline_s=probe_deadline_s)
        self._profiler = WorkloadProfiler(synchronizer, steps)

    def step_finished(self, step_s: float, clean: bool) -> bool:
        return self._profiler.done

    def answer(self) -> dict[str, Any]:
        workload = self._profiler.finish()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
        profile = {"workload": workload, "fits": self._fits, "software": software_versions(), "cores": cores}
        return {"event": "profile", "profile": to_data(profile)}


class TuningSession:
    """Listens to the step boundaries of the model that is tuned."""

    timeouts = TUNING_TIMEOUTS

    def __init__(self, line: ControlLine) -> None:
        self._line = line
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

    def on_backward_end(self, now_s: float) -> None:
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
            self._line.send({"event": "ready", "model_id": self._synchronizer.model_id})
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
            if message["do"] == "profile":
                return ProfileRun(self._synchronizer, int(message["steps"]), float(message["probe_deadline_s"]))
            plan = parse(Plan, message["plan"], "the plan of the trial") if message["plan"] else None
            try:
                self._synchronizer.load(plan or self._current_plan)
            except InvalidStrategy as refusal:  # every rank raised it, and the earlier plan is still loaded
                self._line.send({"event": "failed", "kind": FailureKind.REFUSED.value, "message": str(refusal)})
                continue
            return TrialRun(self._synchronizer, int(message["warmup_steps"]), int(message["timed_steps"]))

    def _heartbeat(self, now_s: float) -> None:
        if now_s - self._said_s >= HEARTBEAT_S:
            self._said_s = now_s
            self._line.send({"event": "step"})


def software_versions() -> dict[str, str]:
    """What a measurement depends on besides the model and the cluster."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform()}
    if torch.cuda.is_available():
        versions |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}
    return versions
