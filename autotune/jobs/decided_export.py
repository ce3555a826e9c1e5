"""From a decided job to its export. Apart from `export.py`, which a training process reads and which knows the nouns only."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import numpy as np

from autotune.export import Export, Timing
from autotune.records import CURRENT_SETUP, Decision, Measured, Role
from autotune.strategy_space.plan import plan
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec


def build_export(
    job_id: str, spec: JobSpec, history: History, decision: Decision, created_at: datetime
) -> Export:
    """The export of a decided job. `created_at` must be in UTC."""
    assert history.profiled is not None
    workload = history.profiled.workload
    chosen = (
        None if decision.strategy_id == CURRENT_SETUP else history.proposals[decision.strategy_id]
    )
    strategy = chosen.strategy if chosen else None
    best = decision.best_candidate_id
    proposal = history.proposals.get(best) if best else None
    return Export(
        job_id=job_id,
        created_at=created_at.isoformat(timespec="seconds"),
        model=workload.model,
        variables=tuple(replace(variable, ready_s=None) for variable in workload.variables),
        world_size=spec.workers,
        strategy=strategy,
        plan_id=plan(strategy, workload, spec.workers).id if strategy else None,
        lossy=strategy is not None and not strategy.lossless,
        reason=decision.reason,
        comparison=decision.comparison,
        tuned=_timing(history, best, Role.CANDIDATE) if best else None,
        current=_timing(history, CURRENT_SETUP, Role.REFERENCE),
        predicted_s=proposal.predicted_s if proposal else None,
        cluster=history.profiled.cluster,
        software=dict(history.profiled.software),
        conditions=history.conditions(spec.conditions),
    )


def _timing(history: History, strategy_id: str, otherwise: Role) -> Timing | None:
    """Of the closing comparison's blocks; of the trials with role `otherwise` where it was not compared."""
    mine = [trial for trial in history.trials if trial.request.strategy_id == strategy_id]
    outcomes = [trial.outcome for trial in mine if trial.request.role is Role.AB]
    outcomes = outcomes or [trial.outcome for trial in mine if trial.request.role is otherwise]
    blocks = [outcome.slowest_s for outcome in outcomes if isinstance(outcome, Measured)]
    if not blocks:
        return None
    low, median, high = np.quantile(np.concatenate(blocks), [0.25, 0.5, 0.75])
    return Timing(float(median), float(low), float(high), len(blocks))
