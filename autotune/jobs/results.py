"""The results of a job: best.json, report.html, and the lines about the decision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autotune.jobs.exports import job_export
from autotune.jobs.workspace import Workspace
from autotune.records import CURRENT_SETUP, Conditions, Decision
from autotune.reports.job_page import write_report
from autotune.storage.store import Store
from autotune.tuning.job import JobSpec


@dataclass(frozen=True)
class Results:
    export: Path
    report: Path


def write_results(workspace: Workspace, store: Store, job_id: str, decision: Decision) -> Results:
    """Write both files of a decided job. Writing them again gives the same."""
    folder = workspace.job(job_id)
    export = folder / "best.json"
    job_export(store, job_id, decision).write(export)
    return Results(export, write_job_report(workspace, store, job_id, decision))


def write_job_report(
    workspace: Workspace, store: Store, job_id: str, decision: Decision | None
) -> Path:
    """Write the report of a job in any state."""
    report = workspace.job(job_id) / "report.html"
    export = workspace.job(job_id) / "best.json"
    write_report(
        report, store.job(job_id), store.history(job_id), decision, export if decision else None
    )
    return report


def taken_under(conditions: Conditions) -> str:
    """The suffix of every figure that was not measured on a real cluster; else empty."""
    return f" [{conditions.label}]" if conditions.label else ""


def decision_text(
    decision: Decision, results: Results, uri: str, unsent: int, spec: JobSpec
) -> str:
    """The final output of `autotune tune`."""
    # If the current setup stays, the reason already states it.
    headline = "" if decision.strategy_id == CURRENT_SETUP else f"exported {decision.strategy_id}: "
    command = " ".join(spec.command)
    lines = [
        f"{headline}{decision.reason}{taken_under(spec.conditions)}",
        f"  export   {results.export}",
        f"  report   {results.report}",
        f"  trials   mlflow ui --backend-store-uri {uri}",
        f"  use it   autotune run --strategy {results.export} -- {command}",
    ]
    if unsent:
        lines.append(
            f"  {unsent} items could not be sent to {uri} yet; `autotune track` sends them"
        )
    return "\n".join(lines)
