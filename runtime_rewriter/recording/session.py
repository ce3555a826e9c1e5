"""Records a launched script: `autotune profile -- torchrun ... train.py`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from autotune.errors import AutotuneError, LaunchError
from runtime_rewriter.further_models import FurtherModels
from runtime_rewriter.pytorch.exchange.ranks import Timeouts
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.recording.recorder import StepRecorder
from runtime_rewriter.recording.settings import RecordSettings

REPORT = "rank{}.report.json"


class Recording(Protocol):
    """A recording in progress, of PyTorch or TensorFlow. `steps`: those that the script made."""

    @property
    def steps(self) -> int: ...

    def boundary(self, clean: bool) -> bool:
        """End a step and begin the next one; return whether everything is written."""

    def finish(self, last_step_ended: bool = False) -> None:
        """Write the steps recorded so far. Raises `LaunchError` without any."""

    def close(self) -> None:
        """Give up, and restore everything."""


class RecordingSession:
    """Records the steps of the first model that the script wraps.

    A step ends at the model's next forward pass. When all is written, the script ends or goes on.
    `report` writes this rank's outcome for the command.
    """

    timeouts = Timeouts(1800.0, 120.0)

    def __init__(self, settings: RecordSettings) -> None:
        self.settings = settings
        self.recorder: Recording | None = None
        self.written = False
        self.at_end = contextlib.ExitStack()
        """Closed when the script is about to end, before this process ends without a shutdown."""
        self._synchronizer: GradientSynchronizer | None = None
        self._in_step = True
        self._further = FurtherModels(self._further_stepped)
        self._last_model = 1

    @property
    def steps(self) -> int:
        return 0 if self.recorder is None else self.recorder.steps

    def model_built(self, synchronizer: GradientSynchronizer) -> None:
        """Collective, like the building of the model.

        Further models are not recorded. A script to be stopped ends once it trains them instead of
        the first one.
        """
        if self.recorder is None:
            self._synchronizer = synchronizer
            if synchronizer.records_graph:
                from runtime_rewriter.recording.horovod_graph import HorovodGraphRecorder

                self.recorder = HorovodGraphRecorder(self.settings, synchronizer)
            else:
                self.recorder = StepRecorder(self.settings, synchronizer)
            synchronizer.listeners.append(self)
        else:
            synchronizer.listeners.append(self._further.add())

    def graph_built(self, recorder: Recording) -> None:
        """Record a TensorFlow graph, if nothing else is recorded."""
        self.recorder = self.recorder or recorder

    def followed(self) -> None:
        """This rank only served rank 0, which records all of them."""
        self.written = True

    def on_backward_end(self) -> None:
        self._in_step = False

    def on_boundary(self, now_s: float, clean: bool) -> None:
        assert self.recorder is not None
        self._in_step = True
        self._further.first_stepped()
        if self.recorder.boundary(clean):
            self._done()

    def _further_stepped(self, number: int, now_s: float) -> None:
        if self._further.replaced_the_first and self.settings.stop:
            self._last_model = number
            self._in_step = True  # the first model's last step has lasted until now
            raise SystemExit(0)

    def _done(self) -> None:
        self.written = True
        self.report()
        if self._synchronizer is not None:
            self._synchronizer.listeners.remove(self)
        if self.settings.stop:
            self.at_end.close()
            raise SystemExit(0)

    def script_ended(self) -> None:
        """Collective: write the steps recorded so far.

        Call when the script has ended or is about to leave the process group. Raises `LaunchError`
        where there are none, or no model was wrapped.
        """
        if self.written:
            return
        if self.recorder is None:
            raise LaunchError(
                "the script must build DistributedDataParallel, or call autotune.apply(model) "
                "once, but it ended without; the two lines autotune.Recorder(model) and "
                "@autotune.profile(recorder) record any script of PyTorch, and "
                "autotune.distribute(step) one of TensorFlow",
                anchor="no-ddp",
            )
        try:
            self.recorder.finish(last_step_ended=not self._in_step)
        except LaunchError as error:
            if self._last_model == 1:
                raise
            raise LaunchError(
                f"{error}; it then trains its DDP model {self._last_model}, but only the first one "
                "is recorded"
            ) from error
        self.written = True
        self.report()

    @contextlib.contextmanager
    def watching_end(self) -> Iterator[None]:
        """Write the files before `destroy_process_group` makes that impossible.

        The function is restored, unless another one has replaced ours since.
        """
        destroy = dist.destroy_process_group

        def finish_and_destroy(group: dist.ProcessGroup | None = None) -> None:
            if group in (None, dist.group.WORLD) and self.recorder is not None and not self.written:
                self.script_ended()
            destroy(group)

        dist.destroy_process_group = finish_and_destroy
        try:
            yield
        finally:
            if dist.destroy_process_group is finish_and_destroy:
                dist.destroy_process_group = destroy
            self.at_end.close()
            if self.recorder is not None:
                self.recorder.close()

    def report(self, problem: BaseException | None = None, described: str = "") -> None:
        """Write one file per rank, if the settings name a folder for it."""
        if not self.settings.reports:
            return
        rank = dist.get_rank() if dist.is_initialized() else _rank_of_launcher()
        outcome: dict[str, Any] = {"rank": rank, "written": self.written, "steps": self.steps}
        if problem is not None:
            outcome |= {"problem": described, "ours": isinstance(problem, AutotuneError)}
        path = Path(self.settings.reports) / REPORT.format(rank)
        with contextlib.suppress(OSError):  # the command may have ended
            path.write_text(json.dumps(outcome), encoding="utf-8")


def _rank_of_launcher() -> int:
    """The rank that torchrun or horovodrun gave; 0 for a single process."""
    return int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")))
