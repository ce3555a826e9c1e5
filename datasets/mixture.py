"""Choose the strategies of a domain's trials: hand-made, random, repeated, and the tuner's.

At most `FIXED` of `count` candidates are builders' strategies (each once) and random ones, half
without and half with lossy compression. Where the script forbids to cross the step, one in
`REFUSED_EVERY` of the random ones crosses it, so that the dataset has real refusals. One in
`REPEAT_EVERY` repeats an earlier strategy, which shows the noise. The rest come from tuning jobs of
`JOB_TRIALS` trials. Earlier trials count, so a collection that was stopped or extended resumes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from autotune.dataset.trials import Domain
from autotune.jobs.campaign.session import TrialSession
from autotune.jobs.campaign.strategy_sources import built, drawn, shuffled
from autotune.jobs.campaign.tuning_jobs import SessionWorld, begin_job, job_spec, open_jobs
from autotune.jobs.driver import drive
from autotune.records import Role
from autotune.rng import generator
from autotune.sampler.proposer import Proposer
from autotune.sampler.random import sample_many
from autotune.simulators.registry import SIMULATORS
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.events import Event
from autotune.tuning.history import History
from autotune.tuning.instructions import Finish, Instruction, RunTrial
from autotune.tuning.job import JobSpec

FIXED = 0.6
REPEAT_EVERY = 16
REFERENCE_EVERY = 8
REFUSED_EVERY = 20
JOB_TRIALS = 40
TOP_K = 8
MOST_DRAWS = 100
"""Draws in which a strategy that crosses the step is found."""
LEARNED = ("linear",)
"""The simulator that jobs train; slower ones would take as long as the trials."""

Obey = Callable[[], None]
"""Raises when somebody asked to stop."""


class SearchEnded(Exception):
    """A job has no trial of its search left, or the domain has enough candidates."""


def sample_domain(session: TrialSession, count: int, seed: int, obey: Obey) -> None:
    """Run trials until the domain has `count` candidates."""
    _fixed(session, int(FIXED * count), seed, obey)
    for number in range(count):
        before = len(session.writer.domain.candidates)
        if before >= count:
            return
        begun = tuning_job(session, f"{seed}-{number}", seed + number, count - before, obey)
        if begun and len(session.writer.domain.candidates) == before:
            return  # the space has nothing new


def fixed_strategies(
    domain: Domain, count: int, seed: int, refused: str
) -> list[tuple[str, Strategy]]:
    """Return at most `count` times (source, strategy), each strategy once, in random order.

    A smaller count gives a subset. `refused`: as `Profile.cross_step_refused`.
    """
    workload, cluster = domain.workload, domain.cluster
    spaces = _space(False, refused), _space(True, refused)
    builders = built(workload, cluster, spaces[1])
    left = max(count - len(builders), 0)
    crossing = left // REFUSED_EVERY if refused else 0
    random = drawn(workload, cluster, spaces, left - crossing, seed)
    random += refused_strategies(domain, crossing, seed)
    once: dict[str, tuple[str, Strategy]] = {}
    for source, strategy in (*builders[:count], *random):
        # In a small space a draw may be a builder's, too.
        once.setdefault(strategy.id, (source, strategy))
    return shuffled(list(once.values()), seed, "mixture", workload.id)


def refused_strategies(domain: Domain, count: int, seed: int) -> list[tuple[str, Strategy]]:
    """Return random strategies that cross the step; a script that forbids it refuses them.

    A smaller count gives a subset.
    """
    everything = SearchSpace.default()
    seeds = range(seed, seed + MOST_DRAWS)
    crossing = (
        ("random:lossless", strategy)
        for one in seeds
        for strategy in sample_many(domain.workload, domain.cluster, everything, REFUSED_EVERY, one)
        if strategy.cross_step
    )
    return list(itertools.islice(crossing, count))


def _fixed(session: TrialSession, count: int, seed: int, obey: Obey) -> None:
    domain, refused = session.writer.domain, session.profile.cross_step_refused
    tried = {trial.strategy.id for trial in domain.candidates if trial.strategy is not None}
    wanted = fixed_strategies(domain, count - count // REPEAT_EVERY, seed, refused)
    todo = [(source, strategy) for source, strategy in wanted if strategy.id not in tried]
    done = sum(trial.kind in ("builder", "random") for trial in domain.candidates)
    for number, (source, strategy) in enumerate(todo):
        obey()
        if number % REFERENCE_EVERY == 0:
            session.reference()
        session.candidate(source, strategy)
        if (done + number + 1) % REPEAT_EVERY == 0:
            _repeat(session, seed)
    if todo:
        session.reference()  # so that the last trials are between two references


def _repeat(session: TrialSession, seed: int) -> None:
    """Repeat an earlier measured candidate."""
    measured = [
        trial for trial in session.writer.trials if trial.strategy is not None and trial.step_s
    ]
    if measured:
        rng = generator(seed, "repeat", len(session.writer.trials))
        chosen = measured[int(rng.integers(len(measured)))]
        assert chosen.strategy is not None
        session.candidate(f"repeat:{chosen.number}", chosen.strategy)


def _space(lossy: bool, refused: str) -> SearchSpace:
    space = SearchSpace.default(lossy=lossy)
    return space.without_cross_step(refused) if refused else space


def tuning_job(session: TrialSession, name: str, seed: int, most: int, obey: Obey) -> bool:
    """Run or resume a search, and return whether it is new. Odd seeds allow lossy strategies."""
    with open_jobs(session) as store:
        begun = begin_job(session, store, name, job_of(session, seed, min(JOB_TRIALS, most)))
        if store.job_status(name) != "running":
            return False
        spec = store.job(name)
        world = _Limited(session, name, len(session.writer.domain.candidates) + most, obey)
        try:
            drive(name, spec, store, world, Proposer(spec, SIMULATORS), [world])
        except SearchEnded:
            store.finish(name, None)
            session.reference()  # so that the last trials are between two references
    return begun


def job_of(session: TrialSession, seed: int, trials: int) -> JobSpec:
    return replace(
        job_spec(session),
        simulators=LEARNED,
        lossy=seed % 2 == 1,
        max_trials=trials,
        top_k=min(TOP_K, trials),
        reference_every=REFERENCE_EVERY,
        seed=seed,
    )


class _Limited(SessionWorld):
    """Ends the search at `goal` candidates, before its closing comparison, or on request."""

    def __init__(self, session: TrialSession, name: str, goal: int, obey: Obey) -> None:
        super().__init__(session, name)
        self._goal, self._obey = goal, obey

    def started(self, instruction: Instruction, history: History) -> None:
        self._obey()
        super().started(instruction, history)
        role = instruction.request.role if isinstance(instruction, RunTrial) else None
        enough = (
            role is Role.CANDIDATE and len(self._session.writer.domain.candidates) >= self._goal
        )
        if enough or role is Role.AB or isinstance(instruction, Finish):
            raise SearchEnded

    def recorded(self, event: Event, history: History) -> None:
        self._obey()
