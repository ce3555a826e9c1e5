"""Sends each kind of outbox item to MLflow: jobs, events, models, files."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from autotune.canonical import to_data
from autotune.records import Conditions, Measured
from autotune.storage.store import OutboxItem, Store
from autotune.tracking.connection import Connection, Metric
from autotune.tracking.logged_models import save_model
from autotune.tuning.events import Profiled, Proposed, TrialFinished
from autotune.tuning.history import History


class Unsendable(Exception):
    """The item can never be sent, whatever the server answers."""


def _condition_params(conditions: Conditions) -> dict[str, Any]:
    """Conditions of the trials, as parameters of every run with figures."""
    params = to_data(conditions)
    return {name: params[name] for name in ("network", "accelerators", "byte_scale", "round_robin")}


class Sender:
    def __init__(self, connection: Connection, store: Store, job_id: str) -> None:
        self._mlflow = connection
        self._store = store
        self._job_id = job_id

    def send(self, item: OutboxItem, history: History) -> None:
        """Raises `Unsendable`, and MLflow's exceptions."""
        if item.kind == "event":
            until = history.first(item.body["seq"] + 1)
            event = until.events[-1]
            if isinstance(event, Profiled):
                self._profile(event)
            elif isinstance(event, Proposed):
                self._round(event)
            else:
                self._trial(event, until)
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
        spec = self._store.job(self._job_id)
        data = spec.to_data()
        scalars = {
            key: value for key, value in data.items() if isinstance(value, str | bool | int | float)
        }
        params = {
            **scalars,
            "command": " ".join(spec.command),
            "simulators": " ".join(spec.simulators),
            "cluster": spec.cluster.name,
            "cluster_id": spec.cluster.id,
            **_condition_params(spec.conditions),
        }
        self._mlflow.log_job(params=params)
        self._mlflow.log_file(data, "job.json")

    def _profile(self, event: Profiled) -> None:
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
        self._mlflow.log_job(metrics, tags=tags, elapsed_s=event.elapsed_s)
        self._mlflow.log_file(workload.to_data(), "workload.json")
        self._mlflow.log_file(event.cluster.to_data(), "cluster.json")

    def _round(self, event: Proposed) -> None:
        metrics: list[Metric] = [("considered", float(event.considered), event.round)]
        for quality in event.quality:
            metrics += [
                (f"ranking/{quality.ranker}/{key}", float(value), event.round)
                for key, value in to_data(quality).items()
                if isinstance(value, int | float)
            ]
        self._mlflow.log_job(metrics, elapsed_s=event.elapsed_s)
        summary = {
            "round": event.round,
            "ranker": event.ranker,
            "reason": event.reason,
            "proposals": [[p.strategy.id, p.origin, p.predicted_s] for p in event.proposals],
        }
        self._mlflow.log_file(summary, f"rounds/{event.round:03d}.json")

    def _trial(self, event: TrialFinished, until: History) -> None:
        request, outcome = event.request, event.outcome
        name = f"{request.number:03d} {request.role.value} {request.strategy_id}"
        run_id = self._mlflow.trial_run(request.number, name, until.events[-2].elapsed_s)
        params = {
            "strategy_id": request.strategy_id,
            "role": request.role.value,
            "round": request.round,
            "attempt": request.attempt,
            "plan_id": event.plan_id or "none",
            **_condition_params(event.conditions),
            **self._strategy(run_id, request.strategy_id, until),
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
        self._mlflow.log(run_id, metrics, params, tags, event.elapsed_s)
        self._progress(event, until)
        self._mlflow.client.set_terminated(run_id, status, self._mlflow.at_ms(event.elapsed_s))

    def _strategy(self, run_id: str, strategy_id: str, until: History) -> dict[str, Any]:
        """Attach the strategy and its plan; return their properties as parameters."""
        planned = until.planned(strategy_id)
        if planned is None:
            return {}
        strategy, plan = planned.strategy, planned.plan
        self._mlflow.client.log_text(run_id, strategy.to_json(), "strategy.json")
        self._mlflow.client.log_text(run_id, plan.to_json(), "plan.json")
        counts = Counter(message.synchronizer.operation for message in plan.messages)
        return {
            "origin": until.proposals[strategy_id].origin,
            "messages": len(plan.messages),
            "primitives": ", ".join(f"{count} {name}" for name, count in sorted(counts.items())),
            "wire_bytes": plan.wire_bytes,
            "cross_step": plan.cross_step,
            "in_flight": plan.in_flight,
            "lossless": strategy.lossless,
        }

    def _progress(self, event: TrialFinished, until: History) -> None:
        """Log the search's progress, and mark the trials that turned out to be disturbed."""
        number = event.request.number
        metrics: list[Metric] = []
        if until.reference_s is not None:
            metrics.append(("reference_s", until.reference_s, number))
        if until.ranking():
            metrics.append(("best_so_far_s", until.ranking()[0][1], number))
        self._mlflow.log_job(metrics, elapsed_s=event.elapsed_s)
        before = until.first(len(until.events) - 1)
        for marked in sorted(until.disturbed - before.disturbed):
            run_id = self._mlflow.trial_run(marked)
            self._mlflow.log(run_id, tags={"autotune.disturbed": "true"})

    def _artifact(self, path: Path) -> None:
        if not path.is_file():
            raise Unsendable(f"{path} is gone, so it cannot be sent")
        self._mlflow.client.log_artifact(self._mlflow.parent_id, str(path))

    def _model(self, item: OutboxItem) -> None:
        folder = Path(item.body["path"])
        if not folder.is_dir():
            raise Unsendable(f"{folder} is gone, so the simulator cannot be sent")
        save_model(self._mlflow, item.body["name"], folder)
        shutil.rmtree(folder)

    def _finish(self, history: History) -> None:
        decision = self._store.decision(self._job_id)
        if decision is not None:
            metrics: list[Metric] = []
            if decision.comparison is not None:
                comparison = decision.comparison
                metrics = [
                    ("time_ratio", comparison.ratio, 0),
                    ("time_ratio_low", comparison.low, 0),
                    ("time_ratio_high", comparison.high, 0),
                ]
            tags = {"autotune.exported": decision.strategy_id, "autotune.reason": decision.reason}
            self._mlflow.log_job(metrics, tags=tags, elapsed_s=history.elapsed_s)
            self._mlflow.log_file(to_data(decision), "decision.json")
        status = "FAILED" if decision is None else "FINISHED"
        end_ms = self._mlflow.at_ms(history.elapsed_s)
        self._mlflow.client.set_terminated(self._mlflow.parent_id, status, end_ms)


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
    if outcome.gradient_error is not None:
        metrics.append(("gradient_error", outcome.gradient_error, 0))
    return metrics
