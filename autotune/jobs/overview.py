"""Everything known about one job, as data: its trials, decision, conditions and report."""

from __future__ import annotations

from typing import Any

from autotune.canonical import to_data
from autotune.jobs.results import job_report
from autotune.jobs.workspace import Workspace
from autotune.records import Decision
from autotune.storage.store import Store
from autotune.strategy_space.backend import backend_of
from autotune.tuning.events import TrialFinished
from autotune.tuning.history import History


def job_overview(
    workspace: Workspace, store: Store, job_id: str, history: History, decision: Decision | None
) -> dict[str, Any]:
    """JSON data of a job in any state. Writes the report of an undecided job anew, and nothing
    else."""
    spec = store.job(job_id)
    return {
        "job": job_id,
        "status": store.job_status(job_id),
        "decision": to_data(decision) if decision else None,
        "carrier": _backend(history, decision),
        "conditions": to_data(history.conditions(spec.conditions)),
        "cross_step_refused": history.profiled.cross_step_refused if history.profiled else None,
        "current_setup_s": history.reference_s,
        "reference_noise": history.reference_noise,
        "repeated": history.repeated,
        "trial_count": len(history.trials),
        "trials": [_trial(trial, history) for trial in history.trials],
        "report": str(job_report(workspace, spec, job_id, history, decision)),
    }


def _backend(history: History, decision: Decision | None) -> str | None:
    """The backend of the exported strategy, if there is one."""
    planned = history.planned(decision.strategy_id) if decision else None
    if planned is None or history.profiled is None:
        return None
    return backend_of(planned.plan, history.profiled.workload.variables)


def _trial(trial: TrialFinished, history: History) -> dict[str, Any]:
    """`interval` is the interval of the median step time, in seconds."""
    return {
        **to_data(trial),
        "disturbed": trial.request.number in history.disturbed,
        "interval": to_data(trial.interval),
    }
