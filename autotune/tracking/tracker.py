"""Sends every trial to MLflow without delaying or failing the job.

A job is a run, a trial is a run nested in it, and a trained simulator is a model in the registry.
Items to send are in the store's outbox and leave it in order. If the server cannot be reached, or
does not take an item by its deadline, the items stay, and a circuit breaker waits before the next
attempt.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

from autotune.deadlines import Call, Overdue
from autotune.errors import MissingExtra, install_extra
from autotune.garbage import collection_paused
from autotune.masking import masked
from autotune.simulators.interface import Simulator
from autotune.simulators.replay_settings import ReplaySettings
from autotune.storage.outbox import OutboxItem
from autotune.storage.store import Store
from autotune.tracking.connection import Connection, is_local
from autotune.tracking.home_network import HomeNetwork
from autotune.tracking.sender import Delivery, Sender, Unsendable, discard
from autotune.tuning.events import Event
from autotune.tuning.history import History
from autotune.tuning.instructions import Instruction

RETRY_AFTER_S = 60.0
"""Wait of the breaker after a failure: a dead server then costs one timeout a minute."""
BETWEEN_TRIALS_S = 5.0
"""Maximum time for sending while the workers wait; the rest is sent after the next event."""
ITEM_S = 15.0
"""Time for a server to take an item, whose requests have 5 s each (`mlflow_environment`) only
between two bytes."""
PATIENT_ITEM_S = 300.0
"""The same where nothing waits for it, and for local files: MLflow creates its database at the
first item, in 40 s on two busy cores."""
FLUSH_S = 30.0
"""Time at the end of a job in which items are begun; `autotune track` sends the rest."""
_NEVER_ACCEPTED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
_GONE = "RESOURCE_DOES_NOT_EXIST"
"""MLflow's error code for a run or an experiment that was deleted for good."""
_TOO_LARGE = 413
"""HTTP status of a proxy that limits requests."""


def mlflow_environment(timeout_s: int = 5, retries: int = 0) -> dict[str, str]:
    """Environment variables for our own use of MLflow, which has no other source for them.

    Short HTTP timeouts, no telemetry, progress bars or chatter. No retries: MLflow would repeat a
    request that creates a run and was only answered late, too. The breaker retries, and looks
    first.
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


def _use_mlflow_quietly() -> None:
    """Set `mlflow_environment`, in which the user's values stay, before MLflow is imported.

    The ranks have started by then: their scripts may use MLflow, too, with its own values.
    """
    for name, value in mlflow_environment().items():
        os.environ.setdefault(name, value)


def require_mlflow() -> None:
    """Raise `MissingExtra` if MLflow is not installed."""
    if importlib.util.find_spec("mlflow") is None:
        raise MissingExtra(
            f"tracking needs MLflow, which is not installed; {install_extra('mlflow')}"
        )


class _Unreachable(Exception):
    """The server did not take an item, but may later; the text is its reason."""


class Tracker:
    """Sends one job's outbox; an observer of the driver.

    It sends from the network in which it is created. Files go to `artifact_dir` if the URI is not
    a server's. Sending raises nothing that MLflow and its clients of artifact stores raise: see
    `problem`, `Outbox.waiting` and `Outbox.rejected`. It takes at most `item_s` per item. An item
    that takes longer is left behind on its thread, and no other is sent until the thread has ended.
    """

    def __init__(
        self,
        store: Store,
        job_id: str,
        tracking_uri: str,
        experiment: str,
        artifact_dir: Path,
        item_s: float = ITEM_S,
        retry_after_s: float = RETRY_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_mlflow()
        self.uri = tracking_uri
        self.problem = ""
        """The reason why the last item had to wait; empty if it was sent."""
        self._store = store
        self._job_id = job_id
        self._experiment = experiment
        self._artifact_dir = artifact_dir
        self._item_s = max(item_s, PATIENT_ITEM_S) if is_local(tracking_uri) else item_s
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._open_until_s = float("-inf")
        self._sender = Sender(store, job_id)
        self._network = HomeNetwork()
        self._connection: Connection | None = None
        self._late: Call[str] | None = None

    def started(self, instruction: Instruction, history: History) -> None:
        """Do nothing: there is no event yet."""

    def recorded(self, event: Event, history: History) -> None:
        """Send the outbox, for as long as fits between two trials; it holds the event already.

        Nothing is sent before the first candidate trial, which would wait for MLflow's import.
        """
        if history.candidates and self._clock() >= self._open_until_s:
            self._send(history, BETWEEN_TRIALS_S)

    def keep(
        self,
        trained: Mapping[str, Simulator],
        files: Sequence[Path],
        replays: ReplaySettings,
        of_trials: Mapping[int, Path] = MappingProxyType({}),
    ) -> None:
        """Queue trained simulators and files for `flush`. Queueing them again changes nothing.

        `replays`: those from which the simulators learned. `of_trials`: number of a trial -> a file
        for its run.
        """
        for name, simulator in trained.items():
            folder = self._store.path.parent / "unsent-models" / self._job_id / name
            shutil.rmtree(folder, ignore_errors=True)
            simulator.save(folder)
            replays.save(folder)
            body = {"name": name, "path": str(folder.resolve())}
            self._store.outbox.enqueue(self._job_id, "model", body)
        for path in files:
            self._store.outbox.enqueue(self._job_id, "artifact", {"path": str(path.resolve())})
        for number, path in of_trials.items():
            timeline = {"path": str(path.resolve()), "trial": number}
            self._store.outbox.enqueue(self._job_id, "artifact", timeline)

    def flush(self, limit_s: float = FLUSH_S) -> int:
        """Send the waiting items, ignoring the breaker; return the number of items left.

        No item is begun after `limit_s`.
        """
        self._send(self._store.history(self._job_id), limit_s)
        return len(self._store.outbox.waiting(self._job_id))

    def _send(self, history: History, limit_s: float) -> None:
        began_s = self._clock()
        for item in self._store.outbox.waiting(self._job_id):
            if self._clock() - began_s > limit_s:
                return
            if not self._send_item(item, history):
                self._open_until_s = self._clock() + self._retry_after_s
                return

    def _send_item(self, item: OutboxItem, history: History) -> bool:
        """Return False if the item has to wait."""
        _use_mlflow_quietly()
        try:
            with collection_paused():
                import mlflow.exceptions  # noqa: F401 - takes seconds, which are not the server's
        except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
            self.problem = f"MLflow cannot be imported: {type(error).__name__}: {error}"
            return False
        if self._late is not None and self._late.running:
            return False
        delivery = self._sender.delivery(item, history)
        created_at = self._store.created_at(self._job_id)
        call = Call(lambda: self._deliver(delivery, created_at))
        try:
            rejection = call.result(self._item_s)
        except _Unreachable as error:
            self.problem = str(error)
            return False
        except Overdue:
            self.problem = f"it did not answer within {self._item_s:g} s"
            self._late = call
            return False
        self.problem = ""
        if rejection:
            self._store.outbox.mark_rejected(self._job_id, item.position, rejection)
        else:
            self._store.outbox.mark_sent(self._job_id, item.position)
        discard(item)
        return True

    def _deliver(self, delivery: Delivery, created_at: datetime) -> str:
        """Send an item; return the reason if it can never be sent. Raises `_Unreachable`.

        It runs on another thread, so it does not use the store.
        """
        try:
            self._network.enter()
            if self._connection is None:
                self._connection = Connection.open(
                    self.uri, self._experiment, self._artifact_dir, self._job_id, created_at
                )
            delivery(self._connection)
        except Unsendable as error:
            return str(error)
        except Exception as error:  # MLflow's, its database's, and those of any artifact store
            code = getattr(error, "error_code", None)
            if self._connection is not None and (code in _NEVER_ACCEPTED or _is_too_large(error)):
                if not self._runs_are_lost(self._connection):
                    return str(error)
                code = _GONE
            if code == _GONE:
                self._connection = None  # the next one looks for the runs anew
            raise _Unreachable(masked(f"{type(error).__name__}: {error}")) from error
        return ""

    @staticmethod
    def _runs_are_lost(connection: Connection) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return connection.has_lost_runs()
        except MlflowException:  # a run that was deleted for good, say
            return True


def _is_too_large(error: Exception) -> bool:
    """Whether a proxy refused a request for its size, by MLflow's client or by `requests`."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status == _TOO_LARGE or f"error code {_TOO_LARGE}" in str(error)
