"""Every trial in MLflow, without ever holding up or failing the job.

A job is a run, a trial a run nested in it, a trained simulator a model in the registry. What is to be sent stands in the
store's outbox; items leave it in order, one by one, and an item is found again by its tags before it is created, so
that a repeated send changes nothing. When the server cannot be reached the items stay and a circuit breaker waits.
MLflow is used through explicit clients only: no active run, no global tracking URI.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from autotune.canonical import to_data
from autotune.errors import InvalidInput
from autotune.records import Conditions, Measured
from autotune.simulators.interface import Simulator
from autotune.storage.store import OutboxItem, Store
from autotune.tracking.logged_models import save_model
from autotune.tuning.events import Event, Profiled, Proposed, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.tuning.tuner import Instruction

RETRY_AFTER_S = 60.0
"""How long the breaker waits after a failure: a dead server then costs one timeout a minute."""
BETWEEN_TRIALS_S = 5.0
"""The most that sending may take while the workers wait; what is left goes with the next event."""
_BATCH = 800
"""A server takes 1000 metrics, parameters and tags together."""
_NEVER_TAKEN = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


def mlflow_environment(timeout_s: int = 5, retries: int = 1) -> dict[str, str]:
    """What the command line puts into its environment before MLflow is imported.

    MLflow takes these from nowhere else: short HTTP timeouts and few retries (the breaker is what retries), no
    telemetry, no progress bars and no chatter.
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
    """Sends one job's outbox; an observer of the driver. `artifact_dir` is used where the URI is no server's.

    Sending is synchronous and never raises for what MLflow does: see `Store.waiting` and `Store.rejected`.
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
        self._store, self._job_id = store, job_id
        self.uri, self._experiment, self._artifact_dir = tracking_uri, experiment, artifact_dir
        self._retry_after_s, self._clock = retry_after_s, clock
        self._open_until_s = float("-inf")
        self._sender: _Sender | None = None

    def started(self, instruction: Instruction, history: History) -> None:
        """Nothing to send yet."""

    def recorded(self, event: Event, history: History) -> None:
        """The event is in the outbox since it is in the store; send what fits in between two trials."""
        if self._clock() >= self._open_until_s:
            self._send(history, BETWEEN_TRIALS_S)

    def keep(self, trained: Mapping[str, Simulator], files: Sequence[Path]) -> None:
        """Queue the trained simulators and the files; `flush` sends them. Queueing them again changes nothing."""
        for name, simulator in trained.items():
            folder = self._store.path.parent / "unsent-models" / self._job_id / name
            shutil.rmtree(folder, ignore_errors=True)
            simulator.save(folder)
            self._store.enqueue(
                self._job_id, "model", {"name": name, "path": str(folder.resolve())}
            )
        for path in files:
            self._store.enqueue(self._job_id, "artifact", {"path": str(path.resolve())})

    def flush(self) -> int:
        """Send everything that waits, now, whatever the breaker says; the number of items that are left."""
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
        """False if the item has to wait."""
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError
        from urllib3.exceptions import HTTPError

        unreachable = (MlflowException, SQLAlchemyError, HTTPError, OSError)
        try:
            sender = self._sender = self._sender or _Sender(
                self._connect(), self._store, self._job_id
            )
        except unreachable:
            return False
        try:
            sender.send(item, history)
        except _Unsendable as error:
            self._store.mark_rejected(self._job_id, item.position, str(error))
            return True
        except unreachable as error:
            if getattr(error, "error_code", None) not in _NEVER_TAKEN:
                return False
            self._store.mark_rejected(self._job_id, item.position, str(error))
            return True
        self._store.mark_sent(self._job_id, item.position)
        return True

    def _connect(self) -> _Connection:
        """The client, the experiment and the job's run, found or made."""
        import mlflow

        client = mlflow.MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        found = client.get_experiment_by_name(self._experiment)
        if found is None:
            location = (
                None
                if self.uri.startswith(("http:", "https:"))
                else self._artifact_dir.resolve().as_uri()
            )
            experiment_id = client.create_experiment(self._experiment, artifact_location=location)
        else:
            experiment_id = found.experiment_id
        created_at = self._store.created_at(self._job_id)
        connection = _Connection(client, experiment_id, self._job_id, created_at)
        connection.parent_id = connection.run(
            "job", self._job_id, {"mlflow.source.name": "autotune"}, 0.0
        )
        return connection


class _Unsendable(Exception):
    """The item can never be sent, whatever the server says."""


class _Connection:
    """An MLflow client with the job's experiment. Runs are found by their tags before they are created."""

    def __init__(self, client: Any, experiment_id: str, job_id: str, created_at: datetime) -> None:
        self.client, self.experiment_id, self.job_id = client, experiment_id, job_id
        self._created_ms = int(created_at.timestamp() * 1000)
        self._runs: dict[str, str] = {}
        self.parent_id = ""

    def at_ms(self, elapsed_s: float) -> int:
        """The same for every repetition of a send, so that MLflow recognizes a metric that it has."""
        return self._created_ms + int(elapsed_s * 1000)

    def run(self, role: str, name: str, tags: dict[str, str], elapsed_s: float) -> str:
        """Id of the run that is tagged as this job's `role`."""
        if role not in self._runs:
            query = (
                f"tags.`autotune.tuning.job` = '{self.job_id}' and tags.`autotune.run` = '{role}'"
            )
            found = self.client.search_runs(
                [self.experiment_id], filter_string=query, max_results=1
            )
            if found:
                self._runs[role] = found[0].info.run_id
            else:
                tags = {"autotune.tuning.job": self.job_id, "autotune.run": role, **tags}
                run = self.client.create_run(
                    self.experiment_id, start_time=self.at_ms(elapsed_s), tags=tags, run_name=name
                )
                self._runs[role] = run.info.run_id
        return self._runs[role]

    def log(
        self,
        run_id: str,
        metrics: Sequence[tuple[str, float, int]] = (),
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
        elapsed_s: float = 0.0,
    ) -> None:
        """`metrics` are (key, value, step)."""
        from mlflow.entities import Metric, Param, RunTag

        points = [Metric(key, value, self.at_ms(elapsed_s), step) for key, value, step in metrics]
        self.client.log_batch(
            run_id,
            metrics=points[:_BATCH],
            params=[Param(key, str(value)[:6000]) for key, value in (params or {}).items()],
            tags=[RunTag(key, str(value)[:5000]) for key, value in (tags or {}).items()],
        )
        for first in range(_BATCH, len(points), _BATCH):
            self.client.log_batch(run_id, metrics=points[first : first + _BATCH])


def _condition_params(conditions: Conditions) -> dict[str, Any]:
    """What was real, beside every figure that a run shows."""
    params = to_data(conditions)
    return {name: params[name] for name in ("network", "accelerators", "byte_scale", "round_robin")}


class _Sender:
    """What each kind of item becomes in MLflow."""

    def __init__(self, connection: _Connection, store: Store, job_id: str) -> None:
        self._mlflow, self._store, self._job_id = connection, store, job_id
        self._spec: JobSpec = store.job(job_id)

    def send(self, item: OutboxItem, history: History) -> None:
        if item.kind == "event":
            upto = history.first(item.body["seq"] + 1)
            event = upto.events[-1]
            if isinstance(event, Profiled):
                self._profile(event)
            elif isinstance(event, Proposed):
                self._round(event)
            else:
                self._trial(event, upto)
        elif item.kind == "start":
            self._start()
        elif item.kind == "model":
            self._model(item)
        elif item.kind == "artifact":
            self._artifact(Path(item.body["path"]))
        else:
            assert item.kind == "finish", item.kind
            self._finish(history)

    def _start(self) -> None:
        data = self._spec.to_data()
        params = {
            key: value for key, value in data.items() if isinstance(value, str | bool | int | float)
        }
        params |= {
            "command": " ".join(self._spec.command),
            "simulators": " ".join(self._spec.simulators),
        }
        params |= {
            "cluster": self._spec.cluster.name,
            "cluster_id": self._spec.cluster.id,
        } | _condition_params(self._spec.conditions)
        self._mlflow.log(self._mlflow.parent_id, params=params)
        self._mlflow.client.log_dict(self._mlflow.parent_id, data, "job.json")

    def _profile(self, event: Profiled) -> None:
        workload = event.workload
        times = {
            "forward_s": workload.forward_s,
            "backward_s": workload.backward_s,
            "update_s": workload.update_s,
        }
        metrics = [
            (key, value, 0)
            for key, value in {**times, "grad_bytes": float(workload.grad_bytes)}.items()
        ]
        tags = {
            "autotune.model": workload.model,
            "autotune.model_id": workload.id,
            "autotune.device": workload.device,
        }
        tags |= {f"autotune.software.{name}": version for name, version in event.software.items()}
        self._mlflow.log(self._mlflow.parent_id, metrics, tags=tags, elapsed_s=event.elapsed_s)
        self._mlflow.client.log_dict(self._mlflow.parent_id, workload.to_data(), "workload.json")
        self._mlflow.client.log_dict(
            self._mlflow.parent_id, event.cluster.to_data(), "cluster.json"
        )

    def _round(self, event: Proposed) -> None:
        metrics: list[tuple[str, float, int]] = [
            ("considered", float(event.considered), event.round)
        ]
        for quality in event.quality:
            for key, value in to_data(quality).items():
                if isinstance(value, int | float):
                    metrics.append((f"ranking/{quality.ranker}/{key}", float(value), event.round))
        self._mlflow.log(self._mlflow.parent_id, metrics, elapsed_s=event.elapsed_s)
        proposals = [[p.strategy.id, p.origin, p.predicted_s] for p in event.proposals]
        summary = {
            "round": event.round,
            "ranker": event.ranker,
            "reason": event.reason,
            "proposals": proposals,
        }
        self._mlflow.client.log_dict(
            self._mlflow.parent_id, summary, f"rounds/{event.round:03d}.json"
        )

    def _trial(self, event: TrialFinished, upto: History) -> None:
        request, outcome = event.request, event.outcome
        began_s = upto.events[-2].elapsed_s
        name = f"{request.number:03d} {request.role.value} {request.strategy_id}"
        run_id = self._mlflow.run(
            f"trial-{request.number}", name, {"mlflow.parentRunId": self._mlflow.parent_id}, began_s
        )
        params = {
            "strategy_id": request.strategy_id,
            "role": request.role.value,
            "round": request.round,
            "attempt": request.attempt,
        }
        params["plan_id"] = event.plan_id or "none"
        params |= _condition_params(event.conditions)
        tags: dict[str, str] = {}
        metrics: list[tuple[str, float, int]] = []
        if request.predicted_s is not None:
            metrics.append(("predicted_s", request.predicted_s, 0))
        if isinstance(outcome, Measured):
            low, high = outcome.quartiles_s
            metrics += [
                ("median_s", outcome.median_s, 0),
                ("low_quartile_s", low, 0),
                ("high_quartile_s", high, 0),
            ]
            metrics += [
                ("step_s", float(value), step) for step, value in enumerate(outcome.slowest_s)
            ]
            if event.interval is not None:
                metrics += [
                    ("median_low_s", event.interval.low, 0),
                    ("median_high_s", event.interval.high, 0),
                ]
            if outcome.stopped is not None:
                tags["autotune.stopped"] = outcome.stopped.value
            if outcome.gradient_error is not None:
                metrics.append(("gradient_error", outcome.gradient_error, 0))
        else:
            tags = {
                "autotune.failure": outcome.kind.value,
                "autotune.failure_message": outcome.message,
            }
        params |= self._enacted(run_id, request.strategy_id, upto)
        self._mlflow.log(run_id, metrics, params, tags, event.elapsed_s)
        self._progress(event, upto)
        status = "FINISHED" if isinstance(outcome, Measured) else "FAILED"
        self._mlflow.client.set_terminated(run_id, status, self._mlflow.at_ms(event.elapsed_s))

    def _enacted(self, run_id: str, strategy_id: str, upto: History) -> dict[str, Any]:
        """The strategy and its plan as artifacts; what it is made of as parameters."""
        planned = upto.planned(strategy_id)
        if planned is None:
            return {}
        strategy, plan = planned.strategy, planned.plan
        self._mlflow.client.log_text(run_id, strategy.to_json(), "strategy.json")
        self._mlflow.client.log_text(run_id, plan.to_json(), "plan.json")
        counts: dict[str, int] = {}
        for message in plan.messages:
            counts[message.synchronizer.operation] = (
                counts.get(message.synchronizer.operation, 0) + 1
            )
        return {
            "origin": upto.proposals[strategy_id].origin,
            "messages": len(plan.messages),
            "primitives": ", ".join(f"{count} {name}" for name, count in sorted(counts.items())),
            "wire_bytes": plan.wire_bytes,
            "cross_step": plan.cross_step,
            "in_flight": plan.in_flight,
            "lossless": strategy.lossless,
        }

    def _progress(self, event: TrialFinished, upto: History) -> None:
        """The course of the search on the job's run, and the mark on trials that turned out to be disturbed."""
        number = event.request.number
        metrics: list[tuple[str, float, int]] = []
        if upto.reference_s is not None:
            metrics.append(("reference_s", upto.reference_s, number))
        if upto.ranking():
            metrics.append(("best_so_far_s", upto.ranking()[0][1], number))
        self._mlflow.log(self._mlflow.parent_id, metrics, elapsed_s=event.elapsed_s)
        before = upto.first(len(upto.events) - 1)
        for marked in sorted(upto.disturbed - before.disturbed):
            run_id = self._mlflow.run(
                f"trial-{marked}", "", {"mlflow.parentRunId": self._mlflow.parent_id}, 0.0
            )
            self._mlflow.log(run_id, tags={"autotune.disturbed": "true"})

    def _artifact(self, path: Path) -> None:
        if not path.is_file():
            raise _Unsendable(f"{path} is gone, so it cannot be sent")
        self._mlflow.client.log_artifact(self._mlflow.parent_id, str(path))

    def _model(self, item: OutboxItem) -> None:
        folder = Path(item.body["path"])
        if not folder.is_dir():
            raise _Unsendable(f"{folder} is gone, so the simulator cannot be sent")
        save_model(
            self._mlflow.client,
            self._mlflow.experiment_id,
            self._mlflow.parent_id,
            self._job_id,
            item.body["name"],
            folder,
        )
        shutil.rmtree(folder)

    def _finish(self, history: History) -> None:
        decision = self._store.decision(self._job_id)
        status = "FAILED" if decision is None else "FINISHED"
        if decision is not None:
            metrics = []
            if decision.comparison is not None:
                compared = decision.comparison
                metrics = [
                    ("time_ratio", compared.ratio, 0),
                    ("time_ratio_low", compared.low, 0),
                    ("time_ratio_high", compared.high, 0),
                ]
            tags = {"autotune.exported": decision.strategy_id, "autotune.reason": decision.reason}
            self._mlflow.log(
                self._mlflow.parent_id, metrics, tags=tags, elapsed_s=history.elapsed_s
            )
            self._mlflow.client.log_dict(self._mlflow.parent_id, to_data(decision), "decision.json")
        self._mlflow.client.set_terminated(
            self._mlflow.parent_id, status, self._mlflow.at_ms(history.elapsed_s)
        )
