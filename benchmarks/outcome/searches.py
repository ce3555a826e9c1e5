"""The searches of a domain: the tuner's own loop on a script that runs already, frozen at every mark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autotune.driver import MeasuredProfile, TrialWorld, carry_out
from autotune.history import History
from autotune.job import JobSpec, Search
from autotune.records import Failed, Measured, TrialRequest
from autotune.sampler.proposer import Proposer
from autotune.simulators.registry import simulators
from autotune.store import Store
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Strategy
from autotune.tuner import contender, look_instruction, search_instruction
from autotune.workload import Workload
from benchmarks.outcome.kept import Described, Folder, Settings

OURS, OURS_LOSSY, RANDOM, BAYES = "ours", "ours-lossy", "random", "scikit-optimize"
"""Ids of the jobs. All but the second are lossless."""
WARMUP_STEPS, TIMED_STEPS, MOST_STEPS = 2, 6, 12
"""Of a trial of a search: one to three seconds; half the width of its interval may be 2 %, the tuner's default."""
NO_LIMIT_S = 30 * 24 * 3600.0
NEAR = 1.05
"""Incumbents of the search within this of its last one are measured again, to tell which came within 2 % of the best."""


@dataclass(frozen=True)
class Incumbent:
    """The best of a search from trial number `trials` on, `seconds` after its start (profile included)."""

    trials: int
    seconds: float
    strategy: Strategy


@dataclass(frozen=True)
class Searched:
    """`at`: mark -> what the tuner would compare with the current setup if its budget were that. Marks that brought nothing are missing.

    `trials_at`, `seconds_at`: mark -> trials that were made (a search may run out of new strategies), and tuning time until then.
    `incumbents`: the bests of the search in order, without those that were further than `NEAR` from the last.
    """

    at: dict[int, Strategy]
    trials_at: dict[int, int]
    seconds_at: dict[int, float]
    incumbents: tuple[Incumbent, ...]


class SharedWorld:
    """One running script for several searches: profiled once, and every trial is kept."""

    def __init__(self, world: TrialWorld, described: Described, folder: Folder) -> None:
        self._world, self._described, self._folder = world, described, folder
        self.phase, self.round = "", 0

    @property
    def profile_s(self) -> float:
        return self._described.profile_s

    def model_id(self) -> str:
        return self._world.model_id()

    def profile(self) -> MeasuredProfile:
        """What was found out before the first search."""
        return self._described.profile

    def run_trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        outcome = self._world.run_trial(request, plan)
        self._folder.append(self.phase, self.round, request, plan, outcome)
        return outcome

    def emulate(self, workload: Workload) -> None:
        """Nothing: the accelerators wait for the shared profile already."""

    def round_robin(self) -> bool:
        return self._world.round_robin()


def job_spec(command: tuple[str, ...], described: Described, search: Search, lossy: bool, settings: Settings) -> JobSpec:
    return JobSpec(
        command,
        described.given.world_size,
        described.given,
        search=search,
        lossy=lossy,
        max_trials=settings.marks[-1],
        max_seconds=NO_LIMIT_S,
        warmup_steps=WARMUP_STEPS,
        timed_steps=TIMED_STEPS,
        most_steps=MOST_STEPS,
        seed=settings.seed,
        conditions=described.conditions,
    )


def searched(job_id: str, spec: JobSpec, store: Store, world: SharedWorld, marks: Sequence[int], say: Callable[[str], None]) -> Searched:
    """Search up to the last mark, from wherever the job's log ends; at every mark its finalists get the tuner's second look.

    The looks are events of a job of their own, `JOB-MARK`: the search goes on as if there had been none.
    """
    if job_id not in {job.id for job in store.jobs()}:
        store.create_job(job_id, spec)
    world.phase, world.round = job_id, 0
    proposer = Proposer(spec, simulators())
    at, trials_at, seconds_at, history = {}, {}, {}, store.history(job_id)
    for mark in marks:
        bounded = replace(spec, max_trials=mark)
        history = carry_out(job_id, bounded, store, world, proposer, [], search_instruction)
        until_mark = _until_over(bounded, history)
        trials_at[mark] = len(until_mark.candidates) - len(until_mark.refused)
        seconds_at[mark] = until_mark.elapsed_s + world.profile_s
        looked = _with_looks(f"{job_id}-{mark}", bounded, store, world, proposer, until_mark)
        chosen = contender(looked)
        if chosen is not None:
            at[mark] = looked.proposals[chosen].strategy
            say(f"{job_id} after {mark} trials: {looked.measured_s[chosen] * 1e3:.1f} ms ({looked.proposals[chosen].origin})")
    return Searched(at, trials_at, seconds_at, near_the_last(history, incumbents(history, world.profile_s)))


def _until_over(spec: JobSpec, history: History) -> History:
    """The history up to where the search was over by this budget; later events belong to a larger one."""
    for count in range(len(history.events)):
        shorter = History(history.events[:count], history.deviation)
        if shorter.references and search_instruction(spec, shorter) is None:
            return shorter
    return history


def _with_looks(job_id: str, spec: JobSpec, store: Store, world: SharedWorld, proposer: Proposer, history: History) -> History:
    if job_id not in {job.id for job in store.jobs()}:
        store.create_job(job_id, spec)
    there = len(store.history(job_id).events)
    for number, event in enumerate(history.events[there:], start=there):
        store.append(job_id, number, event)
    return carry_out(job_id, spec, store, world, proposer, [], look_instruction)


def incumbents(history: History, profile_s: float = 0.0) -> tuple[Incumbent, ...]:
    """The bests of a search in order, each from the trial on that made it the best."""
    found: list[Incumbent] = []
    trials = 0
    candidates = {id(trial) for trial in history.candidates if not trial.refused}
    for count, event in enumerate(history.events, start=1):
        if id(event) not in candidates:
            continue
        trials += 1
        ranking = History(history.events[:count], history.deviation).ranking()
        if ranking and (not found or found[-1].strategy.id != ranking[0][0]):
            found.append(Incumbent(trials, event.elapsed_s + profile_s, history.proposals[ranking[0][0]].strategy))
    return tuple(found)


def near_the_last(history: History, found: Sequence[Incumbent]) -> tuple[Incumbent, ...]:
    """Those whose time, as the whole search measured it, is within `NEAR` of the last one's."""
    times_s = history.measured_s
    return tuple(own for own in found if times_s[own.strategy.id] <= NEAR * times_s[found[-1].strategy.id])
