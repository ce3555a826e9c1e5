"""Everything known about one job: for `autotune show`, as an object and as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.canonical import to_data
from autotune.jobs.results import job_report
from autotune.jobs.workspace import Workspace
from autotune.records import CURRENT_SETUP, Conditions, Decision
from autotune.storage.store import Store
from autotune.strategy_space.backend import backend_of
from autotune.strategy_space.plan import PlannedStrategy
from autotune.tuning.figures import JobSummary


@dataclass(frozen=True)
class Overview:
    """A job in any state. `report` is None if there is none yet: see `job_report`."""

    job_id: str
    status: str
    decision: Decision | None
    backend: str | None
    requested: Conditions
    summary: JobSummary
    report: Path | None

    @cached_property
    def conditions(self) -> Conditions:
        return self.summary.conditions(self.requested)


def job_overview(workspace: Workspace, store: Store, job_id: str, report_now: bool) -> Overview:
    """`report_now`: write the report of an undecided job, too."""
    summary, decision = store.summary(job_id), store.decision(job_id)
    return Overview(
        job_id,
        store.job_status(job_id),
        decision,
        _backend(store, summary, decision),
        store.job(job_id).conditions,
        summary,
        job_report(workspace, store, job_id, decision, report_now),
    )


def _backend(store: Store, summary: JobSummary, decision: Decision | None) -> str | None:
    """The backend of the exported strategy, if there is one."""
    if decision is None or decision.strategy_id == CURRENT_SETUP or summary.profiled is None:
        return None
    workload, ranks = summary.profiled.workload, summary.profiled.cluster.world_size
    planned = PlannedStrategy.of(store.strategy(decision.strategy_id), workload, ranks)
    return backend_of(planned.plan, workload.variables, workload.library)


def overview_data(store: Store, overview: Overview) -> dict[str, Any]:
    """JSON data, with the step times of every trial."""
    summary, profiled = overview.summary, overview.summary.profiled
    trials = zip(store.trials(overview.job_id), summary.trials, strict=False)
    return {
        "job": overview.job_id,
        "status": overview.status,
        "decision": to_data(overview.decision) if overview.decision else None,
        "carrier": overview.backend,
        "conditions": to_data(overview.conditions),
        "cross_step_refused": profiled.cross_step_refused if profiled else None,
        "current_setup_s": summary.reference_s,
        "reference_noise": summary.reference_noise,
        "repeated": summary.repeated,
        "trial_count": len(summary.trials),
        "trials": [
            {
                **to_data(trial),
                "disturbed": row.figures.number in summary.disturbed,
                "interval": to_data(row.interval),  # of the median step time, in seconds
            }
            for trial, row in trials
        ],
        "report": str(overview.report) if overview.report else None,
    }
