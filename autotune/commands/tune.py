"""`autotune tune`: run or resume a tuning job."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.prompt import Confirm

from autotune.canonical import to_data
from autotune.commands.arguments import (
    add_directory,
    add_ray,
    add_settings,
    add_tracking,
    given_settings,
)
from autotune.commands.render.progress import ConsoleProgress
from autotune.commands.render.rejected import rejected_text
from autotune.commands.render.terminal import Terminal
from autotune.jobs.driver import Observer
from autotune.jobs.files import Ask, refuse_lost_checkpoints, with_agreed_writes
from autotune.jobs.places import Where, refuse_impossible
from autotune.jobs.processes import shell_status
from autotune.jobs.results import decision_text, job_facts, taken_under, training_text
from autotune.jobs.settings import read_ports, read_settings, refuse_settings
from autotune.jobs.signals import Interruption, terminable
from autotune.jobs.tracking import Tracking, open_tracker
from autotune.jobs.tune import FinishedJob, Job, created_job, resumed_job, run_job
from autotune.jobs.workspace import Workspace
from autotune.masking import masked
from autotune.storage.store import Store
from autotune.tracking.tracker import require_mlflow
from autotune.tuning.job import SETTINGS
from runtime_rewriter.world.results import Trained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(
        interrupted="interrupted; finished trials are kept, `autotune tune --resume` continues"
    )
    parser.add_argument(
        "job_file", nargs="?", type=Path, help="a job.yaml; options given here override it"
    )
    parser.add_argument("--job", help="id of the job (default: script name and time)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="JOB",
        help="continue JOB (default: the latest unfinished one that no process drives)",
    )
    add_directory(parser)
    add_ray(parser)
    parser.add_argument(
        "--shared-directory",
        action="store_true",
        help="the current directory exists on every host: do not send it",
    )
    add_tracking(parser)
    add_settings(parser)


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Run or resume a job; return the decision."""
    began_s = time.monotonic()
    require_mlflow()  # before anything is written
    where = Where(options.address, options.shared_directory, read_ports(options.master_ports))
    if options.resume is None:
        settings = read_settings(
            options.command, given_settings(options), options.job_file, options.address
        )
        refuse_impossible(settings.spec.cluster, settings.spec.conditions)
        refuse_lost_checkpoints(settings.spec, where)
        if options.address is None:  # other hosts make their views themselves
            settings = with_agreed_writes(settings, Workspace(options.directory), _question())
        workspace = Workspace.create(options.directory)
    else:
        refuse_settings(_given_options(options))
        workspace = Workspace.existing(options.directory)
    console = Terminal()
    with Store.open(workspace.store_path) as store, terminable() as interruption:
        if options.resume is None:
            locked = created_job(workspace, store, settings, options.job)
        else:
            locked = resumed_job(workspace, store, options.resume, options.address)
        with locked as job:
            if job.resumed:
                refuse_lost_checkpoints(job.spec, where)
            words = escape(" ".join(job.spec.command))
            under = escape(taken_under(job.spec.conditions))
            console.print(
                f"{'resuming' if job.resumed else 'tuning'} job [bold]{job.id}[/bold]: {words} "
                f"on {job.spec.workers} workers{under}",
                highlight=False,
                soft_wrap=True,
            )
            console.print(
                f"[dim]{escape(training_text(job.spec))}[/dim]", highlight=False, soft_wrap=True
            )
            given = Tracking(options.tracking_uri, options.experiment)
            if not job.resumed:
                given = given.with_environment(os.environ)
            tracking = given.of_job(workspace, job.id)
            tracker = open_tracker(workspace, store, job.id, tracking)
            tracking.keep(workspace, job.id)
            with ConsoleProgress(job.spec, console, began_s) as progress:
                observers: list[Observer] = [progress, tracker, interruption]
                training = _KeptTraining(job, options, progress, interruption)
                done = run_job(
                    *(workspace, store, job, where, tracker, observers, progress.waiting, began_s),
                    training,
                )
    data = {
        "job": job.id,
        "decision": to_data(done.decision),
        "winner": done.winner,
        "trial_count": len(done.history.trials),
        "best": str(done.results.export),
        "report": str(done.results.report),
        "tracking_uri": masked(done.uri),
        "unsent_tracking_items": done.unsent,
        "rejected_tracking_items": done.rejected,
        "files": job.spec.files,
        "training": to_data(done.trained) if done.trained else None,
        "exit_status": _exit_status(done.trained),
    }
    return data, _text(job, done)


def _text(job: Job, done: FinishedJob) -> str:
    facts = job_facts(done.history)
    if done.logs:
        facts.append(f"logs     {done.logs}, on the host of each rank")
    if done.rejected:
        facts.append(f"mlflow   {rejected_text(done.rejected)}")
    profiled = done.history.profiled
    return decision_text(
        done.decision,
        done.results,
        done.uri,
        done.unsent,
        job.spec,
        done.winner,
        done.trained,
        facts,
        profiled.cluster if profiled else None,
    )


def _exit_status(trained: Trained | None) -> int:
    """The script's own if its training was kept; a signal's as in a shell."""
    return shell_status(trained.exit_status) if trained else 0


class _KeptTraining:
    """Prints the decision and the further training, and obeys signals."""

    def __init__(
        self,
        job: Job,
        options: argparse.Namespace,
        progress: ConsoleProgress,
        interruption: Interruption,
    ) -> None:
        self._job, self._options = job, options
        self._progress, self._interruption = progress, interruption

    def decided(self, job: FinishedJob) -> None:
        self._options.interrupted = (
            "the training was interrupted; the job has ended with its results, and "
            f"{job.results.export} starts the training with them: `autotune run`"
        )
        self._progress.decided(_text(self._job, job))

    def trained(self, steps: int) -> None:
        self._interruption.obey()
        self._progress.trained(steps)


def _question() -> Ask | None:
    """A question on stderr, if there is a terminal to answer it."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    return lambda question: Confirm.ask(escape(question), console=Terminal(), default=False)


def _given_options(options: argparse.Namespace) -> list[str]:
    """The options of a resumed job that only a new one may have."""
    given = given_settings(options)
    names = [setting.option for setting in SETTINGS if setting.name in given]
    extra = {"--job": options.job, "the job file": options.job_file, "the command": options.command}
    return names + [name for name, value in extra.items() if value]
