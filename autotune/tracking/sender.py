"""The requests of each kind of outbox item: jobs, events, models, files.

An item is prepared from the store and the history on the caller's thread. Its delivery only talks
to MLflow, so it may run, and be left behind, on another thread.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.canonical import to_data
from autotune.records import Conditions, Decision, Measured
from autotune.storage.outbox import OutboxItem
from autotune.storage.store import Store
from autotune.strategy_space.plan import PlannedStrategy
from autotune.tracking.connection import Connection, Metric
from autotune.tracking.logged_models import save_model
from autotune.tuning.events import Profiled, Proposed, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import NO_LIMIT_S, NO_LIMIT_TRIALS, JobSpec

Delivery = Callable[[Connection], None]
"""Sends one item. Raises `Unsendable`, and the exceptions of MLflow and of artifact stores."""


class Unsendable(Exception):
    """The item can never be sent, whatever the server answers."""


def _condition_params(conditions: Conditions) -> dict[str, Any]:
    """Conditions of the trials, as parameters of every run with figures."""
    params = to_data(conditions)
    return {name: params[name] for name in ("network", "accelerators", "byte_scale", "round_robin")}


class Sender:
    """Prepares the items of one job. Events must be asked for in order, to be cheap."""

    def __init__(self, store: Store, job_id: str) -> None:
        self._store = store
        self._job_id = job_id
        self._reached: History | None = None
        """The history until the last event that was prepared."""

    def delivery(self, item: OutboxItem, history: History) -> Delivery:
        """The requests of `item`; `history` holds its event."""
        if item.kind == "event":
            return self._event(item.body["seq"], history)
        if item.kind == "start":
            return _start(self._store.job(self._job_id))
        if item.kind == "model":
            return _model(item.body["name"], Path(item.body["path"]))
        if item.kind == "artifact":
            return _artifact(Path(item.body["path"]), item.body.get("trial"))
        assert item.kind == "finish", item.kind
        return _finish(self._store.decision(self._job_id), history)

    def _event(self, seq: int, history: History) -> Delivery:
        before, until = self._around(seq, history)
        event = until.events[-1]
        if isinstance(event, Profiled):
            return _profile(event)
        if isinstance(event, Proposed):
            return _round(event)
        return _trial(event, before, until)

    def _around(self, seq: int, history: History) -> tuple[History, History]:
        """The histories until event `seq`, without and with it."""
        reached = self._reached
        if reached is None or len(reached.events) not in (seq, seq + 1):
            reached = history.first(seq)
        if len(reached.events) == seq + 1:  # the event is sent again
            return history.first(seq), reached
        self._reached = reached.then(history.events[seq])
        return reached, self._reached


def _start(spec: JobSpec) -> Delivery:
    data = spec.to_data()
    scalars = {
        key: value for key, value in data.items() if isinstance(value, str | bool | int | float)
    }
    limits = {"max_trials": NO_LIMIT_TRIALS, "max_seconds": NO_LIMIT_S}
    params = {
        **{name: value for name, value in scalars.items() if value != limits.get(name)},
        "command": " ".join(spec.command),
        "simulators": " ".join(spec.simulators),
        "cluster": spec.cluster.name,
        "cluster_id": spec.cluster.id,
        **_condition_params(spec.conditions),
    }

    def deliver(mlflow: Connection) -> None:
        mlflow.log_job(params=params)
        mlflow.log_file(data, "job.json")

    return deliver


def _profile(event: Profiled) -> Delivery:
    workload = event.workload
    metrics: list[Metric] = [
        ("forward_s", workload.forward_s, 0),
        ("backward_s", workload.backward_s, 0),
        ("update_s", workload.update_s, 0),
        ("grad_bytes", float(workload.grad_bytes), 0),
    ]
    tags = {
        "autotune.model": workload.model,
        "autotune.model_id": workload.id,
        "autotune.device": workload.device,
        **{f"autotune.software.{name}": version for name, version in event.software.items()},
    }

    def deliver(mlflow: Connection) -> None:
        mlflow.log_job(metrics, tags=tags, elapsed_s=event.elapsed_s)
        mlflow.log_file(workload.to_data(), "workload.json")
        mlflow.log_file(event.cluster.to_data(), "cluster.json")

    return deliver


def _round(event: Proposed) -> Delivery:
    metrics: list[Metric] = [("considered", float(event.considered), event.round)]
    for quality in event.quality:
        metrics += [
            (f"ranking/{quality.ranker}/{key}", float(value), event.round)
            for key, value in to_data(quality).items()
            if isinstance(value, int | float)
        ]
    summary = {
        "round": event.round,
        "ranker": event.ranker,
        "reason": event.reason,
        "proposals": [[p.strategy.id, p.origin, p.predicted_s] for p in event.proposals],
    }

    def deliver(mlflow: Connection) -> None:
        mlflow.log_job(metrics, elapsed_s=event.elapsed_s)
        mlflow.log_file(summary, f"rounds/{event.round:03d}.json")

    return deliver


def _trial(event: TrialFinished, before: History, until: History) -> Delivery:
    request, outcome = event.request, event.outcome
    name = f"{request.number:03d} {request.role.value} {request.strategy_id}"
    planned = until.planned(request.strategy_id)
    origin = until.proposals[request.strategy_id].origin if planned else ""
    params = {
        "strategy_id": request.strategy_id,
        "role": request.role.value,
        "round": request.round,
        "attempt": request.attempt,
        "plan_id": event.plan_id or "none",
        **_condition_params(event.conditions),
        **(_strategy_params(planned, origin) if planned else {}),
    }
    metrics: list[Metric] = []
    if request.predicted_s is not None:
        metrics.append(("predicted_s", request.predicted_s, 0))
    if isinstance(outcome, Measured):
        status, tags = "FINISHED", {}
        metrics += _measured_metrics(event, outcome)
        if outcome.stopped is not None:
            tags["autotune.stopped"] = outcome.stopped.value
    else:
        status, tags = "FAILED", {"autotune.failure": outcome.kind.value}
        tags["autotune.failure_message"] = outcome.message
    progress = _progress_metrics(request.number, until)
    disturbed = sorted(until.disturbed - before.disturbed)

    def deliver(mlflow: Connection) -> None:
        run_id = mlflow.trial_run(request.number, name, before.elapsed_s)
        if planned is not None:
            mlflow.client.log_text(run_id, planned.strategy.to_json(), "strategy.json")
            mlflow.client.log_text(run_id, planned.plan.to_json(), "plan.json")
        mlflow.log(run_id, metrics, params, tags, event.elapsed_s)
        mlflow.log_job(progress, elapsed_s=event.elapsed_s)
        for marked in disturbed:
            mlflow.log(mlflow.trial_run(marked), tags={"autotune.disturbed": "true"})
        mlflow.client.set_terminated(run_id, status, mlflow.at_ms(event.elapsed_s))

    return deliver


def _strategy_params(planned: PlannedStrategy, origin: str) -> dict[str, Any]:
    """Properties of a strategy and its plan, as parameters."""
    plan = planned.plan
    counts = Counter(message.synchronizer.operation for message in plan.messages)
    return {
        "origin": origin,
        "messages": len(plan.messages),
        "primitives": ", ".join(f"{count} {name}" for name, count in sorted(counts.items())),
        "wire_bytes": plan.wire_bytes,
        "cross_step": plan.cross_step,
        "in_flight": plan.in_flight,
        "lossless": planned.strategy.lossless,
    }


def _progress_metrics(number: int, until: History) -> list[Metric]:
    """The search's progress after trial `number`."""
    metrics: list[Metric] = []
    if until.reference_s is not None:
        metrics.append(("reference_s", until.reference_s, number))
    if until.fastest_s is not None:
        metrics.append(("best_so_far_s", until.fastest_s, number))
    return metrics


def _artifact(path: Path, trial: int | None) -> Delivery:
    """A file of the job's own run, or of a trial's."""

    def deliver(mlflow: Connection) -> None:
        if not path.is_file():
            raise Unsendable(f"{path} is gone, so it cannot be sent")
        run_id = mlflow.parent_id if trial is None else mlflow.trial_run(trial)
        mlflow.client.log_artifact(run_id, str(path))

    return deliver


def _model(name: str, folder: Path) -> Delivery:
    def deliver(mlflow: Connection) -> None:
        from mlflow.exceptions import MlflowException

        if not folder.is_dir():
            raise Unsendable(f"{folder} is gone, so the simulator cannot be sent")
        try:
            save_model(mlflow, name, folder)
        except MlflowException as error:
            if error.error_code == "ENDPOINT_NOT_FOUND":
                raise Unsendable("the server has no logged models, as of MLflow 3") from error
            raise

    return deliver


def discard(item: OutboxItem) -> None:
    """Delete the folder of a model that is marked as sent or rejected.

    A delivery does not delete it: one that was left behind ends while the item still waits.
    """
    if item.kind != "model":
        return
    folder = Path(item.body["path"])
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # other models wait in them
        folder.parent.rmdir()
        folder.parent.parent.rmdir()


def _finish(decision: Decision | None, history: History) -> Delivery:
    status = "FAILED" if decision is None else "FINISHED"
    elapsed_s = history.elapsed_s
    metrics: list[Metric] = [("trials", float(len(history.trials)), 0)]
    if decision is not None and decision.comparison is not None:
        comparison = decision.comparison
        metrics.append(("time_ratio", comparison.ratio, 0))
        if comparison.bounded:
            metrics.append(("time_ratio_low", comparison.low, 0))
            metrics.append(("time_ratio_high", comparison.high, 0))

    def deliver(mlflow: Connection) -> None:
        if decision is not None:
            tags = {"autotune.exported": decision.strategy_id, "autotune.reason": decision.reason}
            mlflow.log_job(metrics, tags=tags, elapsed_s=elapsed_s)
            mlflow.log_file(to_data(decision), "decision.json")
        mlflow.client.set_terminated(mlflow.parent_id, status, mlflow.at_ms(elapsed_s))

    return deliver


def _measured_metrics(event: TrialFinished, outcome: Measured) -> list[Metric]:
    low_s, high_s = outcome.quartiles_s
    metrics: list[Metric] = [
        ("median_s", outcome.median_s, 0),
        ("low_quartile_s", low_s, 0),
        ("high_quartile_s", high_s, 0),
        *(("step_s", float(value), step) for step, value in enumerate(outcome.slowest_s)),
    ]
    if event.interval is not None:
        metrics.append(("median_low_s", event.interval.low, 0))
        metrics.append(("median_high_s", event.interval.high, 0))
    if outcome.overrun is not None:
        metrics.append(("overrun", outcome.overrun, 0))
    if outcome.gradient_error is not None:
        metrics.append(("gradient_error", outcome.gradient_error, 0))
    return metrics
