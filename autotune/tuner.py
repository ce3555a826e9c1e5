"""The loop of AutoSync (Fig. 1) as a pure state machine: the history so far in, the next instruction out.

Nothing here runs, stores or times anything. Because the instruction is a function of the job and its recorded
events, a job that was killed continues exactly where its event log ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autotune.events import TrialFinished
from autotune.history import History
from autotune.job import JobSpec, fewest_pairs
from autotune.records import CURRENT_SETUP, Comparison, Decision, Failed, Measured, Role, TrialRequest


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
REFERENCE_TRIES = 3
"""How often the current setup may fail before any measurement, until the job is given up."""


def next_instruction(spec: JobSpec, history: History) -> Instruction:
    """What to do now. Pure: the same spec and history give the same instruction."""
    if history.profiled is None:
        return ProfileWorkload()
    if history.reference_s is None:
        failures = [trial.outcome for trial in history.trials if isinstance(trial.outcome, Failed)]
        if len(failures) >= REFERENCE_TRIES:
            return Abort(f"the script fails with its current setup, so there is nothing to compare with: {failures[-1].message}")
        return _reference(spec, history)
    if not _budget_spent(spec, history):
        instruction = _explore(spec, history)
        if instruction is not None:
            return instruction
    return _close(spec, history)


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
    left = spec.max_trials - len(history.candidates)
    return Propose(len(history.rounds), min(spec.top_k, left))


def _pending(spec: JobSpec, history: History) -> RunTrial | None:
    """The first proposal without a trial, or the first disturbed trial that may be repeated."""
    tried: dict[str, int] = {}
    for trial in history.candidates:
        tried[trial.request.strategy_id] = tried.get(trial.request.strategy_id, 0) + 1
    for proposed in history.rounds:
        for proposal in proposed.proposals:
            attempts = tried.get(proposal.strategy.id, 0)
            if attempts == 0:
                return _candidate(spec, history, proposal.strategy.id, proposed.round, 0, proposal.predicted_s)
            if attempts <= spec.max_repeats and _only_disturbed(history, proposal.strategy.id):
                return _candidate(spec, history, proposal.strategy.id, proposed.round, attempts, proposal.predicted_s)
    return None


def _brought_something_new(history: History) -> bool:
    """Whether the last round holds a strategy that no earlier round proposed."""
    earlier = {proposal.strategy.id for proposed in history.rounds[:-1] for proposal in proposed.proposals}
    return any(proposal.strategy.id not in earlier for proposal in history.rounds[-1].proposals)


def _only_disturbed(history: History, strategy_id: str) -> bool:
    trials = [trial for trial in history.candidates if trial.request.strategy_id == strategy_id]
    return all(isinstance(trial.outcome, Measured) and trial.request.number in history.disturbed for trial in trials)


def _round_unbracketed(spec: JobSpec, history: History) -> bool:
    """Half a reference interval of trials would go into training unchecked: bracket them first."""
    since = _candidates_since_reference(history)
    return since > 0 and 2 * since >= spec.reference_every


def _candidates_since_reference(history: History) -> int:
    count = 0
    for trial in reversed(history.trials):
        if trial.request.role is Role.REFERENCE:
            break
        count += trial.request.role is Role.CANDIDATE
    return count


def _budget_spent(spec: JobSpec, history: History) -> bool:
    if history.ab_trials or len(history.candidates) >= spec.max_trials:
        return True
    blocks = 2 * spec.ab_pairs + spec.finalists
    kept_s = min(blocks * _block_s(spec, history), CLOSING_SHARE * spec.max_seconds)
    return history.elapsed_s + kept_s >= spec.max_seconds


def _block_s(spec: JobSpec, history: History) -> float:
    """About how long one trial of the current setup takes."""
    assert history.reference_s is not None
    return (spec.warmup_steps + spec.timed_steps) * history.reference_s


def _pairs(spec: JobSpec, history: History) -> int:
    """Pairs of blocks that fit into the time that was left when the comparison began; at least as many as the interval needs."""
    before = [event.elapsed_s for event in history.events if not (isinstance(event, TrialFinished) and event.request.role is Role.AB)]
    left_s = spec.max_seconds - before[-1]
    return max(fewest_pairs(spec.confidence), min(spec.ab_pairs, int(left_s / (2 * _block_s(spec, history)))))


def _close(spec: JobSpec, history: History) -> Instruction:
    """A second look at the finalists, then the interleaved A/B, then the decision."""
    ranking = history.ranking()
    if not ranking:
        return Finish(Decision(CURRENT_SETUP, _why_nothing(history), None, None))
    if not history.ab_trials:
        look = next((key for key in _finalists(spec, history) if key not in _second_looks(history)), None)
        if look is not None:
            return _candidate(spec, history, look, len(history.rounds), 1, None)
        if _candidates_since_reference(history) > 0:
            return _reference(spec, history)
    # One lucky trial must not beat a finalist that was measured twice.
    looked_at = _second_looks(history)
    best = next((strategy_id for strategy_id, _ in ranking if strategy_id in looked_at), ranking[0][0])
    # A strategy that fails in its A/B leaves the ranking and the next one is compared from scratch.
    contender = sum(isinstance(t.outcome, Failed) and t.request.strategy_id != CURRENT_SETUP for t in history.ab_trials)
    blocks = [trial for trial in history.ab_trials if trial.request.round == contender]
    if sum(isinstance(trial.outcome, Failed) for trial in blocks) > 1:
        return Finish(
            Decision(CURRENT_SETUP, "the current setup failed twice during the closing comparison, so nothing was proven", None, best)
        )
    mine, current = _blocks(blocks, best), _blocks(blocks, CURRENT_SETUP)
    pairs = _pairs(spec, history)
    if len(mine) >= pairs and len(current) >= pairs:
        return Finish(_decide(spec, history, best, mine[:pairs], current[:pairs]))
    request = TrialRequest(
        len(history.trials), _next_side(best, len(mine), len(current)), Role.AB, spec.warmup_steps, spec.timed_steps, contender
    )
    return RunTrial(request)


def _next_side(best: str, mine: int, current: int) -> str:
    """Blocks in the order ABBA ABBA ..., which cancels a linear drift of the machine."""
    if mine == current:
        return best if mine % 2 == 0 else CURRENT_SETUP
    return best if mine < current else CURRENT_SETUP


def _why_nothing(history: History) -> str:
    if not history.candidates:
        return "the budget ended before a strategy could be tried, so the current setup stays; raise --budget-time"
    return "every strategy that was tried failed, so the current setup stays; the report says why each failed"


def _finalists(spec: JobSpec, history: History) -> list[str]:
    """The fastest strategies of the search: a second look before the choice tames the winner's curse."""
    looks = [
        position
        for position, event in enumerate(history.events)
        if isinstance(event, TrialFinished) and event.request.role is Role.CANDIDATE and event.request.round == len(history.rounds)
    ]
    search = History(history.events[: looks[0]], history.deviation) if looks else history
    return [key for key, _ in search.ranking()[: spec.finalists]]


def _second_looks(history: History) -> set[str]:
    """Finalists that were measured again: their trial carries a round that was never proposed."""
    return {trial.request.strategy_id for trial in history.candidates if trial.request.round == len(history.rounds)}


def _blocks(trials: list[TrialFinished], strategy_id: str) -> list[Measured]:
    return [t.outcome for t in trials if t.request.strategy_id == strategy_id and isinstance(t.outcome, Measured)]


def compare(mine: list[Measured], current: list[Measured], confidence: float) -> Comparison:
    """The interval of the time ratio from paired blocks; see `Comparison`."""
    pairs = min(len(mine), len(current))
    logs = [math.log(a.median_s / b.median_s) for a, b in zip(mine, current, strict=False)]
    walsh = sorted((logs[i] + logs[j]) / 2 for i in range(pairs) for j in range(i, pairs))
    bound = signed_rank_bound(pairs, (1 - confidence) / 2)
    middle = float(np.median(walsh))
    return Comparison(math.exp(middle), math.exp(walsh[bound - 1]), math.exp(walsh[-bound]), pairs, confidence)


def signed_rank_bound(pairs: int, tail: float) -> int:
    """The interval reaches from the k-th smallest to the k-th largest Walsh average: the largest k with P(W < k) <= tail.

    W is the signed-rank statistic of `pairs` differences: every subset of the ranks 1..n is equally likely.
    """
    ways = np.zeros(pairs * (pairs + 1) // 2 + 1)
    ways[0] = 1.0
    for rank in range(1, pairs + 1):
        ways[rank:] = ways[rank:] + ways[:-rank]
    below = np.cumsum(ways) / 2.0**pairs
    return int(np.searchsorted(below, tail, side="right"))


def _decide(spec: JobSpec, history: History, best: str, mine: list[Measured], current: list[Measured]) -> Decision:
    comparison = compare(mine, current, spec.confidence)
    share = f"{100 * spec.confidence:.0f} %"
    interval = f"time ratio {comparison.ratio:.3f}, {share} interval {comparison.low:.3f} to {comparison.high:.3f}"
    if comparison.high < 1:
        return Decision(best, f"faster than the current setup in {comparison.pairs} interleaved pairs: {interval}", comparison, best)
    reason = f"the best of {len(history.measured_s)} strategies is not significantly faster ({interval}), so the current setup stays"
    return Decision(CURRENT_SETUP, reason, comparison, best)


def _reference(spec: JobSpec, history: History) -> RunTrial:
    return _request(spec, history, CURRENT_SETUP, Role.REFERENCE)


def _request(spec: JobSpec, history: History, strategy_id: str, role: Role) -> RunTrial:
    return RunTrial(TrialRequest(len(history.trials), strategy_id, role, spec.warmup_steps, spec.timed_steps))


def _candidate(spec: JobSpec, history: History, strategy_id: str, round_: int, attempt: int, predicted_s: float | None) -> RunTrial:
    request = TrialRequest(
        len(history.trials), strategy_id, Role.CANDIDATE, spec.warmup_steps, spec.timed_steps, round_, attempt, predicted_s
    )
    return RunTrial(request)
