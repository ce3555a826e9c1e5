"""The strategies that a job proposes, and those that it leaves out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

import numpy as np
import pytest

from autotune.arrays import FloatArray
from autotune.cluster import Cluster, Host
from autotune.features.extract import StrategyFeatures, job_extractor
from autotune.lowering.link_rates import with_link_rates
from autotune.lowering.replayed import LoweredSteps
from autotune.optimizer.budget import Budget
from autotune.records import (
    CURRENT_SETUP,
    Accelerators,
    Conditions,
    Measured,
    Network,
    Role,
    TrialRequest,
)
from autotune.rng import generator
from autotune.sampler.bayesian_proposer import BAYES_ASKS
from autotune.sampler.encodings import Encoding, FusionScalars, SpaceChoices
from autotune.sampler.pool import CUT_SHORT, NEIGHBOURS
from autotune.sampler.proposer import Proposer, uncalibrated
from autotune.sampler.random import sample_many
from autotune.sampler.ranking import NO_TIMES, Candidate
from autotune.sampler.scoring import FEWEST_CALIBRATED, Scorer
from autotune.simulators.interface import Simulator
from autotune.simulators.registry import SIMULATORS
from autotune.strategy_space.builders.collectives import ddp_default, per_variable
from autotune.strategy_space.builders.registry import seed_strategies
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.moves.neighbours import neighbourhood
from autotune.strategy_space.plan import PlannedStrategy, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Compressor, Strategy
from autotune.tuning.events import Profiled, Proposal, Proposed, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec, Search
from autotune.workload import Variable, Workload

MODEL = Workload("m", tuple(Variable(f"v{i}", (300, 200)) for i in range(12)), (), 0.1, 0.2)
SMALL = Workload("m", MODEL.variables[:6], (), 0.1, 0.2)


SLOW_NETWORK = Cluster("slow", tuple(Host(f"h{i}", 1, 12.5e6, 1e-4, 10e9, 1e-5) for i in range(4)))
CLIPPED = "gradients are clipped by their global norm"
SHORT = Budget(200), Budget(200)
"""Searches of tests that do not look at how good their results are."""
FEW = Budget(60), Budget(60)
"""Searches of tests in which samples have everything that the space allows."""


def job(cluster: Cluster = SLOW_NETWORK, **settings) -> JobSpec:
    return JobSpec(("torchrun", "train.py"), 4, cluster, **({"samples_per_round": 40} | settings))


def profiled(spec: JobSpec, refused: str = "", model: Workload = MODEL) -> History:
    return History((Profiled(model, spec.cluster, 1.0, {"torch": "2.13.0"}, refused),), 0.1)


def finished(number: int, key: str, plan_id: str | None, step_s: float) -> TrialFinished:
    role = Role.REFERENCE if plan_id is None else Role.CANDIDATE
    request = TrialRequest(number, key, role, 0, 3)
    return TrialFinished(request, Measured(((step_s,) * 3,)), plan_id, float(number))


def leading(proposals: tuple[Proposal, ...]) -> list[Proposal]:
    return [proposal for proposal in proposals if proposal.origin.startswith("optimizer: ")]


@pytest.mark.parametrize("refused", ["", CLIPPED])
def test_no_strategy_crosses_steps_where_the_script_cannot(refused: str) -> None:
    spec = job(Cluster.local(4), samples_per_round=60)
    proposals = Proposer(spec, {}, budgets=FEW).propose(profiled(spec, refused), 0, 40).proposals
    assert len(proposals) == 40
    assert any(proposal.strategy.cross_step for proposal in proposals) is not bool(refused)


@pytest.mark.parametrize("refused", ["", "no sends between ranks"])
def test_no_strategy_exchanges_directly_where_ranks_cannot(refused: str) -> None:
    spec = job(Cluster.local(4), samples_per_round=60)
    history = profiled(spec)
    assert history.profiled is not None
    history = History((replace(history.profiled, direct_refused=refused),), 0.1)
    proposals = Proposer(spec, {}, budgets=FEW).propose(history, 0, 40).proposals
    assert any(proposal.strategy.direct for proposal in proposals) is not bool(refused)


@pytest.mark.parametrize(("byte_scale", "fed_back"), [(1.0, True), (8.0, False)])
def test_compressors_that_scaled_bytes_refuse_are_not_drawn(byte_scale, fed_back) -> None:
    conditions = Conditions(Network.EMULATED, Accelerators.REAL, byte_scale)
    spec = job(Cluster.local(4), lossy=True, samples_per_round=60, conditions=conditions)
    proposed = Proposer(spec, {}, budgets=FEW).propose(profiled(spec), 0, 40)
    choices = [choice for one in proposed.proposals for choice in one.strategy.variables]
    used = {shard.compressor for choice in choices for shard in choice.shards}
    assert any(kind.error_feedback for kind in used) is fed_back and Compressor.FP16 in used
    assert "cannot be enacted" not in proposed.reason


def test_the_first_trials_are_what_the_optimizer_found_with_its_predictions() -> None:
    spec = job(lossy=True)
    proposals = Proposer(spec, {}).propose(profiled(spec), 0, 8).proposals
    first = leading(proposals)
    assert len(first) == 6 and list(proposals[:6]) == first and len(proposals) == 8
    assert any(proposal.strategy.lossless for proposal in first)
    assert first[0].origin.startswith("optimizer: lossy")
    steps = LoweredSteps(MODEL, SLOW_NETWORK)
    predicted_s = [steps.step_s(plan(proposal.strategy, MODEL, 4)) for proposal in first]
    assert [proposal.predicted_s for proposal in first] == predicted_s == sorted(predicted_s)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_the_first_round_tries_the_fastest_strategy_that_no_search_has_changed(seed: int) -> None:
    spec = job(seed=seed)
    proposals = Proposer(spec, {}, budgets=SHORT).propose(profiled(spec, model=SMALL), 0, 6)
    steps = LoweredSteps(SMALL, SLOW_NETWORK)
    built_s = {
        name: steps.step_s(plan(strategy, SMALL, 4))
        for name, strategy in seed_strategies(SMALL, SLOW_NETWORK, SearchSpace.default())
    }
    fastest = min(built_s, key=built_s.__getitem__)
    assert fastest in [proposal.origin for proposal in proposals.proposals]


@pytest.mark.parametrize("right_ones", [0, 1])
def test_a_simulator_that_predicts_no_times_does_not_rank(right_ones: int) -> None:
    """As one of a plugin may: always, or after a right prediction of what it has learned from."""
    asked = count()

    def odd() -> Simulator:
        simulator: Any = SIMULATORS["linear"]()
        predict = simulator.predict_step_s

        def predict_step_s(features: Sequence[StrategyFeatures]) -> FloatArray:
            seconds: FloatArray = predict(features)
            return seconds if next(asked) < right_ones else np.full_like(seconds, np.nan)

        simulator.predict_step_s = predict_step_s
        return simulator

    spec, space = job(simulators=("linear",)), SearchSpace.default()
    history = profiled(spec, model=SMALL).then(finished(0, CURRENT_SETUP, None, 0.5))
    *tried, one, other = sample_many(SMALL, SLOW_NETWORK, space, 18, 0)
    proposed = tuple(Proposal(strategy, "sampled") for strategy in tried)
    history = history.then(Proposed(0, proposed, "none", "", len(tried), (), 0.0))
    for number, strategy in enumerate(tried, start=1):
        plan_id = plan(strategy, SMALL, 4).id
        history = history.then(finished(number, strategy.id, plan_id, 0.4 + 0.05 * number))
    scorer = Scorer(spec, {"linear": odd})
    others = [Candidate(PlannedStrategy.of(each, SMALL, 4), "sampled") for each in (one, other)]
    scores = scorer.score(history, others)
    assert scores.ranker == "replay"
    assert scores.predicted_s is not None and np.isfinite(scores.predicted_s).all()
    assert f"linear left out: it predicts {NO_TIMES}" in scores.reason
    assert "linear" not in {one.ranker for one in scores.quality}


def test_the_last_training_keeps_to_its_share_of_the_job() -> None:
    spec = job(max_seconds=100.0)
    history = profiled(spec, model=SMALL).then(finished(0, CURRENT_SETUP, None, 0.5))
    proposed = Proposer(spec, {}, budgets=SHORT).propose(history, 0, 12)
    history = history.then(proposed)
    for number, proposal in enumerate(proposed.proposals, start=1):
        plan_id = plan(proposal.strategy, SMALL, 4).id
        trial = finished(number, proposal.strategy.id, plan_id, 0.4 + 0.01 * number)
        history = history.then(trial)
    make = {"linear": SIMULATORS["linear"]}
    assert Proposer(spec, make).finish(history).keys() == make.keys()
    looks = count()
    slow = Proposer(spec, make, clock=lambda: next(looks) * 6.0)  # the second look is beyond 10 s
    assert slow.finish(history) == {}


def test_in_a_later_round_the_optimizer_goes_on_from_what_was_measured() -> None:
    spec = job(seed=4)  # here the ranker chooses none of the search's further results
    history = profiled(spec, model=SMALL).then(finished(0, CURRENT_SETUP, None, 0.5))
    budgets = Budget(200), Budget(800, stale=30)  # enough for four optima in the later round
    proposer = Proposer(spec, {}, budgets=budgets)
    first = proposer.propose(history, 0, 8)
    history = history.then(first)
    steps = job_extractor(SMALL, SLOW_NETWORK, spec.conditions.accelerators, {}).steps
    for number, proposal in enumerate(first.proposals, start=1):
        planned = plan(proposal.strategy, SMALL, 4)
        trial = finished(number, proposal.strategy.id, planned.id, steps.step_s(planned))
        history = history.then(trial)
    later = proposer.propose(history, 1, 8).proposals
    assert leading(later) == list(later[:4])
    tried = {trial.plan_id for trial in history.trials}
    assert not tried & {plan(proposal.strategy, SMALL, 4).id for proposal in later}


def test_a_round_of_the_descent_proposes_untried_neighbours_of_the_incumbent() -> None:
    spec = job(samples_per_round=10)
    history = profiled(spec, model=SMALL).then(finished(0, CURRENT_SETUP, None, 0.5))
    budgets = Budget(60), Budget(20)
    first = Proposer(spec, {}, budgets=budgets).propose(history, 0, 4)
    history = history.then(first)
    for number, proposal in enumerate(first.proposals, start=1):
        plan_id = plan(proposal.strategy, SMALL, 4).id
        assert proposal.predicted_s is not None  # measured as predicted
        trial = finished(number, proposal.strategy.id, plan_id, proposal.predicted_s)
        history = history.then(trial)
    start = first.proposals[0].strategy
    descending = Proposer(spec, {}, budgets=budgets).propose(history, 1, 1000, start.id)
    assert descending.incumbent == start.id
    assert 0 < len(descending.proposals) < descending.considered  # without those that are slow
    around = neighbourhood(start, SMALL, SLOW_NETWORK, SearchSpace.default(), generator(0))
    near = {strategy.id for strategy in around}
    near |= {proposal.strategy.id for proposal in first.passed_over}
    tried = {trial.plan_id for trial in history.trials}
    for proposal in descending.proposals:
        assert proposal.strategy.id in near
        assert plan(proposal.strategy, SMALL, 4).id not in tried


def after_trials(history: History, strategies: Sequence[Strategy], model: Workload) -> History:
    """The history after a round of these strategies, each measured once."""
    proposals = tuple(Proposal(strategy, "sampled", 0.5) for strategy in strategies)
    history = history.then(Proposed(0, proposals, "replay", "", len(proposals), (), 2.0))
    for number, strategy in enumerate(strategies, start=len(history.trials)):
        plan_id = plan(strategy, model, 4).id
        history = history.then(finished(number, strategy.id, plan_id, 0.5))
    return history


def test_a_round_of_the_descent_scores_as_many_neighbours_however_many_were_tried() -> None:
    spec = job()
    start = per_variable(SMALL)
    rng = generator(spec.seed, "neighbours", 1)
    around = neighbourhood(start, SMALL, SLOW_NETWORK, SearchSpace.default(), rng)
    begun = profiled(spec, model=SMALL).then(finished(0, CURRENT_SETUP, None, 0.5))
    history = after_trials(begun, [start, *islice(around, 3)], SMALL)
    descending = Proposer(spec, {}).propose(history, 1, 4, start.id)
    assert descending.considered == NEIGHBOURS and len(descending.proposals) == 4


def relabelled(strategy: Strategy) -> Strategy:
    """The same merged shards under other labels."""
    choices = []
    for choice in strategy.variables:
        shards = [
            one if one.group is None else replace(one, group=one.group + 5) for one in choice.shards
        ]
        choices.append(replace(choice, shards=tuple(shards)))
    return replace(strategy, variables=tuple(choices))


def test_a_strategy_that_was_tried_under_other_labels_is_not_proposed_again() -> None:
    spec = job(search=Search.NO_SIMULATOR)
    untried = profiled(spec, model=SMALL).then(finished(0, CURRENT_SETUP, None, 0.5))
    proposals = Proposer(spec, {}).propose(untried, 0, 1000).proposals
    others = [relabelled(one.strategy) for one in proposals]
    assert {other.id for other in others} != {one.strategy.id for one in proposals}
    history = after_trials(untried, others, SMALL)
    tried = {plan(one.strategy, SMALL, 4).enacted_id for one in proposals}
    again = Proposer(spec, {}).propose(history, 0, 1000).proposals
    assert not tried & {plan(one.strategy, SMALL, 4).enacted_id for one in again}


@pytest.mark.parametrize("search", [Search.RANDOM, Search.NO_SIMULATOR])
def test_a_round_goes_on_after_a_draw_that_was_tried(search: Search) -> None:
    spec = job(search=search, samples_per_round=1)
    begun = profiled(spec, model=SMALL).then(finished(0, CURRENT_SETUP, None, 0.5))
    tried = [one.strategy for one in Proposer(spec, {}).propose(begun, 0, 1000).proposals]
    assert tried
    [another] = Proposer(spec, {}).propose(after_trials(begun, tried, SMALL), 0, 1000).proposals
    assert another.strategy not in tried and another.origin == "sampled"


def test_measured_strategies_that_enact_the_same_are_one_group() -> None:
    spec, strategy = job(), ddp_default(SMALL)
    twins = [strategy, relabelled(strategy), per_variable(SMALL)]
    begun = profiled(spec, model=SMALL).then(finished(0, CURRENT_SETUP, None, 0.5))
    examples = Scorer(spec, {}).examples(after_trials(begun, twins, SMALL))
    groups = {example.features.strategy_id: example.group for example in examples}
    one, same, other = (groups[twin.id] for twin in twins)
    assert one == same != other


def test_proposals_depend_on_the_speed_of_the_machine_only_if_they_say_so() -> None:
    spec = job(lossy=True, samples_per_round=20)

    def proposed(look_s: float) -> tuple[Proposed, float]:
        """The proposals with a clock that moves by `look_s` at each look, and its last time."""
        looks = count()
        proposer = Proposer(spec, {}, budgets=SHORT, clock=lambda: next(looks) * look_s)
        return proposer.propose(profiled(spec, model=SMALL), 0, 8), next(looks) * look_s

    fast, _ = proposed(1e-6)
    slow, took_s = proposed(0.02)
    assert took_s > 10 and slow == fast
    assert CUT_SHORT not in fast.reason
    for look_s in (0.2, 1.0, 4.0, 1000.0):
        cut, _ = proposed(look_s)
        assert CUT_SHORT in cut.reason or cut == fast, look_s
    assert CUT_SHORT in cut.reason


def test_a_round_says_that_its_replay_could_not_be_calibrated_in_time() -> None:
    spec = job()
    history = profiled(spec, model=SMALL).then(finished(0, CURRENT_SETUP, None, 0.5))
    uninterrupted = Proposer(spec, {}, budgets=SHORT)
    stated = uninterrupted.propose(history, 0, FEWEST_CALIBRATED)
    history = history.then(stated)
    for number, proposal in enumerate(stated.proposals, 1):
        planned = plan(proposal.strategy, SMALL, 4)
        trial = finished(number, proposal.strategy.id, planned.id, proposal.predicted_s)
        history = history.then(trial)
    looks, seconds_per_look = count(), 1000.0
    slow = Proposer(spec, {}, budgets=SHORT, clock=lambda: next(looks) * seconds_per_look)
    assert slow.propose(history, 1, 4).reason.endswith(uncalibrated(before=False))
    seconds_per_look = 0.0
    slower = Proposer(spec, {}, budgets=SHORT, clock=lambda: next(looks) * seconds_per_look)
    in_time = slower.propose(history, 1, 4)
    assert "calibration" not in in_time.reason
    # That of a resumed job.
    assert in_time.proposals == uninterrupted.propose(history, 1, 4).proposals
    assert stated.constants is None and in_time.constants is not None
    planned = plan(in_time.proposals[0].strategy, SMALL, 4)
    trial = finished(FEWEST_CALIBRATED + 1, in_time.proposals[0].strategy.id, planned.id, 0.4)
    seconds_per_look = 1000.0
    later = slower.propose(history.then(in_time).then(trial), 2, 4)
    assert later.reason.endswith(uncalibrated(before=True))


@pytest.mark.parametrize("search", [Search.RANDOM, Search.NO_SIMULATOR])
def test_the_baselines_do_without_the_optimizer(search: Search) -> None:
    spec = job(search=search)
    proposed = Proposer(spec, {}).propose(profiled(spec), 0, 8)
    assert not any(proposal.origin.startswith("optimizer") for proposal in proposed.proposals)


def test_the_optimizer_keeps_to_what_the_script_allows() -> None:
    spec = job()
    proposals = Proposer(spec, {}, budgets=SHORT).propose(profiled(spec, CLIPPED), 0, 8).proposals
    [first] = [proposal for proposal in proposals if proposal.origin.startswith("optimizer")]
    assert first.origin == "optimizer: lossless, within the step"
    assert first.strategy.lossless and not first.strategy.cross_step


TABLE = Variable("table", (2**17, 2**15), "float32")  # 2^32 elements: too many for top_k
HUGE = Workload("huge", (TABLE, Variable("bias", (8,))), (), 0.1, 0.2)


@pytest.mark.slow
def test_trials_that_contradict_a_link_are_reported_and_correct_the_predictions() -> None:
    spec, rates = job(), [1.0, 0.5, 1.0, 1.0]
    history = profiled(spec, model=SMALL).then(finished(0, CURRENT_SETUP, None, 0.5))
    stated = Proposer(spec, {}, budgets=SHORT).propose(history, 0, 12)
    assert stated.contradicted == ()
    slow = with_link_rates(SLOW_NETWORK, rates)
    truth = job_extractor(SMALL, slow, spec.conditions.accelerators, {"torch": "2.13.0"}).steps
    history = history.then(stated)
    for number, proposal in enumerate(stated.proposals, 1):
        planned = plan(proposal.strategy, SMALL, 4)
        trial = finished(number, proposal.strategy.id, planned.id, truth.step_s(planned))
        history = history.then(trial)
    proposed = Proposer(spec, {}, budgets=SHORT).propose(history, 1, 4)
    [line] = proposed.contradicted
    assert re.match(r"the link of host h1 behaves as (4[89]|5[012])", line), line
    assert line.endswith("the cluster is described with 100 Mbit/s")
    for proposal in proposed.proposals:
        measured_s = truth.step_s(plan(proposal.strategy, SMALL, 4))
        assert proposal.predicted_s == pytest.approx(measured_s, rel=0.1)


@pytest.mark.parametrize(
    "search", [Search.RANDOM, pytest.param(Search.AUTOSYNC, marks=pytest.mark.slow)]
)
def test_strategies_that_cannot_be_enacted_are_left_out_with_the_reason(search: Search) -> None:
    spec = job(Cluster.local(4), search=search, lossy=True, samples_per_round=80)
    history = profiled(spec, model=HUGE)
    proposed = Proposer(spec, {}, budgets=SHORT).propose(history, 0, 80)
    assert proposed.considered > 20
    rule = r"; left out (\d+) strategies that cannot be enacted, the first because of message"
    left_out = re.search(rule + r" \d+ \(.*table", proposed.reason)
    assert left_out is not None and int(left_out[1]) > 1, proposed.reason
    assert "top_k sends int32 indices, but the message has" in proposed.reason
    plans = [plan(proposal.strategy, HUGE, 4) for proposal in proposed.proposals]
    assert all(refusal_reason(each) is None for each in plans)
    assert Proposer(spec, {}, budgets=SHORT).propose(history, 0, 80) == proposed


def test_a_bayesian_search_of_known_plans_ends_at_its_deadline() -> None:
    spec, single = job(search=Search.FUSION), Workload("m", MODEL.variables[:1], (), 0.1, 0.2)
    history = profiled(spec, model=single).then(finished(0, CURRENT_SETUP, None, 0.3))
    first = Proposer(spec, {}).propose(history, 0, 1)
    [proposal] = first.proposals
    trial = finished(1, proposal.strategy.id, plan(proposal.strategy, single, 4).id, 0.2)
    history = history.then(first).then(trial)
    looks = count()
    slow = Proposer(spec, {}, clock=lambda: next(looks) * 1000.0).propose(history, 1, 1)
    assert slow.proposals == () and CUT_SHORT in slow.reason
    unhurried = Proposer(spec, {}).propose(history, 1, 1)
    assert slow.considered < BAYES_ASKS <= unhurried.considered
    assert CUT_SHORT not in unhurried.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "encoding"), [(Search.BAYES, SpaceChoices), (Search.FUSION, FusionScalars)]
)
def test_a_resumed_bayesian_search_goes_on_as_if_it_had_never_stopped(
    search: Search, encoding: type[Encoding]
) -> None:
    """The references drift. A resumed search uses each trial's time as it was known then."""
    spec = job(search=search)
    history = profiled(spec).then(finished(0, CURRENT_SETUP, None, 0.30))
    live = Proposer(spec, {})
    for round_ in range(encoding.initial + 3):  # more than the random points
        proposed = live.propose(history, round_, 1)
        assert Proposer(spec, {}).propose(history, round_, 1) == proposed
        [proposal] = proposed.proposals
        planned = plan(proposal.strategy, MODEL, 4)
        step_s, number = 0.2 + 0.01 * len(planned.messages), 2 * round_ + 1
        slow = finished(number, proposal.strategy.id, planned.id, step_s)
        reference = finished(number + 1, CURRENT_SETUP, None, 0.30 + 0.004 * round_)
        history = history.then(proposed).then(slow).then(reference)
