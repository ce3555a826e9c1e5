"""The results of a job: best.json, report.html, and the lines about the decision."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.cluster import Cluster
from autotune.jobs.exports import job_export, write_export
from autotune.jobs.several_hosts import hosts_text, on_several_hosts, use_of
from autotune.jobs.workspace import Workspace
from autotune.masking import masked
from autotune.records import CURRENT_SETUP, Conditions, Decision, Network
from autotune.storage.store import Store
from autotune.tuning.figures import JobFigures
from autotune.tuning.job import JobSpec
from runtime_rewriter.world.results import Trained

EXPORT, REPORT = "best.json", "report.html"


@dataclass(frozen=True)
class Results:
    export: Path
    report: Path


def write_results(workspace: Workspace, store: Store, job_id: str, decision: Decision) -> Results:
    """Write both files of a decided job. Writing them again gives the same."""
    folder = workspace.job(job_id)
    export = folder / EXPORT
    write_export(job_export(store, job_id, decision), export)
    return Results(export, _write_report(store, job_id, folder, decision))


def job_report(
    workspace: Workspace, store: Store, job_id: str, decision: Decision | None, now: bool
) -> Path | None:
    """The report of a job. That of a decided job is final, and written once.

    That of an undecided job takes as long as the job has trials: it is written, anew, only if
    `now`; else there is none.
    """
    folder = workspace.job(job_id)
    if decision is None:
        return _write_report(store, job_id, folder, decision) if now else None
    report = folder / REPORT
    return report if report.exists() else _write_report(store, job_id, folder, decision)


def _write_report(store: Store, job_id: str, folder: Path, decision: Decision | None) -> Path:
    from autotune.reports.job_page import write_report  # heavy, as it imports numba

    spec, history = store.job(job_id), store.history(job_id)
    report, export = folder / REPORT, folder / EXPORT if decision else None
    several = _several(spec, history.profiled.cluster if history.profiled else None)
    command = ""
    if decision is not None and several is not None:
        where, command = _use(folder / EXPORT, spec, several)
        command = f"# {hosts_text(several)}\n# {where}\n{command}"
    write_report(report, spec, history, decision, export, command)
    return report


def job_facts(figures: JobFigures) -> list[str]:
    """Lines about the trials of a job: how many, and the overrun of emulated accelerators."""
    facts = [f"trials   {figures.counts}"]
    if figures.overrun_range:
        facts.append(f"overrun  emulated accelerators were late by {figures.overrun_range}")
    return facts


def taken_under(conditions: Conditions) -> str:
    """The suffix of every figure that was not measured on a real cluster; else empty."""
    return f" [{conditions.label}]" if conditions.label else ""


def training_text(spec: JobSpec) -> str:
    """Describe, as the job starts, what happens to the training and its files."""
    if spec.continue_training:
        return (
            "the trials are steps of your training, which writes your real files and goes on under "
            "the best strategy after the decision (--continue)"
        )
    writes = "what it writes changes your files, and comes from trials (writes_are_fine)"
    if not spec.writes_are_fine:
        protected = ["its own folder", "the working folder", *spec.protect]
        writes = (
            f"it sees a copy-on-write view of {', '.join(protected)}, and what it writes there "
            "vanishes with the job"
        )
    return (
        f"the script trains meanwhile and ends with the job; {writes} "
        "(AUTOTUNE_TUNING=1 is in its environment)"
    )


def _training_state(spec: JobSpec, trained: Trained | None) -> str:
    if not spec.continue_training:
        return "the script that was tuned has ended; start your training anew"
    if trained is None:
        return "goes on under this decision, to its own end"
    if trained.exit_status:
        return f"failed after {trained.steps} steps: {trained.reason}"
    return f"ended by itself after {trained.steps} steps"


def _mlflow_text(uri: str) -> str:
    """The address of a server, or the command that starts one for the store at `uri`."""
    if uri.startswith(("http:", "https:")):
        return masked(uri)
    return f"mlflow ui --backend-store-uri {shlex.quote(masked(uri))}"


def _several(spec: JobSpec, cluster: Cluster | None) -> Cluster | None:
    """The cluster if its hosts are several real ones, which ranks must be started on."""
    return cluster if cluster and on_several_hosts(spec.conditions, cluster) else None


def _use(export: Path, spec: JobSpec, several: Cluster | None) -> tuple[str, str]:
    """The place to use the export ("" on one host), and the command; `several`: the hosts."""
    if several is None:
        run = ["autotune", "run", "--strategy", str(export), "--", *spec.command]
        return "", shlex.join(run)
    use = use_of(export, spec.command, several)
    return f"{use.where}; every host needs {export.name} at this path", use.command


def decision_text(
    decision: Decision,
    results: Results,
    uri: str,
    unsent: int,
    spec: JobSpec,
    winner: str = "",
    trained: Trained | None = None,
    facts: Sequence[str] = (),
    cluster: Cluster | None = None,
) -> str:
    """The final output of `autotune tune`, or its output before a kept training goes on.

    `winner`: the exported strategy in words. `trained`: the end of a kept training.
    `facts`: as `job_facts` returns them. `cluster`: that of the profile.
    """
    # If the current setup stays, the reason already states it.
    headline = ""
    if decision.strategy_id != CURRENT_SETUP:
        headline = f"exported {decision.strategy_id}{f' ({winner})' if winner else ''}: "
    several = _several(spec, cluster)
    why = [f"  why      {decision.explanation}"] if decision.explanation else []
    lines = [
        f"{headline}{decision.reason}{taken_under(spec.conditions)}",
        *why,
        *(f"  {fact}" for fact in facts),
        *(
            [f"  hosts    {hosts_text(cluster)}"]
            if cluster and spec.conditions.network is Network.HOSTS
            else []
        ),
        f"  export   {results.export}",
        f"  report   {results.report}",
        f"  mlflow   {_mlflow_text(uri)}",
    ]
    if decision.strategy_id != CURRENT_SETUP:
        where, command = _use(results.export, spec, several)
        lines.append("  use it   " + "\n           ".join(filter(None, (where, command))))
    lines.append(f"  training {_training_state(spec, trained)}")
    going_on = spec.continue_training and trained is None
    if unsent:
        lines.append(
            f"  {unsent} items could not be sent to {masked(uri)} yet; `autotune track` sends them"
            f"{' after the training' if going_on else ''}"
        )
    return "\n".join(lines)
