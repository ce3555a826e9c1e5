"""`autotune tune`: the main job, from the command line to best.json, report and MLflow."""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Console

from autotune.canonical import to_data
from autotune.commands.progress import ConsoleProgress
from autotune.commands.results import decision_text, write_results
from autotune.commands.settings import read_ports, read_settings
from autotune.commands.workspace import Workspace, latest_job, new_job_id, use_mlflow_quietly
from autotune.driver import drive
from autotune.errors import InvalidInput
from autotune.job import JobSpec
from autotune.sampler.proposer import Proposer
from autotune.simulators.registry import simulators
from autotune.store import Store
from autotune.tracking import Tracker
from runtime_rewriter.command import read_command
from runtime_rewriter.ray_world import RayCluster, ray_world


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
    workspace = Workspace.create(options.directory)
    with Store.open(workspace.store_path) as store, _terminable():
        if options.resume is None:
            job = _Job(options.job or new_job_id(settings.script.name, datetime.now()), settings.spec, False)
            store.create_job(job.id, job.spec)
        else:
            job_id = options.resume or latest_job(store, unfinished=True)
            job = _Job(job_id, store.job(job_id), True)
            if store.job_status(job_id) != "running":
                raise InvalidInput(
                    f"job {job_id!r} has ended ({store.job_status(job_id)}); see `autotune show {job_id}`, or start a new one"
                )
        with store.lock(job.id):
            return _tune(options, ports, workspace, store, job)


def _tune(options: argparse.Namespace, ports: tuple[int, int], workspace: Workspace, store: Store, job: _Job) -> tuple[dict[str, Any], str]:
    console = Console(stderr=True)
    where = "resuming" if job.resumed else "tuning"
    console.print(
        f"{where} job [bold]{job.id}[/bold]: {' '.join(job.spec.command)} on {job.spec.workers} workers", highlight=False, soft_wrap=True
    )
    uri = options.tracking_uri or workspace.default_tracking_uri
    use_mlflow_quietly()
    tracker = Tracker(store, job.id, uri, options.experiment, workspace.artifacts)
    proposer = Proposer(job.spec, simulators())
    script = read_command(job.spec.command)
    with ConsoleProgress(job.spec, console) as progress, contextlib.ExitStack() as stack:
        cluster = RayCluster(options.address, job.spec.workers)
        stack.callback(cluster.close)
        world = ray_world(
            cluster,
            script,
            job.spec.workers,
            workspace.job(job.id) / "logs",
            job.spec.step_timeout_s,
            job.spec.start_timeout_s,
            ports,
        )
        stack.callback(world.close)
        decision = drive(job.id, job.spec, store, world, proposer, [progress, tracker])
    results = write_results(workspace, store, job.id)
    tracker.finish(proposer.trained, [results.export, results.report])
    data = {
        "job": job.id,
        "decision": to_data(decision),
        "best": str(results.export),
        "report": str(results.report),
        "tracking_uri": uri,
        "unsent_tracking_items": len(store.waiting(job.id)),
        "exit_status": 0,
    }
    return data, decision_text(decision, results, uri, len(store.waiting(job.id)), job.spec)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the job as Ctrl-C does: the workers are stopped and the job can be resumed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
