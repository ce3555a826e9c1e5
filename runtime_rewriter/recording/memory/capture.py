"""Records the memory of a replica in steps of a job that trains on.

The steps run under a plan that sends its messages after the backward pass, as those that measure
the workload do. So communication has a place of its own in every step, before the forward pass
(buffers) and after the backward pass (gradients), and is left out. Only rank 0 is recorded, since
replicas are equal. If the script ends with the recording, it also computes half of the last batch,
which shows how times shrink with it. A module may keep state of which nothing is known here, so
this would change the training of a script that goes on.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autotune.errors import InvalidInput
from autotune.recordings.memory_file import NOT_RECORDED, RecordedMemory
from autotune.recordings.memory_profile import FixedShare
from autotune.strategy_space.plan import Plan
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.module_hooks import ModuleHook
from runtime_rewriter.pytorch.observers import BackwardObserver
from runtime_rewriter.pytorch.profile import profiling_plan
from runtime_rewriter.pytorch.reads import script_compiles
from runtime_rewriter.pytorch.recorded_pass import collectives_started
from runtime_rewriter.recording.memory.fixed_share import ModuleCall, fixed_share
from runtime_rewriter.recording.memory.recorder import RECORDED_STEPS, MemoryRecorder

_WARMUP_STEPS, _TIMED_STEPS = 1, 2
_log = logging.getLogger("autotune")
MEMORY_STEPS = _WARMUP_STEPS + _TIMED_STEPS + RECORDED_STEPS


class MemoryCapture(BackwardObserver):
    """Records `MEMORY_STEPS` steps under `plan`, or under the profiling plan.

    Building one is collective, between two steps. `done` becomes true at the boundary after the
    last step, equally on all ranks. `finish` is collective too and leaves no plan loaded. `note`:
    the reason for a missing profile, else "". `script_ends`: the script ends with the recording.
    """

    def __init__(
        self, synchronizer: GradientSynchronizer, plan: Plan | None, script_ends: bool = True
    ) -> None:
        self._synchronizer = synchronizer
        self._script_ends = script_ends
        self._steps = 0
        self._saw_backward = self._apart = False
        self.note = ""
        self._recorder: MemoryRecorder | None = None
        self._fixed: FixedShare | None = None
        self._call: ModuleCall | None = None
        self._call_hooks: tuple[RemovableHandle, ...] = ()
        self._collectives_before = 0
        if plan is None:
            plan = profiling_plan(synchronizer.workload, synchronizer.ranks.size)
        synchronizer.load(plan, deferred=True)
        synchronizer.observers.append(self)
        # before the listener that reads `done` at the same boundary
        synchronizer.listeners.insert(0, self)
        if synchronizer.ranks.rank == 0:
            self._begin()

    def _begin(self) -> None:
        if script_compiles():
            self._give_up("the script uses torch.compile, whose kernels show no modules")
            return
        self._recorder = MemoryRecorder(
            self._synchronizer.module, timed_steps=_TIMED_STEPS, warmup_steps=_WARMUP_STEPS
        )
        self._boundary()

    @property
    def done(self) -> bool:
        return self._steps >= MEMORY_STEPS

    def on_boundary(self, now_s: float, clean: bool) -> None:
        if self._saw_backward:  # else a step ends that began before this recording
            self._steps += 1
            self._boundary()
        self._set_apart(True)

    def on_forward_start(self) -> None:
        self._set_apart(False)

    def on_computed(self) -> None:
        self._set_apart(True)

    def on_backward_end(self) -> None:
        self._saw_backward = True
        self._set_apart(False)

    def _set_apart(self, apart: bool) -> None:
        """Switch between the replica's own work and its synchronization."""
        if self._recorder is not None and self._apart is not apart:
            self._apart = apart
            self._recorder.apart()

    def _boundary(self) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        try:
            recorder.boundary()
        except InvalidInput as refusal:
            self._give_up(str(refusal))
            return
        if self._steps == _WARMUP_STEPS and self._script_ends:
            # before the recorded steps, in which the call would keep what the script drops
            module = self._synchronizer.module
            self._call_hooks = (
                module.register_forward_pre_hook(ModuleHook(self._called), with_kwargs=True),
                module.register_forward_hook(ModuleHook(self._returned)),
            )
        elif recorder.done:
            self._measure_fixed_share(recorder.batch)

    def _called(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if torch.is_grad_enabled():
            self._call = ModuleCall(arguments, options)
            self._collectives_before = collectives_started()

    def _returned(self, module: nn.Module, arguments: object, output: object) -> None:
        """Drop the call of a module with collectives of its own, such as synchronized batch norms.

        It would wait for ranks that compute no half batch.
        """
        if self._call is not None:
            if collectives_started() != self._collectives_before:
                self._call = None
            self._remove_call_hooks()

    def _remove_call_hooks(self) -> None:
        for handle in self._call_hooks:
            handle.remove()
        self._call_hooks = ()

    def _measure_fixed_share(self, batch: int | None) -> None:
        """Compare, between two steps, half of the last batch with all of it."""
        call, self._call = self._call, None
        if call is None or batch is None or batch < 2:
            return
        try:
            self._fixed = fixed_share(self._synchronizer.module, call, batch)
        except Exception as error:  # noqa: BLE001 - the script's own code, which need not accept half a batch
            _log.warning(
                "the module computes no half of a batch, so times of micro-batches are assumed: %s",
                error,
            )

    def _give_up(self, reason: str) -> None:
        self.note = f"{NOT_RECORDED}: {reason}"
        self._stop()

    def _stop(self) -> None:
        self._remove_call_hooks()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def close(self) -> None:
        """Local: remove every hook."""
        self._stop()
        for subscribers in (self._synchronizer.observers, self._synchronizer.listeners):
            if self in subscribers:
                subscribers.remove(self)

    def finish(self) -> RecordedMemory | None:
        """Collective: the recorded memory; None on other ranks, and where `note` states why."""
        recorder = self._recorder
        self.close()
        self._synchronizer.load(None)
        if recorder is None:
            return None
        try:
            profile = recorder.profile()
        except InvalidInput as refusal:
            self._give_up(str(refusal))
            return None
        view = self._synchronizer.backend.bucket_view
        return RecordedMemory(
            profile,
            ddp=view is not None,
            bucket_view=bool(view),
            batch=recorder.batch,
            fixed=self._fixed,
        )
