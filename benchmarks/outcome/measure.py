"""Measure one domain: DDP's options, then in one running script the sweeps, searches and rounds.

The closing comparison measures every side once a round, in an order drawn for each round, and pairs
by round. So no side has a minute of its own, and no side is judged by the trials that chose it.
Every trial is one of the domain's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from autotune.dataset.folder import read_domain
from autotune.dataset.trials import REFERENCE, DatasetTrial
from autotune.errors import InvalidInput
from autotune.jobs.campaign.domains import outcome_domains
from autotune.jobs.campaign.session import OnTrial, TrialLength, TrialSession, trial_session
from autotune.jobs.campaign.setups import Setup, varied
from autotune.jobs.campaign.tuning_jobs import begin_job, job_spec, open_jobs
from autotune.rng import generator
from autotune.storage.store import Store
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.job import JobSpec, Search
from benchmarks.outcome.ddp_options import SweptOptions, measured_options
from benchmarks.outcome.figures import failures_of, whole_rounds
from benchmarks.outcome.freeze import Tuned, freeze, plan_id
from benchmarks.outcome.kept import (
    CLOSING,
    SWEEP,
    Frozen,
    OutcomeSettings,
    Side,
    read_frozen,
    rounds_of,
    write_frozen,
)
from benchmarks.outcome.rivals import Settings, families
from benchmarks.outcome.searches import (
    BAYES,
    MOST_STEPS,
    OURS,
    OURS_LOSSY,
    RANDOM,
    WITHIN,
    searched,
    seed_job,
)
from benchmarks.outcome.sweeps import best_of, medians_s, missing, swept, title_of
from benchmarks.repository import ROOT

DOMAINS: Mapping[str, Setup] = outcome_domains(ROOT)
UNDILATED: Mapping[str, Setup] = outcome_domains(ROOT, dilation=False)
"""The same, with ranks that share the machine's cores in the clock's time."""
SETUPS: Mapping[str, Setup] = {**UNDILATED, **DOMAINS}
"""All domains that can be named."""
LENGTHS = TrialLength(warmup_steps=2, timed_steps=6)
"""Length of every trial; those of a search may be longer."""
BLOCK_S, FEWEST_STEPS = 1.2, 3
"""A block of a round lasts about `BLOCK_S` and has at least `FEWEST_STEPS` steps."""
CURRENT_TRIES = 3
"""Failures of the current setup in closing rounds after which the domain is given up."""

Say = Callable[[str], None]


def measure(
    setup: Setup,
    folder: Path,
    settings: OutcomeSettings,
    say: Say,
    quick: bool = False,
    on_trial: OnTrial = lambda trial: None,
) -> None:
    """Measure until the domain in `folder` has all its rounds; resume an earlier run. Needs root.

    `quick`: as in `trial_session`. `on_trial` gets every trial.
    """
    if is_complete(folder, settings):
        say(f"{setup.name}: complete")
        return
    swept = None
    if settings.options:
        swept = measured_options(setup, folder, LENGTHS, say, on_trial, quick)
        setup = varied(setup, swept.options)
    with trial_session(folder, setup, LENGTHS, say, on_trial, quick) as session:
        run(session, settings, say, swept)


def is_complete(folder: Path, settings: OutcomeSettings) -> bool:
    """Whether the domain has all its rounds under these settings."""
    frozen = read_frozen(folder)
    return (
        frozen is not None
        and frozen.settings == settings
        and not missing_rounds(rounds_of(read_domain(folder).trials, CLOSING), frozen)
    )


def run(
    session: TrialSession, settings: OutcomeSettings, say: Say, options: SweptOptions | None = None
) -> None:
    """Run everything after DDP's options."""
    folder = session.writer.folder
    frozen = read_frozen(folder)
    if frozen is None or frozen.settings != settings:
        with open_jobs(session) as store:
            specs = begin_searches(
                session, store, settings
            )  # first, since a job remembers how long the domain's profile took
            tuned = tune_rivals(session, settings, say)
            searches = {
                job: searched(job, spec, store, session, _marks(job, settings), say, _narrowed(job))
                for job, spec in specs.items()
            }
        frozen = freeze(session, settings, tuned, searches, options)
        write_frozen(folder, frozen)
    close(session, frozen, say)


def begin_searches(
    session: TrialSession, store: Store, settings: OutcomeSettings
) -> dict[str, JobSpec]:
    """Create the jobs that do not exist yet, and return job -> settings."""
    wanted = {
        OURS: (Search.AUTOSYNC, False, settings.seed),
        OURS_LOSSY: (Search.AUTOSYNC, True, settings.seed),
        RANDOM: (Search.RANDOM, False, settings.seed),
        BAYES: (Search.BAYES, False, settings.seed),
        WITHIN: (Search.AUTOSYNC, False, settings.seed),
    }
    wanted |= {seed_job(seed): (Search.AUTOSYNC, False, seed) for seed in settings.more_seeds}
    if not settings.lossy:
        del wanted[OURS_LOSSY]
    if not settings.baselines:
        del wanted[RANDOM], wanted[BAYES]
    if not settings.parts or session.profile.cross_step_refused:
        del wanted[WITHIN]  # within the step it would be our search once more
    base = replace(job_spec(session), max_trials=settings.budget, most_steps=MOST_STEPS)
    specs = {
        job: replace(base, search=search, lossy=lossy, seed=seed)
        for job, (search, lossy, seed) in wanted.items()
    }
    there = {job.id for job in store.jobs()} & specs.keys()
    for job in sorted(there):
        seed = store.job(job).seed
        if seed != specs[job].seed:
            raise InvalidInput(
                f"the search {job} of {session.writer.folder} has seed {seed}, "
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
    """Return all marks for our searches, and the last one for the others.

    Our lossless search goes on to the best known plan.
    """
    if job == OURS and settings.long > settings.budget:
        return (*settings.marks, settings.long)
    return settings.marks if job in (OURS, OURS_LOSSY) else settings.marks[-1:]


def _narrowed(job: str) -> Callable[[SearchSpace], SearchSpace]:
    if job == WITHIN:
        return lambda space: space.without_cross_step("this search stays within the step")
    return lambda space: space


def tune_rivals(session: TrialSession, settings: OutcomeSettings, say: Say) -> dict[str, Tuned]:
    """Measure every rival's settings, all with the budget of our search; return their bests.

    A round measures the settings of all rivals that are left, in an order of its own.
    """
    domain = session.writer.domain
    rivals = families(
        domain.workload, domain.cluster, across_steps=not session.profile.cross_step_refused
    )
    while left := missing_settings(session, rivals, settings.budget):
        number = min(round_number for round_number, _ in left.values())
        sides: dict[str, Strategy | None] = {
            title_of(rival, setting): rivals[rival][setting]
            for rival, (round_number, names) in left.items()
            for setting in names
            if round_number == number
        }
        session.reference()
        take_round(session, settings.seed, SWEEP, number, sides)
    tuned = {}
    for rival, of_rival in rivals.items():
        by_round = swept(session.writer.trials, rival, list(of_rival))
        best = best_of(by_round, rival) if len(of_rival) > 1 else next(iter(of_rival))
        tuned[rival] = Tuned(best, of_rival[best], medians_s(by_round))
        say(f"{rival}: {len(of_rival)} settings, best: {best}")
    return tuned


def missing_settings(
    session: TrialSession, rivals: Mapping[str, Settings], budget: int
) -> dict[str, tuple[int, list[str]]]:
    """Return rival -> its first round with missing trials, and their settings."""
    trials = session.writer.trials
    left = {
        rival: missing(swept(trials, rival, list(of_rival)), list(of_rival), budget)
        for rival, of_rival in rivals.items()
    }
    return {rival: of_rival for rival, of_rival in left.items() if of_rival is not None}


def take_round(
    session: TrialSession, seed: int, phase: str, number: int, sides: Mapping[str, Strategy | None]
) -> None:
    """Measure each side once, in an order of the round's own. None is the script's own DDP.

    The first round of a sweep has most of its trials, and only has to find the faster half.
    """
    names = list(sides)
    shortest = phase == SWEEP and number == 0
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
                FEWEST_STEPS if shortest else steps_of_block(step_s.get(strategy.id)),
            )


def steps_of_block(step_s: float | None) -> int:
    """Return the timed steps of a block; fewer for long steps (`step_s`), which scatter less."""
    if step_s is None:
        return LENGTHS.timed_steps
    return min(LENGTHS.timed_steps, max(FEWEST_STEPS, math.ceil(BLOCK_S / step_s)))


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
    while left := missing_rounds(rounds := rounds_of(session.writer.trials, CLOSING), frozen):
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
        say(f"closing comparison: {left} rounds of {len(sides)} plans to go")
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
