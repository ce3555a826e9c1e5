"""The MLflow server and experiment of a job, as its user gave them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.canonical import to_data
from autotune.files import write_whole
from autotune.jobs.workspace import Workspace
from autotune.parsing import parse, read_json
from autotune.storage.store import Store
from autotune.tracking.tracker import ITEM_S, Tracker

TRACKING_FILE = "tracking.json"
"""In the job's folder, for its owner only: a URI may have a password."""
EXPERIMENT = "autotune"
URI_VARIABLE = "MLFLOW_TRACKING_URI"
"""MLflow's own variable for the tracking URI."""


@dataclass(frozen=True)
class Tracking:
    """An MLflow tracking URI and experiment.

    None if the user gave none: the workspace's own SQLite file, and `EXPERIMENT`.
    """

    __pydantic_config__ = {"extra": "forbid"}

    uri: str | None = None
    experiment: str | None = None

    def with_environment(self, environment: Mapping[str, str]) -> Tracking:
        """With the URI of MLflow's own variable where none was given."""
        return replace(self, uri=self.uri or environment.get(URI_VARIABLE) or None)

    def keep(self, workspace: Workspace, job_id: str) -> None:
        """Store with the job what was given, for `autotune track` and for resuming."""
        if self != Tracking():
            text = json.dumps(to_data(self))
            write_whole(_file(workspace, job_id), text, "the tracking URI", private=True)

    def of_job(self, workspace: Workspace, job_id: str) -> Tracking:
        """With the job's own values where none was given."""
        path = _file(workspace, job_id)
        stored = parse(Tracking, read_json(path), str(path)) if path.exists() else Tracking()
        return Tracking(self.uri or stored.uri, self.experiment or stored.experiment)


def _file(workspace: Workspace, job_id: str) -> Path:
    return workspace.job(job_id) / TRACKING_FILE


def open_tracker(
    workspace: Workspace, store: Store, job_id: str, tracking: Tracking, item_s: float = ITEM_S
) -> Tracker:
    uri = tracking.uri or workspace.default_tracking_uri
    experiment = tracking.experiment or EXPERIMENT
    return Tracker(store, job_id, uri, experiment, workspace.artifacts, item_s)
