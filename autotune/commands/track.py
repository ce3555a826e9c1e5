"""`autotune track`: send to MLflow what a server that was down could not take while tuning."""

from __future__ import annotations

import argparse
from typing import Any

from autotune.jobs.workspace import Workspace, latest_job, use_mlflow_quietly
from autotune.storage.store import Store
from autotune.tracking.tracker import Tracker


def track(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Exit status 1 while something is still unsent."""
    workspace = Workspace.existing(options.directory)
    use_mlflow_quietly()
    uri = options.tracking_uri or workspace.default_tracking_uri
    with Store.open(workspace.store_path) as store:
        job_id = options.job or latest_job(store)
        before = len(store.waiting(job_id))
        left = Tracker(store, job_id, uri, options.experiment, workspace.artifacts).flush()
        refused = store.rejected(job_id)
    data = {
        "job": job_id,
        "sent": before - left,
        "unsent": left,
        "rejected": refused,
        "exit_status": int(left > 0),
    }
    text = f"{before - left} items of job {job_id} sent to {uri}"
    if left:
        text += f"; {left} are still unsent because the server cannot be reached"
    return data, text
