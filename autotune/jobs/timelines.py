"""The replayed timelines of a job's fastest strategies, as files for Perfetto.

They are written after the decision, when no trial waits for them. A trial does not record its steps
(that would slow them down), so its timeline is the replay of its plan from the profile and the
probed links, as in the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from autotune.dfg.chrome_trace import write_chrome_trace
from autotune.records import CURRENT_SETUP, Conditions, Decision, Measured
from autotune.strategy_space.plan import Plan
from autotune.tuning.explanation import Explainer
from autotune.tuning.history import History

TIMELINES = "timelines"
MOST_STRATEGIES = 10
"""Strategies with a timeline, besides the current setup."""
MOST_OPS = 20_000
"""Ops in a file; a larger timeline is reduced to its critical path and longest ops."""
LIMIT_S = 5.0
"""No timeline is begun later: the ranks of a kept training may wait for the end of this."""


def write_timelines(
    folder: Path,
    history: History,
    decision: Decision,
    conditions: Conditions,
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, Path]:
    """Write three replayed steps of the current setup, the best candidate and the fastest others.

    Returns the number of the strategy's first measured trial -> its file. Raises `InvalidInput` if
    a file cannot be written.
    """
    began_s, replays = clock(), Explainer(history, conditions).replays
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[int, Path] = {}
    for strategy_id, plan in _plans(history, decision).items():
        number = _first_measured(history, strategy_id)
        if number is None:
            continue
        if clock() - began_s > LIMIT_S:
            break
        files[number] = folder / f"trial-{number}.timeline.json.gz"
        write_chrome_trace(replays.steady(plan, 1).timeline, files[number], MOST_OPS)
    return files


def _plans(history: History, decision: Decision) -> dict[str, Plan]:
    """Strategy id -> plan: the current setup if its messages are known, then by speed."""
    current = history.current_plan
    plans = {} if current is None else {CURRENT_SETUP: current}
    ranked = [strategy_id for strategy_id, _ in history.ranking()]
    if decision.best_candidate_id is not None:
        ranked.insert(0, decision.best_candidate_id)
    for strategy_id in list(dict.fromkeys(ranked))[:MOST_STRATEGIES]:
        planned = history.planned(strategy_id)
        if planned is not None:
            plans[strategy_id] = planned.plan
    return plans


def _first_measured(history: History, strategy_id: str) -> int | None:
    """The number of the strategy's first trial that was measured."""
    numbers = (
        trial.request.number
        for trial in history.trials
        if trial.request.strategy_id == strategy_id and isinstance(trial.outcome, Measured)
    )
    return next(numbers, None)
