"""The ranks of the user's script: placed, started, instructed together, restarted and stopped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from autotune.errors import LaunchError
from autotune.records import Failed, FailureKind
from autotune.workload import Workload
from runtime_rewriter.failures import NO_DDP_FIX
from runtime_rewriter.protocol import (
    HEARTBEAT_S,
    EmulationAnswer,
    EndScript,
    Probing,
    RankEvent,
    RankInstruction,
    Ready,
    StartEmulation,
    StartProbe,
    StartProfile,
    decode_event,
    encode,
)
from runtime_rewriter.world.answers import Answer, Answers, ScriptEnded, Silence
from runtime_rewriter.world.placement import Placement
from runtime_rewriter.world.worker import ProcessExited, WorkerLost

POLL_S = 2.0
STARTS = 3
"""Attempts to bring the script to its first step before the job is given up."""
FAREWELL_S = 3.0
"""Time for all ranks to end at a step boundary."""
FAREWELL_POLL_S = 0.5
STRAGGLER_S = 5.0
"""Time for the other ranks to report after the first one failed."""
SILENT_HEARTBEATS = 3.0

Report = Callable[[str], None]


class RunningScript:
    """`place()` finds room for the workers; it is called again when a worker itself was lost.

    All methods raise `LaunchError` if the script does not start or cannot be tuned.
    """

    def __init__(
        self, place: Callable[[], Placement], step_timeout_s: float, start_timeout_s: float
    ) -> None:
        self._place = place
        # A healthy rank sends a heartbeat, however short its steps are.
        self.step_timeout_s = max(step_timeout_s, SILENT_HEARTBEATS * HEARTBEAT_S)
        self._start_timeout_s = start_timeout_s
        self._placement: Placement | None = None
        self._log_paths: tuple[str, ...] = ()  # of the last start, by rank
        self.running = False
        self._fresh = False
        """No instruction was carried out since the last start."""
        self.emulated: Workload | None = None
        """The accelerators wait for its times after every start."""
        self.model_id = ""
        self.round_robin = False
        """Whether every rank ran under round-robin scheduling at the last start."""
        self.restarts = -1
        """Starts of the script after the first."""

    @property
    def hosts(self) -> tuple[tuple[str, int], ...]:
        """Name and number of ranks of every host, in rank order."""
        return self.placement.hosts

    @property
    def placement(self) -> Placement:
        """Where the ranks run; only while there are workers."""
        assert self._placement is not None
        return self._placement

    def instruct(
        self,
        instruction: RankInstruction,
        answer: type[Answer],
        silence_s: float,
        report: Report | None = None,
    ) -> list[Answer] | Failed:
        """Start the script if necessary, instruct all ranks and return their answers in rank order.

        `report` gets rank 0's descriptions of a long probe. A script that came to its end is
        started again. If a worker is lost, the script starts on other workers, but only once: the
        instruction may be what takes the machine down.
        """
        lost: WorkerLost | None = None
        while True:
            self.ensure_running()
            started_fresh = self._fresh
            try:
                self._send(self._with_devices(instruction))
                outcome = self._collect(answer, silence_s, report)
            except WorkerLost as error:
                self.lose_workers()
                if lost is not None:
                    return worker_lost_again(error)
                lost = error
                continue
            except Silence as silence:
                outcome = Failed(FailureKind.HANG, str(silence), silence.rank)
            except ScriptEnded as ended:
                self._stop()
                if started_fresh:
                    raise LaunchError(
                        f"the script ends after {ended.steps} steps, but one trial needs more; "
                        "let it train "
                        "longer (more epochs or steps) or lower --warmup-steps and --timed-steps"
                    ) from ended
                continue
            if not isinstance(outcome, Failed):
                self._fresh = False
            elif outcome.kind is not FailureKind.REFUSED:
                self._stop()
            return outcome

    def resume(
        self, instruction: RankInstruction, answer: type[Answer]
    ) -> list[Answer] | Failed | None:
        """Instruct ranks that just answered, without a restart; None if the script came to its end.

        Raises `WorkerLost`.
        """
        try:
            self._send(instruction)
            outcome = self._collect(answer, self.step_timeout_s)
        except Silence as silence:
            outcome = Failed(FailureKind.HANG, str(silence), silence.rank)
        except ScriptEnded:
            self._stop()
            return None
        if isinstance(outcome, Failed):
            self._stop()
        return outcome

    def ensure_running(self) -> None:
        if self.running:
            return
        problem = Failed(FailureKind.CRASH, "the workers could not be placed")
        for _ in range(STARTS):
            try:
                outcome = self._started()
            except WorkerLost as error:
                self._give_up_places()
                problem = Failed(FailureKind.CRASH, f"a worker was lost: {error}")
                continue
            if outcome is None:
                self.running = self._fresh = True
                return
            self._stop()
            if outcome.kind is FailureKind.REFUSED:
                raise LaunchError(outcome.message)
            problem = outcome
            lost_the_port = "address already in use" in problem.message.lower()
            if problem.kind is FailureKind.HANG or not (self.model_id or lost_the_port):
                break  # another attempt at a script that hangs or never ran would end the same way
        log = self._log_paths[problem.rank or 0] if self._log_paths else ""
        raise LaunchError(
            f"the script died before its first step ({problem.kind}): {problem.message}"
            f"{f'; its output: {log}' if log else ''}"
        )

    def lose_workers(self) -> None:
        """Give up all workers after one was lost."""
        self.running = False
        self._give_up_places()

    def close(self) -> None:
        """End the training: at a step boundary within `FAREWELL_S`, else by force."""
        if self.running:
            with contextlib.suppress(WorkerLost):  # a lost worker has ended already
                self._send(EndScript())
                self._await_exits(FAREWELL_S)
        self._stop()
        self._give_up_places()

    def _started(self) -> Failed | None:
        """One attempt to bring all ranks to their first step boundary."""
        try:
            self._start_ranks()
            ready = self._collect(Ready, self._start_timeout_s)
            if isinstance(ready, Failed):
                return ready
            self.model_id = ready[0].model_id
            self.round_robin = all(event.round_robin for event in ready)
            if self.emulated is None:
                return None
            self._send(StartEmulation(self.emulated))
            emulating = self._collect(EmulationAnswer, self.step_timeout_s)
            return emulating if isinstance(emulating, Failed) else None
        except ScriptEnded:
            self._stop()
            raise LaunchError(
                "the script ended without a training step under DistributedDataParallel; "
                f"{NO_DDP_FIX}",
                anchor="no-ddp",
            ) from None
        except Silence:
            self._stop()
            raise LaunchError(
                "the script made no training step under DistributedDataParallel within "
                f"{self._start_timeout_s:.0f} s; {NO_DDP_FIX}, or raise --start-timeout",
                anchor="no-ddp",
            ) from None

    def _start_ranks(self) -> None:
        if self._placement is None:
            self._placement = self._place()
        launch = self._placement.launch()
        self._log_paths = launch.log_paths
        words = list(launch.command.as_python_words())
        for rank, worker in enumerate(self._placement.workers):
            worker.start(words, launch.environments[rank], launch.directory, launch.log_paths[rank])
        self.restarts += 1

    def _with_devices(self, instruction: RankInstruction) -> RankInstruction:
        if isinstance(instruction, StartProfile | StartProbe):
            return replace(instruction, devices=tuple(ranks for _, ranks in self.hosts))
        return instruction

    def _send(self, instruction: RankInstruction) -> None:
        line = encode(instruction)
        for worker in self.placement.workers:
            worker.instruct(line)

    def _stop(self) -> None:
        """Kill the script on all ranks; the workers stay, unless one of them is lost."""
        self.running = False
        if self._placement is not None:
            try:
                for worker in self._placement.workers:
                    worker.stop()
            except WorkerLost:
                self._give_up_places()

    def _give_up_places(self) -> None:
        if self._placement is not None:
            self._placement.release()
            self._placement = None

    def _poll(self, timeout_s: float) -> list[list[RankEvent | ProcessExited]]:
        """New events of every rank."""
        events: list[list[RankEvent | ProcessExited]] = []
        for polled in self.placement.poll(timeout_s):
            ended = [] if polled.exited is None else [polled.exited]
            events.append([*map(decode_event, polled.lines), *ended])
        return events

    def _collect(
        self, answer: type[Answer], silence_s: float, report: Report | None = None
    ) -> list[Answer] | Failed:
        """One `answer` of every rank, or the root cause of the first failure.

        Raises `ScriptEnded` and `Silence`.
        """
        answers = Answers(answer, len(self.placement.workers), silence_s, time.monotonic())
        while True:
            by_rank = self._poll(min(POLL_S, silence_s))
            now_s = time.monotonic()
            for rank, events in enumerate(by_rank):
                answers.take(rank, events, now_s)
            for event in by_rank[0]:
                if report is not None and isinstance(event, Probing):
                    report(event.description)
            if answers.complete(now_s, STRAGGLER_S):
                return answers.outcome(now_s)

    def _await_exits(self, deadline_s: float) -> None:
        """Wait until every process has ended, at most `deadline_s`; a running trial continues."""
        alive = set(range(len(self.placement.workers)))
        end_s = time.monotonic() + deadline_s
        while alive and (left_s := end_s - time.monotonic()) > 0:
            for rank, polled in enumerate(self.placement.poll(min(left_s, FAREWELL_POLL_S))):
                if polled.exited is not None:
                    alive.discard(rank)


def worker_lost_again(error: WorkerLost) -> Failed:
    """Failure of an instruction that lost a worker twice."""
    return Failed(FailureKind.CRASH, f"a worker was lost, and again on other workers: {error}")
