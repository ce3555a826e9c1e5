"""The loop of AutoSync (Fig. 1) as a pure state machine: the history so far in, the next instruction out.

Nothing here runs, stores or times anything. Because the instruction is a function of the job and its recorded
events, a job that was killed continues exactly where its event log ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from autotune.records import CURRENT_SETUP, Decision, Failed, Measured, Role, TrialRequest
from autotune.tuning.events import TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.tuning.statistics import Ended, PairRule, compare, enough_pairs, fewest_values


@dataclass(frozen=True)
class ProfileWorkload:
    """Run the script, profile one replica and probe the links."""


@dataclass(frozen=True)
class Propose:
    """Retrain on what was measured and propose the strategies of `round`, at most `count` of them."""

    round: int
    count: int


@dataclass(frozen=True)
class RunTrial:
    request: TrialRequest


@dataclass(frozen=True)
class Finish:
    decision: Decision


@dataclass(frozen=True)
class Abort:
    """The script cannot be tuned: it fails as it is."""

    message: str


Instruction = ProfileWorkload | Propose | RunTrial | Finish | Abort

CLOSING_SHARE = 0.4
"""At most this share of the time budget is kept back for the finalists and the closing comparison."""
TRIAL_SHARE = 0.02
"""At most this share of the time budget is spent on one trial of the search, if its first batch of steps is not more already."""
REFERENCE_TRIES = 3
"""How often the current setup may fail before any measurement, until the job is given up."""


def next_instruction(spec: JobSpec, history: History) -> Instruction:
    """What to do now. Pure: the same spec and history give the same instruction."""
    return (
        search_instruction(spec, history)
        or look_instruction(spec, history)
        or _close(spec, history)
    )


def search_instruction(spec: JobSpec, history: History) -> Instruction | None:
    """What the search does now; None once its budget is spent, or the space has nothing new."""
    if history.profiled is None:
        return ProfileWorkload()
    if history.reference_s is None:
        failures = [trial.outcome for trial in history.trials if isinstance(trial.outcome, Failed)]
        if len(failures) >= REFERENCE_TRIES:
            return Abort(
                f"the script fails with its current setup, so there is nothing to compare with: {failures[-1].message}"
            )
        return _reference(spec, history)
    return None if _budget_spent(spec, history) else _explore(spec, history)


def look_instruction(spec: JobSpec, history: History) -> RunTrial | None:
    """After the search: a second look at the finalists; None once `contender` may choose among them."""
    if history.ab_trials or not history.ranking():
        return None
    look = next(
        (key for key in _finalists(spec, history) if key not in _second_looks(history)), None
    )
    if look is not None:
        return _candidate(spec, history, look, len(history.rounds), 1, None)
    return _reference(spec, history) if _candidates_since_reference(history) > 0 else None


def contender(history: History) -> str | None:
    """The strategy that is compared with the current setup; None where none was measured.

    One lucky trial must not beat a finalist that was measured twice.
    """
    ranking, looked_at = history.ranking(), _second_looks(history)
    chosen = _first(history, [entry for entry in ranking if entry[0] in looked_at] or ranking, 1)
    return chosen[0] if chosen else None


def _explore(spec: JobSpec, history: History) -> Instruction | None:
    """The next candidate, reference or round; None when the space has nothing new to offer."""
    if _candidates_since_reference(history) >= spec.reference_every:
        return _reference(spec, history)
    pending = _pending(spec, history)
    if pending is not None:
        return pending
    if history.rounds and not _brought_something_new(history):
        return None
    if history.rounds and _round_unbracketed(spec, history):
        return _reference(spec, history)
    return Propose(len(history.rounds), min(spec.top_k, spec.max_trials - _trials_spent(history)))


def _pending(spec: JobSpec, history: History) -> RunTrial | None:
    """The first proposal without a trial, or the first disturbed trial that may be repeated."""
    tried: dict[str, int] = {}
    for trial in history.candidates:
        tried[trial.request.strategy_id] = tried.get(trial.request.strategy_id, 0) + 1
    for proposed in history.rounds:
        for proposal in proposed.proposals:
            attempts = tried.get(proposal.strategy.id, 0)
            if attempts == 0:
                return _candidate(
                    spec, history, proposal.strategy.id, proposed.round, 0, proposal.predicted_s
                )
            if attempts <= spec.max_repeats and _only_disturbed(history, proposal.strategy.id):
                return _candidate(
                    spec,
                    history,
                    proposal.strategy.id,
                    proposed.round,
                    attempts,
                    proposal.predicted_s,
                )
    return None


def _brought_something_new(history: History) -> bool:
    """Whether the last round holds a strategy that no earlier round proposed."""
    earlier = {
        proposal.strategy.id for proposed in history.rounds[:-1] for proposal in proposed.proposals
    }
    return any(proposal.strategy.id not in earlier for proposal in history.rounds[-1].proposals)


def _only_disturbed(history: History, strategy_id: str) -> bool:
    trials = [trial for trial in history.candidates if trial.request.strategy_id == strategy_id]
    return all(
        isinstance(trial.outcome, Measured) and trial.request.number in history.disturbed
        for trial in trials
    )


def _round_unbracketed(spec: JobSpec, history: History) -> bool:
    """Half a reference interval of trials would go into training unchecked: bracket them first."""
    since = _candidates_since_reference(history)
    return since > 0 and 2 * since >= spec.reference_every


def _candidates_since_reference(history: History) -> int:
    count = 0
    for trial in reversed(history.trials):
        if trial.request.role is Role.REFERENCE:
            break
        count += trial.request.role is Role.CANDIDATE and not trial.refused
    return count


def _trials_spent(history: History) -> int:
    """Of the budget. A trial that the ranks refuse makes no step and costs none, but of those there may be no more than of the others."""
    refused = len(history.refused)
    return max(len(history.candidates) - refused, refused)


def _budget_spent(spec: JobSpec, history: History) -> bool:
    if history.ab_trials or _trials_spent(history) >= spec.max_trials:
        return True
    look_s = (
        _block_s(spec, history)
        / (spec.warmup_steps + spec.timed_steps)
        * (spec.warmup_steps + _longest(spec, history))
    )
    closing_s = 2 * spec.ab_pairs * _block_s(spec, history) + spec.finalists * look_s
    return history.elapsed_s + min(closing_s, CLOSING_SHARE * spec.max_seconds) >= spec.max_seconds


def _block_s(spec: JobSpec, history: History) -> float:
    """About how long one block of the current setup takes in the closing comparison."""
    assert history.reference_s is not None
    return (spec.warmup_steps + spec.timed_steps) * history.reference_s


def _pairs(spec: JobSpec, history: History, number: int) -> int:
    """Most pairs of blocks: what fits into the time that was left when the comparison with contender `number` began.

    At least as many as the interval needs, even if the time is over: what was found so far would be worth nothing otherwise.
    """
    began_s = history.elapsed_s
    for before, event in pairwise(history.events):
        if (
            isinstance(event, TrialFinished)
            and event.request.role is Role.AB
            and event.request.round == number
        ):
            began_s = before.elapsed_s
            break
    left_s = spec.max_seconds - began_s
    return max(
        fewest_values(spec.confidence),
        min(spec.ab_pairs, int(left_s / (2 * _block_s(spec, history)))),
    )


def _close(spec: JobSpec, history: History) -> Instruction:
    """The interleaved A/B of the contender, then the decision."""
    best = contender(history)
    if best is None:
        return Finish(Decision(CURRENT_SETUP, _why_nothing(history), None, None))
    # A strategy that fails in its A/B leaves the ranking and the next one is compared from scratch.
    number = sum(
        isinstance(t.outcome, Failed) and t.request.strategy_id != CURRENT_SETUP
        for t in history.ab_trials
    )
    blocks = [trial for trial in history.ab_trials if trial.request.round == number]
    if sum(isinstance(trial.outcome, Failed) for trial in blocks) > 1:
        return Finish(
            Decision(
                CURRENT_SETUP,
                "the current setup failed twice during the closing comparison, so nothing was proven",
                None,
                best,
            )
        )
    mine, current = _blocks(blocks, best), _blocks(blocks, CURRENT_SETUP)
    rule = PairRule(
        spec.confidence,
        spec.ab_precision,
        fewest_values(spec.confidence),
        _pairs(spec, history, number),
    )
    ended = enough_pairs(mine, current, rule) if len(mine) == len(current) else None
    if ended is not None:
        return Finish(_decide(spec, history, best, mine, current, ended))
    side = best if next_is_tuned(len(mine), len(current)) else CURRENT_SETUP
    # Blocks have a fixed length: the number of pairs is what is chosen, and short blocks leave a drift less time.
    return RunTrial(
        TrialRequest(
            len(history.trials), side, Role.AB, spec.warmup_steps, spec.timed_steps, number
        )
    )


def next_is_tuned(mine: int, current: int) -> bool:
    """Whose block comes next, after so many of both: in the order ABBA ABBA ..., which cancels a linear drift of the machine."""
    return mine % 2 == 0 if mine == current else mine < current


def _why_nothing(history: History) -> str:
    if not history.candidates:
        return "the budget ended before a strategy could be tried, so the current setup stays; raise --budget-time"
    return "every strategy that was tried failed, so the current setup stays; the report says why each failed"


def _finalists(spec: JobSpec, history: History) -> list[str]:
    """The fastest strategies of the search: a second look before the choice tames the winner's curse."""
    looks = [
        position
        for position, event in enumerate(history.events)
        if isinstance(event, TrialFinished)
        and event.request.role is Role.CANDIDATE
        and event.request.round == len(history.rounds)
    ]
    search = history.first(looks[0]) if looks else history
    return _first(search, search.ranking(), spec.finalists)


def _first(history: History, ranking: list[tuple[str, float]], count: int) -> list[str]:
    """The first `count` strategies of a ranking. Those that tie with the last of them, closer than the noise, get in lossless first."""
    if not ranking:
        return []
    last_s, tie = ranking[:count][-1][1], 1 + history.noise
    ahead = [key for key, value in ranking if value * tie < last_s]
    tied = [key for key, value in ranking if last_s <= value * tie and value <= last_s * tie]
    return [*ahead, *sorted(tied, key=lambda key: not history.proposals[key].strategy.lossless)][
        :count
    ]


def _second_looks(history: History) -> set[str]:
    """Finalists that were measured again: their trial carries a round that was never proposed."""
    return {
        trial.request.strategy_id
        for trial in history.candidates
        if trial.request.round == len(history.rounds)
    }


def _blocks(trials: list[TrialFinished], strategy_id: str) -> list[Measured]:
    return [
        t.outcome
        for t in trials
        if t.request.strategy_id == strategy_id and isinstance(t.outcome, Measured)
    ]


def _decide(
    spec: JobSpec,
    history: History,
    best: str,
    mine: list[Measured],
    current: list[Measured],
    ended: Ended,
) -> Decision:
    comparison = compare(mine, current, spec.confidence)
    if ended is Ended.LOSING:
        # The signs of the differences ended it, so the interval does not have its confidence.
        reason = (
            f"the best of {len(history.measured_s)} strategies is {ended.value} in {comparison.pairs} interleaved pairs, which ended the "
            f"comparison: time ratio about {comparison.ratio:.3f} (without an interval, as its direction ended it); "
            f"so the current setup stays; {history.quality}"
        )
        return Decision(CURRENT_SETUP, reason, comparison, best)
    share = f"{100 * spec.confidence:.0f} %"
    interval = f"time ratio {comparison.ratio:.3f}, {share} interval {comparison.low:.3f} to {comparison.high:.3f}"
    pairs = f"{comparison.pairs} interleaved pairs ({ended.value})"
    if comparison.high < 1:
        return Decision(
            best,
            f"faster than the current setup in {pairs}: {interval}; {history.quality}",
            comparison,
            best,
        )
    reason = (
        f"the best of {len(history.measured_s)} strategies is not significantly faster in {pairs}: {interval}; "
        f"so the current setup stays; {history.quality}"
    )
    return Decision(CURRENT_SETUP, reason, comparison, best)


def _reference(spec: JobSpec, history: History) -> RunTrial:
    most, precision = _longest(spec, history), spec.precision
    request = TrialRequest(
        len(history.trials), CURRENT_SETUP, Role.REFERENCE, spec.warmup_steps, spec.timed_steps
    )
    return RunTrial(replace(request, most_steps=most, precision=precision))


def _candidate(
    spec: JobSpec,
    history: History,
    strategy_id: str,
    round_: int,
    attempt: int,
    predicted_s: float | None,
) -> RunTrial:
    request = TrialRequest(
        len(history.trials),
        strategy_id,
        Role.CANDIDATE,
        spec.warmup_steps,
        spec.timed_steps,
        round_,
        attempt,
        predicted_s,
        _longest(spec, history),
        spec.precision,
        _losing_s(spec, history),
    )
    return RunTrial(request)


def _longest(spec: JobSpec, history: History) -> int:
    """Timed steps that a trial of the search may take: fewer than `most_steps` where they would cost too much of the budget."""
    assert history.profiled is not None
    step_s = max(
        history.reference_s or 0.0, history.profiled.workload.compute_s
    )  # before any trial: at least the computation
    affordable = int(TRIAL_SHARE * spec.max_seconds / step_s) if step_s > 0 else spec.most_steps
    return min(spec.most_steps, max(spec.timed_steps, affordable))


def _losing_s(spec: JobSpec, history: History) -> float:
    """The step time above which a candidate is clearly losing: `losing` times the best so far, at the machine's speed of now."""
    assert history.reference_s is not None
    best_s = min([history.reference_s, *(value for _, value in history.ranking()[:1])])
    return spec.losing * best_s * history.references[-1][1] / history.reference_s
