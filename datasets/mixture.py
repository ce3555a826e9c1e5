"""Which strategies a domain's trials try: hand-made ones, random ones, repeats, and what the tuner itself proposes.

Of `count` candidates at most `FIXED` are builders' strategies (each once) and random ones, half without and half with lossy compression.
One in `REPEAT_EVERY` is an earlier strategy once more, which tells the noise. The rest come from tuning jobs of `JOB_TRIALS` trials.
What was tried before counts, so that a collection that was stopped, or is asked for more, goes on.
"""

from __future__ import annotations

from collections.abc import Callable

from autotune.dataset.trials import Domain
from autotune.dataset.writing import WORK
from autotune.driver import drive
from autotune.errors import InvalidInput
from autotune.events import Event, Profiled
from autotune.history import History
from autotune.job import JobSpec
from autotune.records import CURRENT_SETUP, Failed, Measured, Role, TrialRequest
from autotune.rng import generator
from autotune.sampler.proposer import Proposer
from autotune.sampler.random import sample_many
from autotune.simulators.registry import simulators
from autotune.store import Store
from autotune.strategy_space.builders.catalogue import seed_strategies
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.tuner import Finish, Instruction, RunTrial
from autotune.workload import Workload
from benchmarks.trial_session import TrialSession

FIXED = 0.6
REPEAT_EVERY = 16
REFERENCE_EVERY = 8
JOB_TRIALS = 40
TOP_K = 8
LEARNED = ("linear",)
"""The simulator that jobs train; the slower ones would take as long as the trials."""
FOREVER_S = 1e6

Obey = Callable[[], None]
"""Raises where somebody asked to stop."""


class SearchEnded(Exception):
    """A job has no trial of its search left (its closing comparison is not taken), or the domain has what was asked for."""


def sample_domain(session: TrialSession, count: int, seed: int, obey: Obey) -> None:
    """Take trials until the domain has `count` candidates. `session.writer` keeps each."""
    _fixed(session, int(FIXED * count), seed, obey)
    for number in range(count):
        before = len(session.writer.domain.candidates)
        if before >= count:
            return
        begun = tuning_job(session, f"{seed}-{number}", seed + number, count - before, obey)
        if begun and len(session.writer.domain.candidates) == before:
            return  # the space has nothing new


def fixed_strategies(domain: Domain, count: int, seed: int, refused: str) -> list[tuple[str, Strategy]]:
    """(source, strategy), at most `count`, each strategy once; fewer are among more. `refused`: as `Profile.cross_step_refused`."""
    lossless, lossy = (_space(lossy, refused) for lossy in (False, True))
    made = [(f"builder:{name}", strategy) for name, strategy in seed_strategies(domain.workload, domain.cluster, lossy)]
    left = max(count - len(made), 0)
    drawn = [("random:lossless", strategy) for strategy in sample_many(domain.workload, domain.cluster, lossless, left - left // 2, seed)]
    drawn += [("random:lossy", strategy) for strategy in sample_many(domain.workload, domain.cluster, lossy, left // 2, seed + 1)]
    once: dict[str, tuple[str, Strategy]] = {}
    for source, strategy in (*made[:count], *drawn):
        once.setdefault(strategy.id, (source, strategy))  # in a small space a draw may be hand-made, too
    found = list(once.values())
    order = generator(seed, "mixture", domain.workload.id).permutation(len(found)).tolist()
    return [found[index] for index in order]


def _fixed(session: TrialSession, count: int, seed: int, obey: Obey) -> None:
    domain = session.writer.domain
    there = {trial.strategy.id for trial in domain.candidates if trial.strategy is not None}
    wanted = fixed_strategies(domain, count - count // REPEAT_EVERY, seed, session.profile.cross_step_refused)
    todo = [(source, strategy) for source, strategy in wanted if strategy.id not in there]
    drawn = sum(trial.kind in ("builder", "random") for trial in domain.candidates)
    for number, (source, strategy) in enumerate(todo):
        obey()
        if number % REFERENCE_EVERY == 0:
            session.reference()
        session.candidate(source, strategy)
        if (drawn + number + 1) % REPEAT_EVERY == 0:
            _repeat(session, seed)
    if todo:
        session.reference()  # the last trials stand between two references, too


def _repeat(session: TrialSession, seed: int) -> None:
    """An earlier measured candidate once more."""
    measured = [trial for trial in session.writer.trials if trial.strategy is not None and trial.step_s]
    if measured:
        rng = generator(seed, "repeat", len(session.writer.trials))
        chosen = measured[int(rng.integers(len(measured)))]
        assert chosen.strategy is not None
        session.candidate(f"repeat:{chosen.number}", chosen.strategy)


def _space(lossy: bool, refused: str) -> SearchSpace:
    space = SearchSpace.default(lossy=lossy)
    return space.without_cross_step(refused) if refused else space


def tuning_job(session: TrialSession, name: str, seed: int, most: int, obey: Obey) -> bool:
    """Run a search of the tuner, or go on with one of this name; whether it was begun now. Odd seeds allow lossy strategies."""
    with Store.open(session.writer.folder / WORK / "jobs.db") as store:
        begun = name not in {job.id for job in store.jobs()}
        if begun:
            store.create_job(name, job_spec(session, seed, min(JOB_TRIALS, most)))
            domain, profile = session.writer.domain, session.profile
            store.append(name, 0, Profiled(domain.workload, domain.cluster, 0.0, profile.software, profile.cross_step_refused))
        if store.job_status(name) != "running":
            return False
        if not begun:
            session.reference()  # a session begins with one
        spec = store.job(name)
        kept = _Kept(session, name, len(session.writer.domain.candidates) + most, obey)
        try:
            drive(name, spec, store, kept, Proposer(spec, simulators()), [kept])
        except SearchEnded:
            store.finish(name, None)
            session.reference()  # the last trials stand between two references, too
    return begun


def job_spec(session: TrialSession, seed: int, trials: int) -> JobSpec:
    """Trials are as long as the others of the domain."""
    domain, lengths = session.writer.domain, session.lengths
    return JobSpec(
        command=("python", session.setup.script[0]),
        workers=domain.cluster.world_size,
        cluster=domain.cluster,
        simulators=LEARNED,
        lossy=seed % 2 == 1,
        max_trials=trials,
        max_seconds=FOREVER_S,
        top_k=min(TOP_K, trials),
        warmup_steps=lengths.warmup_steps,
        timed_steps=lengths.timed_steps,
        most_steps=lengths.most_steps,
        precision=lengths.precision or 0.02,
        reference_every=REFERENCE_EVERY,
        seed=seed,
        conditions=domain.environment.conditions,
    )


class _Kept:
    """The session as a job's world, and the job's observer: every trial is kept, with the round and origin of its strategy.

    A trial is kept before the job hears of it. Killed in between, the job takes it once more: a repeat, and nothing is lost.
    """

    def __init__(self, session: TrialSession, name: str, goal: int, obey: Obey) -> None:
        self._session, self._name, self._goal, self._obey = session, name, goal, obey
        self._history: History | None = None

    def started(self, instruction: Instruction, history: History) -> None:
        self._obey()
        self._history = history
        role = instruction.request.role if isinstance(instruction, RunTrial) else None
        enough = role is Role.CANDIDATE and len(self._session.writer.domain.candidates) >= self._goal
        if enough or role is Role.AB or isinstance(instruction, Finish):
            raise SearchEnded

    def recorded(self, event: Event, history: History) -> None:
        self._obey()

    def run_trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        load = self._session.load()
        outcome = self._session.world.run_trial(request, plan)
        if request.strategy_id == CURRENT_SETUP:
            self._session.record(f"tuning:{self._name}:reference", None, None, outcome, load)
            return outcome
        assert self._history is not None and plan is not None
        proposal = self._history.proposals[request.strategy_id]
        source = f"tuning:{self._name}:{request.round}:{proposal.origin}"
        self._session.record(source, proposal.strategy, plan.id, outcome, load)
        return outcome

    def model_id(self) -> str:
        return self._session.world.model_id()

    def emulate(self, workload: Workload) -> None:
        self._session.world.emulate(workload)

    def round_robin(self) -> bool:
        return self._session.world.round_robin()

    def profile(self) -> object:
        raise InvalidInput("a job of a collection is begun with the domain's profile; its store has lost it, so remove .work/jobs.db")
