"""Measured sets of ops as a decision of the search: predictions, moves and proposals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune.cluster import Cluster, Host
from autotune.errors import InvalidStrategy
from autotune.lowering.replayed import LoweredSteps
from autotune.optimizer.budget import Budget
from autotune.optimizer.suggest import suggestions
from autotune.sampler.proposer import Proposer
from autotune.strategy_space.builders.collectives import single_bucket
from autotune.strategy_space.moves.neighbours import mutate
from autotune.strategy_space.op_fusion import OpFusionChoice
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.tuning.events import Profiled, event_from_data, event_to_data
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.workload import Variable, Workload

NAMES = [f"v{number}" for number in range(6)]
READY_S = dict(zip(NAMES, np.linspace(0.05, 0.3, 6).tolist(), strict=True))
MODEL = Workload(
    "m",
    tuple(Variable(name, (300, 200), ready_s=READY_S[name], needed_s=0.05) for name in NAMES),
    forward_s=0.2,
    backward_s=0.3,
    update_s=0.05,
)
NETWORK = Cluster("slow", tuple(Host(f"h{i}", 1, 12.5e6, 1e-4, 10e9, 1e-5) for i in range(4)))
FORWARD = OpFusionChoice("forward", (("b", "a"),), 0.1, 0.1, 0.3, 0.05, READY_S)
LATE = OpFusionChoice(
    "late", (("c", "d"), ("e", "f")), 0.01, 0.2, 0.29, 0.05, dict.fromkeys(NAMES, 0.29)
)


def fused(choices=(FORWARD, LATE)) -> LoweredSteps:
    workloads = {choice.sets: choice.workload(MODEL) for choice in choices}
    return LoweredSteps(MODEL, NETWORK, fused=workloads)


def space(*choices: OpFusionChoice) -> SearchSpace:
    whole = replace(SearchSpace.default(), cross_step=False)
    return replace(whole, op_fusions=tuple(choice.sets for choice in choices))


def test_a_choice_changes_the_times_of_the_workload_and_keeps_the_order() -> None:
    workload = FORWARD.workload(MODEL)
    assert [one.name for one in workload.variables] == NAMES
    assert workload.forward_s == 0.1 and workload.variables[0].needed_s == pytest.approx(0.025)
    assert {one.ready_s for one in LATE.workload(MODEL).variables} == {0.29}
    assert FORWARD.sets == (("a", "b"),)
    with pytest.raises(InvalidStrategy, match="at least 2"):
        replace(FORWARD, sets=(("a",),))


def test_the_replay_predicts_a_plan_with_the_times_of_its_sets() -> None:
    steps, strategy = fused(), single_bucket(MODEL)
    apart_s, forward_s = (
        steps.step_s(plan(replace(strategy, op_fusion=sets), MODEL, 4))
        for sets in ((), FORWARD.sets)
    )
    assert forward_s == pytest.approx(apart_s - 0.1, rel=0.01)
    other = replace(strategy, op_fusion=(("x", "y"),))
    assert steps.step_s(plan(other, MODEL, 4)) == apart_s


def test_the_search_fuses_ops_unless_gradients_wait_too_long_for_them() -> None:
    found = suggestions(fused(), space(FORWARD, LATE), budget=Budget(replays=400))
    assert {one.strategy.op_fusion for one in found.best} == {FORWARD.sets}
    found = suggestions(fused((LATE,)), space(LATE), budget=Budget(replays=400))
    assert {one.strategy.op_fusion for one in found.best} == {()}


def test_moves_switch_between_the_choices_of_the_space_only() -> None:
    rng, seen, strategy = np.random.default_rng(1), set(), single_bucket(MODEL)
    for _ in range(150):
        strategy = mutate(strategy, MODEL, NETWORK, space(FORWARD, LATE), rng)
        seen.add(strategy.op_fusion)
    assert seen == {(), FORWARD.sets, LATE.sets}
    other = replace(strategy, op_fusion=(("x", "y"),))
    assert "fuses other sets, such as x, y" in space(LATE).violation(other, MODEL, NETWORK)


def test_the_first_trials_compare_the_fastest_strategy_with_and_without_fused_ops() -> None:
    spec = JobSpec(("python", "train.py"), 4, NETWORK, samples_per_round=40)
    event = Profiled(MODEL, NETWORK, 1.0, {}, "steps end", (), (FORWARD, LATE), "op fusion: 3 sets")
    assert event_from_data(event_to_data(event)) == event
    round_ = Proposer(spec, {}).propose(History((event,), 0.1), 0, 10)
    origins = {proposal.origin: proposal.strategy for proposal in round_.proposals}
    without = next(name for name in origins if name.endswith(", no op fusion"))
    best = origins[without.removesuffix(", no op fusion")]
    assert best.op_fusion == FORWARD.sets
    assert origins[without] == replace(best, op_fusion=())


def test_jobs_without_choices_are_proposed_no_fused_ops() -> None:
    spec = JobSpec(("python", "train.py"), 4, NETWORK, samples_per_round=40)
    history = History((Profiled(MODEL, NETWORK, 1.0, {}),), 0.1)
    short = Budget(60), Budget(60)
    proposals = Proposer(spec, {}, budgets=short).propose(history, 0, 10).proposals
    assert not any(proposal.strategy.op_fusion for proposal in proposals)
