"""Records one replica of a script of MultiWorkerMirroredStrategy, for `autotune profile`.

After the warm-up, the first worker captures the step that is about to be called, without its sums,
and runs it in a session of its own with that call's batch. The others wait in the step's first
collective, or end if the recording ends the script. Training does not change.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from autotune.errors import LaunchError
from autotune.strategy_space.mirrored import MIRRORED
from autotune.strategy_space.plan import Plan
from autotune.workload import Variable
from runtime_rewriter.mirrored.alone import without_other_workers
from runtime_rewriter.mirrored.observed import Observation
from runtime_rewriter.mirrored.steps import Steps
from runtime_rewriter.rank.tensorflow_model import software
from runtime_rewriter.recording.session import RecordingSession
from runtime_rewriter.software import software_versions
from runtime_rewriter.tensorflow.local_device import LocalDevice
from runtime_rewriter.tensorflow.measured import client_time, replica_times
from runtime_rewriter.tensorflow.recording.recorder import StepRecording
from runtime_rewriter.tensorflow.recording_files import RecordedReplicas, RecordingFiles
from runtime_rewriter.tensorflow.refusals import CROSSING_REFUSED, DIRECT_REFUSED
from runtime_rewriter.tensorflow.session_step import SessionStep

NOTE = f"one replica is recorded alone, without the sums of {MIRRORED}"


class MirroredRecorder:
    """Implements `StepObserver` and `Recording`."""

    def __init__(self, session: RecordingSession, worker: int) -> None:
        self.script_steps = Steps(self, before_call=self._before)
        self.steps = 0
        self._session, self._worker = session, worker
        self._written = False
        session.graph_built(self)

    def found(self, variables: Sequence[Variable], buckets: Sequence[Sequence[str]]) -> Plan | None:
        return None

    def stepped(self, observation: Observation | None) -> None:
        self.steps += 1

    def between_steps(self, now_s: float, clean: bool) -> None: ...

    def boundary(self, clean: bool) -> bool:
        return self._written

    def finish(self, last_step_ended: bool = False) -> None:
        """Raises `LaunchError`: the script has ended before the recording."""
        raise LaunchError(
            f"the script made {self.steps} steps, but the recording follows after "
            f"{self._session.settings.warmup}; let it train longer, or ask for less with --warmup"
        )

    def close(self) -> None:
        """Nothing was changed that would have to be restored."""

    def _before(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Record, once, before a call of the step."""
        if self._written or self.steps < self._session.settings.warmup:
            return
        if self._worker == 0:
            self._record(function, arguments, named)
        self._written = True
        self._session.on_boundary(0.0, clean=True)

    def _record(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        settings, marks = self._session.settings, self.script_steps.marks
        with without_other_workers():
            step = SessionStep(function, arguments, named, marks)
        recording = StepRecording(settings.steps)
        while not recording.done:
            step.run(recording, function, arguments, named)
        records, training = recording.records, step.captured.training
        plain_s = median(records.plain_s)
        (device,) = LocalDevice.devices
        recorded = RecordedReplicas(
            records,
            tuple(replica_times(training, events, 0) for events in records.steps),
            median(client_time(plain_s, events) for events in records.steps),
            {device.rpartition("/device:")[0]: socket.gethostname()},
        )
        files = RecordingFiles(
            Path(settings.folder),
            step.name,
            training,
            plan=None,
            threads=step.threads,
            command=settings.command,
            software=software_versions() | software(),
            refused=(CROSSING_REFUSED, DIRECT_REFUSED),
            mirrored=True,
        )
        try:
            files.write(recorded, 1, recording, [NOTE])
        except OSError as error:
            raise LaunchError(f"rank 0 cannot write to {settings.folder}: {error}") from error
        step.running.close()
