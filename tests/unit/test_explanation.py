"""Why a strategy missed its prediction: only reasons that the job's records show."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from synthetic_job import WORKLOAD, SyntheticWorld, drive, job_spec, strategy

from autotune.canonical import canonical_json
from autotune.records import (
    CURRENT_SETUP,
    Accelerators,
    Conditions,
    Constants,
    Decision,
    Measured,
    Network,
)
from autotune.simulators.constants import START
from autotune.strategy_space.plan import plan
from autotune.tuning.events import (
    Event,
    Profiled,
    Proposed,
    TrialFinished,
    event_from_data,
    event_to_data,
)
from autotune.tuning.explanation import NOT_EXPLAINED, Explainer, explained
from autotune.tuning.history import History
from autotune.units import format_seconds

SPEC = job_spec(max_trials=4)
REAL = Conditions()
EMULATED = Conditions(Network.EMULATED, Accelerators.EMULATED)
BUCKETS = (tuple(variable.name for variable in WORKLOAD.variables),)


def replayed_s(history: History, number: int, conditions: Conditions = REAL) -> float:
    enacted = plan(strategy(number), WORKLOAD, 2)
    return Explainer(history, conditions).replays.step_s(enacted)


def job(
    predicted: float = 1.0,
    measured: float = 1.0,
    current: float = 1.0,
    overrun: float | None = None,
    ranker: str = "replay",
    second: float = 1.0,
) -> History:
    """Strategies 0 to 3. Of strategy 0 the figures are these multiples of its replay.

    The others are measured as predicted, but strategy 1 takes `second` times that. `current`: the
    current setup's measured over its replayed step time.
    """
    first = History((Profiled(WORKLOAD, SPEC.cluster, 1.0, {}, "", BUCKETS),), SPEC.deviation)
    conditions = REAL if overrun is None else EMULATED
    replays = {number: replayed_s(first, number, conditions) for number in range(4)}
    current_plan = first.current_plan
    assert current_plan is not None
    current_s = Explainer(first, conditions).replays.step_s(current_plan)
    world = SyntheticWorld(
        replays | {0: measured * replays[0], 1: second * replays[1]},
        available=4,
        current_s=current * current_s,
    )
    history, _ = drive(SPEC, world)

    def changed(event: Event) -> Event:
        if isinstance(event, Profiled):
            return replace(event, current_buckets=BUCKETS)
        if isinstance(event, Proposed):
            proposals = tuple(
                replace(p, predicted_s=(predicted if number == 0 else 1.0) * replays[number])
                for p in event.proposals
                for number in [world.by_id[p.strategy.id]]
            )
            return replace(event, ranker=ranker, proposals=proposals)
        assert isinstance(event, TrialFinished) and isinstance(event.outcome, Measured)
        is_first = event.request.strategy_id == strategy(0).id
        return replace(event, outcome=replace(event.outcome, overrun=overrun if is_first else None))

    return History(tuple(changed(event) for event in history.events), SPEC.deviation)


def reason(history: History, conditions: Conditions = REAL) -> str:
    explanation = Explainer(history, conditions).explain(strategy(0).id)
    assert explanation is not None
    return explanation.reason


def test_a_small_difference_is_noise() -> None:
    assert reason(job(measured=1.01)) == "within ± 2%, the noise of measurements"


def test_without_a_record_of_the_cause_it_is_not_explained() -> None:
    assert reason(job(measured=1.5)) == NOT_EXPLAINED


@pytest.mark.parametrize(
    ("ranker", "who"), [("rnn", "the rnn simulator"), ("replay", "its ranking")]
)
def test_a_correction_that_the_replay_contradicts_is_a_reason(ranker: str, who: str) -> None:
    text = reason(job(predicted=1.5, ranker=ranker))
    assert text.startswith(f"{who} predicted ") and ", the replay " in text
    assert NOT_EXPLAINED not in text


def test_a_correction_in_the_right_direction_is_none() -> None:
    assert reason(job(predicted=1.2, measured=1.5)) == NOT_EXPLAINED


def test_an_overrun_explains_its_part() -> None:
    history = job(measured=1.3, overrun=0.05)
    late_ms = 0.05 * WORKLOAD.compute_s * 1000
    text = reason(history, EMULATED)
    assert text.startswith(f"emulated accelerators overran by up to {late_ms:.3g} ms per step; ")
    assert text.endswith(NOT_EXPLAINED)


def test_a_miss_in_common_with_the_current_setup_is_named() -> None:
    assert reason(job(measured=1.1, current=1.1)) == (
        "the current setup misses its replay by +10.0%, too"
    )
    assert reason(job(measured=1.1, current=0.9)) == NOT_EXPLAINED


def test_a_disturbed_trial_is_named() -> None:
    history = job(measured=1.5)
    number = next(t for t in history.candidates if t.request.strategy_id == strategy(0).id)
    slow = tuple(
        tuple(value * (3 if step < 4 else 1) for step, value in enumerate(row))
        for row in (number.outcome.step_s if isinstance(number.outcome, Measured) else ())
    )
    events = tuple(
        replace(event, outcome=Measured(slow))
        if isinstance(event, TrialFinished) and event.request.strategy_id == strategy(0).id
        else event
        for event in history.events
    )
    disturbed = History(events, SPEC.deviation)
    assert disturbed.disturbed
    assert "the machine changed during every trial of it" in reason(disturbed)


def test_the_worst_misses_come_first_and_all_are_counted() -> None:
    explainer = Explainer(job(measured=1.2, second=0.5), REAL)
    listed, count = explainer.missed(10)
    assert [each.strategy_id for each in listed] == [strategy(1).id, strategy(0).id]
    assert listed[1].miss == pytest.approx(0.2, rel=1e-3) and count == 2
    assert [each.strategy_id for each in explainer.missed(1)[0]] == [strategy(1).id]


def test_the_decision_states_prediction_measurement_and_exposed_time() -> None:
    explainer = Explainer(job(measured=2.0), REAL)
    best = strategy(0).id
    line = explained(Decision(best, "faster", None, best), explainer).explanation
    assert line.startswith("predicted ") and f"(+100.0%: {NOT_EXPLAINED})" in line
    assert "of each step are exposed" in line and "with the current setup" in line
    kept = explained(Decision(CURRENT_SETUP, "slower", None, best), explainer)
    assert kept.explanation.startswith(f"{best}: predicted ")
    nothing = Decision(CURRENT_SETUP, "nothing tried", None, None)
    assert explained(nothing, explainer) == nothing


def test_a_prediction_of_known_uncertainty_is_shown_with_its_interval() -> None:
    history = job(measured=2.0)
    events = tuple(
        replace(event, proposals=tuple(replace(one, predicted_sd=0.05) for one in event.proposals))
        if isinstance(event, Proposed)
        else event
        for event in history.events
    )
    explanation = Explainer(History(events, SPEC.deviation), REAL).explain(strategy(0).id)
    assert explanation is not None
    low, high = explanation.predicted_s * 0.9067, explanation.predicted_s * 1.103
    interval = f"(95% interval {format_seconds(low)} to {format_seconds(high)})"
    assert interval in explanation.line


SLOW_START = Constants({START: 5.0})


def with_constants_of_rounds(history: History, *constants: Constants | None) -> History:
    """The history with a round of each of these constants, the first ones for its proposals.

    Strategies are predicted by the replay with the constants of their round.
    """
    rounds = [
        Proposed(number, (), "none", "", 0, (), history.elapsed_s, constants=one)
        for number, one in enumerate(constants)
    ]
    profiled = history.events[0]
    replays = Explainer(History((profiled, rounds[0]), SPEC.deviation), REAL).replays

    def changed(event: Event) -> Event:
        if not isinstance(event, Proposed):
            return event
        proposals = tuple(
            replace(one, predicted_s=replays.step_s(plan(one.strategy, WORKLOAD, 2)))
            for one in event.proposals
        )
        return replace(event, proposals=proposals, constants=constants[0])

    events = tuple(changed(event) for event in history.events)
    return History((*events, *rounds[1:]), SPEC.deviation)


@pytest.mark.parametrize("constants", [(SLOW_START,), (SLOW_START, None), (None, SLOW_START)])
def test_a_prediction_is_explained_with_the_constants_of_its_round(constants) -> None:
    history = with_constants_of_rounds(job(), *constants)
    explainer = Explainer(history, REAL)
    explanation = explainer.explain(strategy(0).id)
    assert explanation is not None
    assert "its ranking predicted" not in explanation.reason
    assert explanation.steps.step_s == pytest.approx(explanation.predicted_s)
    enacted, stated_s = plan(strategy(0), WORKLOAD, 2), replayed_s(job(), 0)
    latest_s = explainer.replays.step_s(enacted)
    assert latest_s == stated_s if constants[-1] is None else latest_s > 1.1 * stated_s


def test_the_constants_of_a_round_are_stored_with_its_event() -> None:
    event = Proposed(
        1, (), "replay", "", 0, (), 1.0, constants=Constants({START: 0.5}, {"lane": 2})
    )
    assert event_from_data(json.loads(canonical_json(event_to_data(event)))) == event
    assert "constants" not in event_to_data(replace(event, constants=None))
