"""How much of a job's trials and time is left, and how much the closing comparison needs."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from autotune.records import Measured, Role
from autotune.tuning.events import Profiled, TrialFinished
from autotune.tuning.finalists import second_looks
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.tuning.statistics import fewest_values
from autotune.tuning.trial_requests import most_steps

CLOSING_SHARE = 0.4
"""Maximum share of the time budget reserved for the finalists and the closing comparison."""
RECENT_TRIALS = 16
"""Trials whose duration beyond their steps predicts that of the next ones."""


def budget_spent(spec: JobSpec, history: History) -> bool:
    """Whether the closing comparison must begin, or has begun with its finalists."""
    if history.ab_trials or second_looks(history) or trials_spent(history) >= spec.max_trials:
        return True
    return history.elapsed_s + reserved_s(spec, history) >= spec.max_seconds


def trials_spent(history: History) -> int:
    """Trials that count against the budget.

    A refused trial runs no step and costs nothing, but there may be no more of them than of others.
    """
    refused = len(history.refused)
    return max(len(history.candidates) - refused, refused)


def reserved_s(spec: JobSpec, history: History) -> float:
    """The time that is reserved for the finalists and the closing comparison."""
    assert history.reference_s is not None
    block_s = estimated_block_s(spec, history)
    look_s = block_s + (most_steps(spec, history) - spec.timed_steps) * history.reference_s
    looks_s = spec.finalists * look_s
    closing_s = min(2 * spec.ab_pairs * block_s + looks_s, CLOSING_SHARE * spec.max_seconds)
    return max(closing_s, 2 * fewest_values(spec.confidence) * block_s)


def least_budget_s(spec: JobSpec, history: History) -> float:
    """The budget that one trial and the shortest closing comparison need, as far as is known."""
    blocks = 1 + 2 * fewest_values(spec.confidence)
    return history.elapsed_s + blocks * estimated_block_s(spec, history)


def closing_left_s(spec: JobSpec, history: History) -> float:
    """About the longest time that the closing comparison under way still takes."""
    number = history.ab_trials[-1].request.round
    blocks = sum(trial.request.round == number for trial in history.ab_trials)
    blocks_left = max(0, 2 * affordable_pairs(spec, history, number) - blocks)
    return blocks_left * estimated_block_s(spec, history)


def estimated_block_s(spec: JobSpec, history: History) -> float:
    """Approximate duration of a block of the current setup in the closing comparison.

    A trial takes longer than its steps: a plan is loaded and checked.
    """
    assert history.reference_s is not None
    extra_s = [
        event.elapsed_s
        - before.elapsed_s
        - (spec.warmup_steps + len(event.outcome.slowest_s) + event.outcome.left_out)
        * event.outcome.median_s
        for before, event in pairwise(history.events[-RECENT_TRIALS - 1 :])
        # The trial after the profile also starts what is emulated.
        if isinstance(event, TrialFinished)
        and isinstance(event.outcome, Measured)
        and not isinstance(before, Profiled)
    ]
    extra = max(0.0, median(extra_s)) if extra_s else 0.0
    return extra + (spec.warmup_steps + spec.timed_steps) * history.reference_s


def affordable_pairs(spec: JobSpec, history: History, number: int) -> int:
    """Maximum pairs of blocks that fit into the time left at the start of comparison `number`.

    At least as many as the interval needs, even if the time is over: without a comparison the
    search would be worth nothing.
    """
    began_s = history.elapsed_s
    for before, event in pairwise(history.events):
        request = event.request if isinstance(event, TrialFinished) else None
        if request is not None and request.role is Role.AB and request.round == number:
            began_s = before.elapsed_s
            break
    fitting = int((spec.max_seconds - began_s) / (2 * estimated_block_s(spec, history)))
    return max(fewest_values(spec.confidence), min(spec.ab_pairs, fitting))
