"""An MLflow client bound to one job: its experiment, its runs, batched logging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

_BATCH = 800
"""Entries per request; a server accepts 1000 metrics, parameters and tags together."""

Metric = tuple[str, float, int]
"""Key, value and step."""


def is_local(uri: str) -> bool:
    """Whether MLflow keeps its runs in files of this machine."""
    return uri.startswith(("sqlite:", "file:")) or not (uri == "databricks" or "://" in uri)


class Connection:
    """Explicit client, no global tracking URI. Runs are looked up by their tags before creation.

    So a repeated send changes nothing.
    """

    def __init__(self, client: Any, experiment_id: str, job_id: str, created_at: datetime) -> None:
        self.client = client
        self.experiment_id = experiment_id
        self.job_id = job_id
        self._created_ms = int(created_at.timestamp() * 1000)
        self._run_ids: dict[str, str] = {}
        self._latest_id = ""
        self.parent_id = self.run("job", job_id, {"mlflow.source.name": "autotune"}, 0.0)

    @staticmethod
    def open(
        uri: str, experiment: str, artifact_dir: Path, job_id: str, created_at: datetime
    ) -> Connection:
        """Connect, and find or create the experiment and the job's run.

        `artifact_dir` is used if the URI is not a server's. Raises MLflow's exceptions.
        """
        import mlflow

        client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        existing = client.get_experiment_by_name(experiment)
        if existing is not None:
            return Connection(client, existing.experiment_id, job_id, created_at)
        served = uri.startswith(("http:", "https:", "databricks"))
        location = None if served else artifact_dir.resolve().as_uri()
        experiment_id = client.create_experiment(experiment, artifact_location=location)
        return Connection(client, experiment_id, job_id, created_at)

    def at_ms(self, elapsed_s: float) -> int:
        """The same time for every repetition of a send, so that MLflow recognizes a metric."""
        return self._created_ms + int(elapsed_s * 1000)

    def run(self, role: str, name: str, tags: dict[str, str], elapsed_s: float) -> str:
        """Find or create the run that is tagged as this job's `role`; return its id."""
        if role not in self._run_ids:
            # Another store may have a job with this id; both hardly began in one millisecond.
            keys = {
                "autotune.tuning.job": self.job_id,
                "autotune.tuning.created_ms": str(self._created_ms),
                "autotune.run": role,
            }
            query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in keys.items())
            runs = self.client.search_runs([self.experiment_id], filter_string=query, max_results=1)
            if not runs:
                start_ms = self.at_ms(elapsed_s)
                runs = [
                    self.client.create_run(
                        self.experiment_id, start_time=start_ms, tags=keys | tags, run_name=name
                    )
                ]
            self._run_ids[role] = runs[0].info.run_id
        self._latest_id = self._run_ids[role]
        return self._latest_id

    def has_lost_runs(self) -> bool:
        """Whether the job's run or the latest one was deleted since, as with their experiment.

        The others need not be asked: a request each would take longer than an item may.
        """
        runs = map(self.client.get_run, {self.parent_id, self._latest_id})
        return any(run.info.lifecycle_stage != "active" for run in runs)

    def trial_run(self, number: int, name: str = "", elapsed_s: float = 0.0) -> str:
        """Find or create the nested run of a trial; return its id."""
        return self.run(f"trial-{number}", name, {"mlflow.parentRunId": self.parent_id}, elapsed_s)

    def log(
        self,
        run_id: str,
        metrics: Sequence[Metric] = (),
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
        elapsed_s: float = 0.0,
    ) -> None:
        from mlflow import entities

        time_ms = self.at_ms(elapsed_s)
        points = [entities.Metric(key, value, time_ms, step) for key, value, step in metrics]
        self.client.log_batch(
            run_id,
            metrics=points[:_BATCH],
            params=[
                entities.Param(key, str(value)[:6000]) for key, value in (params or {}).items()
            ],
            tags=[entities.RunTag(key, str(value)[:5000]) for key, value in (tags or {}).items()],
        )
        for first in range(_BATCH, len(points), _BATCH):
            self.client.log_batch(run_id, metrics=points[first : first + _BATCH])

    def log_job(
        self,
        metrics: Sequence[Metric] = (),
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
        elapsed_s: float = 0.0,
    ) -> None:
        """Log to the job's own run."""
        self.log(self.parent_id, metrics, params, tags, elapsed_s)

    def log_file(self, data: Any, path: str) -> None:
        """Attach JSON data to the job's own run."""
        self.client.log_dict(self.parent_id, data, path)
