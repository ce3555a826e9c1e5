"""Trials of the current setup and of candidates: their length, precision and bound."""

from __future__ import annotations

import math
from dataclasses import replace

from autotune.records import CURRENT_SETUP, Role, TrialRequest
from autotune.tuning.history import History
from autotune.tuning.instructions import RunTrial
from autotune.tuning.job import JobSpec

TRIAL_SHARE = 0.02
"""Maximum share of the time budget for one search trial; its first batch may exceed it."""


def trial_request(
    spec: JobSpec, history: History, strategy_id: str, role: Role, round_: int = 0
) -> TrialRequest:
    number = len(history.trials)
    return TrialRequest(number, strategy_id, role, spec.warmup_steps, spec.timed_steps, round_)


def reference_trial(spec: JobSpec, history: History) -> RunTrial:
    request = _adaptive(spec, history, trial_request(spec, history, CURRENT_SETUP, Role.REFERENCE))
    return RunTrial(request if history.references else _first_look(spec, request))


def candidate_trial(
    spec: JobSpec,
    history: History,
    strategy_id: str,
    round_: int,
    attempt: int,
    predicted_s: float | None,
) -> RunTrial:
    request = replace(
        _adaptive(spec, history, trial_request(spec, history, strategy_id, Role.CANDIDATE, round_)),
        attempt=attempt,
        predicted_s=predicted_s,
        losing_s=_losing_s(spec, history),
    )
    # The comparison with a first look is no more precise than that.
    looks = history.looked_only and attempt == 0
    return RunTrial(_first_look(spec, request) if looks else request)


def _adaptive(spec: JobSpec, history: History, request: TrialRequest) -> TrialRequest:
    return replace(request, most_steps=most_steps(spec, history), precision=spec.precision)


def _first_look(spec: JobSpec, request: TrialRequest) -> TrialRequest:
    """Let the trial end when it can tell whether the machine changed by `deviation`.

    So the user soon sees a result, which a precise trial then replaces. The difference of two such
    medians has sqrt(2) times their half width.
    """
    return replace(request, first_look=spec.deviation / math.sqrt(2))


def most_steps(spec: JobSpec, history: History) -> int:
    """Maximum timed steps of a search trial: `most_steps`, or fewer to save the budget."""
    assert history.profiled is not None
    # Before any trial, the step takes at least its computation.
    step_s = max(history.reference_s or 0.0, history.profiled.workload.compute_s)
    affordable = int(TRIAL_SHARE * spec.max_seconds / step_s) if step_s > 0 else spec.most_steps
    return min(spec.most_steps, max(spec.timed_steps, affordable))


def _losing_s(spec: JobSpec, history: History) -> float:
    """The step time above which a candidate loses, at the machine's present speed."""
    assert history.reference_s is not None
    best_s = min(history.reference_s, history.fastest_s or math.inf)
    return spec.losing * best_s * history.references[-1][1] / history.reference_s
