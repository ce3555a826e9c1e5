"""`autotune show`: list the jobs of a directory, or show one job's trials and decision."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from autotune.canonical import to_data
from autotune.commands.arguments import add_directory
from autotune.commands.render.progress import first_line, short_name
from autotune.commands.render.tables import plain_table, table_text, terminal_width
from autotune.jobs.overview import job_overview
from autotune.jobs.results import job_facts, taken_under
from autotune.jobs.workspace import Workspace
from autotune.records import CURRENT_SETUP, Measured
from autotune.storage.store import Store
from autotune.tuning.events import TrialFinished
from autotune.tuning.history import History
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


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
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
    data = job_overview(workspace, store, job_id, history, decision)
    exported = decision.strategy_id if decision else None
    words: dict[str, str] = {}
    rows = (_row(trial, history, exported, words) for trial in history.trials)
    table = plain_table(TRIAL_COLUMNS, rows, terminal_width(), SPARE)
    limits = f"{history.profiled.limits}\n" if history.profiled and history.profiled.limits else ""
    summary = f"not finished ({history.quality}); `autotune tune --resume` continues"
    if decision:
        winner = history.in_words(decision.strategy_id)
        summary = (
            f"{decision.strategy_id} ({winner}): {decision.reason}" if winner else decision.reason
        )
    summary += taken_under(history.conditions(store.job(job_id).conditions))
    if data["carrier"]:
        summary += f"; {data['carrier']}"
    head = f"{job_id} ({data['status']}): {summary}"
    why = f"why: {decision.explanation}\n" if decision and decision.explanation else ""
    facts = "".join(f"{fact}\n" for fact in job_facts(history))
    return data, f"{table}{limits}{head}\n{why}{facts}report: {data['report']}"


def _row(
    trial: TrialFinished, history: History, exported: str | None, words: dict[str, str]
) -> tuple[str, ...]:
    """The cells of one trial. `words` keeps the descriptions of strategies that were met."""
    request, outcome = trial.request, trial.outcome
    strategy_id = request.strategy_id
    if strategy_id not in words:
        proposal = history.proposals.get(strategy_id)
        origin = f" ({proposal.origin})" if proposal else ""
        words[strategy_id] = history.in_words(strategy_id) + origin
    notes = [words[strategy_id]]
    if isinstance(outcome, Measured):
        low, high = (format_seconds(value) for value in outcome.quartiles_s)
        error = f"± {trial.interval.half_width:.1%}" if trial.interval else ""
        steps = str(len(outcome.slowest_s))
        steps += f", {outcome.stopped.value}" if outcome.stopped else ""
        figures = (format_seconds(outcome.median_s), error, f"{low} - {high}", steps)
        if request.number in history.disturbed:
            notes.insert(0, "disturbed")
    else:
        figures = ("failed", "", "", "")
        notes = [f"{outcome.kind}: {first_line(outcome.message, 60)}"]
    return (
        WINNER if strategy_id == exported != CURRENT_SETUP else "",
        str(request.number),
        request.role.value,
        short_name(strategy_id),
        *figures,
        format_seconds(request.predicted_s) if request.predicted_s else "",
        "; ".join(filter(None, notes)),
    )
