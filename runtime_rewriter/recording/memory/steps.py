"""The memory of a replica, recorded in steps of a job that trains on.

The steps run under a plan whose messages are issued when the backward pass has ended, as those that measure the workload: what is sent
has a place of its own in every step, before the forward pass (buffers) and after the backward pass (gradients), and is left out.
Rank 0 alone is recorded; replicas are alike. After the last step it computes on half of the batch, too, to tell how times shrink with it.
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
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.observers import BackwardObserver
from runtime_rewriter.pytorch.profile import profiling_plan
from runtime_rewriter.pytorch.reads import script_compiles
from runtime_rewriter.pytorch.recorded_pass import collectives_made
from runtime_rewriter.recording.memory.micro_batch import Call, fixed_share
from runtime_rewriter.recording.memory.recorder import RECORDED_STEPS, MemoryRecorder

_WARMUP_STEPS, _TIMED_STEPS = 1, 2
_log = logging.getLogger("autotune")
MEMORY_STEPS = _WARMUP_STEPS + _TIMED_STEPS + RECORDED_STEPS


class MemoryCapture(BackwardObserver):
    """Records `MEMORY_STEPS` steps. Building one is collective and belongs between two steps: it loads `plan`, or the profiling plan.

    `done` turns true at the boundary after the last step, alike on all ranks; `finish` is collective too and leaves no plan loaded.
    `note`: why there is no profile, "" while there may be one.
    """

    def __init__(self, synchronizer: GradientSynchronizer, plan: Plan | None) -> None:
        self._synchronizer = synchronizer
        self._seen = 0
        self._saw_backward = self._apart = False
        self.note = ""
        self._recorder: MemoryRecorder | None = None
        self._fixed: FixedShare | None = None
        self._call: Call | None = None
        self._look: tuple[RemovableHandle, ...] = ()
        self._made = 0
        synchronizer.load(
            plan or profiling_plan(assumed_workload(synchronizer.module), synchronizer.ranks.size),
            deferred=True,
        )
        synchronizer.observers.append(self)
        synchronizer.listeners.insert(
            0, self
        )  # before whoever asks for `done` at the same boundary
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
        return self._seen >= MEMORY_STEPS

    def on_boundary(self, now_s: float, clean: bool) -> None:
        if self._saw_backward:  # else the end of a step that began before this recording
            self._seen += 1
            self._boundary()
        self._turn(True)

    def on_forward_start(self) -> None:
        self._turn(False)

    def on_computed(self) -> None:
        self._turn(True)

    def on_backward_end(self) -> None:
        self._saw_backward = True
        self._turn(False)

    def _turn(self, apart: bool) -> None:
        """From the replica's own work to what synchronizes it, or back."""
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
        if (
            self._seen == _WARMUP_STEPS
        ):  # before the recorded steps, in which it would hold what the script lets go
            module = self._synchronizer.module
            self._look = (
                module.register_forward_pre_hook(self._called, with_kwargs=True),
                module.register_forward_hook(self._returned),
            )
        elif recorder.done:
            self._measure(recorder.batch)

    def _called(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if torch.is_grad_enabled():
            self._call, self._made = Call(arguments, options), collectives_made()

    def _returned(self, module: nn.Module, arguments: object, output: object) -> None:
        """A module with transfers of its own (batch norms over all ranks, say) would wait for ranks that compute no half batch."""
        if self._call is not None:
            if collectives_made() != self._made:
                self._call = None
            self._look_away()

    def _look_away(self) -> None:
        for handle in self._look:
            handle.remove()
        self._look = ()

    def _measure(self, batch: int | None) -> None:
        """Between two steps: half of the last batch against all of it."""
        call, self._call = self._call, None
        if call is None or batch is None or batch < 2:
            return
        try:
            self._fixed = fixed_share(self._synchronizer.module, call, batch)
        except Exception as error:  # noqa: BLE001 - the script's own code, which never said that it takes half a batch
            _log.warning(
                "the module computes no half of a batch, so that times of micro-batches are assumed: %s",
                error,
            )

    def _give_up(self, why: str) -> None:
        self.note = f"{NOT_RECORDED}: {why}"
        self._stop()

    def _stop(self) -> None:
        self._look_away()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def close(self) -> None:
        """Local: remove every hook."""
        self._stop()
        for listened in (self._synchronizer.observers, self._synchronizer.listeners):
            if self in listened:
                listened.remove(self)

    def finish(self) -> RecordedMemory | None:
        """What was recorded; None on ranks other than the first, and where `note` says why not. Collective."""
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
        view = self._synchronizer.bucket_view
        return RecordedMemory(
            profile,
            ddp=view is not None,
            bucket_view=bool(view),
            batch=recorder.batch,
            fixed=self._fixed,
        )
