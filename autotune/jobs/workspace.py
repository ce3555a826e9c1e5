"""The directory of jobs: the trial store, MLflow's files and a folder per job."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.parsing import check_utf8
from autotune.storage.store import Store

MOST_OF_THE_NAME = 80
"""Characters of a script's name in a job's id, which may have 100."""


@dataclass(frozen=True)
class Workspace:
    """`directory` holds autotune.db, mlflow.db, mlflow-artifacts/ and a folder per job.

    A job's folder holds best.json, report.html, timelines/ and logs/.
    """

    directory: Path

    @staticmethod
    def create(directory: Path) -> Workspace:
        """Create the directory; raises `InvalidInput` if it cannot be written."""
        check_utf8("the path of --directory", str(directory.resolve()))
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(
                f"jobs are stored in {directory}, but it cannot be created ({error.strerror}); "
                "choose another --directory"
            ) from error
        if not os.access(directory, os.W_OK):
            raise InvalidInput(
                f"jobs are stored in {directory}, but it is read-only; choose another --directory"
            )
        return Workspace(directory)

    @staticmethod
    def existing(directory: Path) -> Workspace:
        check_utf8("the path of --directory", str(directory.resolve()))
        if not (directory / "autotune.db").is_file():
            raise InvalidInput(
                f"{directory} holds no jobs (no autotune.db); run `autotune tune` first, or give "
                "the right --directory"
            )
        return Workspace(directory)

    @property
    def store_path(self) -> Path:
        return self.directory / "autotune.db"

    @property
    def default_tracking_uri(self) -> str:
        return f"sqlite:///{(self.directory / 'mlflow.db').resolve()}"

    @property
    def artifacts(self) -> Path:
        return self.directory / "mlflow-artifacts"

    def job(self, job_id: str) -> Path:
        """The job's folder, which the first file in it creates."""
        return self.directory / job_id


def latest_job(store: Store) -> str:
    """The newest job's id; raises `InvalidInput` if there is none."""
    jobs = store.jobs()
    if not jobs:
        raise _without("job", store)
    return jobs[-1].id


def job_to_resume(store: Store) -> str:
    """The newest unfinished job that no process drives; raises `InvalidInput` if there is none."""
    unfinished = [job.id for job in store.jobs() if job.status == "running"]
    if not unfinished:
        raise _without("unfinished job", store)
    for job_id in reversed(unfinished):
        if not store.is_driven(job_id):
            return job_id
    raise InvalidInput(
        f"every unfinished job in {store.path} is being driven by another process "
        f"({', '.join(unfinished)}); wait for it, or stop it and resume"
    )


def _without(what: str, store: Store) -> InvalidInput:
    return InvalidInput(
        f"there is no {what} in {store.path}; start one with "
        "`autotune tune -- torchrun ... train.py`"
    )


def new_job_id(script_name: str, now: datetime) -> str:
    """The id of a job of this script: the part of its name that an id may have, and the time."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", script_name).lstrip("._-")[:MOST_OF_THE_NAME]
    return f"{name or 'job'}-{now:%Y%m%d-%H%M%S}"
