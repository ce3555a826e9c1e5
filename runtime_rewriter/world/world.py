"""The running training: all ranks of the user's script enact one plan after another.

`RunningScript` restarts the script after a failure. `ray_world.py` places its workers on a Ray
cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import Protocol

from autotune.errors import LaunchError
from autotune.records import Accelerators, Failed, Measured, Stopped, TrialRequest
from autotune.strategy_space.plan import Plan
from autotune.workload import Workload
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.protocol import (
    ContinueTrial,
    EmulationAnswer,
    ProbeAnswer,
    ProfileAnswer,
    StartEmulation,
    StartProbe,
    StartProfile,
    StartTrial,
    TrialAnswer,
)
from runtime_rewriter.world.answers import Answer
from runtime_rewriter.world.placement import Placement
from runtime_rewriter.world.results import Probe, Profile, Trained
from runtime_rewriter.world.running import Report, RunningScript, worker_lost_again
from runtime_rewriter.world.worker import WorkerLost

PROFILE_STEPS = 6
RESUMED_STEPS = 1
"""Untimed steps after a pause within a trial: the ranks start them at different moments."""
PROBE_S = 20.0
"""Longest duration of the links' probe before the first trial."""


class StepPolicy(Protocol):
    """Decides when a trial may end; the module `autotune.tuning.statistics` implements it."""

    def further_steps(self, request: TrialRequest, measured: Measured) -> int:
        """Timed steps of the trial's next batch; 0 when it is done."""

    def stop_reason(self, request: TrialRequest, measured: Measured) -> Stopped | None:
        """Why the trial needs no more steps; None if their number was fixed."""


class World:
    """All ranks of one script.

    Emulated accelerators wait for the times of `given_profile`, or for those that rank 0 takes to
    compute alone. `say` gets what the world waits for. Raises `InvalidInput` for a profile without
    these times.

    `keeps_training`: the trials are steps of a training that goes on. The script then starts once:
    methods raise `TrainingEnded` when it has come to its end, and `LaunchError` after a failure.
    """

    def __init__(
        self,
        place: Callable[[], Placement],
        step_timeout_s: float,
        start_timeout_s: float,
        policy: StepPolicy,
        accelerators: Accelerators = Accelerators.REAL,
        given_profile: Workload | None = None,
        probe_s: float = PROBE_S,
        keeps_training: bool = False,
        say: Report = lambda what: None,
    ) -> None:
        if given_profile is not None:
            timetable_of(given_profile)
        self._script = RunningScript(place, step_timeout_s, start_timeout_s, say, keeps_training)
        self._policy = policy
        self._emulated = accelerators is Accelerators.EMULATED
        self._given_profile = given_profile
        self._probe_s = probe_s

    @property
    def restarts(self) -> int:
        """Starts of the script after the first."""
        return self._script.restarts

    @property
    def ended_steps(self) -> int | None:
        """Steps of the script when it came to its own end; None if it has not."""
        return self._script.ended_steps

    @property
    def log_paths(self) -> tuple[str, ...]:
        """Log file of each rank on its host, at the last start."""
        return self._script.log_paths

    def model_id(self) -> str:
        """Identity of the script's model; raises `LaunchError` if the script cannot be tuned."""
        self._script.ensure_running()
        return self._script.model_id

    def round_robin(self) -> bool:
        """Whether every rank ran under round-robin scheduling when the script last started."""
        return self._script.round_robin

    def emulate(self, workload: Workload) -> None:
        """Let the accelerators wait for the times of `workload`, also after restarts.

        Raises `LaunchError` if they cannot.
        """
        script = self._script
        script.emulated = workload
        if script.running:
            script.say("starting the emulated accelerators")
            answers = script.instruct(
                StartEmulation(workload), EmulationAnswer, script.step_timeout_s
            )
            _demand(answers, "the script failed while the accelerators were emulated")

    def profile(self) -> Profile:
        """Profile one replica and probe the links for at most `probe_s` (0: not at all).

        Emulated accelerators then wait for the profiled times. Raises `LaunchError` if the script
        cannot be tuned.
        """
        given = self._given_profile
        if given is not None and given.id != self.model_id():
            raise LaunchError(
                f"the given profile must be of the running model {self._script.model_id}, but is "
                f"of {given.id} "
                f"({given.model!r}, {len(given.variables)} variables); profile this model, or "
                "leave --profile out "
                "to measure it"
            )
        instruction = StartProfile(
            PROFILE_STEPS if given is None else 0, self._probe_s, self._emulated
        )
        self._script.ensure_running()
        probing = f"probing the links (at most {self._probe_s:.0f} s), then " * (self._probe_s > 0)
        self._script.say(f"{probing}profiling {PROFILE_STEPS} steps")
        silence_s = self._probe_s + self._script.step_timeout_s
        answers = _demand(
            self._script.instruct(instruction, ProfileAnswer, silence_s),
            "the script failed while it was profiled",
        )
        first = answers[0]
        workload = given or first.workload
        assert workload is not None
        profile = Profile(
            as_answered(workload, answers),
            first.series,
            first.software,
            first.cores,
            # one rank that cannot cross the step is enough
            next(filter(None, (answer.cross_step_refused for answer in answers)), ""),
            self._script.hosts,
            first.current_buckets,
            first.op_fusions,
            first.op_fusion_report,
            first.mirrored,
            first.direct_refused,
            first.further_models,
            first.plugins_refused,
            self._script.placement.addresses,
        )
        if self._emulated:
            self.emulate(workload)
        return profile

    def probe(self, budget_s: float, report: Report, computing: bool = True) -> Probe:
        """Probe the links for about `budget_s`, with `computing` also while the ranks compute.

        `report` gets a description of each measurement. Raises `LaunchError` where the probe fails.
        """
        silence_s = budget_s + self._script.step_timeout_s
        answers = _demand(
            self._script.instruct(StartProbe(budget_s, computing), ProbeAnswer, silence_s, report),
            "the ranks failed while the links were probed",
        )
        hosts = self._script.hosts
        first_ranks = accumulate((ranks for _, ranks in hosts[:-1]), initial=0)
        cores = tuple(answers[rank].cores for rank in first_ranks)
        first, addresses = answers[0], self._script.placement.addresses
        return Probe(first.series, first.links, first.software, cores, hosts, addresses)

    def run_trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        """Enact `plan` (None: the current setup) for the trial's steps and further ones by policy.

        A failure is returned and stops the script; the next trial starts it again. Raises
        `LaunchError` only if the script no longer starts.
        """
        try:
            return self._trial(request, plan)
        except WorkerLost:  # during further steps: from the start once more, on other workers
            self._script.lose_workers()
        try:
            return self._trial(request, plan)
        except WorkerLost as error:
            self._script.lose_workers()
            return worker_lost_again(error)

    def _trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        """Raises `WorkerLost` if one is lost after the first batch of steps."""
        instruction = StartTrial(plan, request.warmup_steps, request.timed_steps)
        answers = self._script.instruct(instruction, TrialAnswer, self._script.step_timeout_s)
        if isinstance(answers, Failed):
            return answers
        measured = _measured(answers)
        while steps := self._policy.further_steps(request, measured):
            batch = self._script.resume(ContinueTrial(RESUMED_STEPS, steps), TrialAnswer)
            if isinstance(batch, Failed):
                return batch
            if batch is None:
                return replace(measured, stopped=Stopped.ENDED)
            answers = [_joined(first, then) for first, then in zip(answers, batch, strict=True)]
            measured = _measured(answers)
        return replace(measured, stopped=self._policy.stop_reason(request, measured))

    def train_on(self, plan: Plan | None, report: Callable[[int], None]) -> Trained:
        """Train under `plan` (None: the current setup) until the script ends by itself.

        `report` gets the number of steps since the start, every few seconds.
        """
        return self._script.train_on(plan, report)

    def terminate(self) -> None:
        """End the training as torchrun does: by SIGTERM, after a while by SIGKILL."""
        self._script.terminate()

    def close(self) -> None:
        """End the training: at a step boundary if that is near, else by force."""
        self._script.close()


def _demand(answers: list[Answer] | Failed, problem: str) -> list[Answer]:
    if isinstance(answers, Failed):
        raise LaunchError(f"{problem} ({answers.kind}): {answers.message}")
    return answers


def as_answered(workload: Workload, answers: list[ProfileAnswer]) -> Workload:
    """A profile with what the script itself does, which a given one may not state."""
    rows_only = {name for answer in answers for name in answer.rows_only}
    variables = (
        replace(one, rows_only=one.sparse and one.name in rows_only) for one in workload.variables
    )
    return replace(
        workload,
        variables=tuple(variables),
        reads_norms=any(answer.reads_norms for answer in answers),
    )


def _joined(first: TrialAnswer, then: TrialAnswer) -> TrialAnswer:
    """One rank's answer for two batches of steps; the numerics gate ran in the first."""
    return TrialAnswer(
        first.step_s + then.step_s,
        first.clean + then.clean,
        first.overrun + then.overrun,
        first.gradient_error,
    )


def _measured(answers: list[TrialAnswer]) -> Measured:
    """Step times of all ranks, without the steps that an evaluation interrupted on any of them.

    A script that evaluates in every step is measured with its evaluation.
    """
    steps = range(len(answers[0].step_s))
    clean = [step for step in steps if all(answer.clean[step] for answer in answers)] or steps
    errors = [answer.gradient_error for answer in answers if answer.gradient_error is not None]
    overrun = None
    if answers[0].overrun:
        overrun = median(max(answer.overrun[step] for answer in answers) for step in clean)
    return Measured(
        tuple(tuple(answer.step_s[step] for step in clean) for answer in answers),
        max(errors, default=None),
        len(steps) - len(clean),
        overrun=overrun,
    )
