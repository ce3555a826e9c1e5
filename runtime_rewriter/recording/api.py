"""`autotune.Recorder` and `@autotune.profile(recorder)`, two lines in a script (dPRO, sec. 6)."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import ParamSpec, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.masking import masked_command
from runtime_rewriter.active import current_session
from runtime_rewriter.pytorch.ddp import adopted, synchronizer_of
from runtime_rewriter.pytorch.exchange.ranks import TRAINING_TIMEOUTS
from runtime_rewriter.recording.recorder import RecordingPhase, StepRecorder
from runtime_rewriter.recording.settings import PROFILE_STEPS, WARMUP_STEPS, RecordSettings

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("autotune")


class Recorder:
    """Records `steps` training steps of this process into `folder`, after `warmup` ordinary ones.

    Between two recorded steps come `between` ordinary ones, by default as many as keep the cost of
    the recording at 3 % of the training in that time.

    Build one on every rank at the same place, after `init_process_group`. `model` is the
    `DistributedDataParallel`, or the model passed to `autotune.apply`; any other module is recorded
    without its workload. Under `autotune profile` and `autotune tune`, which watch the steps
    themselves, it does nothing. The last three options make the profiler see more and cost more.
    Raises `InvalidInput` for too small a number of steps, and for a DDP class other than torch's
    own.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        folder: str | Path = "autotune-profile",
        steps: int = PROFILE_STEPS,
        warmup: int = WARMUP_STEPS,
        between: int | None = None,
        workload: bool = True,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        self.folder = Path(folder)
        settings = RecordSettings(
            folder=str(self.folder.resolve()),
            steps=steps,
            warmup=warmup,
            between=between,
            workload=workload,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            command=masked_command(sys.argv),
        )
        self.written = False
        """Whether all ranks' traces and `job.json` are in the folder."""
        self._restore = ExitStack()
        self._steps: StepRecorder | None = None
        if current_session() is None:
            synchronizer = synchronizer_of(model)
            if synchronizer is None and isinstance(model, DistributedDataParallel):
                timeouts = TRAINING_TIMEOUTS
                adoption = adopted(
                    model, timeout_s=timeouts.message_s, agreement_timeout_s=timeouts.agreement_s
                )
                synchronizer = self._restore.enter_context(adoption)
            self._steps = StepRecorder(settings, synchronizer)
            self._restore.callback(self._steps.close)
            atexit.register(self._at_exit)

    def begin_step(self) -> None:
        """Begin a training step; `profile` calls this."""
        if self._steps is not None:
            self._steps.begin_step()

    def end_step(self) -> None:
        """End the step; `profile` calls this. Collective at some steps."""
        if self._steps is None:
            return
        self._steps.end_step()
        if self._steps.advance():
            self.written = True
            self.close()

    def finish(self) -> None:
        """Collective, between two steps: write the steps recorded so far.

        Raises `LaunchError` where there are none.
        """
        if self._steps is not None:
            self._steps.finish()
            self.written = True
            self.close()

    def close(self) -> None:
        """Local: stop recording and restore the model."""
        self._restore.close()
        self._steps = None
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if self._steps is not None:
            hint = ""
            if self._steps.phase is RecordingPhase.RECORDING:
                hint = "; recorder.finish() at the script's end writes the steps until there"
            _log.warning("nothing was written: %s%s", self._steps.too_few(), hint)
            self._steps.close()


def profile(recorder: Recorder) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the function of one training step: each call is a step of `recorder`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def step(*arguments: P.args, **options: P.kwargs) -> R:
            recorder.begin_step()
            try:
                result = function(*arguments, **options)
            except BaseException:
                recorder.close()
                raise
            recorder.end_step()
            return result

        return step

    return decorate
