"""The running training: all ranks of the user's script, one plan after another, restarted when it fails.

A `World` is what the driver needs to measure: `profile`, `run_trial`, `close`. This one works on any list of
`Worker`s; `ray_world.py` places them on a Ray cluster.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import Any

from autotune.errors import LaunchError
from autotune.parsing import parse
from autotune.records import Accelerators, Failed, FailureKind, Measured, Stopped, TrialRequest
from autotune.strategy_space.plan import Plan
from autotune.tuning.statistics import further_steps, stop_reason
from autotune.workload import Workload
from runtime_rewriter.control import HEARTBEAT_S
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.world.answers import Answers, ScriptEnded, Silence
from runtime_rewriter.world.findings import Probe, Profile
from runtime_rewriter.world.placement import Placement
from runtime_rewriter.world.worker import WorkerLost

POLL_S = 2.0
STARTS = 3
"""Attempts to bring the script to its first step before the job is given up."""
FAREWELL_S = 3.0
"""How long the ranks may take to end politely, all together."""
FAREWELL_POLL_S = 0.5
STRAGGLER_S = 5.0
"""How long the other ranks may take to tell their side after the first one failed."""
SILENT_HEARTBEATS = 3.0
PROFILE_STEPS = 6
RESUMED_STEPS = 1
"""Untimed steps after a pause within a trial: the ranks start them at different moments."""
PROBE_S = 20.0
"""What the probe of the links takes at most before the first trial."""


class World:
    """`place()` finds room for the workers; it is called again when a worker itself was lost.

    Emulated accelerators wait as the `given_profile` says, or as rank 0 was measured to compute alone. Raises `InvalidInput`
    for a profile that cannot be waited for.
    """

    def __init__(
        self,
        place: Callable[[], Placement],
        step_timeout_s: float,
        start_timeout_s: float,
        accelerators: Accelerators = Accelerators.REAL,
        given_profile: Workload | None = None,
        probe_s: float = PROBE_S,
    ) -> None:
        self._place = place
        # A healthy rank is heard once per heartbeat, however short its steps are.
        self._step_timeout_s = max(step_timeout_s, SILENT_HEARTBEATS * HEARTBEAT_S)
        self._start_timeout_s = start_timeout_s
        self._placement: Placement | None = None
        self._running = False
        self._fresh = False
        self._model_id = ""
        self._emulated = accelerators is Accelerators.EMULATED
        self._given_profile = given_profile
        self._probe_s = probe_s
        if given_profile is not None:
            timetable_of(given_profile)
        self._workload: Workload | None = None  # what the accelerators wait for once that is known
        self._round_robin = False
        self.restarts = -1
        """Starts of the script after the first."""

    def model_id(self) -> str:
        """Identity of the model that the running script builds; raises `LaunchError` if the script cannot be tuned."""
        self._ensure_running()
        return self._model_id

    def round_robin(self) -> bool:
        """Whether every rank ran under round-robin scheduling when the script last started."""
        return self._round_robin

    def emulate(self, workload: Workload) -> None:
        """From now on, after restarts too, the accelerators wait as `workload` says; raises `LaunchError` where they cannot."""
        self._workload = workload
        if self._running:
            outcome = self._instruct(_emulation(workload), "emulating", self._step_timeout_s)
            if isinstance(outcome, Failed):
                raise LaunchError(
                    f"the script failed while the accelerators were emulated ({outcome.kind}): {outcome.message}"
                )

    def profile(self) -> Profile:
        """Profile one replica and probe the links for at most `probe_s` (0: not at all).

        Emulated accelerators go on as the profile says. Raises `LaunchError` if the script cannot be tuned.
        """
        given = self._given_profile
        if given is not None and given.id != self.model_id():
            raise LaunchError(
                f"the given profile must be of the running model {self._model_id}, but is of {given.id} ({given.model!r}, "
                f"{len(given.variables)} variables); profile this model, or leave --profile out to measure it"
            )
        steps = PROFILE_STEPS if given is None else 0
        message = {
            "do": "profile",
            "steps": steps,
            "probe_deadline_s": self._probe_s,
            "alone": self._emulated,
        }
        outcome = self._instruct(message, "profile", self._probe_s + self._step_timeout_s)
        if isinstance(outcome, Failed):
            raise LaunchError(
                f"the script failed while it was profiled ({outcome.kind}): {outcome.message}"
            )
        assert self._placement is not None
        told = [answer["profile"] for answer in outcome]
        refused = next(
            filter(None, (profile["cross_step_refused"] for profile in told)), ""
        )  # one rank that cannot is enough
        data = {**told[0], "hosts": self._placement.hosts, "cross_step_refused": refused}
        profile = parse(
            Profile, data if given is None else {**data, "workload": given}, "the profile of rank 0"
        )
        if self._emulated:
            self.emulate(profile.workload)
        return profile

    def probe(self, budget_s: float, said: Callable[[str], None], computing: bool = True) -> Probe:
        """Probe the links for about `budget_s`, with `computing` also while the ranks compute; `said` hears what is being probed.

        Raises `LaunchError` where that fails.
        """
        message = {"do": "probe", "budget_s": budget_s, "computing": computing}
        outcome = self._instruct(message, "probe", budget_s + self._step_timeout_s, said)
        if isinstance(outcome, Failed):
            raise LaunchError(
                f"the ranks failed while the links were probed ({outcome.kind}): {outcome.message}"
            )
        assert self._placement is not None
        told = [answer["probe"] for answer in outcome]
        first_ranks = accumulate((ranks for _, ranks in self._placement.hosts[:-1]), initial=0)
        data = {
            **told[0],
            "cores": [told[rank]["cores"] for rank in first_ranks],
            "hosts": self._placement.hosts,
        }
        return parse(Probe, data, "the probe of rank 0")

    def run_trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        """Enact `plan` (None: the user's own setup) for the trial's steps, and for as many more as the request asks for.

        A failure is returned, the world is stopped and comes back with the next trial. Raises `LaunchError`
        only when the script no longer starts.
        """
        try:
            return self._trial(request, plan)
        except WorkerLost:  # during further steps: from the start once more, on other workers
            self._lose_workers()
        try:
            return self._trial(request, plan)
        except WorkerLost as error:
            self._lose_workers()
            return Failed(
                FailureKind.CRASH, f"a worker was lost, and again on other workers: {error}"
            )

    def _lose_workers(self) -> None:
        self._running = False
        self._give_up_places()

    def _trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        """Raises `WorkerLost` if one is lost after the first batch of steps."""
        message = {
            "do": "trial",
            "plan": plan.to_data() if plan else None,
            "warmup_steps": request.warmup_steps,
            "timed_steps": request.timed_steps,
        }
        outcome = self._instruct(message, "trial", self._step_timeout_s)
        if isinstance(outcome, Failed):
            return outcome
        answers = outcome
        while steps := further_steps(request, _measured(answers)):
            more = self._more(steps)
            if isinstance(more, Failed):
                return more
            if more is None:
                return replace(_measured(answers), stopped=Stopped.ENDED)
            answers = [_joined(first, then) for first, then in zip(answers, more, strict=True)]
        measured = _measured(answers)
        return replace(measured, stopped=stop_reason(request, measured))

    def _more(self, steps: int) -> list[dict[str, Any]] | Failed | None:
        """Timed steps after those that all ranks just made, under the same plan; None where the script came to its end instead."""
        try:
            self._send({"do": "more", "warmup_steps": RESUMED_STEPS, "timed_steps": steps})
            outcome = self._collect("trial", self._step_timeout_s)
        except Silence as silence:
            outcome = Failed(FailureKind.HANG, str(silence), silence.rank)
        except ScriptEnded:
            self._stop()
            return None
        if isinstance(outcome, Failed):
            self._stop()
        return outcome

    def close(self) -> None:
        """End the training: politely at a step boundary within `FAREWELL_S`, else by force."""
        if self._running:
            with contextlib.suppress(WorkerLost):  # a lost worker has ended already
                self._send({"do": "finish"})
                self._await_exits(FAREWELL_S)
        self._stop()
        self._give_up_places()

    def _instruct(
        self,
        message: dict[str, Any],
        answer: str,
        silence_s: float,
        said: Callable[[str], None] | None = None,
    ) -> list[dict[str, Any]] | Failed:
        """Send to all ranks, with the layout of their hosts, and wait for all answers; `said` hears what rank 0 says meanwhile.

        A script that comes to its end is started again. So it is on other workers when one was lost, but only
        once: what is instructed may be what takes the machine down.
        """
        lost: WorkerLost | None = None
        while True:
            self._ensure_running()
            started_fresh = self._fresh
            try:
                self._send({**message, "devices": self._devices})
                outcome = self._collect(answer, silence_s, said)
            except WorkerLost as error:
                self._running = False
                self._give_up_places()
                if lost is not None:
                    return Failed(
                        FailureKind.CRASH, f"a worker was lost, and again on other workers: {error}"
                    )
                lost = error
                continue
            except Silence as silence:
                outcome = Failed(FailureKind.HANG, str(silence), silence.rank)
            except ScriptEnded as ended:
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
                outcome = self._started()
            except WorkerLost as error:
                self._give_up_places()
                problem = Failed(FailureKind.CRASH, f"a worker was lost: {error}")
                continue
            if not isinstance(outcome, Failed):
                self._running = self._fresh = True
                return
            self._stop()
            if outcome.kind is FailureKind.REFUSED:
                raise LaunchError(outcome.message)
            problem = outcome
            lost_the_port = "address already in use" in problem.message.lower()
            if problem.kind is FailureKind.HANG or not (self._model_id or lost_the_port):
                break  # waiting as long again, or a script that never ran, would end the same way
        raise LaunchError(
            f"the script died before its first step ({problem.kind}): {problem.message}"
        )

    def _started(self) -> list[dict[str, Any]] | Failed:
        """One attempt to bring all ranks to their first step boundary."""
        try:
            self._start_ranks()
            ready = self._collect("ready", self._start_timeout_s)
            if isinstance(ready, Failed):
                return ready
            self._model_id = str(ready[0]["model_id"])
            self._round_robin = all(answer["round_robin"] for answer in ready)
            if self._workload is None:
                return ready
            self._send(_emulation(self._workload))
            return self._collect("emulating", self._step_timeout_s)
        except ScriptEnded:
            self._stop()
            raise LaunchError(
                "the script ended without a training step under DistributedDataParallel; wrap the model in "
                "torch.nn.parallel.DistributedDataParallel or call autotune.apply(model, optimizer)"
            ) from None
        except Silence:
            self._stop()
            raise LaunchError(
                f"the script made no training step under DistributedDataParallel within {self._start_timeout_s:.0f} s; wrap the model "
                "in torch.nn.parallel.DistributedDataParallel, call autotune.apply(model, optimizer), or raise --start-timeout"
            ) from None

    def _start_ranks(self) -> None:
        if self._placement is None:
            self._placement = self._place()
        launch = self._placement.launch()
        words = list(launch.command.as_python_words())
        for rank, worker in enumerate(self._placement.workers):
            worker.start(words, launch.environments[rank], launch.directory, launch.log_paths[rank])
        self.restarts += 1

    @property
    def _devices(self) -> list[int]:
        """Ranks per host, in rank order."""
        assert self._placement is not None
        return [ranks for _, ranks in self._placement.hosts]

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

    def _collect(
        self, answer: str, silence_s: float, said: Callable[[str], None] | None = None
    ) -> list[dict[str, Any]] | Failed:
        """One `answer` event of every rank, by rank; or the root cause of the first failure. Raises `ScriptEnded` and `Silence`."""
        assert self._placement is not None
        answers = Answers(answer, len(self._placement.workers), silence_s, time.monotonic())
        while True:
            polled = self._placement.poll(min(POLL_S, silence_s))
            now_s = time.monotonic()
            for rank, events in enumerate(polled):
                answers.take(rank, events, now_s)
            for event in polled[0] if said is not None else []:
                if said is not None and event["event"] == "probing":
                    said(str(event["what"]))
            if answers.complete(now_s, STRAGGLER_S):
                return answers.outcome(now_s)

    def _await_exits(self, deadline_s: float) -> None:
        """Until every process has ended, but no longer than `deadline_s`: a running trial goes on to its end."""
        assert self._placement is not None
        alive = set(range(len(self._placement.workers)))
        end_s = time.monotonic() + deadline_s
        while alive and (left_s := end_s - time.monotonic()) > 0:
            for rank, events in enumerate(self._placement.poll(min(left_s, FAREWELL_POLL_S))):
                if any(event["event"] == "exited" for event in events):
                    alive.discard(rank)


def _emulation(workload: Workload) -> dict[str, Any]:
    return {"do": "emulate", "workload": workload.to_data()}


def _joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """One rank's answer for two batches of steps; the numerics gate ran in the first."""
    return {
        **first,
        **{name: [*first[name], *then[name]] for name in ("step_s", "clean", "overrun")},
    }


def _measured(answers: list[dict[str, Any]]) -> Measured:
    """Step times of all ranks, without the steps that an evaluation interrupted on any of them."""
    gates = [answer["gate"] for answer in answers if answer["gate"] is not None]
    steps = range(len(answers[0]["step_s"]))
    clean = [step for step in steps if all(answer["clean"][step] for answer in answers)]
    kept = clean or list(
        steps
    )  # a script that evaluates in every step is measured with its evaluation
    step_s = tuple(tuple(float(answer["step_s"][step]) for step in kept) for answer in answers)
    overruns = [
        max(float(answer["overrun"][step]) for answer in answers)
        for step in kept
        if answers[0]["overrun"]
    ]
    return Measured(
        step_s,
        max((float(gate) for gate in gates), default=None),
        len(steps) - len(kept),
        overrun=median(overruns) if overruns else None,
    )
