"""A history that grows event by event equals one built at once, and an obvious twin."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from known_examples import examples
from synthetic_job import job_spec, strategy

from autotune.records import CURRENT_SETUP, Failed, FailureKind, Measured, Role, TrialRequest
from autotune.storage.summaries import parse_trials, rows_of_job
from autotune.tuning.events import Event, Proposal, Proposed, TrialFinished
from autotune.tuning.figures import JobSummary, TrialSummary
from autotune.tuning.history import History

FAILED = Failed(FailureKind.CRASH, "rank 1 exited with code 1", 1)
STEPS = st.sampled_from([1.0, 1.01, 1.1, 1.4])


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Events in any order: references, rounds, and trials of strategies that may repeat or fail."""
    events: list[Event] = []
    for number in range(draw(st.integers(0, 25))):
        kind = draw(st.sampled_from(["round", "reference", "candidate", "candidate", "closing"]))
        if kind == "round":
            numbers = draw(st.lists(st.integers(0, 5), max_size=3))
            proposals = tuple(Proposal(strategy(n), "sampled") for n in numbers)
            events.append(Proposed(number, proposals, "replay", "", 9, (), float(number)))
            continue
        role = {"reference": Role.REFERENCE, "candidate": Role.CANDIDATE}.get(kind, Role.AB)
        key = strategy(draw(st.integers(0, 5))).id
        if role is Role.REFERENCE or (role is Role.AB and draw(st.booleans())):
            key = CURRENT_SETUP
        times = draw(st.lists(STEPS, min_size=1, max_size=12))
        outcome = Measured((tuple(times),)) if draw(st.integers(0, 5)) else FAILED
        request = TrialRequest(number, key, role, 2, 4)
        events.append(TrialFinished(request, outcome, None, float(number)))
    return events


def disturbed(history: History) -> set[int]:
    marked = set()
    for trial in history.trials:
        number = trial.request.number
        before = [value for at, value in history.references if at < number][-1:]
        after = [value for at, value in history.references if at > number][:1]
        around = [*before, *after]
        changed = len(around) == 2 and max(around) > (1 + history.tolerance) * min(around)
        if trial.request.role is Role.CANDIDATE and (changed or trial.unsteady):
            marked.add(number)
    return marked


def steady_s(history: History, trial: TrialFinished) -> float:
    assert isinstance(trial.outcome, Measured)
    number = trial.request.number
    before = [value for at, value in history.references if at < number][-1:]
    after = [value for at, value in history.references if at > number][:1]
    if not before and not after:
        return trial.outcome.median_s
    usual_s = float(np.median([value for _, value in history.references]))
    return trial.outcome.median_s * usual_s / float(np.mean([*before, *after]))


def measured_s(history: History) -> dict[str, float]:
    times_s: dict[str, dict[bool, list[float]]] = {}
    for trial in history.trials:
        if trial.request.role is Role.CANDIDATE and isinstance(trial.outcome, Measured):
            quiet = trial.request.number not in disturbed(history)
            of_strategy = times_s.setdefault(trial.request.strategy_id, {})
            of_strategy.setdefault(quiet, []).append(steady_s(history, trial))
    return {key: float(np.median(each.get(True) or each[False])) for key, each in times_s.items()}


def next_proposal(history: History, most_repeats: int) -> tuple[int, str, int] | None:
    trials = [trial for trial in history.trials if trial.request.role is Role.CANDIDATE]
    attempts = Counter(trial.request.strategy_id for trial in trials)
    useful = {
        trial.request.strategy_id
        for trial in trials
        if isinstance(trial.outcome, Failed) or trial.request.number not in disturbed(history)
    }
    for event in history.events:
        for proposal in event.proposals if isinstance(event, Proposed) else ():
            key = proposal.strategy.id
            if attempts[key] <= most_repeats and key not in useful:
                return event.round, key, attempts[key]
    return None


@settings(max_examples=examples(150), deadline=None)
@given(logs(), st.integers(0, 2))
def test_a_growing_history_equals_its_twin(events, most_repeats) -> None:
    history = History((), job_spec().deviation)
    for event in events:
        history = history.then(event)
        for each in (history, History(history.events, history.deviation)):
            assert each.disturbed == disturbed(history)
            assert each.measured_s == measured_s(history)
            ranking = each.ranking()
            assert each.fastest_s == (ranking[0][1] if ranking else None)
            chosen = each.next_proposal(most_repeats)
            pending = chosen and (chosen[0].round, chosen[1].strategy.id, chosen[2])
            assert pending == next_proposal(history, most_repeats)
    again = History(tuple(events), history.deviation)
    for name in ("rounds", "trials", "candidates", "ab_trials", "refused", "references", "figures"):
        assert getattr(history, name) == getattr(again, name)
    assert list(history.proposals.items()) == list(again.proposals.items())
    assert list(history.measured_s) == list(again.measured_s)


@settings(max_examples=examples(100), deadline=None)
@given(logs())
def test_the_rows_of_a_list_give_the_figures_of_the_history(events) -> None:
    history = History(tuple(events), job_spec().deviation)
    bodies = [row.body for row in rows_of_job(enumerate(events)) if row.body is not None]
    trials = parse_trials(bodies, "a summary")
    summary = JobSummary(trials, {}, None, len(history.rounds), history.deviation)
    assert trials == tuple(map(TrialSummary.of, history.trials))
    for name in ("figures", "tolerance", "disturbed", "repeated", "overruns", "references"):
        assert getattr(summary, name) == getattr(history, name), name
    assert (summary.counts, summary.quality) == (history.counts, history.quality)
