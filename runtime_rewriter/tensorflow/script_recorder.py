"""Records the steps of a script under `autotune profile`: traces, `graph.json.gz`, `job.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from autotune.errors import LaunchError
from autotune.recordings.job_file import RecordedJob
from autotune.recordings.memory_file import MEMORY_FILE
from autotune.recordings.recorded_steps import collective_rows
from autotune.units import format_seconds
from runtime_rewriter.tensorflow.measured import client_time, replica_times, workload_of_steps
from runtime_rewriter.tensorflow.recording.recorder import StepRecording, StepRecords
from runtime_rewriter.tensorflow.recording.replicas import replicated, trained_variables
from runtime_rewriter.tensorflow.recording.summary import device_summaries
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
            results, _ = self._running.observed_step(values, metadata, {}, options)
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
        assert loaded is not None and records.partitions is not None
        ranks = len(loaded.devices)
        graph = records.write(
            self._folder, replicated(training, ranks), trained_variables(training), self._hosts
        )
        summaries = device_summaries(records.partitions, graph, records.steps)
        steps = len(records.steps)
        times = [
            replica_times(training, events, rank)
            for events in records.steps
            for rank in range(ranks)
        ]
        plain_s = median(records.plain_s)
        client_s = median(client_time(plain_s, events) for events in records.steps)
        workload = workload_of_steps(
            training,
            self._model,
            times,
            median(step.update_s for step in times) + client_s,
            touched={},
            threads=self._running.servers.config.intra_op_parallelism_threads,
        )
        job = RecordedJob(
            world_size=len(summaries),
            ranks=tuple(one.record for one in summaries),
            steps=steps,
            asked_steps=self._recording.steps,
            warmup_steps=self._recording.warmup,
            model_id=workload.id,
            workload=workload,
            plan=loaded.plan,
            plan_id=loaded.plan.id,
            backend="tensorflow",
            collectives=collective_rows([one.seen for one in summaries], steps),
            software=self._software,
            command=self._command,
            notes=(
                f"a call of the step takes {format_seconds(plain_s)} (median), and "
                f"{format_seconds(median(records.recorded_s))} while it is recorded; "
                f"{format_seconds(client_s)} of it are dispatch, feeds and results",
                *loaded.notes,
            ),
            cross_step_refused=CROSSING_REFUSED,
            direct_refused=DIRECT_REFUSED,
        )
        (self._folder / MEMORY_FILE).unlink(missing_ok=True)  # of an earlier recording
        job.write(self._folder)
