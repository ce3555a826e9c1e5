"""Writes what was recorded of a TensorFlow script: traces, `graph.json.gz`, `job.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from autotune.recordings.job_file import RecordedJob
from autotune.recordings.memory_file import MEMORY_FILE
from autotune.recordings.recorded_steps import collective_rows
from autotune.strategy_space.plan import Plan
from autotune.units import format_seconds
from runtime_rewriter.tensorflow.measured import ReplicaTimes, workload_of_steps
from runtime_rewriter.tensorflow.recording.recorder import StepRecording, StepRecords
from runtime_rewriter.tensorflow.recording.replicas import replicated, trained_variables
from runtime_rewriter.tensorflow.recording.summary import device_summaries
from runtime_rewriter.tensorflow.training_graph import TrainingGraph


@dataclass(frozen=True)
class RecordedReplicas:
    """The steps of some replicas.

    `times`: of each replica in each step. `client_s`: dispatch, feeds and results of a step.
    `hosts`: task, such as `/job:worker/replica:0/task:0` -> its host.
    """

    records: StepRecords
    times: tuple[ReplicaTimes, ...]
    client_s: float
    hosts: Mapping[str, str]


@dataclass(frozen=True)
class RecordingFiles:
    """The files of a recording, in `folder`.

    `plan`: by which the replicas synchronized; None: by the script's own messages. `threads`:
    between the ops of a replica. `refused`: why the script cannot cross the step, and why it cannot
    exchange directly; "" for no known reason. `mirrored`: see `RecordedJob`.
    """

    folder: Path
    model: str
    training: TrainingGraph
    plan: Plan | None
    threads: int
    command: tuple[str, ...]
    software: Mapping[str, str]
    refused: tuple[str, str]
    mirrored: bool = False

    def write(
        self,
        recorded: RecordedReplicas,
        replicas: int,
        recording: StepRecording,
        notes: Sequence[str] = (),
    ) -> None:
        """`replicas`: how many names of replicas the graph has. Raises `OSError`."""
        records, training = recorded.records, self.training
        trained = replicated(training, replicas)
        graph = records.write(self.folder, trained, trained_variables(training), recorded.hosts)
        assert records.partitions is not None
        summaries = device_summaries(records.partitions, graph, records.steps)
        steps = len(records.steps)
        workload = workload_of_steps(
            training,
            self.model,
            recorded.times,
            median(step.update_s for step in recorded.times) + recorded.client_s,
            recording.touched,
            threads=self.threads,
        )
        job = RecordedJob(
            world_size=len(summaries),
            ranks=tuple(one.record for one in summaries),
            steps=steps,
            asked_steps=recording.steps,
            warmup_steps=recording.warmup,
            model_id=workload.id,
            workload=workload,
            plan=self.plan,
            plan_id="" if self.plan is None else self.plan.id,
            backend="tensorflow",
            collectives=collective_rows([one.seen for one in summaries], steps),
            software=dict(self.software),
            command=self.command,
            notes=(
                f"a call of the step takes {format_seconds(median(records.plain_s))} (median), and "
                f"{format_seconds(median(records.recorded_s))} while it is recorded; "
                f"{format_seconds(recorded.client_s)} of it are dispatch, feeds and results",
                *notes,
            ),
            cross_step_refused=self.refused[0],
            direct_refused=self.refused[1],
            mirrored=self.mirrored,
        )
        (self.folder / MEMORY_FILE).unlink(missing_ok=True)  # of an earlier recording
        job.write(self.folder)
