"""The HTML report of a job in any state: the decision, its reason, and every trial.

One self-contained file. Everything in it is escaped: names of variables and messages of failures
come from the user's script.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from statistics import median
from typing import Any

from autotune.records import CURRENT_SETUP, Accelerators, Decision, Failed, Measured, Network, Role
from autotune.reports.before_after import before_and_after, predictions
from autotune.reports.charts import prediction_chart, quality_chart, rankers, search_chart
from autotune.reports.pages import write_page
from autotune.reports.plot import SERIES
from autotune.strategy_space.backend import backend_of
from autotune.strategy_space.builders.rows import ddp_with_rows
from autotune.strategy_space.describe import (
    message_rows,
    messages_of,
    numbers_text,
    variable_rows,
    whole_text,
)
from autotune.strategy_space.plan import PlannedStrategy, plan
from autotune.tuning.events import Profiled, TrialFinished
from autotune.tuning.explanation import Explainer
from autotune.tuning.history import History
from autotune.tuning.job import NO_LIMIT_S, NO_LIMIT_TRIALS, JobSpec
from autotune.units import format_seconds

OPEN_ROWS = 40
"""Longer tables are folded."""
_ROLE = {Role.CANDIDATE: "candidate", Role.REFERENCE: "reference", Role.AB: "A/B"}


def write_report(
    path: Path,
    spec: JobSpec,
    history: History,
    decision: Decision | None,
    export_path: Path | None,
    command: str = "",
) -> None:
    """Write the report to `path`, in one piece. Raises `InvalidInput` if that fails.

    `command` uses the export; "": the command of the job, with `autotune run` before it.
    """
    context = _context(spec, history, decision, export_path)
    if command and context["command"]:
        context["command"] = command
    write_page(path, "job_page.html.j2", context, "the report")


def _context(
    spec: JobSpec, history: History, decision: Decision | None, export_path: Path | None
) -> dict[str, Any]:
    profiled = history.profiled
    shown = _shown_strategy(history, decision)
    sides = _sides(history, decision)
    return {
        **_explained(spec, history, decision, sides),
        "spec": spec,
        "budget": _budget(spec),
        "history": history,
        "profiled": profiled,
        "conditions": _conditions(spec, history),
        "under": history.conditions(spec.conditions).label,
        "headline": _headline(history, decision),
        "decision": decision,
        "sides": sides,
        "command": _command(spec, export_path) if decision and export_path else None,
        "export_path": export_path,
        "search_chart": search_chart(history),
        "prediction_chart": prediction_chart(history),
        "contradicted": history.rounds[-1].contradicted if history.rounds else (),
        "quality_chart": quality_chart(history.rounds),
        "rankers": [(name, f"s{i % SERIES}") for i, name in enumerate(rankers(history.rounds))],
        "details": _details(spec, profiled, *shown) if profiled and shown else None,
        "failures": [trial for trial in history.trials if isinstance(trial.outcome, Failed)],
        "disturbed": _disturbed(history),
        "trials": [_trial_row(trial, history) for trial in history.trials],
        "open_rows": OPEN_ROWS,
    }


def _explained(
    spec: JobSpec, history: History, decision: Decision | None, sides: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the parts that only a decided job has, since replaying takes long."""
    if decision is None or history.profiled is None:
        return {"timelines": None, "predictions": [], "missed": 0}
    explainer = Explainer(history, spec.conditions)
    measured_s = {side["name"]: side["median_s"] for side in sides}
    rows, missed = predictions(history, decision, explainer)
    return {
        "timelines": before_and_after(history, decision, explainer, measured_s),
        "predictions": rows,
        "missed": missed,
    }


def _budget(spec: JobSpec) -> str:
    """The limits that the user gave."""
    limits = []
    if spec.max_trials < NO_LIMIT_TRIALS:
        limits.append(f"{spec.max_trials} candidate trials")
    if spec.max_seconds < NO_LIMIT_S:
        limits.append(format_seconds(spec.max_seconds))
    return ", ".join(limits) or "none"


def _conditions(spec: JobSpec, history: History) -> str:
    """Sentences about what was emulated; empty on a real cluster."""
    conditions = history.conditions(spec.conditions)
    parts = []
    if conditions.network is Network.LOOPBACK:
        parts.append("The ranks were processes of one machine and used its loopback.")
    if conditions.network is Network.EMULATED:
        parts.append(
            "The network is emulated: hosts are namespaces of one machine; transfers are real, "
            "over links with the given rates."
        )
    if conditions.accelerators is Accelerators.EMULATED:
        parts.append(
            "Accelerators are emulated: computation is a timed wait; parameters, gradients and "
            "transfers are real."
        )
    if conditions.byte_scale != 1:
        parts.append(
            f"Links and messages are divided by {conditions.byte_scale:g}; bytes and rates are "
            "given for the whole cluster."
        )
    if conditions.round_robin:
        parts.append("The ranks ran under real-time round-robin scheduling.")
    return " ".join(parts)


def _headline(history: History, decision: Decision | None) -> dict[str, str]:
    """The headline and the sentence below it; `kind` selects the color."""
    if decision is None:
        ranking, current_s = history.ranking(), history.reference_s
        if not ranking or current_s is None:
            kind, title = "open", "Nothing decided yet"
            text = "No strategy has been measured so far."
        else:
            strategy_id, best_s = ranking[0]
            kind, title = "open", f"Not decided yet: {current_s / best_s:.2f}x as fast so far"
            text = (
                f"Best so far: {strategy_id} with {format_seconds(best_s)} per step; the current "
                f"setup takes {format_seconds(current_s)}."
            )
    elif decision.strategy_id == CURRENT_SETUP:
        kind, title, text = "kept", "The current setup stays", decision.reason
    else:
        assert decision.comparison is not None
        compared = decision.comparison
        kind, title = "won", f"{1 / compared.ratio:.2f}x as fast"
        text = (
            f"{decision.strategy_id} is exported: {history.in_words(decision.strategy_id)}. "
            f"{compared.confidence:.0%} interval "
            f"{1 / compared.high:.2f}x to {1 / compared.low:.2f}x, {compared.pairs} interleaved "
            "pairs."
        )
    return {"kind": kind, "title": title, "text": text}


def _sides(history: History, decision: Decision | None) -> list[dict[str, Any]]:
    """Both sides of the closing comparison: name, blocks in order, median."""
    if decision is None or decision.comparison is None or decision.best_candidate_id is None:
        return []
    sides = []
    for strategy_id in (decision.best_candidate_id, CURRENT_SETUP):
        blocks = [
            trial.outcome.median_s
            for trial in history.ab_trials
            if trial.request.strategy_id == strategy_id and isinstance(trial.outcome, Measured)
        ]
        median_s = median(blocks) if blocks else None
        sides.append({"name": strategy_id, "blocks": blocks, "median_s": median_s})
    return sides


def _command(spec: JobSpec, export_path: Path) -> str:
    return f"autotune run --strategy {shlex.quote(str(export_path))} -- {shlex.join(spec.command)}"


def _shown_strategy(
    history: History, decision: Decision | None
) -> tuple[str, PlannedStrategy] | None:
    """Title and strategy of the strategy section: the exported, else the best measured one."""
    if decision is not None and decision.strategy_id != CURRENT_SETUP:
        title, strategy_id = "The exported strategy", decision.strategy_id
    elif decision is not None and decision.best_candidate_id is not None:
        title = "The best strategy that was tried (not exported)"
        strategy_id = decision.best_candidate_id
    elif history.ranking():
        title, strategy_id = "The best strategy so far", history.ranking()[0][0]
    else:
        return None
    planned = history.planned(strategy_id)
    return (title, planned) if planned else None


def _details(
    spec: JobSpec, profiled: Profiled, title: str, planned: PlannedStrategy
) -> dict[str, Any]:
    workload = profiled.workload
    strategy, enacted = planned.strategy, planned.plan
    default = plan(ddp_with_rows(workload), workload, spec.workers)
    return {
        "title": title,
        "strategy": strategy,
        "plan": enacted,
        "whole": whole_text(strategy),
        "carrier": backend_of(enacted, workload.variables, workload.library),
        "default": default,
        "variables": variable_rows(workload, planned),
        "buckets": {name: numbers_text(numbers) for name, numbers in messages_of(default).items()},
        "messages": message_rows(enacted),
    }


def _disturbed(history: History) -> list[tuple[TrialFinished, TrialFinished | None]]:
    """Every disturbed trial with the first repeat after it, if there was one."""
    pairs = []
    for at, trial in enumerate(history.candidates):
        if trial.request.number in history.disturbed:
            strategy_id = trial.request.strategy_id
            later = (
                t for t in history.candidates[at + 1 :] if t.request.strategy_id == strategy_id
            )
            pairs.append((trial, next(later, None)))
    return pairs


def _trial_row(trial: TrialFinished, history: History) -> dict[str, Any]:
    request, outcome = trial.request, trial.outcome
    proposal = history.proposals.get(request.strategy_id)
    measured = isinstance(outcome, Measured)
    steady_s = history.steady_s(trial) if measured and request.role is Role.CANDIDATE else None
    speedup = history.reference_s / steady_s if steady_s and history.reference_s else None
    status = f"failed: {outcome.kind.value}" if isinstance(outcome, Failed) else ""
    if request.number in history.disturbed:
        status = "disturbed"
    return {
        "number": request.number,
        "role": _ROLE[request.role],
        "strategy": request.strategy_id,
        "origin": proposal.origin if proposal else "",
        "round": request.round if request.role is Role.CANDIDATE else None,
        "predicted_s": request.predicted_s,
        "outcome": outcome if measured else None,
        "interval": trial.interval,
        "speedup": speedup,
        "status": status,
        "overrun": outcome.overrun if isinstance(outcome, Measured) else None,
        "elapsed_s": trial.elapsed_s,
    }
