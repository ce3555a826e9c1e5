"""Search a domain with the tuner's own loop on a running script, and freeze it at every mark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autotune.jobs.campaign.session import TrialSession
from autotune.jobs.campaign.tuning_jobs import SessionWorld
from autotune.jobs.driver import carry_out
from autotune.sampler.proposer import Proposer
from autotune.simulators.registry import SIMULATORS
from autotune.storage.store import Store
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.finalists import contender
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.tuning.tuner import look_instruction, search_instruction

OURS, OURS_LOSSY, RANDOM, BAYES = "ours", "ours-lossy", "random", "scikit-optimize"
WITHIN, SEED = "ours-within-step", "ours-seed-"
"""Ids of the jobs; all but the second are lossless. `SEED` is followed by the seed."""
MOST_STEPS = 12
"""Limit of a search's trial, which ends earlier once its interval is narrow (2 %)."""
NEAR = 1.05
"""Bests of a search within this of its last one are measured again."""


def seed_job(seed: int) -> str:
    """Return the id of our search with another seed."""
    return f"{SEED}{seed}"


def is_seed(job: str) -> bool:
    return job.startswith(SEED)


@dataclass(frozen=True)
class Incumbent:
    """The best of a search from trial `trials` on, `seconds` (with profile and probe) later."""

    trials: int
    seconds: float
    strategy: Strategy


@dataclass(frozen=True)
class Searched:
    """A search up to its last mark.

    - `at`: mark -> the strategy that the tuner would compare with the current setup; no entry if it
      found none.
    - `trials_at`, `seconds_at`: mark -> trials run (a search may run out of strategies), and tuning
      time.
    - `incumbents`: the bests of the search in order, without those further than `NEAR` from the
      last.
    """

    at: dict[int, Strategy]
    trials_at: dict[int, int]
    seconds_at: dict[int, float]
    incumbents: tuple[Incumbent, ...]


def searched(
    job: str,
    spec: JobSpec,
    store: Store,
    session: TrialSession,
    marks: Sequence[int],
    say: Callable[[str], None],
    narrow: Callable[[SearchSpace], SearchSpace] = lambda space: space,
) -> Searched:
    """Search up to the last mark, resuming the job's log; at each mark measure its finalists again.

    The second looks are events of a separate job, `JOB-MARK`: the search continues as if they had
    not happened.
    """
    proposer = Proposer(spec, SIMULATORS, narrow=narrow)
    at, trials_at, seconds_at, history = {}, {}, {}, store.history(job)
    for mark in marks:
        bounded, world = replace(spec, max_trials=mark), SessionWorld(session, job)
        history = carry_out(job, bounded, store, world, proposer, [world], search_instruction)
        until_mark = _until_over(bounded, history)
        trials_at[mark] = len(until_mark.candidates) - len(until_mark.refused)
        seconds_at[mark] = until_mark.elapsed_s
        looked = _with_looks(f"{job}-{mark}", bounded, store, session, proposer, until_mark)
        chosen = contender(looked)
        if chosen is not None:
            at[mark] = looked.proposals[chosen].strategy
            say(
                f"{job} after {mark} trials: {looked.measured_s[chosen] * 1e3:.1f} ms "
                f"({looked.proposals[chosen].origin})"
            )
    within = _until_over(replace(spec, max_trials=marks[-1]), history)
    return Searched(at, trials_at, seconds_at, near_the_last(within, incumbents(within)))


def _until_over(spec: JobSpec, history: History) -> History:
    """Return the history until this budget was used up; later events belong to a larger one."""
    for count in range(len(history.events)):
        shorter = history.first(count)
        if shorter.references and search_instruction(spec, shorter) is None:
            return shorter
    return history


def _with_looks(
    job: str,
    spec: JobSpec,
    store: Store,
    session: TrialSession,
    proposer: Proposer,
    history: History,
) -> History:
    if job not in {known.id for known in store.jobs()}:
        store.create_job(job, spec)
    there = len(store.history(job).events)
    for number, event in enumerate(history.events[there:], start=there):
        store.append(job, number, event)
    world = SessionWorld(session, job)
    return carry_out(job, spec, store, world, proposer, [world], look_instruction)


def incumbents(history: History) -> tuple[Incumbent, ...]:
    """Return the bests of a search in order, each from the trial that made it the best."""
    bests: list[Incumbent] = []
    trials = 0
    candidates = {id(trial) for trial in history.candidates if not trial.refused}
    for count, event in enumerate(history.events, start=1):
        if id(event) not in candidates:
            continue
        trials += 1
        ranking = history.first(count).ranking()
        if ranking and (not bests or bests[-1].strategy.id != ranking[0][0]):
            bests.append(
                Incumbent(trials, event.elapsed_s, history.proposals[ranking[0][0]].strategy)
            )
    return tuple(bests)


def near_the_last(history: History, bests: Sequence[Incumbent]) -> tuple[Incumbent, ...]:
    """Return those whose time, by the whole search, is within `NEAR` of the last one's."""
    times_s = history.measured_s
    return tuple(
        best for best in bests if times_s[best.strategy.id] <= NEAR * times_s[bests[-1].strategy.id]
    )
