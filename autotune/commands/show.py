"""`autotune show`: the jobs of a directory, or one job's trials and decision."""

from __future__ import annotations

import argparse
from typing import Any

from rich.markup import escape
from rich.table import Table

from autotune.canonical import to_data
from autotune.commands.render.progress import first_line
from autotune.commands.render.tables import table_text
from autotune.jobs.results import taken_under, write_job_report
from autotune.jobs.workspace import Workspace
from autotune.records import CURRENT_SETUP, Decision, Measured
from autotune.storage.store import Store
from autotune.strategy_space.backend import carrier_of
from autotune.strategy_space.plan import plan
from autotune.tuning.events import TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.units import format_seconds


def show(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Read only, but for the report, which is written anew for a job in any state."""
    workspace = Workspace.existing(options.directory)
    with Store.open(workspace.store_path) as store:
        return _job(workspace, store, options.job) if options.job else _jobs(store)


def _jobs(store: Store) -> tuple[dict[str, Any], str]:
    table = Table("job", "created (UTC)", "status", "model", "trials")
    for job in store.jobs():
        table.add_row(job.id, job.created_at[:19], job.status, job.model or "-", str(job.trials))
    return {"jobs": to_data(store.jobs())}, table_text(table)


def _job(workspace: Workspace, store: Store, job_id: str) -> tuple[dict[str, Any], str]:
    history, decision = store.history(job_id), store.decision(job_id)
    table = Table(
        "trial",
        "role",
        "strategy",
        "origin",
        "measured",
        "95 %",
        "quartiles",
        "steps",
        "predicted",
        "note",
    )
    for trial in history.trials:
        table.add_row(*_row(trial, history))
    report = write_job_report(workspace, store, job_id, decision)
    carrier = _carrier(store.job(job_id), history, decision)
    data = {
        "job": job_id,
        "status": store.job_status(job_id),
        "decision": to_data(decision) if decision else None,
        "carrier": carrier,
        "conditions": to_data(history.conditions(store.job(job_id).conditions)),
        "cross_step_refused": history.profiled.cross_step_refused if history.profiled else None,
        "current_setup_s": history.reference_s,
        "reference_noise": history.reference_noise,
        "repeated": history.repeated,
        "trials": [_trial_data(trial, history) for trial in history.trials],
        "report": str(report),
    }
    tail = (
        decision.reason
        if decision
        else f"not finished ({history.quality}); `autotune tune --resume` goes on"
    )
    tail += taken_under(history.conditions(store.job(job_id).conditions)) + (
        f"; {carrier}" if carrier else ""
    )
    limits = f"{history.profiled.limits}\n" if history.profiled and history.profiled.limits else ""
    return data, table_text(
        table
    ) + f"{limits}{job_id} ({store.job_status(job_id)}): {tail}\nreport: {report}"


def _carrier(spec: JobSpec, history: History, decision: Decision | None) -> str | None:
    """Who carries out the exported strategy, if there is one."""
    if decision is None or decision.strategy_id == CURRENT_SETUP or history.profiled is None:
        return None
    workload = history.profiled.workload
    return carrier_of(
        plan(history.proposals[decision.strategy_id].strategy, workload, spec.workers),
        workload.variables,
    )


def _trial_data(trial: TrialFinished, history: History) -> dict[str, Any]:
    """`interval` is that of the median step time, in seconds."""
    return {
        **to_data(trial),
        "disturbed": trial.request.number in history.disturbed,
        "interval": to_data(trial.interval),
    }


def _row(trial: TrialFinished, history: History) -> tuple[str, ...]:
    request, outcome = trial.request, trial.outcome
    proposal = history.proposals.get(request.strategy_id)
    name = "current setup" if request.strategy_id == CURRENT_SETUP else request.strategy_id
    note = "disturbed" if request.number in history.disturbed else ""
    if isinstance(outcome, Measured):
        low, high = (format_seconds(value) for value in outcome.quartiles_s)
        error = f"± {trial.interval.half_width:.1%}" if trial.interval else ""
        steps = str(len(outcome.slowest_s)) + (
            f", {outcome.stopped.value}" if outcome.stopped else ""
        )
        figures = (format_seconds(outcome.median_s), error, f"{low} - {high}", steps)
    else:
        figures, note = ("failed", "", "", ""), f"{outcome.kind}: {first_line(outcome.message, 60)}"
    predicted = format_seconds(request.predicted_s) if request.predicted_s else ""
    cells = (
        str(request.number),
        request.role.value,
        name,
        proposal.origin if proposal else "",
        *figures,
        predicted,
        note,
    )
    return tuple(escape(cell) for cell in cells)
