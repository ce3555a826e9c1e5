"""`autotune export`: a measured strategy as the file that a training script takes."""

from __future__ import annotations

import argparse
from typing import Any

from autotune.errors import InvalidInput
from autotune.jobs.decided_export import build_export
from autotune.jobs.workspace import Workspace, latest_job
from autotune.records import CURRENT_SETUP, Decision
from autotune.storage.store import Store
from autotune.tuning.history import History


def export(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Write the decided strategy, or the one that is asked for with what is known about it."""
    workspace = Workspace.existing(options.directory)
    with Store.open(workspace.store_path) as store:
        job_id = options.job or latest_job(store)
        history, decision = store.history(job_id), store.decision(job_id)
        chosen = _chosen(job_id, history, decision, options.strategy)
        built = build_export(job_id, store.job(job_id), history, chosen, store.created_at(job_id))
    built.write(options.output)
    data = {
        "job": job_id,
        "strategy": chosen.strategy_id,
        "reason": chosen.reason,
        "path": str(options.output),
    }
    return data, f"wrote {options.output}: {chosen.strategy_id} of job {job_id}; {chosen.reason}"


def _chosen(
    job_id: str, history: History, decision: Decision | None, wanted: str | None
) -> Decision:
    if history.profiled is None:
        raise InvalidInput(
            f"job {job_id!r} has no profile yet, so nothing can be exported; resume it with `autotune tune --resume {job_id}`"
        )
    if wanted is None:
        if decision is None:
            raise InvalidInput(
                f"job {job_id!r} has not decided yet; resume it, or name a measured strategy with --strategy"
            )
        return decision
    matching = [
        key
        for key in history.measured_s
        if key.startswith(wanted) or key.removeprefix("strategy-").startswith(wanted)
    ]
    if len(matching) != 1 and wanted != CURRENT_SETUP:
        known = ", ".join(key for key, _ in history.ranking()[:3]) or "none"
        raise InvalidInput(
            f"--strategy needs one measured strategy, but {wanted!r} fits {len(matching)}; the fastest are {known}"
        )
    strategy_id = wanted if wanted == CURRENT_SETUP else matching[0]
    if decision is not None and decision.strategy_id == strategy_id:
        return decision
    if decision is not None and decision.best_candidate_id == strategy_id:
        reason = f"chosen by hand, although it was not proven faster than the current setup: {decision.reason}"
        return Decision(strategy_id, reason, decision.comparison, strategy_id)
    reason = "chosen by hand; it was not compared with the current setup in an A/B"
    return Decision(
        strategy_id, reason, None, None if strategy_id == CURRENT_SETUP else strategy_id
    )
