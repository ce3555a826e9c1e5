"""The running training: all ranks of the user's script, one plan after another, restarted when it fails.

A `World` is what the driver needs to measure: `profile`, `run_trial`, `close`. This one works on any list of
`Worker`s; `ray_world.py` places them on a Ray cluster.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autotune.cluster import CollectiveFit
from autotune.errors import LaunchError
from autotune.parsing import parse
from autotune.records import Failed, FailureKind, Measured, TrialRequest
from autotune.strategy_space.plan import Plan
from autotune.workload import Workload
from runtime_rewriter.command import ScriptCommand
from runtime_rewriter.failures import failure_of_exit, root_cause
from runtime_rewriter.worker import Worker, WorkerLost

POLL_S = 2.0
STARTS = 3
"""Attempts to bring the script to its first step before the job is given up."""
FAREWELL_S = 3.0
"""How long the ranks may take to end politely."""
STRAGGLER_S = 5.0
"""How long the other ranks may take to tell their side after the first one failed."""
PROFILE_STEPS = 6
PROBE_DEADLINE_S = 20.0


@dataclass(frozen=True)
class Profile:
    """What one replica does, what the links cost, the software that runs it, and the CPU cores of rank 0's host."""

    workload: Workload
    fits: tuple[CollectiveFit, ...]
    software: dict[str, str]
    cores: int


@dataclass(frozen=True)
class Launch:
    """How each rank is started: `environments[rank]` is added to the process's own."""

    command: ScriptCommand
    environments: tuple[dict[str, str], ...]
    directory: str
    log_directory: str


class Placement(Protocol):
    """Workers on their machines, by rank. `poll` asks all at once; `release` gives the places back."""

    @property
    def workers(self) -> Sequence[Worker]: ...
    def launch(self) -> Launch: ...
    def poll(self, timeout_s: float) -> list[list[dict[str, Any]]]: ...
    def release(self) -> None: ...


class _ScriptEnded(Exception):
    def __init__(self, steps: int) -> None:
        self.steps = steps


class World:
    """`place()` finds room for the workers; it is called again when a worker itself was lost."""

    def __init__(self, place: Callable[[], Placement], step_timeout_s: float, start_timeout_s: float) -> None:
        self._place = place
        self._step_timeout_s, self._start_timeout_s = step_timeout_s, start_timeout_s
        self._placement: Placement | None = None
        self._running = False
        self._fresh = False
        self._model_id = ""
        self.restarts = -1
        """Starts of the script after the first."""

    def model_id(self) -> str:
        """Identity of the model that the running script builds; raises `LaunchError` if the script cannot be tuned."""
        self._ensure_running()
        return self._model_id

    def profile(self) -> Profile:
        """Profile one replica and probe the links; raises `LaunchError` if the script cannot be tuned."""
        message = {"do": "profile", "steps": PROFILE_STEPS, "probe_deadline_s": PROBE_DEADLINE_S}
        outcome = self._instruct(message, "profile", PROBE_DEADLINE_S + self._step_timeout_s)
        if isinstance(outcome, Failed):
            raise LaunchError(f"the script failed while it was profiled ({outcome.kind}): {outcome.message}")
        return parse(Profile, outcome[0]["profile"], "the profile of rank 0")

    def run_trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        """Enact `plan` (None: the user's own setup) for the trial's steps.

        A failure is returned, the world is stopped and comes back with the next trial. Raises `LaunchError`
        only when the script no longer starts.
        """
        message = {
            "do": "trial",
            "plan": plan.to_data() if plan else None,
            "warmup_steps": request.warmup_steps,
            "timed_steps": request.timed_steps,
        }
        outcome = self._instruct(message, "trial", self._step_timeout_s)
        if isinstance(outcome, Failed):
            return outcome
        return _measured(outcome)

    def close(self) -> None:
        """End the training: politely at a step boundary, else by force."""
        if self._running:
            with contextlib.suppress(WorkerLost):  # a lost worker has ended already
                self._send({"do": "finish"})
                self._collect("exited", FAREWELL_S, strict=False)
        self._stop()
        self._give_up_places()

    def _instruct(self, message: dict[str, Any], answer: str, silence_s: float) -> list[dict[str, Any]] | Failed:
        """Send to all ranks and wait for all answers; a script that comes to its end is started again."""
        while True:
            self._ensure_running()
            started_fresh = self._fresh
            try:
                self._send(message)
                outcome = self._collect(answer, silence_s)
            except WorkerLost as error:
                self._running = False
                self._give_up_places()
                return Failed(FailureKind.CRASH, f"a worker was lost: {error}")
            except _ScriptEnded as ended:
                self._stop()
                if started_fresh:
                    raise LaunchError(
                        f"the script ends after {ended.steps} steps, but one trial needs more; let it train longer "
                        "(more epochs or steps) or lower --warmup-steps and --timed-steps"
                    ) from ended
                continue
            if isinstance(outcome, Failed):
                if outcome.kind is not FailureKind.REFUSED:
                    self._stop()
                return outcome
            self._fresh = False
            return outcome

    def _ensure_running(self) -> None:
        if self._running:
            return
        problem = Failed(FailureKind.CRASH, "the workers could not be placed")
        for _ in range(STARTS):
            try:
                self._start_ranks()
                outcome = self._collect("ready", self._start_timeout_s)
            except WorkerLost as error:
                self._give_up_places()
                problem = Failed(FailureKind.CRASH, f"a worker was lost: {error}")
                continue
            except _ScriptEnded:
                self._stop()
                raise LaunchError(
                    "the script ended without a training step under DistributedDataParallel; wrap the model in "
                    "torch.nn.parallel.DistributedDataParallel or call autotune.apply(model, optimizer)"
                ) from None
            if not isinstance(outcome, Failed):
                self._running = self._fresh = True
                self._model_id = str(outcome[0]["model_id"])
                return
            self._stop()
            problem = outcome
            lost_the_port = "address already in use" in problem.message.lower()
            if problem.kind is FailureKind.HANG or not (self._model_id or lost_the_port):
                break  # waiting as long again, or a script that never ran, would end the same way
        if problem.kind is FailureKind.HANG:
            raise LaunchError(
                f"the script made no training step under DistributedDataParallel within {self._start_timeout_s:.0f} s; wrap the model "
                "in torch.nn.parallel.DistributedDataParallel, call autotune.apply(model, optimizer), or raise --start-timeout"
            )
        raise LaunchError(f"the script died before its first step ({problem.kind}): {problem.message}")

    def _start_ranks(self) -> None:
        if self._placement is None:
            self._placement = self._place()
        launch = self._placement.launch()
        words = list(launch.command.as_python_words())
        for rank, worker in enumerate(self._placement.workers):
            log_path = str(Path(launch.log_directory) / f"rank{rank}.log")
            worker.start(words, launch.environments[rank], launch.directory, log_path)
        self.restarts += 1

    def _send(self, message: dict[str, Any]) -> None:
        assert self._placement is not None
        for worker in self._placement.workers:
            worker.instruct(message)

    def _stop(self) -> None:
        """Kill the script on all ranks; the workers stay, unless one of them is lost."""
        self._running = False
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

    def _collect(self, answer: str, silence_s: float, strict: bool = True) -> list[dict[str, Any]] | Failed:
        """One `answer` event of every rank, by rank; or the root cause of the first failure.

        A rank that says nothing (no heartbeat either) for `silence_s` is hung.
        """
        assert self._placement is not None
        count = len(self._placement.workers)
        answers: dict[int, dict[str, Any]] = {}
        failures: dict[int, Failed] = {}
        ended: dict[int, int] = {}
        heard_s = [time.monotonic()] * count
        first_failure_s = None
        while len(answers) + len(failures) + len(ended) < count:
            polled = self._placement.poll(min(POLL_S, silence_s))
            now_s = time.monotonic()
            for rank, events in enumerate(polled):
                for event in events:
                    heard_s[rank] = now_s
                    self._sort(event, rank, answer, answers, failures, ended)
            if failures and first_failure_s is None:
                first_failure_s = now_s
            if first_failure_s is not None and now_s - first_failure_s > STRAGGLER_S:
                break
            silent = [r for r in range(count) if r not in answers | failures | ended and now_s - heard_s[r] > silence_s]
            if silent and not failures:
                message = f"rank {silent[0]} made no step for {silence_s:.0f} s; the limit is --step-timeout"
                return Failed(FailureKind.HANG, message, silent[0])
        if failures and strict:
            return root_cause(list(failures.values()))
        if ended and strict:
            raise _ScriptEnded(max(ended.values()))
        return [answers.get(rank, {}) for rank in range(count)]

    @staticmethod
    def _sort(
        event: dict[str, Any],
        rank: int,
        answer: str,
        answers: dict[int, dict[str, Any]],
        failures: dict[int, Failed],
        ended: dict[int, int],
    ) -> None:
        kind = event["event"]
        if kind == answer:
            answers[rank] = event
        elif kind == "failed":
            failures.setdefault(rank, Failed(FailureKind(event["kind"]), event["message"], rank))
        elif kind == "ended":
            ended[rank] = int(event["steps"])
        elif kind == "exited" and rank not in answers and rank not in ended:
            failures.setdefault(rank, failure_of_exit(int(event["code"]), rank, event["log"]))


def _measured(answers: list[dict[str, Any]]) -> Measured | Failed:
    """Step times of all ranks, without the steps that an evaluation interrupted on any of them."""
    gates = [answer["gate"] for answer in answers if answer["gate"] is not None]
    steps = range(len(answers[0]["step_s"]))
    clean = [step for step in steps if all(answer["clean"][step] for answer in answers)]
    kept = clean or list(steps)  # a script that evaluates in every step is measured with its evaluation
    step_s = tuple(tuple(float(answer["step_s"][step]) for step in kept) for answer in answers)
    return Measured(step_s, max((float(gate) for gate in gates), default=None))
