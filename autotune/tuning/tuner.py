"""The loop of AutoSync (Fig. 1) as a pure state machine: history in, next instruction out.

This module runs, stores and times nothing. The instruction is a function of the job and its
recorded events, so a killed job continues exactly where its event log ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from autotune.records import CURRENT_SETUP, Decision, Failed, Measured, Role, TrialRequest
from autotune.tuning.descent import Descent, descent
from autotune.tuning.events import Profiled, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec, Search
from autotune.tuning.prospects import nothing_to_prove, nothing_to_win
from autotune.tuning.statistics import Ended, PairRule, compare, enough_pairs, fewest_values


@dataclass(frozen=True)
class ProfileWorkload:
    """Run the script, profile one replica and probe the links."""


@dataclass(frozen=True)
class Propose:
    """Retrain on the measured trials and propose at most `count` strategies for `round`.

    `incumbent`: the strategy whose neighbours are proposed, "" for a search of the whole space.
    """

    round: int
    count: int
    incumbent: str = ""


@dataclass(frozen=True)
class RunTrial:
    request: TrialRequest


@dataclass(frozen=True)
class Finish:
    decision: Decision


@dataclass(frozen=True)
class Abort:
    """The script cannot be tuned: it fails unchanged."""

    message: str


Instruction = ProfileWorkload | Propose | RunTrial | Finish | Abort

CLOSING_SHARE = 0.4
"""Maximum share of the time budget reserved for the finalists and the closing comparison."""
TRIAL_SHARE = 0.02
"""Maximum share of the time budget for one search trial; its first batch may exceed it."""
RECENT_TRIALS = 16
"""Trials whose duration beyond their steps predicts that of the next ones."""
REFERENCE_TRIES = 3
"""Failures of the current setup, before any measurement, that abort the job."""


def next_instruction(spec: JobSpec, history: History) -> Instruction:
    """The next instruction; the same spec and history give the same one."""
    return (
        search_instruction(spec, history)
        or look_instruction(spec, history)
        or _close(spec, history)
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
        return _reference(spec, history)
    return None if _budget_spent(spec, history) else _explore(spec, history)


def look_instruction(spec: JobSpec, history: History) -> RunTrial | None:
    """Measure the finalists again after the search; None once `contender` may choose."""
    if history.ab_trials or not history.ranking():
        return None
    measured_again = _second_looks(history)
    for strategy_id in _finalists(spec, history):
        if strategy_id not in measured_again:
            return _candidate(spec, history, strategy_id, len(history.rounds), 1, None)
    return _reference(spec, history) if _candidates_since_reference(history) > 0 else None


def contender(history: History) -> str | None:
    """The strategy to compare with the current setup; None if none was measured.

    One lucky trial must not beat a finalist that was measured twice.
    """
    ranking, measured_again = history.ranking(), _second_looks(history)
    twice = [entry for entry in ranking if entry[0] in measured_again]
    chosen = _first(history, twice or ranking, 1)
    return chosen[0] if chosen else None


def _explore(spec: JobSpec, history: History) -> Instruction | None:
    """The next trial or round, or the end; None if the space has nothing new."""
    if _candidates_since_reference(history) >= _candidates_per_reference(spec, history):
        return _reference(spec, history)
    descending = descent(history)
    pending = _descend(spec, history, descending) if descending else _pending(spec, history)
    if pending is not None:
        return pending
    exhausted = bool(history.rounds) and not _last_round_is_new(history)
    if exhausted and (descending or not _may_descend(spec, history)):
        return None
    if history.rounds and _round_unbracketed(spec, history):
        return _reference(spec, history)
    left, rounds = spec.max_trials - _trials_spent(history), len(history.rounds)
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
        return Propose(rounds, _neighbours(spec, left), _first(history, history.ranking(), 1)[0])
    return Propose(rounds, min(spec.top_k, wide))


def _may_descend(spec: JobSpec, history: History) -> bool:
    """Whether the search ends with a descent, and there is a strategy to descend from."""
    guided = spec.search is Search.AUTOSYNC and spec.descent > 0
    return guided and bool(history.rounds) and bool(history.ranking())


def _late(spec: JobSpec, history: History) -> bool:
    """Whether the time of the search has come to the share that is left for the descent."""
    search_s = spec.max_seconds - _closing_s(spec, history)
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
    return _candidate(spec, history, strategy_id, round_, 0, predicted_s)


def _pending(spec: JobSpec, history: History) -> RunTrial | None:
    """The first proposal without a trial, or whose trials are useless and may be repeated."""
    pending = history.next_proposal(spec.max_repeats)
    if pending is None:
        return None
    proposed, proposal, attempt = pending
    return _candidate(
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


def _trials_spent(history: History) -> int:
    """Trials that count against the budget.

    A refused trial runs no step and costs nothing, but there may be no more of them than of others.
    """
    refused = len(history.refused)
    return max(len(history.candidates) - refused, refused)


def _budget_spent(spec: JobSpec, history: History) -> bool:
    """Whether the closing comparison must begin, or has begun with its finalists."""
    if history.ab_trials or _second_looks(history) or _trials_spent(history) >= spec.max_trials:
        return True
    return history.elapsed_s + _closing_s(spec, history) >= spec.max_seconds


def _closing_s(spec: JobSpec, history: History) -> float:
    """The time that is reserved for the finalists and the closing comparison."""
    assert history.reference_s is not None
    block_s = _block_s(spec, history)
    look_s = block_s + (_longest(spec, history) - spec.timed_steps) * history.reference_s
    looks_s = spec.finalists * look_s
    closing_s = min(2 * spec.ab_pairs * block_s + looks_s, CLOSING_SHARE * spec.max_seconds)
    return max(closing_s, 2 * fewest_values(spec.confidence) * block_s)


def least_budget_s(spec: JobSpec, history: History) -> float:
    """The budget that one trial and the shortest closing comparison need, as far as is known."""
    return history.elapsed_s + (1 + 2 * fewest_values(spec.confidence)) * _block_s(spec, history)


def closing_left_s(spec: JobSpec, history: History) -> float:
    """About the longest time that the closing comparison under way still takes."""
    number = history.ab_trials[-1].request.round
    blocks = sum(trial.request.round == number for trial in history.ab_trials)
    return max(0, 2 * _pairs(spec, history, number) - blocks) * _block_s(spec, history)


def _block_s(spec: JobSpec, history: History) -> float:
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


def _pairs(spec: JobSpec, history: History, number: int) -> int:
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
    fitting = int((spec.max_seconds - began_s) / (2 * _block_s(spec, history)))
    return max(fewest_values(spec.confidence), min(spec.ab_pairs, fitting))


def _close(spec: JobSpec, history: History) -> Instruction:
    """The interleaved A/B of the contender, then the decision."""
    best = contender(history)
    if best is None:
        return Finish(Decision(CURRENT_SETUP, _no_candidate_reason(history), None, None))
    # A strategy that fails in its A/B leaves the ranking; the next one is compared from scratch.
    number = sum(
        isinstance(trial.outcome, Failed) and trial.request.strategy_id != CURRENT_SETUP
        for trial in history.ab_trials
    )
    blocks = [trial for trial in history.ab_trials if trial.request.round == number]
    if sum(isinstance(trial.outcome, Failed) for trial in blocks) > 1:
        reason = (
            "the current setup failed twice during the closing comparison, so nothing was proven"
        )
        return Finish(Decision(CURRENT_SETUP, reason, None, best))
    tuned, current = _blocks(blocks, best), _blocks(blocks, CURRENT_SETUP)
    fewest = fewest_values(spec.confidence)
    rule = PairRule(spec.confidence, spec.ab_precision, fewest, _pairs(spec, history, number))
    ended = enough_pairs(tuned, current, rule) if len(tuned) == len(current) else None
    if ended is not None:
        return Finish(_decide(spec, history, best, tuned, current, ended))
    side = best if next_is_tuned(len(tuned), len(current)) else CURRENT_SETUP
    # Blocks have a fixed length: the number of pairs adapts, and short blocks drift less.
    return RunTrial(_request(spec, history, side, Role.AB, round_=number))


def next_is_tuned(tuned: int, current: int) -> bool:
    """Whether the tuned side's block is next after these numbers of blocks.

    The order is ABBA ABBA ..., which cancels a linear drift of the machine.
    """
    return tuned % 2 == 0 if tuned == current else tuned < current


def _no_candidate_reason(history: History) -> str:
    if not history.candidates:
        return (
            "the budget ended before a strategy could be tried, so the current setup stays; "
            "raise --budget-time"
        )
    return (
        "every strategy that was tried failed, so the current setup stays; the report says why "
        "each failed"
    )


def _finalists(spec: JobSpec, history: History) -> list[str]:
    """The fastest strategies of the search. Measuring them again tames the winner's curse."""
    for position, event in enumerate(history.events):
        if isinstance(event, TrialFinished) and _is_second_look(history, event):
            history = history.first(position)
            break
    return _first(history, history.ranking(), spec.finalists)


def _is_second_look(history: History, trial: TrialFinished) -> bool:
    """Whether a finalist was measured again: its trial has a round that was never proposed."""
    return trial.request.role is Role.CANDIDATE and trial.request.round == len(history.rounds)


def _second_looks(history: History) -> set[str]:
    return {
        trial.request.strategy_id for trial in history.candidates if _is_second_look(history, trial)
    }


def _first(history: History, ranking: list[tuple[str, float]], count: int) -> list[str]:
    """The first `count` strategies of a ranking.

    Among those that tie with the last one, closer than the noise, lossless ones come first.
    """
    if not ranking:
        return []
    last_s, tie = ranking[:count][-1][1], 1 + history.noise
    ahead = [key for key, value in ranking if value * tie < last_s]
    tied = [key for key, value in ranking if last_s <= value * tie and value <= last_s * tie]
    tied.sort(key=lambda key: not history.proposals[key].strategy.lossless)
    return [*ahead, *tied][:count]


def _blocks(trials: list[TrialFinished], strategy_id: str) -> list[Measured]:
    return [
        trial.outcome
        for trial in trials
        if trial.request.strategy_id == strategy_id and isinstance(trial.outcome, Measured)
    ]


def _decide(
    spec: JobSpec,
    history: History,
    best: str,
    tuned: list[Measured],
    current: list[Measured],
    ended: Ended,
) -> Decision:
    comparison = compare(tuned, current, spec.confidence)
    count = f"the best of {len(history.measured_s)} strategies"
    stays = f"so the current setup stays; {history.quality}{_why_search_ended(spec, history)}"
    if ended is Ended.LOSING:
        # The signs of the differences ended it, so the interval does not have its confidence.
        reason = (
            f"{count} is {ended.value} in {comparison.pairs} interleaved pairs, which ended the "
            f"comparison: time ratio about {comparison.ratio:.3f} (without an interval, as its "
            f"direction ended it); {stays}"
        )
        return Decision(CURRENT_SETUP, reason, comparison, best)
    half_width = (comparison.high - comparison.low) / 2 / comparison.ratio
    precise = ended is Ended.PRECISE and half_width <= spec.ab_precision
    pairs = (
        f"{comparison.pairs} interleaved pairs "
        f"({'as precise as asked for' if precise else ended.value}): time ratio "
        f"{comparison.ratio:.3f}, {100 * spec.confidence:.0f} % interval {comparison.low:.3f} to "
        f"{comparison.high:.3f}"
    )
    if comparison.high < 1:
        reason = f"faster than the current setup in {pairs}; {history.quality}"
        return Decision(best, reason, comparison, best)
    finding = "slower than the current setup" if comparison.low > 1 else "not significantly faster"
    reason = f"{count} is {finding} in {pairs}; {stays}"
    return Decision(CURRENT_SETUP, reason, comparison, best)


def _why_search_ended(spec: JobSpec, history: History) -> str:
    """Why the search ended before its budget; empty if it did not, or if there was none."""
    closing = (
        position
        for position, event in enumerate(history.events)
        if isinstance(event, TrialFinished)
        and (event.request.role is Role.AB or _is_second_look(history, event))
    )
    begin = next(closing, None)
    if begin is None or _budget_spent(spec, searched := history.first(begin)):
        return ""
    left = spec.max_trials - _trials_spent(searched)
    why = nothing_to_prove(spec, searched, left)
    return f"; the search ended early with {why}" if why else ""


def _request(
    spec: JobSpec, history: History, strategy_id: str, role: Role, round_: int = 0
) -> TrialRequest:
    number = len(history.trials)
    return TrialRequest(number, strategy_id, role, spec.warmup_steps, spec.timed_steps, round_)


def _reference(spec: JobSpec, history: History) -> RunTrial:
    request = _adaptive(spec, history, _request(spec, history, CURRENT_SETUP, Role.REFERENCE))
    return RunTrial(request if history.references else _first_look(spec, request))


def _adaptive(spec: JobSpec, history: History, request: TrialRequest) -> TrialRequest:
    return replace(request, most_steps=_longest(spec, history), precision=spec.precision)


def _first_look(spec: JobSpec, request: TrialRequest) -> TrialRequest:
    """Let the trial end when it can tell whether the machine changed by `deviation`.

    So the user soon sees a result, which a precise trial then replaces. The difference of two such
    medians has sqrt(2) times their half width.
    """
    return replace(request, first_look=spec.deviation / math.sqrt(2))


def _candidate(
    spec: JobSpec,
    history: History,
    strategy_id: str,
    round_: int,
    attempt: int,
    predicted_s: float | None,
) -> RunTrial:
    request = replace(
        _adaptive(spec, history, _request(spec, history, strategy_id, Role.CANDIDATE, round_)),
        attempt=attempt,
        predicted_s=predicted_s,
        losing_s=_losing_s(spec, history),
    )
    # The comparison with a first look is no more precise than that.
    looks = history.looked_only and attempt == 0
    return RunTrial(_first_look(spec, request) if looks else request)


def _longest(spec: JobSpec, history: History) -> int:
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
