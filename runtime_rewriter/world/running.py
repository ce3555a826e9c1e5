"""The ranks of the user's script: placed, started, instructed together, restarted and stopped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from autotune.deadlines import AwakeClock
from autotune.errors import InvalidInput, LaunchError
from autotune.records import Failed, FailureKind
from autotune.strategy_space.plan import Plan
from autotune.workload import Workload
from runtime_rewriter.failures import failure_of_exit, root_cause
from runtime_rewriter.protocol import (
    HEARTBEAT_S,
    KEEPS_TRAINING,
    STEP_TIMEOUT,
    EmulationAnswer,
    EndScript,
    Heartbeat,
    Probing,
    RankEvent,
    RankFailed,
    RankInstruction,
    Ready,
    ScriptFinished,
    StartEmulation,
    StartProbe,
    StartProfile,
    TrainOn,
    decode_event,
    encode,
)
from runtime_rewriter.world.answers import Answer, Answers, ScriptEnded, Silence
from runtime_rewriter.world.placement import Placement
from runtime_rewriter.world.results import Trained, TrainingEnded
from runtime_rewriter.world.short_scripts import no_first_step, too_short
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
EXIT_S = 30.0
"""Time for a kept training to end after a signal or its own end; torchrun allows as much."""
DISCARDED = {"AUTOTUNE_TUNING": "1"}
KEPT = {KEEPS_TRAINING: "1"}
"""Variables of ranks. Scripts that read the first one may write no checkpoints."""

Report = Callable[[str], None]


class RunningScript:
    """`place()` finds room for the workers; it is called again when a worker itself was lost.

    `say` gets what it waits for. All methods raise `LaunchError` if the script does not start or
    cannot be tuned. With `keeps_training` it starts once, and they raise `TrainingEnded` after its
    own end.
    """

    def __init__(
        self,
        place: Callable[[], Placement],
        step_timeout_s: float,
        start_timeout_s: float,
        say: Report,
        keeps_training: bool = False,
    ) -> None:
        self._place = place
        self.say = say
        self._keeps_training = keeps_training
        self.ended_steps: int | None = None
        """Steps of the script when it last came to its own end."""
        self._problem = ""
        """Why the script does not run."""
        self._exits: dict[int, int] = {}
        """Exit statuses by rank, since the last start."""
        # A healthy rank sends a heartbeat, however short its steps are.
        self.step_timeout_s = max(step_timeout_s, SILENT_HEARTBEATS * HEARTBEAT_S)
        self._start_timeout_s = start_timeout_s
        self._placement: Placement | None = None
        self.log_paths: tuple[str, ...] = ()
        """Log file of each rank, at the last start."""
        self._log_addresses: tuple[str, ...] = ()
        """Address of the host of each log file; empty if all are on this machine."""
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
                outcome = self._hang(silence)
            except ScriptEnded as ended:
                self._script_ended(ended)
                if started_fresh and not self._keeps_training:
                    raise LaunchError(too_short(ended, instruction)) from ended
                continue
            if not isinstance(outcome, Failed):
                self._fresh = False
            elif outcome.kind is not FailureKind.REFUSED:
                self._script_failed(outcome)
            return outcome

    def _script_ended(self, ended: ScriptEnded) -> None:
        self.ended_steps = ended.steps
        if self._keeps_training:  # its exit handlers may write
            self._await_exits(EXIT_S)
        self._stop()

    def _script_failed(self, failure: Failed) -> None:
        self._problem = f"{failure.kind}: {failure.message}"
        self._stop()

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
            outcome = self._hang(silence)
        except ScriptEnded as ended:
            self._script_ended(ended)
            return None
        if isinstance(outcome, Failed):
            self._script_failed(outcome)
        return outcome

    def train_on(self, plan: Plan | None, report: Callable[[int], None]) -> Trained:
        """Train under `plan` until the script ends by itself, or a rank fails."""
        self.ensure_running()
        self._send(TrainOn(plan))
        steps, failures = 0, dict[int, Failed]()
        while len(self._exits) < len(self.placement.workers) and not any(self._exits.values()):
            for rank, events in enumerate(self._poll(POLL_S)):
                for event in events:
                    if isinstance(event, RankFailed):
                        failures[rank] = Failed(event.kind, event.message, rank)
                    elif isinstance(event, ProcessExited) and event.code and rank not in failures:
                        failures[rank] = failure_of_exit(event.code, rank, event.log_tail)
                    elif rank == 0 and isinstance(event, Heartbeat | ScriptFinished):
                        steps = event.steps
            report(steps)
            refused = [f for f in failures.values() if f.kind is FailureKind.REFUSED]
            if refused:  # the ranks wait
                raise LaunchError(f"the training cannot go on: {refused[0].message}")
        self._await_exits(STRAGGLER_S)
        self._stop()
        status = next(filter(None, self._exits.values()), 0)
        return Trained(steps, status, root_cause([*failures.values()]).message if failures else "")

    def terminate(self) -> None:
        """End the script by SIGTERM, which it may handle, and after `EXIT_S` by SIGKILL."""
        if self.running:
            with contextlib.suppress(WorkerLost):
                for worker in self.placement.workers:
                    worker.terminate()
                self._await_exits(EXIT_S)
        self._stop()

    def ensure_running(self) -> None:
        if self.running:
            return
        if self._keeps_training and self.ended_steps is not None:
            raise TrainingEnded(self.ended_steps)
        if self._keeps_training and self._problem:
            raise LaunchError(
                f"the training failed ({self._problem}). It is not started again, which would "
                "repeat or overwrite what it has done; start it anew, from its last checkpoint: "
                "`autotune tune --resume` goes on with the search"
            )
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
        raise LaunchError(
            f"the script died before its first step ({problem.kind}): {problem.message}"
            f"{self._output_of(problem.rank or 0)}"
        )

    def _output_of(self, rank: int) -> str:
        """The end of a message: a rank's log, with its host if that is another machine."""
        if not self.log_paths:
            return ""
        host = f" on {self._log_addresses[rank]}" if self._log_addresses else ""
        return f"; its output: {self.log_paths[rank]}{host}"

    def lose_workers(self) -> None:
        """Give up all workers after one was lost."""
        self.running, self._problem = False, "a worker was lost"
        self._give_up_places()

    def close(self) -> None:
        """End the training: at a step boundary within `FAREWELL_S`, else by force."""
        if self.running:
            # A lost worker has ended already; Ray may not answer.
            with contextlib.suppress(WorkerLost, LaunchError):
                self._send(EndScript())
                self._await_exits(EXIT_S if self._keeps_training else FAREWELL_S)
        self._stop()
        self._give_up_places()

    def _started(self) -> Failed | None:
        """One attempt to bring all ranks to their first step boundary."""
        try:
            self._start_ranks()
            ready = self._collect(Ready, self._start_timeout_s)
        except (ScriptEnded, Silence) as end:
            self._stop()
            output = self._output_of(end.rank if isinstance(end, Silence) else 0)
            raise no_first_step(end, len(self.log_paths), self._start_timeout_s, output) from None
        if isinstance(ready, Failed):
            return ready
        self.model_id = ready[0].model_id
        self.round_robin = all(event.round_robin for event in ready)
        return None if self.emulated is None else self._emulated_again(self.emulated)

    def _emulated_again(self, workload: Workload) -> Failed | None:
        instruction = StartEmulation(workload)
        try:
            self._send(instruction)
            answers = self._collect(EmulationAnswer, self.step_timeout_s)
        except ScriptEnded as ended:
            self._stop()
            raise LaunchError(too_short(ended, instruction)) from None
        except Silence as silence:
            return Failed(FailureKind.HANG, str(silence), silence.rank)
        return answers if isinstance(answers, Failed) else None

    def _hang(self, silence: Silence) -> Failed:
        message = f"{silence}{self._output_of(silence.rank)}"
        return Failed(FailureKind.HANG, message, silence.rank)

    def _start_ranks(self) -> None:
        if self._placement is None:
            self.say("placing the workers")
            self._placement = self._place()
        self.say(f"starting the script on {len(self._placement.workers)} ranks")
        launch = self._placement.launch()
        self.log_paths = launch.log_paths
        self._log_addresses = tuple(
            address
            for address, (_, ranks) in zip(self._placement.addresses, self.hosts, strict=False)
            for _ in range(ranks)
        )
        words = list(launch.command.as_python_words())
        self._exits.clear()
        added = {STEP_TIMEOUT: repr(self.step_timeout_s)}
        added |= KEPT if self._keeps_training else DISCARDED
        for rank, worker in enumerate(self._placement.workers):
            environment = launch.environments[rank] | added
            worker.start(words, environment, launch.directory, launch.log_paths[rank])
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
        """Kill the script on all ranks; the workers stay, unless one of them does not answer."""
        self.running = False
        if self._placement is not None:
            try:
                for worker in self._placement.workers:
                    worker.stop()
            except (WorkerLost, LaunchError):
                self._give_up_places()

    def _give_up_places(self) -> None:
        if self._placement is not None:
            self._placement.release()
            self._placement = None

    def _poll(self, timeout_s: float) -> list[list[RankEvent | ProcessExited]]:
        """New events of every rank."""
        events: list[list[RankEvent | ProcessExited]] = []
        for rank, polled in enumerate(self.placement.poll(timeout_s)):
            events.append([*map(_event_of, polled.lines)])
            if polled.exited is not None:
                self._exits[rank] = polled.exited.code
                events[-1].append(polled.exited)
        return events

    def _collect(
        self, answer: type[Answer], silence_s: float, report: Report | None = None
    ) -> list[Answer] | Failed:
        """One `answer` of every rank, or the root cause of the first failure.

        Raises `ScriptEnded` and `Silence`.
        """
        clock = AwakeClock(2 * POLL_S)  # a poll that took longer had a pause inside
        answers = Answers(answer, len(self.placement.workers), silence_s, clock.now_s())
        while True:
            by_rank = self._poll(min(POLL_S, silence_s))
            now_s = clock.now_s()
            for rank, events in enumerate(by_rank):
                answers.take(rank, events, now_s)
            for event in by_rank[0]:
                if report is not None and isinstance(event, Probing):
                    report(event.description)
            if answers.complete(now_s, STRAGGLER_S):
                return answers.outcome(now_s)

    def _await_exits(self, deadline_s: float) -> None:
        """Wait until every process has ended, at most `deadline_s`; a running trial continues."""
        end_s = time.monotonic() + deadline_s
        while len(self._exits) < len(self.placement.workers):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            self._poll(min(left_s, FAREWELL_POLL_S))


def _event_of(line: str) -> RankEvent:
    """The event, or a failure of its rank: one rank's wrong line must not end the job."""
    try:
        return decode_event(line)
    except InvalidInput as error:
        return RankFailed(FailureKind.CRASH, f"a message of the rank cannot be read: {error}")


def worker_lost_again(error: WorkerLost) -> Failed:
    """Failure of an instruction that lost a worker twice."""
    return Failed(FailureKind.CRASH, f"a worker was lost, and again on other workers: {error}")
