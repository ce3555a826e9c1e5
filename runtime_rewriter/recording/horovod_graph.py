"""Records a TensorFlow script of Horovod: the graph of its step on every rank.

The function of a step is traced once more, with Horovod's own averages alone, and further steps
run in a session of this process: only sessions return partitions and the times of ops that end in
another thread. So a collective of Horovod lasts from the moment when this rank enqueues it until it
is complete here. Every rank records itself; rank 0 joins the graphs and writes the files.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import tensorflow as tf

from autotune.errors import AutotuneError, LaunchError
from runtime_rewriter.horovod.tensorflow_synchronizer import NO_CROSSING, TensorflowSynchronizer
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.recording.peers import Peers
from runtime_rewriter.recording.settings import RecordSettings
from runtime_rewriter.software import software_versions
from runtime_rewriter.tensorflow.measured import client_time, replica_times
from runtime_rewriter.tensorflow.program_variables import ProgramVariables
from runtime_rewriter.tensorflow.recording.joined import joined, of_task
from runtime_rewriter.tensorflow.recording.partitions import HOROVOD_COLLECTIVES
from runtime_rewriter.tensorflow.recording.recorder import StepRecording
from runtime_rewriter.tensorflow.recording_files import RecordedReplicas, RecordingFiles
from runtime_rewriter.tensorflow.session_step import SessionStep


class HorovodGraphRecorder:
    """Implements `Recording` and `GraphRecorder`. Building one is collective.

    The script's variables keep their values: a use of one fetches that of the session before.
    """

    def __init__(self, settings: RecordSettings, synchronizer: GradientSynchronizer) -> None:
        assert isinstance(synchronizer, TensorflowSynchronizer)
        self._settings, self._synchronizer = settings, synchronizer
        self._peers = Peers.join(synchronizer.world)
        self._recording = StepRecording(settings.steps, settings.warmup)
        self._session: SessionStep | None = None
        self._program: ProgramVariables | None = None
        self._until_closed = ExitStack()
        self._written = False
        self.capturing = False
        self.steps = 0
        synchronizer.graph_recorder = self

    def run_step(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run a call of the step's function in the session."""
        if self._session is None:
            self._synchronizer.mark_unclean()  # tracing takes time
            self._session = self._captured(function, arguments, named)
            self._program = ProgramVariables(
                self._session.captured.variables, self._session.running
            )
            self._until_closed.enter_context(self._program.watched())
        assert self._program is not None
        self.steps += 1
        self._program.send_changes()
        results = self._session.run(self._recording, function, arguments, named)
        self._program.stepped()
        return self._session.captured.packed(results)

    def _captured(
        self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> SessionStep:
        """Collective: trace the step. Raises `LaunchError` where the ranks trace different ones.

        Horovod waits for a collective that a rank lacks until the session's own limit.
        """
        failure: AutotuneError | None = None
        step: SessionStep | None = None
        self.capturing = True
        try:
            step = SessionStep(function, arguments, named)
        except AutotuneError as error:
            failure = error
        finally:
            self.capturing = False
        traced = [] if step is None else collectives_of(step.captured.training.graph_def)
        everyone = self._peers.gather((str(failure or ""), traced))
        if failure is not None:
            raise failure
        check_same_collectives(everyone)
        assert step is not None
        return step

    def boundary(self, clean: bool) -> bool:
        """End a step. Returns whether everything is written. Raises `LaunchError`."""
        if self._recording.done and not self._written:
            self.finish()
        return self._written

    def finish(self, last_step_ended: bool = False) -> None:
        """Collective: write the steps recorded so far. Raises `LaunchError` without any."""
        session, records = self._session, self._recording.records
        if session is None or not records.steps:
            raise LaunchError(
                f"the script made {self.steps + 1} steps, but the first recorded one comes after "
                f"{self._recording.steps_before + 1}; let it train longer, or ask for less with "
                "--warmup"
            )
        everyone = self._peers.gather(self._own_records(session))
        problem = ""
        if self._peers.rank == 0:
            try:
                self._files(session).write(_joined(everyone), 1, self._recording)
            except OSError as error:
                problem = f"rank 0 cannot write to {self._settings.folder}: {error}"
        problem = self._peers.gather(problem)[0]
        if problem:
            raise LaunchError(problem)
        self._peers.leave()
        self._written = True
        self.close()

    def close(self) -> None:
        """Restore everything. After a recording the script's own function goes on."""
        self._synchronizer.graph_recorder = None
        if self._session is not None and self._written:
            for variable in self._session.captured.variables.values():
                variable.read_value()  # which fetches the value of the session
            self._until_closed.close()
            self._session.running.close()
        self._until_closed.close()
        self._session = None

    def _own_records(self, session: SessionStep) -> RecordedReplicas:
        """This rank's steps, with the name of its device in the job."""
        records = self._recording.records
        assert records.partitions is not None
        messages = [node.name for node in records.partitions.nodes if node.collective is not None]
        plain_s = median(records.plain_s)
        task = f"/job:worker/replica:0/task:{self._peers.rank}"
        training = session.captured.training
        return RecordedReplicas(
            of_task(records, task),
            tuple(replica_times(training, events, 0, messages) for events in records.steps),
            median(client_time(plain_s, events) for events in records.steps),
            {task: socket.gethostname()},
        )

    def _files(self, session: SessionStep) -> RecordingFiles:
        settings = self._settings
        return RecordingFiles(
            Path(settings.folder),
            session.name,
            session.captured.training,
            plan=None,
            threads=session.threads,
            command=settings.command,
            software=software_versions() | {"tensorflow": tf.__version__},
            refused=(NO_CROSSING, self._synchronizer.direct_refused),
        )


def collectives_of(graph_def: Any) -> list[str]:
    """The collectives of a step by Horovod's names for them, as `op name`, sorted."""
    calls = (node for node in graph_def.node if node.op in HOROVOD_COLLECTIVES)
    return sorted(f"{node.op} {node.name}" for node in calls)


def check_same_collectives(ranks: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Raise `LaunchError` unless all ranks could trace a step, with the same collectives.

    `ranks`: (why a rank could not, or "", and its collectives) of each.
    """
    for rank, (problem, _) in enumerate(ranks):
        if problem:
            raise LaunchError(f"rank {rank} cannot record its step: {problem}")
    of_first = Counter(ranks[0][1])
    for rank, (_, traced) in enumerate(ranks):
        of_rank = Counter(traced)
        for holder, other, calls in ((0, rank, of_first - of_rank), (rank, 0, of_rank - of_first)):
            if calls:
                raise LaunchError(
                    "all ranks must trace the same collectives in the recorded step, but "
                    f"{min(calls)!r} is on rank {holder} and not on rank {other} ({calls.total()} "
                    "such); compute the same gradients on every rank, and call Horovod outside of "
                    "branches on the rank"
                )


def _joined(ranks: Sequence[RecordedReplicas]) -> RecordedReplicas:
    return RecordedReplicas(
        joined([rank.records for rank in ranks]),
        tuple(step for rank in ranks for step in rank.times),
        median(rank.client_s for rank in ranks),
        {task: host for rank in ranks for task, host in rank.hosts.items()},
    )
