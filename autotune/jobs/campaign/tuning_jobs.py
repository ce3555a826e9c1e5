"""Let a tuner choose the trials of a session.

The tuner's jobs are in a store in the domain's folder, apart from the dataset; their trials are
trials of the session's domain.
"""

from __future__ import annotations

from typing import NoReturn

from autotune.dataset.trials import REFERENCE
from autotune.dataset.writing import WORK
from autotune.errors import InvalidInput
from autotune.jobs.campaign.session import TrialSession
from autotune.records import Failed, Measured, TrialRequest
from autotune.storage.store import Store
from autotune.strategy_space.plan import Plan
from autotune.tuning.events import Event, Profiled
from autotune.tuning.history import History
from autotune.tuning.instructions import Instruction
from autotune.tuning.job import JobSpec
from autotune.workload import Workload

FOREVER_S = 1e6


def open_jobs(session: TrialSession) -> Store:
    """Open the store of the domain's jobs, a context manager."""
    return Store.open(session.writer.folder / WORK / "jobs.db")


def job_spec(session: TrialSession) -> JobSpec:
    """Return the settings of a lossless search on the probed cluster, without a time limit.

    Its trials are as long as the session's.
    """
    domain = session.writer.domain
    length = session.length
    return JobSpec(
        command=("python", *session.setup.script),
        workers=domain.cluster.world_size,
        cluster=domain.cluster,
        max_seconds=FOREVER_S,
        warmup_steps=length.warmup_steps,
        timed_steps=length.timed_steps,
        most_steps=length.most_steps,
        precision=length.precision or JobSpec.precision,
        conditions=domain.environment.conditions,
    )


def begin_job(
    session: TrialSession, store: Store, name: str, spec: JobSpec, prepared_s: float = 0.0
) -> bool:
    """Create the job unless it exists, and return whether it is new.

    It starts with the domain's profile and probe, for which it counts `prepared_s`.
    """
    new = name not in {job.id for job in store.jobs()}
    if new:
        store.create_job(name, spec)
    if not store.history(name).events:
        domain = session.writer.domain
        profile = session.profile
        profiled = Profiled(
            domain.workload,
            domain.cluster,
            prepared_s,
            profile.software,
            profile.cross_step_refused,
        )
        store.append(name, 0, profiled)
    return new


class SessionWorld:
    """A session as a job's world and observer.

    Each trial is kept with the round and origin of its strategy, before the job hears of it. If the
    process is killed in between, the job runs the trial again: a repeat, and nothing is lost.
    """

    def __init__(self, session: TrialSession, job: str) -> None:
        self._session = session
        self._job = job
        self._history: History | None = None

    def started(self, instruction: Instruction, history: History) -> None:
        self._history = history

    def recorded(self, event: Event, history: History) -> None:
        """Do nothing: the trial is kept already."""

    def run_trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        source, strategy = REFERENCE, None
        if plan is not None:
            assert self._history is not None
            proposal = self._history.proposals[request.strategy_id]
            source, strategy = f"{request.round}:{proposal.origin}", proposal.strategy
        source = f"tuning:{self._job}:{source}"
        return self._session.run_trial(source, request, strategy, plan).outcome

    def model_id(self) -> str:
        return self._session.world.model_id()

    def emulate(self, workload: Workload) -> None:
        """Do nothing: the session's accelerators wait for the domain's profile already."""

    def round_robin(self) -> bool:
        return self._session.world.round_robin()

    def profile(self) -> NoReturn:
        raise InvalidInput("a session's job starts with the domain's profile: call `begin_job`")
