"""The loop of AutoSync (Fig. 1) as a pure state machine: history in, next instruction out.

This module runs, stores and times nothing. The instruction is a function of the job and its
recorded events, so a killed job continues exactly where its event log ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.records import CURRENT_SETUP, Decision, Failed, Measured, Role
from autotune.tuning.closing import closing_instruction
from autotune.tuning.descent import Descent, descent
from autotune.tuning.events import TrialFinished
from autotune.tuning.finalists import contender, finalists, is_second_look, lossless_first
from autotune.tuning.history import History
from autotune.tuning.instructions import (
    Abort,
    Finish,
    Instruction,
    ProfileWorkload,
    Propose,
    RunTrial,
)
from autotune.tuning.job import JobSpec, Search
from autotune.tuning.prospects import nothing_to_prove, nothing_to_win
from autotune.tuning.time_budget import budget_spent, least_budget_s, reserved_s, trials_spent
from autotune.tuning.trial_requests import candidate_trial, reference_trial

REFERENCE_TRIES = 3
"""Failures of the current setup, before any measurement, that abort the job."""


def next_instruction(spec: JobSpec, history: History) -> Instruction:
    """The next instruction; the same spec and history give the same one."""
    return (
        search_instruction(spec, history)
        or look_instruction(spec, history)
        or closing_instruction(spec, history)
    )


def search_instruction(spec: JobSpec, history: History) -> Instruction | None:
    """The search's next instruction; None once its budget or the space is exhausted."""
    if history.profiled is None:
        return ProfileWorkload()
    if history.reference_s is None:
        failures = [trial.outcome for trial in history.trials if isinstance(trial.outcome, Failed)]
        if len(failures) >= REFERENCE_TRIES:
            return Abort(
                "the script fails with its current setup, so there is nothing to compare with: "
                f"{failures[-1].message}"
            )
        return reference_trial(spec, history)
    return None if budget_spent(spec, history) else _explore(spec, history)


def look_instruction(spec: JobSpec, history: History) -> RunTrial | None:
    """Measure the finalists again after the search; None once `contender` may choose.

    As in the search, references are run before, after and between the looks, and disturbed looks
    are repeated. No look begins that would leave too little time for the closing comparison.
    """
    if history.ab_trials or not history.ranking():
        return None
    since_reference = _candidates_since_reference(history)
    if since_reference >= _candidates_per_reference(spec, history):
        return reference_trial(spec, history)
    looks = [trial for trial in history.candidates if is_second_look(history, trial)]
    for strategy_id in finalists(spec, history):
        tried = [look for look in looks if look.request.strategy_id == strategy_id]
        if _fits(spec, history) and (not tried or _look_again(spec, history, tried)):
            attempt = 1 + len(tried)
            return candidate_trial(spec, history, strategy_id, len(history.rounds), attempt, None)
    return reference_trial(spec, history) if since_reference else None


def _fits(spec: JobSpec, history: History) -> bool:
    """Whether there is time for one more trial and the shortest closing comparison."""
    return least_budget_s(spec, history) <= spec.max_seconds


def _look_again(spec: JobSpec, history: History, looks: Sequence[TrialFinished]) -> bool:
    """Whether all looks at a finalist were disturbed, and another one is allowed."""
    if len(looks) > spec.max_repeats:
        return False
    measured = all(isinstance(look.outcome, Measured) for look in looks)
    return measured and all(look.request.number in history.disturbed for look in looks)


def _explore(spec: JobSpec, history: History) -> Instruction | None:
    """The next trial or round, or the end; None if the space has nothing new."""
    if _candidates_since_reference(history) >= _candidates_per_reference(spec, history):
        return reference_trial(spec, history)
    descending = descent(history, spec.max_repeats)
    pending = _descend(spec, history, descending) if descending else _pending(spec, history)
    if pending is not None:
        return pending
    exhausted = bool(history.rounds) and not _last_round_is_new(history)
    if exhausted and (descending or not _may_descend(spec, history)):
        return None
    if history.rounds and _round_unbracketed(spec, history):
        return reference_trial(spec, history)
    left, rounds = spec.max_trials - trials_spent(history), len(history.rounds)
    if rounds and (reason := nothing_to_win(spec, history, left)):
        return Finish(Decision(CURRENT_SETUP, reason, None, contender(history)))
    if rounds and nothing_to_prove(spec, history, left):
        return None
    if descending:
        return Propose(rounds, _neighbours(spec, left), descending.winner or descending.incumbent)
    if not _may_descend(spec, history):
        return Propose(rounds, min(spec.top_k, left))
    wide = left - round(spec.descent * spec.max_trials)  # trials of the search before the descent
    if exhausted or 2 * wide < min(spec.top_k, left) or _late(spec, history):
        (incumbent,) = lossless_first(history, history.ranking(), 1)
        return Propose(rounds, _neighbours(spec, left), incumbent)
    return Propose(rounds, min(spec.top_k, wide))


def _may_descend(spec: JobSpec, history: History) -> bool:
    """Whether the search ends with a descent, and there is a strategy to descend from."""
    guided = spec.search is Search.AUTOSYNC and spec.descent > 0
    return guided and bool(history.rounds) and bool(history.ranking())


def _late(spec: JobSpec, history: History) -> bool:
    """Whether the time of the search has come to the share that is left for the descent."""
    search_s = spec.max_seconds - reserved_s(spec, history)
    return search_s - history.elapsed_s <= spec.descent * search_s


def _neighbours(spec: JobSpec, left: int) -> int:
    """Neighbours of a round: up to two for each trial of the incumbent."""
    return max(1, min(spec.top_k, 2 * left // 3))


def _descend(spec: JobSpec, history: History, descending: Descent) -> RunTrial | None:
    """The next trial of the descent; None if it needs proposals."""
    strategy_id = None if descending.winner else descending.next_trial
    if strategy_id is None:
        return None
    round_, predicted_s = len(history.rounds) - 1, history.proposals[strategy_id].predicted_s
    return candidate_trial(spec, history, strategy_id, round_, 0, predicted_s)


def _pending(spec: JobSpec, history: History) -> RunTrial | None:
    """The first proposal without a trial, or whose trials are useless and may be repeated."""
    pending = history.next_proposal(spec.max_repeats)
    if pending is None:
        return None
    proposed, proposal, attempt = pending
    return candidate_trial(
        spec, history, proposal.strategy.id, proposed.round, attempt, proposal.predicted_s
    )


def _last_round_is_new(history: History) -> bool:
    """Whether the last round holds a strategy that no earlier round proposed."""
    earlier = {
        proposal.strategy.id for proposed in history.rounds[:-1] for proposal in proposed.proposals
    }
    return any(proposal.strategy.id not in earlier for proposal in history.rounds[-1].proposals)


def _round_unbracketed(spec: JobSpec, history: History) -> bool:
    """Whether half a reference interval of trials has no reference after it.

    Training must not learn from more trials without a reference to check them.
    """
    since = _candidates_since_reference(history)
    return since > 0 and 2 * since >= spec.reference_every


def _candidates_per_reference(spec: JobSpec, history: History) -> int:
    """Candidates until the next reference; one after a first look, which it replaces."""
    return 1 if history.looked_only else spec.reference_every


def _candidates_since_reference(history: History) -> int:
    count = 0
    for trial in reversed(history.trials):
        if trial.request.role is Role.REFERENCE:
            break
        count += trial.request.role is Role.CANDIDATE and not trial.refused
    return count
