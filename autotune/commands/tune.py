"""`autotune tune`: the main job, from the command line to best.json, report and MLflow."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.markup import escape

from autotune.canonical import to_data
from autotune.commands.render.progress import ConsoleProgress
from autotune.commands.settings import read_ports, read_settings, refuse_settings
from autotune.errors import InvalidInput, LaunchError
from autotune.jobs.driver import drive
from autotune.jobs.places import Ranks, Where, placed_world, refuse_elsewhere, refuse_impossible
from autotune.jobs.results import decision_text, taken_under, write_results
from autotune.jobs.signals import Interruption, terminable
from autotune.jobs.workspace import Workspace, latest_job, new_job_id, use_mlflow_quietly
from autotune.sampler.proposer import Proposer
from autotune.simulators.registry import SIMULATORS
from autotune.storage.store import Store
from autotune.tracking.tracker import Tracker
from autotune.tuning.job import JobSpec
from runtime_rewriter.world.command import read_command


@dataclass(frozen=True)
class _Job:
    id: str
    spec: JobSpec
    resumed: bool


def tune(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Run or resume a job; returns what was decided."""
    ports = read_ports(options.master_ports)
    if options.resume is None:
        settings = read_settings(options)  # before anything is written
        refuse_impossible(settings.spec.cluster, settings.spec.conditions)
        workspace = Workspace.create(options.directory)
    else:
        refuse_settings(options)
        workspace = Workspace.existing(options.directory)
    with Store.open(workspace.store_path) as store, terminable() as interruption:
        if options.resume is None:
            job = _Job(
                options.job or new_job_id(settings.script.name, datetime.now()),
                settings.spec,
                False,
            )
            store.create_job(job.id, job.spec)
        else:
            job_id = options.resume or latest_job(store, unfinished=True)
            job = _Job(job_id, store.job(job_id), True)
            refuse_elsewhere(job.spec.conditions, options.address)
        with store.lock(job.id):
            if store.job_status(job.id) != "running":
                ended = f"job {job.id!r} has ended ({store.job_status(job.id)})"
                raise InvalidInput(f"{ended}; see `autotune show {job.id}`, or start a new one")
            return _tune(options, ports, workspace, store, job, interruption)


def _tune(
    options: argparse.Namespace,
    ports: tuple[int, int],
    workspace: Workspace,
    store: Store,
    job: _Job,
    interruption: Interruption,
) -> tuple[dict[str, Any], str]:
    console = Console(stderr=True)
    words, under = escape(" ".join(job.spec.command)), escape(taken_under(job.spec.conditions))
    console.print(
        f"{'resuming' if job.resumed else 'tuning'} job [bold]{job.id}[/bold]: {words} on {job.spec.workers} workers{under}",
        highlight=False,
        soft_wrap=True,
    )
    uri = options.tracking_uri or workspace.default_tracking_uri
    use_mlflow_quietly()
    tracker = Tracker(store, job.id, uri, options.experiment, workspace.artifacts)
    proposer = Proposer(job.spec, SIMULATORS)
    try:
        where = Where(options.address, options.shared_directory, ports)
        with (
            ConsoleProgress(job.spec, console) as progress,
            placed_world(
                where,
                job.spec.cluster,
                job.spec.conditions,
                _ranks(workspace, job),
                progress.waiting,
            ) as world,
        ):
            decision = drive(
                job.id, job.spec, store, world, proposer, [progress, tracker, interruption]
            )
    except LaunchError:
        tracker.flush()
        raise
    # All that the job leaves behind is safe before it is closed: a kill in between is mended by --resume.
    results = write_results(workspace, store, job.id, decision)
    tracker.keep(proposer.finish(store.history(job.id)), [results.export, results.report])
    store.finish(job.id, decision)
    unsent = tracker.flush()
    data = {
        "job": job.id,
        "decision": to_data(decision),
        "best": str(results.export),
        "report": str(results.report),
        "tracking_uri": uri,
        "unsent_tracking_items": unsent,
        "exit_status": 0,
    }
    return data, decision_text(decision, results, uri, unsent, job.spec)


def _ranks(workspace: Workspace, job: _Job) -> Ranks:
    spec = job.spec
    logs = workspace.job(job.id) / "logs"
    limits = (spec.step_timeout_s, spec.start_timeout_s)
    return Ranks(
        read_command(spec.command), spec.workers, logs, *limits, spec.given_profile, spec.probe_s
    )
