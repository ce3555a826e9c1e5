"""The closing comparison of the contender with the current setup, and the decision."""

from __future__ import annotations

from dataclasses import replace

from autotune.records import CURRENT_SETUP, Decision, Failed, Measured, Role
from autotune.tuning.events import TrialFinished
from autotune.tuning.finalists import contender, is_second_look
from autotune.tuning.history import History
from autotune.tuning.instructions import Finish, Instruction, RunTrial
from autotune.tuning.job import JobSpec
from autotune.tuning.prospects import nothing_to_prove
from autotune.tuning.statistics import Ended, PairRule, compare, enough_pairs, fewest_values
from autotune.tuning.time_budget import affordable_pairs, budget_spent, trials_spent
from autotune.tuning.trial_requests import trial_request


def closing_instruction(spec: JobSpec, history: History) -> Instruction:
    """The next interleaved block, then the decision."""
    best = contender(history)
    if best is None:
        return Finish(Decision(CURRENT_SETUP, _no_candidate_reason(history), None, None))
    # A strategy that fails in its A/B leaves the ranking; the next one is compared from scratch.
    number = sum(
        isinstance(trial.outcome, Failed) and trial.request.strategy_id != CURRENT_SETUP
        for trial in history.ab_trials
    )
    blocks = [trial for trial in history.ab_trials if trial.request.round == number]
    if reason := _nothing_proven_reason(spec, history, number, blocks):
        return Finish(Decision(CURRENT_SETUP, reason, None, best))
    tuned, current = _sides(blocks)
    rule = PairRule(
        spec.confidence,
        spec.ab_precision,
        fewest=fewest_values(spec.confidence),
        most=affordable_pairs(spec, history, number),
    )
    ended = enough_pairs(tuned, current, rule) if len(tuned) == len(current) else None
    if ended is not None:
        return Finish(decide(spec, history, best, tuned, current, ended))
    is_tuned = next_is_tuned(len(tuned), len(current), current_first=number > 0)
    side = best if is_tuned else CURRENT_SETUP
    # Blocks have a fixed length: the number of pairs adapts, and short blocks drift less.
    return RunTrial(trial_request(spec, history, side, Role.AB, round_=number))


def next_is_tuned(tuned: int, current: int, current_first: bool = False) -> bool:
    """Whether the tuned side's block is next after these numbers of blocks.

    The order is ABBA ABBA ..., which cancels a linear drift of the machine, or BAAB BAAB ....
    """
    return (tuned % 2 == 0) != current_first if tuned == current else tuned < current


def _nothing_proven_reason(
    spec: JobSpec, history: History, number: int, blocks: list[TrialFinished]
) -> str:
    """The reason to end the comparison without a result; empty if it goes on.

    `number`: contenders that failed before this one, whose `blocks` are given. After a failure the
    current setup runs first, since a hang takes long: its failure shows that strategies are not
    the cause.
    """
    failed = [trial.outcome for trial in blocks if isinstance(trial.outcome, Failed)]
    if len(failed) > 1:
        return "the current setup failed twice during the closing comparison, so nothing was proven"
    if number == 0 or len(failed) < len(blocks):
        return ""
    strategies = "1 strategy" if number == 1 else f"{number} strategies"
    failures = f"{strategies} failed in the closing comparison"
    if failed:
        return (
            f"{failures}, and right after that the current setup failed too, so nothing was "
            f"proven: {failed[0].message}"
        )
    stays = "so the current setup stays; the report says why each failed"
    if number >= spec.finalists:
        return f"{failures} and the setting finalists allows no more contenders, {stays}"
    if history.elapsed_s >= spec.max_seconds:
        return f"{failures} and the time is over, {stays}"
    return ""


def _no_candidate_reason(history: History) -> str:
    if history.rounds and not history.proposals:
        reason = history.rounds[-1].reason
        return f"no strategy could be tried, so the current setup stays: {reason}"
    if not history.candidates:
        return (
            "the budget ended before a strategy could be tried, so the current setup stays; "
            "raise --budget-time"
        )
    return (
        "every strategy that was tried failed, so the current setup stays; the report says why "
        "each failed"
    )


def _sides(blocks: list[TrialFinished]) -> tuple[list[Measured], list[Measured]]:
    """The measured blocks of the tuned side and of the current setup.

    A block without a partner before a restart is left out: the machine may have changed.
    """
    tuned: list[Measured] = []
    current: list[Measured] = []
    for block in blocks:
        if block.restarted:
            pairs = min(len(tuned), len(current))
            del tuned[pairs:], current[pairs:]
        if isinstance(block.outcome, Measured):
            is_current = block.request.strategy_id == CURRENT_SETUP
            (current if is_current else tuned).append(block.outcome)
    return tuned, current


def decide(
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
        comparison = replace(comparison, bounded=False)
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
        and (event.request.role is Role.AB or is_second_look(history, event))
    )
    begin = next(closing, None)
    if begin is None or budget_spent(spec, searched := history.first(begin)):
        return ""
    left = spec.max_trials - trials_spent(searched)
    why = nothing_to_prove(spec, searched, left)
    return f"; the search ended early with {why}" if why else ""
