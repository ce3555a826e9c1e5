"""`autotune track`: send to MLflow the results that an unreachable server missed while tuning."""

from __future__ import annotations

import argparse
from typing import Any

from autotune.commands.arguments import add_directory, add_tracking
from autotune.jobs.tune import open_tracker
from autotune.jobs.workspace import Workspace, latest_job
from autotune.storage.store import Store
from autotune.tracking.tracker import PATIENT_ITEM_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    add_tracking(parser)
    parser.add_argument("job", nargs="?", help="default: the latest job")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Send the outbox; exit status 1 while something is still unsent."""
    workspace = Workspace.existing(options.directory)
    with Store.open(workspace.store_path) as store:
        job_id = options.job or latest_job(store)
        before = len(store.outbox.waiting(job_id))
        where = options.tracking_uri, options.experiment
        tracker = open_tracker(workspace, store, job_id, *where, PATIENT_ITEM_S)
        left = tracker.flush(float("inf"))
        rejected = store.outbox.rejected(job_id)
    data = {
        "job": job_id,
        "sent": before - left,
        "unsent": left,
        "rejected": rejected,
        "exit_status": int(left > 0),
    }
    text = f"{before - left} items of job {job_id} sent to {tracker.uri}"
    if left:
        reason = "the server cannot be reached, or does not answer in time"
        text += f"; {left} are still unsent because {reason}"
    return data, text
