"""Sends every trial to MLflow without delaying or failing the job.

A job is a run, a trial is a run nested in it, and a trained simulator is a model in the registry.
Items to send are in the store's outbox and leave it in order. If the server cannot be reached, the
items stay, and a circuit breaker waits before the next attempt.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.simulators.interface import Simulator
from autotune.storage.store import OutboxItem, Store
from autotune.tracking.connection import Connection
from autotune.tracking.sender import Sender, Unsendable
from autotune.tuning.events import Event
from autotune.tuning.history import History
from autotune.tuning.tuner import Instruction

RETRY_AFTER_S = 60.0
"""Wait of the breaker after a failure: a dead server then costs one timeout a minute."""
BETWEEN_TRIALS_S = 5.0
"""Maximum time for sending while the workers wait; the rest is sent after the next event."""
_NEVER_ACCEPTED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


def mlflow_environment(timeout_s: int = 5, retries: int = 1) -> dict[str, str]:
    """Environment variables that the command line sets before MLflow is imported.

    MLflow has no other source for them: short HTTP timeouts, few retries (the breaker retries), no
    telemetry, progress bars or chatter.
    """
    return {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(timeout_s),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(retries),
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }


class Tracker:
    """Sends one job's outbox; an observer of the driver.

    Files go to `artifact_dir` if the URI is not a server's. Sending is synchronous and raises
    nothing that MLflow raises: see `Store.waiting` and `Store.rejected`.
    """

    def __init__(
        self,
        store: Store,
        job_id: str,
        tracking_uri: str,
        experiment: str,
        artifact_dir: Path,
        retry_after_s: float = RETRY_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise InvalidInput(
                "tracking needs MLflow, which is not installed; run: pip install 'autotune[mlflow]'"
            )
        self.uri = tracking_uri
        self._store = store
        self._job_id = job_id
        self._experiment = experiment
        self._artifact_dir = artifact_dir
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._open_until_s = float("-inf")
        self._sender: Sender | None = None

    def started(self, instruction: Instruction, history: History) -> None:
        """Do nothing: there is no event yet."""

    def recorded(self, event: Event, history: History) -> None:
        """Send the outbox, for as long as fits between two trials; it holds the event already."""
        if self._clock() >= self._open_until_s:
            self._send(history, BETWEEN_TRIALS_S)

    def keep(self, trained: Mapping[str, Simulator], files: Sequence[Path]) -> None:
        """Queue trained simulators and files for `flush`. Queueing them again changes nothing."""
        for name, simulator in trained.items():
            folder = self._store.path.parent / "unsent-models" / self._job_id / name
            shutil.rmtree(folder, ignore_errors=True)
            simulator.save(folder)
            body = {"name": name, "path": str(folder.resolve())}
            self._store.enqueue(self._job_id, "model", body)
        for path in files:
            self._store.enqueue(self._job_id, "artifact", {"path": str(path.resolve())})

    def flush(self) -> int:
        """Send all waiting items now, ignoring the breaker; return the number of items left."""
        self._send(self._store.history(self._job_id), float("inf"))
        return len(self._store.waiting(self._job_id))

    def _send(self, history: History, limit_s: float) -> None:
        began_s = self._clock()
        for item in self._store.waiting(self._job_id):
            if self._clock() - began_s > limit_s:
                return
            if not self._send_item(item, history):
                self._open_until_s = self._clock() + self._retry_after_s
                return

    def _send_item(self, item: OutboxItem, history: History) -> bool:
        """Return False if the item has to wait."""
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError
        from urllib3.exceptions import HTTPError

        unreachable = (MlflowException, SQLAlchemyError, HTTPError, OSError)
        try:
            if self._sender is None:
                self._sender = Sender(self._connect(), self._store, self._job_id)
        except unreachable:
            return False
        try:
            self._sender.send(item, history)
        except (Unsendable, *unreachable) as error:
            code = getattr(error, "error_code", None)
            if not isinstance(error, Unsendable) and code not in _NEVER_ACCEPTED:
                return False
            self._store.mark_rejected(self._job_id, item.position, str(error))
            return True
        self._store.mark_sent(self._job_id, item.position)
        return True

    def _connect(self) -> Connection:
        created_at = self._store.created_at(self._job_id)
        return Connection.open(
            self.uri, self._experiment, self._artifact_dir, self._job_id, created_at
        )
