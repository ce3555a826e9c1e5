"""Start, resume and finish a tuning job: from its settings to best.json, report and MLflow."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Protocol

from autotune.cluster import MAX_NAMED
from autotune.errors import InvalidInput, LaunchError
from autotune.files import write_whole
from autotune.jobs.driver import Observer, drive
from autotune.jobs.files import protected_folders
from autotune.jobs.past_jobs import past_jobs
from autotune.jobs.places import Ranks, Where, placed_world, refuse_elsewhere
from autotune.jobs.preparation import prepare_in_background
from autotune.jobs.results import Results, write_results
from autotune.jobs.settings import Settings
from autotune.jobs.timelines import TIMELINES, write_timelines
from autotune.jobs.workspace import Workspace, job_to_resume, new_job_id
from autotune.masking import MASK, masked_command
from autotune.parsing import read_json
from autotune.records import Decision
from autotune.sampler.proposer import Proposer
from autotune.simulators.registry import SIMULATORS
from autotune.storage.store import Store
from autotune.strategy_space.plan import PlannedStrategy
from autotune.tracking.tracker import Tracker
from autotune.tuning.explanation import Explainer, explained
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from runtime_rewriter.private_network import NETWORK, TRUSTED
from runtime_rewriter.world.command import read_command
from runtime_rewriter.world.results import Trained
from runtime_rewriter.world.world import World

COMMAND_FILE = "command.json"
"""The words of a command with secrets, which every other copy masks; for its owner only."""


@dataclass(frozen=True)
class Job:
    """`command` is what runs; `spec` has it without secrets."""

    id: str
    spec: JobSpec
    command: tuple[str, ...]
    resumed: bool = False


@dataclass(frozen=True)
class FinishedJob:
    """`unsent` counts the items that MLflow at `uri` has not received yet. `winner`: the exported
    strategy in words; empty if the current setup stays. `trained`: the end of a kept training.
    `logs`: the folder of each rank's log on its host; empty if it is that of the job, here.
    `rejected`: MLflow's reasons for the items that it will never take."""

    decision: Decision
    results: Results
    uri: str
    unsent: int
    winner: str
    history: History
    trained: Trained | None = None
    logs: str = ""
    rejected: tuple[str, ...] = ()


class Spectator(Protocol):
    """Receives what happens after the decision of a job that keeps its training."""

    def decided(self, job: FinishedJob) -> None: ...
    def trained(self, steps: int) -> None: ...


@contextlib.contextmanager
def created_job(
    workspace: Workspace, store: Store, settings: Settings, job_id: str | None
) -> Iterator[Job]:
    """Create a job and hold its lock, which it has before another process can see the job."""
    command = settings.spec.command
    spec = replace(settings.spec, command=masked_command(command))
    with contextlib.ExitStack() as locks:
        if job_id:
            store.create_job(job_id, spec, locks=locks)
        else:  # several jobs may begin in one second
            new_id = new_job_id(settings.script.name, datetime.now())
            job_id = store.create_job(new_id, spec, numbered=True, locks=locks)
        if spec.command != command:
            path = workspace.job(job_id) / COMMAND_FILE
            write_whole(path, json.dumps(command), "the command", private=True)
        yield Job(job_id, spec, command)


def _command(workspace: Workspace, job_id: str, spec: JobSpec) -> tuple[str, ...]:
    """The command that runs, from its own file if it has secrets; raises `InvalidInput`."""
    path = workspace.job(job_id) / COMMAND_FILE
    if path.exists():
        return tuple(map(str, read_json(path)))
    if any(MASK in word for word in spec.command):
        raise InvalidInput(
            f"the command of job {job_id!r} has secrets, which {path} keeps, but it is gone; "
            "start a new job"
        )
    return spec.command


@contextlib.contextmanager
def resumed_job(
    workspace: Workspace, store: Store, job_id: str | None, address: str | None
) -> Iterator[Job]:
    """Hold the lock of the job to resume, by default that of `job_to_resume`.

    Raises `InvalidInput` if another process has the lock, or if the job has ended.
    """
    job_id = job_id or job_to_resume(store)
    with store.lock(job_id):  # before its command is read: a new job has no file of it yet
        status = store.job_status(job_id)
        if status != "running":
            raise InvalidInput(
                f"job {job_id!r} has ended ({status}); see `autotune show {job_id}`, or start a "
                "new one"
            )
        spec = store.job(job_id)
        refuse_elsewhere(spec.conditions, address)
        yield Job(job_id, spec, _command(workspace, job_id, spec), resumed=True)


def run_job(
    workspace: Workspace,
    store: Store,
    job: Job,
    where: Where,
    tracker: Tracker,
    observers: Sequence[Observer],
    waiting: Callable[[str], None],
    began_s: float,
    spectator: Spectator,
) -> FinishedJob:
    """Run a locked job to its decision and write its results; `waiting` receives progress lines.

    A kept training then goes on under the decision, to its own end.

    `began_s`: when the command began, on the monotonic clock; the budget counts from there.

    `observers` are notified in order; the tracker should be one of them.

    Raises `LaunchError` if the script cannot be tuned.
    """
    spec, script = job.spec, read_command(job.command)
    if spec.trusted_network:
        script = replace(script, environment={**script.environment, NETWORK: TRUSTED})
    known = partial(past_jobs, store, job.id, spec.conditions.accelerators)
    proposer = Proposer(spec, SIMULATORS, past=known)
    ranks = Ranks(
        script,
        spec.workers,
        workspace.job(job.id) / "logs",
        spec.step_timeout_s,
        spec.start_timeout_s,
        spec.given_profile,
        spec.probe_s,
        protected_folders(spec, script, workspace, job.id),
        spec.continue_training,
    )
    prepare_in_background()
    try:
        with placed_world(where, spec.cluster, spec.conditions, ranks, waiting) as world:
            decision = drive(job.id, spec, store, world, proposer, observers, began_s)
            if not spec.continue_training:
                world.close()
            finished = replace(
                _written(workspace, store, job, decision, tracker, proposer),
                logs=_other_folders(world.log_paths, ranks.log_directory),
            )
            if not spec.continue_training:
                return finished
            if world.ended_steps is not None:
                return replace(finished, trained=Trained(world.ended_steps))
            spectator.decided(finished)
            planned = store.history(job.id).planned(decision.strategy_id)
            return replace(finished, trained=_trained(world, planned, spectator))
    except LaunchError:
        tracker.flush()
        raise


def _other_folders(paths: Sequence[str], folder: Path) -> str:
    """The folders of `paths`, but for `folder`."""
    folders = {str(Path(path).parent) for path in paths} - {str(folder)}
    return ", ".join(sorted(folders)[:MAX_NAMED])


def _trained(world: World, planned: PlannedStrategy | None, spectator: Spectator) -> Trained:
    """Let the training go on to its end."""
    try:
        return world.train_on(planned.plan if planned else None, spectator.trained)
    except KeyboardInterrupt:
        world.terminate()
        raise


def _written(
    workspace: Workspace,
    store: Store,
    job: Job,
    decision: Decision,
    tracker: Tracker,
    proposer: Proposer,
) -> FinishedJob:
    history = store.history(job.id)
    decision = explained(decision, Explainer(history, job.spec.conditions))
    # Every result is written before the job is closed, so --resume repairs a kill in between.
    results = write_results(workspace, store, job.id, decision)
    trained, replays = proposer.finish(history), proposer.replay_settings(history)
    timelines = write_timelines(
        workspace.job(job.id) / TIMELINES, history, decision, job.spec.conditions
    )
    tracker.keep(trained, [results.export, results.report], replays, timelines)
    store.finish(job.id, decision)
    winner = history.in_words(decision.strategy_id)
    unsent = tracker.flush()
    rejected = tuple(store.outbox.rejected(job.id))
    return FinishedJob(decision, results, tracker.uri, unsent, winner, history, rejected=rejected)
