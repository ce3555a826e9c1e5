"""Measure one domain in one running script: the sweep, the searches, the closing comparison.

The closing comparison measures every side once a round, in an order drawn for each round, and pairs
by round. So no side has a minute of its own, and no side is judged by the trials that chose it.
Every trial is one of the domain's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from autotune.dataset.folder import read_domain
from autotune.dataset.trials import REFERENCE, DatasetTrial
from autotune.errors import InvalidInput
from autotune.jobs.campaign.session import TrialLength, TrialSession, trial_session
from autotune.jobs.campaign.setups import Setup
from autotune.jobs.campaign.tuning_jobs import begin_job, job_spec, open_jobs
from autotune.records import CURRENT_SETUP
from autotune.rng import generator
from autotune.storage.store import Store
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.job import JobSpec, Search
from benchmarks.outcome.figures import best_of_sweep, failures_of, whole_rounds
from benchmarks.outcome.kept import (
    CLOSING,
    SWEEP,
    Course,
    Frozen,
    Group,
    OutcomeSettings,
    Side,
    Stop,
    read_frozen,
    rounds_of,
    write_frozen,
)
from benchmarks.outcome.rivals import DDP_BEST, DDP_DEFAULT, bucket_sweep, rivals
from benchmarks.outcome.searches import (
    BAYES,
    MOST_STEPS,
    OURS,
    OURS_LOSSY,
    RANDOM,
    Incumbent,
    Searched,
    searched,
)
from benchmarks.repository import setup_of

MODELS = ("vgg", "densenet", "embedding", "gpt_text")
CLUSTERS = ("four_hosts", "four_hosts_uneven", "four_hosts_mixed", "two_hosts_two_devices")
DOMAINS: Mapping[str, Setup] = MappingProxyType(
    {setup.name: setup for setup in (setup_of(m, c) for m in MODELS for c in CLUSTERS)}
)
LENGTHS = TrialLength(warmup_steps=2, timed_steps=6)
"""Length of every trial; those of a search may be longer."""
BLOCK_S, FEWEST_STEPS = 1.2, 3
"""A block of a round lasts about `BLOCK_S` and has at least `FEWEST_STEPS` steps."""
CURRENT_TRIES = 3
"""Failures of the current setup in closing rounds after which the domain is given up."""
MOST_INCUMBENTS = 3
"""So many of a search's bests that no other side shares are measured again."""

Say = Callable[[str], None]


def measure(
    setup: Setup, folder: Path, settings: OutcomeSettings, say: Say, quick: bool = False
) -> None:
    """Measure until the domain in `folder` has all its rounds; resume an earlier run. Needs root.

    `quick`: as in `trial_session`.
    """
    frozen = read_frozen(folder)
    if (
        frozen is not None
        and frozen.settings == settings
        and not missing_rounds(rounds_of(read_domain(folder).trials, CLOSING), frozen)
    ):
        say(f"{setup.name}: complete")
        return
    with trial_session(folder, setup, LENGTHS, say, lambda trial: None, quick) as session:
        run(session, settings, say)


def run(session: TrialSession, settings: OutcomeSettings, say: Say) -> None:
    """Run everything after the profile."""
    folder = session.writer.folder
    frozen = read_frozen(folder)
    if frozen is None or frozen.settings != settings:
        with open_jobs(session) as store:
            specs = begin_searches(
                session, store, settings
            )  # first, since a job remembers how long the domain's profile took
            swept = sweep(session, settings, say)
            searches = {
                job: searched(job, spec, store, session, _marks(job, settings), say)
                for job, spec in specs.items()
            }
        frozen = freeze(session, settings, swept, searches)
        write_frozen(folder, frozen)
    close(session, frozen, say)


def begin_searches(
    session: TrialSession, store: Store, settings: OutcomeSettings
) -> dict[str, JobSpec]:
    """Create the jobs that do not exist yet, and return job -> settings."""
    wanted = {
        OURS: (Search.AUTOSYNC, False),
        OURS_LOSSY: (Search.AUTOSYNC, True),
        RANDOM: (Search.RANDOM, False),
        BAYES: (Search.BAYES, False),
    }
    if not settings.lossy:
        del wanted[OURS_LOSSY]
    base = replace(
        job_spec(session), max_trials=settings.marks[-1], most_steps=MOST_STEPS, seed=settings.seed
    )
    specs = {
        job: replace(base, search=search, lossy=lossy) for job, (search, lossy) in wanted.items()
    }
    there = {job.id for job in store.jobs()} & specs.keys()
    seeds = {store.job(job).seed for job in there} - {settings.seed}
    if seeds:
        raise InvalidInput(
            f"the searches of {session.writer.folder} have seed {seeds.pop()}, "
            f"but --seed is {settings.seed}; use another --folder"
        )
    prepared_s = next(
        (events[0].elapsed_s for job in there if (events := store.history(job).events)),
        session.prepared_s,
    )
    for job, spec in specs.items():
        begin_job(session, store, job, spec, prepared_s)
    return specs


def _marks(job: str, settings: OutcomeSettings) -> tuple[int, ...]:
    """Return all marks for our searches, and the last one for the others."""
    return settings.marks if job in (OURS, OURS_LOSSY) else settings.marks[-1:]


def plan_id(session: TrialSession, strategy: Strategy) -> str:
    domain = session.writer.domain
    return plan(strategy, domain.workload, domain.cluster.world_size).id


def take_round(
    session: TrialSession, seed: int, phase: str, number: int, sides: Mapping[str, Strategy | None]
) -> None:
    """Measure each side once, in an order of the round's own. None is the script's own DDP."""
    names = list(sides)
    step_s = {
        trial.strategy.id: trial.median_s
        for trial in session.writer.trials
        if trial.strategy is not None and not trial.failure
    }
    for index in generator(seed, phase, number).permutation(len(names)).tolist():
        strategy = sides[names[index]]
        if strategy is None:
            session.reference(f"{phase}:{number}:{REFERENCE}")
        else:
            session.candidate(
                f"{phase}:{number}:{names[index]}",
                strategy,
                steps_of_block(step_s.get(strategy.id)),
            )


def steps_of_block(step_s: float | None) -> int:
    """Return the timed steps of a block; fewer for long steps (`step_s`), which scatter less."""
    if step_s is None:
        return LENGTHS.timed_steps
    return min(LENGTHS.timed_steps, max(FEWEST_STEPS, math.ceil(BLOCK_S / step_s)))


@dataclass(frozen=True)
class Swept:
    times_s: dict[str, float]
    best: Strategy


def sweep(session: TrialSession, settings: OutcomeSettings, say: Say) -> Swept:
    """Measure every bucket size `sweeps` times, in random orders; the lowest median wins."""
    domain = session.writer.domain
    sizes = bucket_sweep(domain.workload, domain.cluster.world_size)
    plans = {name: plan_id(session, strategy) for name, strategy in sizes.items()}
    for number in range(settings.sweeps):
        done = {trial.plan_id for trial in rounds_of(session.writer.trials, SWEEP).get(number, ())}
        left = {name: strategy for name, strategy in sizes.items() if plans[name] not in done}
        if left:
            session.reference()
            take_round(session, settings.seed, SWEEP, number, left)
    times_s = best_of_sweep(rounds_of(session.writer.trials, SWEEP), plans)
    best = min(times_s, key=times_s.__getitem__)
    say(
        "sweep: "
        + ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in times_s.items())
        + f"; best: {best}"
    )
    return Swept(times_s, sizes[best])


def freeze(
    session: TrialSession, settings: OutcomeSettings, swept: Swept, searches: Mapping[str, Searched]
) -> Frozen:
    """Return the sides of the closing comparison."""
    domain = session.writer.domain

    def side(name: str, group: Group, strategy: Strategy) -> Side:
        return Side(name, group, plan_id(session, strategy), strategy)

    rival_strategies = rivals(
        domain.workload, domain.cluster, across_steps=not session.profile.cross_step_refused
    )
    sides = [
        Side(DDP_DEFAULT, Group.TODAY, CURRENT_SETUP, None),
        side(DDP_BEST, Group.TODAY, swept.best),
    ]
    sides += [side(name, Group.RIVAL, strategy) for name, strategy in rival_strategies.items()]
    for job, search in searches.items():
        group = Group.OURS if job in (OURS, OURS_LOSSY) else Group.RIVAL
        sides += [
            side(_frozen_name(job, mark, search), group, strategy)
            for mark, strategy in search.at.items()
        ]
    courses = {}
    for job in (job for job in (OURS, OURS_LOSSY) if job in searches):
        search = searches[job]
        bests = [
            (best, side(f"{job}, best from trial {best.trials}", Group.STOP, best.strategy))
            for best in search.incumbents
        ]
        measured_again = _measured_again(bests, {there.plan for there in sides})
        sides += [made_side for _, made_side in measured_again]
        courses[job] = Course(
            # if every trial failed, the tuner keeps the current setup
            {
                str(mark): _frozen_name(job, mark, search) if mark in search.at else DDP_DEFAULT
                for mark in settings.marks
            },
            {str(mark): trials for mark, trials in search.trials_at.items()},
            {str(mark): seconds for mark, seconds in search.seconds_at.items()},
            tuple(
                Stop(best.trials, best.seconds, made_side.name)
                for best, made_side in measured_again
            ),
        )
    return Frozen(settings, tuple(sides), courses, swept.times_s)


def _frozen_name(job: str, mark: int, searched: Searched) -> str:
    return f"{job}, {mark if job in (OURS, OURS_LOSSY) else searched.trials_at[mark]} trials"


def _measured_again(
    bests: list[tuple[Incumbent, Side]], planned: set[str]
) -> list[tuple[Incumbent, Side]]:
    """Keep the bests whose plan is `planned` anyway, and the first `MOST_INCUMBENTS` others."""
    chosen, once, left = [], set(), MOST_INCUMBENTS
    for best, side in bests:
        new = side.plan not in planned
        if side.plan not in once and (not new or left > 0):
            chosen.append((best, side))
            once.add(side.plan)
            left -= new
    return chosen


def close(session: TrialSession, frozen: Frozen, say: Say) -> None:
    """Measure rounds of all sides, equal plans once, until there are enough whole ones.

    A side that fails is left out from then on. A round that was cut is repeated as a whole, since
    its halves would belong to different minutes.
    """
    for side in frozen.sides:
        if side.strategy is not None and plan_id(session, side.strategy) != side.plan:
            raise InvalidInput(
                f"the planner has changed since {side.name!r} was frozen; "
                "measure into another folder"
            )
    before = len(session.writer.trials)
    while missing := missing_rounds(rounds := rounds_of(session.writer.trials, CLOSING), frozen):
        failed = failures_of(rounds)
        of_current = [
            trial.failure
            for outcomes in rounds.values()
            for trial in outcomes
            if trial.failure and trial.strategy is None
        ]
        if len(of_current) >= CURRENT_TRIES:
            raise InvalidInput(
                "the script failed with its current setup, so there is no baseline: "
                f"{of_current[-1]}"
            )
        sides: dict[str, Side] = {}
        for side in frozen.sides:
            if side.plan not in failed:
                sides.setdefault(side.plan, side)
        say(f"closing comparison: {missing} rounds of {len(sides)} plans to go")
        number = 1 + max(rounds, default=-1)
        take_round(
            session,
            frozen.settings.seed,
            CLOSING,
            number,
            {side.name: side.strategy for side in sides.values()},
        )
    if len(session.writer.trials) > before:
        session.reference()  # so that the last trials are between two references


def missing_rounds(rounds: Mapping[int, list[DatasetTrial]], frozen: Frozen) -> int:
    """Return how many rounds of the closing comparison are missing."""
    return max(0, frozen.settings.rounds - len(whole_rounds(rounds, frozen.sides)))
