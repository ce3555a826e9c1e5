"""Records the steps of a script under `autotune profile`: traces, `graph.json.gz`, `job.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from autotune.errors import LaunchError
from runtime_rewriter.tensorflow.measured import client_time, replica_times
from runtime_rewriter.tensorflow.recording.recorder import StepRecording, StepRecords
from runtime_rewriter.tensorflow.recording_files import RecordedReplicas, RecordingFiles
from runtime_rewriter.tensorflow.refusals import CROSSING_REFUSED, DIRECT_REFUSED
from runtime_rewriter.tensorflow.running import RunningGraph


class ScriptRecorder:
    """Records the steps of a running graph into `folder`.

    `hosts`: task -> its host. `asked_steps` are recorded after `warmup` ordinary ones and the one
    that returns the partitions; ordinary and recorded steps take turns. Training is not changed.
    """

    def __init__(
        self,
        running: RunningGraph,
        model: str,
        hosts: Mapping[str, str],
        folder: Path,
        asked_steps: int,
        warmup: int,
        command: tuple[str, ...] = (),
        software: Mapping[str, str] | None = None,
    ) -> None:
        self._running, self._model, self._hosts = running, model, hosts
        self._folder, self._command = folder, command
        self._software = dict(software or {})
        self._recording = StepRecording(asked_steps, warmup)
        self._evaluated: list[int] = []
        self._written = False
        self.steps = 0

    def step(self, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Train one step with the global batch; return the fetches of the first replica."""

        def run(options: Any, metadata: Any) -> list[np.ndarray]:
            wanted = self._recording.further_fetches(self._running.training.row_indices(0))
            results, rows = self._running.observed_step(values, metadata, wanted, options)
            self._recording.note_rows(rows)
            return results

        results = self._recording.step(run)
        self.steps += 1
        return results

    def boundary(self, clean: bool) -> bool:
        """End a step. Returns whether everything is written. Raises `LaunchError`."""
        if self._recording.done and not self._written:
            self.finish()
        return self._written

    def finish(self, last_step_ended: bool = False) -> None:
        """Write the steps recorded so far. Raises `LaunchError` without any, or a full disk."""
        records = self._recording.records
        if not records.steps:
            raise LaunchError(
                f"the script made {self.steps} steps, but the first recorded one comes after "
                f"{self._recording.steps_before}; let it train longer, or ask for less with "
                "--warmup"
            )
        try:
            self._write(records)
        except OSError as error:
            raise LaunchError(f"rank 0 cannot write to {self._folder}: {error}") from error
        self._written = True

    def close(self) -> None:
        """Nothing was changed that would have to be restored."""

    def _write(self, records: StepRecords) -> None:
        training, loaded = self._running.training, self._running.graph
        assert loaded is not None
        ranks = len(loaded.devices)
        times = tuple(
            replica_times(training, events, rank)
            for events in records.steps
            for rank in range(ranks)
        )
        plain_s = median(records.plain_s)
        client_s = median(client_time(plain_s, events) for events in records.steps)
        files = RecordingFiles(
            self._folder,
            self._model,
            training,
            loaded.plan,
            threads=self._running.servers.config.intra_op_parallelism_threads,
            command=self._command,
            software=self._software,
            refused=(CROSSING_REFUSED, DIRECT_REFUSED),
        )
        recorded = RecordedReplicas(records, times, client_s, self._hosts)
        files.write(recorded, ranks, self._recording, loaded.notes)
