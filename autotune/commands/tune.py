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
from rich.markup import escape

from autotune.canonical import to_data
from autotune.commands.progress import ConsoleProgress
from autotune.commands.results import decision_text, write_results
from autotune.commands.settings import read_ports, read_settings, refuse_settings
from autotune.commands.workspace import Workspace, latest_job, new_job_id, use_mlflow_quietly
from autotune.driver import drive
from autotune.errors import InvalidInput, LaunchError
from autotune.job import JobSpec
from autotune.sampler.proposer import Proposer
from autotune.simulators.registry import simulators
from autotune.store import Store
from autotune.tracking import Tracker
from runtime_rewriter.command import read_command
from runtime_rewriter.ray_world import RayCluster, ray_world
from runtime_rewriter.world import World


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
    else:
        refuse_settings(options)
        workspace = Workspace.existing(options.directory)
    with Store.open(workspace.store_path) as store, _terminable():
        if options.resume is None:
            job = _Job(options.job or new_job_id(settings.script.name, datetime.now()), settings.spec, False)
            store.create_job(job.id, job.spec)
        else:
            job_id = options.resume or latest_job(store, unfinished=True)
            job = _Job(job_id, store.job(job_id), True)
        with store.lock(job.id):
            if store.job_status(job.id) != "running":
                ended = f"job {job.id!r} has ended ({store.job_status(job.id)})"
                raise InvalidInput(f"{ended}; see `autotune show {job.id}`, or start a new one")
            return _tune(options, ports, workspace, store, job)


def _tune(options: argparse.Namespace, ports: tuple[int, int], workspace: Workspace, store: Store, job: _Job) -> tuple[dict[str, Any], str]:
    console = Console(stderr=True)
    words = escape(" ".join(job.spec.command))
    console.print(
        f"{'resuming' if job.resumed else 'tuning'} job [bold]{job.id}[/bold]: {words} on {job.spec.workers} workers",
        highlight=False,
        soft_wrap=True,
    )
    uri = options.tracking_uri or workspace.default_tracking_uri
    use_mlflow_quietly()
    tracker = Tracker(store, job.id, uri, options.experiment, workspace.artifacts)
    proposer = Proposer(job.spec, simulators())
    try:
        with ConsoleProgress(job.spec, console) as progress, _world(options, ports, workspace, job) as world:
            decision = drive(job.id, job.spec, store, world, proposer, [progress, tracker])
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


@contextlib.contextmanager
def _world(options: argparse.Namespace, ports: tuple[int, int], workspace: Workspace, job: _Job) -> Iterator[World]:
    """The script's ranks on Ray; all of it ends with the block."""
    spec = job.spec
    cluster = RayCluster(options.address, spec.workers, options.shared_directory)
    try:
        command = read_command(spec.command)
        layout = tuple(host.devices for host in spec.cluster.hosts)
        if len(layout) == 1 and command.nodes > 1:
            layout = (spec.workers // command.nodes,) * command.nodes
        world = ray_world(
            cluster,
            command,
            spec.workers,
            workspace.job(job.id) / "logs",
            spec.step_timeout_s,
            spec.start_timeout_s,
            ports,
            layout if options.address else (),  # a private local cluster is one node, whatever it stands for
            tuple(host.address for host in spec.cluster.hosts),
        )
        try:
            yield world
        finally:
            world.close()
    finally:
        cluster.close()


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
