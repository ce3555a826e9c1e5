"""A tuner's jobs on the script of a trial session, so that their trials are trials of the session's domain.

The jobs lie in a store below the domain's folder, apart from the dataset. Used by `datasets/mixture.py` and by `benchmarks.outcome`.
"""

from __future__ import annotations

from typing import NoReturn

from autotune.dataset.trials import REFERENCE
from autotune.dataset.writing import WORK
from autotune.errors import InvalidInput
from autotune.records import Failed, Measured, TrialRequest
from autotune.storage.store import Store
from autotune.strategy_space.plan import Plan
from autotune.tuning.events import Event, Profiled
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.tuning.tuner import Instruction
from autotune.workload import Workload
from autotune.jobs.campaign.session import TrialSession

FOREVER_S = 1e6


def jobs_of(session: TrialSession) -> Store:
    """The store of the domain's jobs, a context manager."""
    return Store.open(session.writer.folder / WORK / "jobs.db")


def job_spec(session: TrialSession) -> JobSpec:
    """Of a lossless search by the domain's probed cluster, with trials as long as the session's, and all time there is."""
    domain, lengths = session.writer.domain, session.lengths
    return JobSpec(
        command=("python", *session.setup.script),
        workers=domain.cluster.world_size,
        cluster=domain.cluster,
        max_seconds=FOREVER_S,
        warmup_steps=lengths.warmup_steps,
        timed_steps=lengths.timed_steps,
        most_steps=lengths.most_steps,
        precision=lengths.precision or JobSpec.precision,
        conditions=domain.environment.conditions,
    )


def begin_job(
    session: TrialSession, store: Store, name: str, spec: JobSpec, prepared_s: float = 0.0
) -> bool:
    """Whether there was no such job. It begins with the domain's profile and probe, for which it counts `prepared_s`."""
    new = name not in {job.id for job in store.jobs()}
    if new:
        store.create_job(name, spec)
    if not store.history(name).events:
        domain, profile = session.writer.domain, session.profile
        store.append(
            name,
            0,
            Profiled(
                domain.workload,
                domain.cluster,
                prepared_s,
                profile.software,
                profile.cross_step_refused,
            ),
        )
    return new


class SessionWorld:
    """The session as a job's world, and the job's observer: every trial is kept, with the round and origin of its strategy.

    A trial is kept before the job hears of it. Killed in between, the job takes it once more: a repeat, and nothing is lost.
    """

    def __init__(self, session: TrialSession, job: str) -> None:
        self._session, self._job = session, job
        self._history: History | None = None

    def started(self, instruction: Instruction, history: History) -> None:
        self._history = history

    def recorded(self, event: Event, history: History) -> None:
        """Nothing more."""

    def run_trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        if plan is None:
            return self._session.take(
                f"tuning:{self._job}:{REFERENCE}", request, None, None
            ).outcome
        assert self._history is not None
        proposal = self._history.proposals[request.strategy_id]
        return self._session.take(
            f"tuning:{self._job}:{request.round}:{proposal.origin}",
            request,
            proposal.strategy,
            plan,
        ).outcome

    def model_id(self) -> str:
        return self._session.world.model_id()

    def emulate(self, workload: Workload) -> None:
        """Nothing: the session's accelerators wait for the domain's profile already."""

    def round_robin(self) -> bool:
        return self._session.world.round_robin()

    def profile(self) -> NoReturn:
        raise InvalidInput(
            "a session's job begins with the domain's profile (`begin_job`), but this one has none"
        )
