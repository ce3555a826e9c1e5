"""`autotune track`: send to MLflow the results that an unreachable server missed while tuning."""

from __future__ import annotations

import argparse
from typing import Any

from autotune.commands.arguments import add_directory, add_tracking
from autotune.commands.render.names import first_line
from autotune.commands.render.rejected import PROBLEM_CHARACTERS, rejected_text
from autotune.jobs.tracking import Tracking, open_tracker
from autotune.jobs.workspace import Workspace, latest_job
from autotune.masking import masked
from autotune.storage.store import Store
from autotune.tracking.tracker import PATIENT_ITEM_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    add_tracking(parser)
    parser.add_argument("job", nargs="?", help="default: the latest job")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Send the outbox; exit status 1 while something is still unsent.

    Raises `InvalidInput` while another process drives the job, which sends its items itself.
    """
    workspace = Workspace.existing(options.directory)
    with Store.open(workspace.store_path) as store:
        job_id = options.job or latest_job(store)
        with store.lock(job_id):
            given = Tracking(options.tracking_uri, options.experiment)
            tracking = given.of_job(workspace, job_id)
            tracker = open_tracker(workspace, store, job_id, tracking, PATIENT_ITEM_S)
            before = len(store.outbox.waiting(job_id))
            rejected_before = len(store.outbox.rejected(job_id))
            left = tracker.flush(float("inf"))
            rejected = store.outbox.rejected(job_id)
            sent = before - left - (len(rejected) - rejected_before)
    data = {
        "job": job_id,
        "sent": sent,
        "unsent": left,
        "problem": tracker.problem,
        "rejected": rejected,
        "exit_status": int(left > 0),
    }
    text = f"{sent} items of job {job_id} sent to {masked(tracker.uri)}"
    if left:
        text += f"; {left} are still unsent: {first_line(tracker.problem, PROBLEM_CHARACTERS)}"
    if rejected:
        text += f"; {rejected_text(rejected)}"
    return data, text
