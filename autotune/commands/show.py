"""`autotune show`: list the jobs of a directory, or show one job's trials and decision."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from autotune.canonical import to_data
from autotune.commands.arguments import add_directory
from autotune.commands.render.names import first_line, short_name
from autotune.commands.render.tables import plain_table, table_text, terminal_width
from autotune.commands.render.terminal import Terminal
from autotune.errors import InvalidInput
from autotune.jobs.overview import Overview, job_overview, overview_data
from autotune.jobs.results import job_facts, taken_under
from autotune.jobs.workspace import Workspace
from autotune.records import CURRENT_SETUP
from autotune.storage.store import Store
from autotune.tuning.figures import TrialSummary
from autotune.units import format_seconds

TRIAL_COLUMNS = (
    *("", "trial", "role", "strategy", "measured", "95 %", "quartiles", "steps", "predicted"),
    "what it does",
)
SPARE = ("quartiles", "steps", "predicted", "95 %")
"""Columns that a narrow terminal leaves out, the least important first."""
WINNER = "*"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    parser.add_argument("job", nargs="?", help="default: list all jobs")
    parser.add_argument(
        "--report",
        action="store_true",
        help="write the report of JOB now if it has no decision yet, which takes a while if it has "
        "thousands of trials",
    )


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Only the data or only the text of a job: its trials may be thousands."""
    workspace = Workspace.existing(options.directory)
    with Store.open_to_read(workspace.store_path) as store:
        if not options.job:
            if options.report:
                raise InvalidInput("--report needs a job; use `autotune show JOB --report`")
            return _jobs(store)
        if missing := store.missing_summaries(options.job):
            text = f"autotune: summarizing {missing} events of an older version, once"
            Terminal().print(text)
        overview = job_overview(workspace, store, options.job, options.report)
        return (overview_data(store, overview), "") if options.json else ({}, _text(overview))


def _jobs(store: Store) -> tuple[dict[str, Any], str]:
    table = Table("job", "created (UTC)", "status", "model", "trials")
    for job in store.jobs():
        table.add_row(job.id, job.created_at[:19], job.status, job.model or "-", str(job.trials))
    return {"jobs": to_data(store.jobs())}, table_text(table)


def _text(overview: Overview) -> str:
    summary, decision = overview.summary, overview.decision
    exported = decision.strategy_id if decision else None
    rows = (_row(trial, overview, exported) for trial in summary.trials)
    table = plain_table(TRIAL_COLUMNS, rows, terminal_width(), SPARE)
    limits = f"{summary.profiled.limits}\n" if summary.profiled and summary.profiled.limits else ""
    headline = (
        f"not finished ({summary.quality}); `autotune tune --resume {overview.job_id}` continues"
    )
    if overview.status == "aborted":
        headline = (
            "nothing was decided, since the current setup failed: repair the script and start a "
            "new job"
        )
    elif decision:
        winner = summary.in_words(decision.strategy_id)
        headline = (
            f"{decision.strategy_id} ({winner}): {decision.reason}" if winner else decision.reason
        )
    headline += taken_under(overview.conditions)
    if overview.backend:
        headline += f"; {overview.backend}"
    head = f"{overview.job_id} ({overview.status}): {headline}"
    why = f"why: {decision.explanation}\n" if decision and decision.explanation else ""
    facts = "".join(f"{fact}\n" for fact in job_facts(summary))
    report = overview.report or f"`autotune show {overview.job_id} --report` writes it"
    return f"{table}{limits}{head}\n{why}{facts}report: {report}"


def _row(trial: TrialSummary, overview: Overview, exported: str | None) -> tuple[str, ...]:
    """The cells of one trial."""
    row, summary = trial.figures, overview.summary
    origin, words = summary.origin(row.strategy_id), summary.in_words(row.strategy_id)
    notes = [f"{words} ({origin})" if origin else words]
    if trial.quartiles_s is not None and row.median_s is not None:
        low, high = (format_seconds(value) for value in trial.quartiles_s)
        error = f"± {trial.interval.half_width:.1%}" if trial.interval else ""
        steps = f"{trial.steps}, {trial.stopped.value}" if trial.stopped else str(trial.steps)
        figures = (format_seconds(row.median_s), error, f"{low} - {high}", steps)
        if row.number in summary.disturbed:
            notes.insert(0, "disturbed")
    else:
        figures = ("failed", "", "", "")
        notes = [f"{trial.failure}: {first_line(trial.message, 60)}"]
    return (
        WINNER if row.strategy_id == exported != CURRENT_SETUP else "",
        str(row.number),
        row.role.value,
        short_name(row.strategy_id),
        *figures,
        format_seconds(trial.predicted_s) if trial.predicted_s else "",
        "; ".join(filter(None, notes)),
    )
