"""What a job may propose: what its script refuses is not among it."""

from __future__ import annotations

import re
from itertools import count

import pytest

from autotune.cluster import Cluster, Host
from autotune.lowering.replayed import LoweredSteps
from autotune.records import (
    CURRENT_SETUP,
    Accelerators,
    Conditions,
    Measured,
    Network,
    Role,
    TrialRequest,
)
from autotune.sampler.proposer import CUT_SHORT, Proposer
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Compressor, Strategy
from autotune.tuning.events import Profiled, Proposed, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec, Search
from autotune.workload import Variable, Workload

MODEL = Workload("m", tuple(Variable(f"v{i}", (300, 200)) for i in range(12)), (), 0.1, 0.2)


@pytest.mark.parametrize(
    ("refused", "across"), [("", True), ("gradients are clipped by their global norm", False)]
)
def test_no_strategy_crosses_steps_where_the_script_cannot(refused: str, across: bool) -> None:
    cluster = Cluster.local(4)
    spec = JobSpec(
        ("torchrun", "train.py"), 4, cluster, search=Search.AUTOSYNC, samples_per_round=60
    )
    history = History((Profiled(MODEL, cluster, 1.0, {"torch": "2.13.0"}, refused),), 0.1)
    proposed = Proposer(spec, {}).propose(history, 0, 40)
    assert len(proposed.proposals) == 40
    assert any(proposal.strategy.cross_step for proposal in proposed.proposals) is across


def compressors_of(strategies: list[Strategy]) -> set[Compressor]:
    return {
        shard.compressor
        for strategy in strategies
        for choice in strategy.variables
        for shard in choice.shards
    }


@pytest.mark.parametrize(("byte_scale", "fed_back"), [(1.0, True), (8.0, False)])
def test_compressors_that_scaled_bytes_refuse_are_not_drawn(
    byte_scale: float, fed_back: bool
) -> None:
    cluster = Cluster.local(4)
    conditions = Conditions(Network.EMULATED, Accelerators.REAL, byte_scale)
    spec = JobSpec(
        ("torchrun", "train.py"),
        4,
        cluster,
        lossy=True,
        samples_per_round=60,
        conditions=conditions,
    )
    history = History((Profiled(MODEL, cluster, 1.0, {"torch": "2.13.0"}),), 0.1)
    proposed = Proposer(spec, {}).propose(history, 0, 40)
    used = compressors_of([proposal.strategy for proposal in proposed.proposals])
    assert any(kind.error_feedback for kind in used) is fed_back and Compressor.FP16 in used
    assert "cannot be enacted" not in proposed.reason


SLOW_NETWORK = Cluster("slow", tuple(Host(f"h{i}", 1, 12.5e6, 1e-4, 10e9, 1e-5) for i in range(4)))


def test_the_first_trials_are_what_the_optimizer_found_with_its_predictions() -> None:
    spec = JobSpec(("torchrun", "train.py"), 4, SLOW_NETWORK, lossy=True, samples_per_round=40)
    history = History((Profiled(MODEL, SLOW_NETWORK, 1.0, {"torch": "2.13.0"}),), 0.1)
    first = Proposer(spec, {}).propose(history, 0, 8).proposals
    leading = [proposal for proposal in first if proposal.origin.startswith("optimizer: ")]
    assert len(leading) == 6 and list(first[:6]) == leading and len(first) == 8
    assert any(proposal.strategy.lossless for proposal in leading)
    assert leading[0].origin.startswith("optimizer: lossy")
    steps = LoweredSteps(MODEL, SLOW_NETWORK)
    for proposal in leading:
        assert proposal.predicted_s == steps.step_s(plan(proposal.strategy, MODEL, 4))
    assert [own.predicted_s for own in leading] == sorted(own.predicted_s or 0.0 for own in leading)


def test_in_a_later_round_the_optimizer_goes_on_from_what_was_measured() -> None:
    spec = JobSpec(("torchrun", "train.py"), 4, SLOW_NETWORK, samples_per_round=40)
    history = History(
        (
            Profiled(MODEL, SLOW_NETWORK, 1.0, {"torch": "2.13.0"}),
            finished(0, CURRENT_SETUP, None, 0.5),
        ),
        0.1,
    )
    proposer = Proposer(spec, {})
    first = proposer.propose(history, 0, 8)
    history = history.then(first)
    for number, proposal in enumerate(first.proposals, start=1):
        history = history.then(
            finished(
                number,
                proposal.strategy.id,
                plan(proposal.strategy, MODEL, 4).id,
                0.4 + 0.01 * number,
            )
        )
    later = proposer.propose(history, 1, 8).proposals
    assert Proposer(spec, {}).propose(history, 1, 8).proposals == later  # a resumed job
    leading = [proposal.origin.startswith("optimizer: ") for proposal in later]
    assert leading == [True] * 4 + [False] * 4
    tried = {trial.plan_id for trial in history.trials}
    assert not any(plan(proposal.strategy, MODEL, 4).id in tried for proposal in later)


def test_what_is_proposed_does_not_depend_on_the_speed_of_the_machine_unless_it_says_so() -> None:
    spec = JobSpec(("torchrun", "train.py"), 4, SLOW_NETWORK, lossy=True, samples_per_round=20)
    history = History((Profiled(MODEL, SLOW_NETWORK, 1.0, {"torch": "2.13.0"}),), 0.1)

    def proposed(look_s: float) -> tuple[Proposed, float]:
        """With a clock on which each look takes so long; and what it shows at the end."""
        looks = count()
        return Proposer(spec, {}, clock=lambda: next(looks) * look_s).propose(history, 0, 8), next(
            looks
        ) * look_s

    fast, _ = proposed(1e-6)
    slow, took_s = proposed(0.2)
    assert took_s > 40 and slow == fast
    stuck, _ = proposed(1000.0)
    assert CUT_SHORT in stuck.reason and CUT_SHORT not in fast.reason


@pytest.mark.parametrize("search", [Search.RANDOM, Search.NO_SIMULATOR])
def test_the_baselines_do_without_the_optimizer(search: Search) -> None:
    spec = JobSpec(("torchrun", "train.py"), 4, SLOW_NETWORK, search=search, samples_per_round=40)
    history = History((Profiled(MODEL, SLOW_NETWORK, 1.0, {"torch": "2.13.0"}),), 0.1)
    proposed = Proposer(spec, {}).propose(history, 0, 8)
    assert not any(proposal.origin.startswith("optimizer") for proposal in proposed.proposals)


def test_the_optimizer_keeps_to_what_the_script_allows() -> None:
    spec = JobSpec(("torchrun", "train.py"), 4, SLOW_NETWORK, samples_per_round=40)
    history = History(
        (
            Profiled(
                MODEL,
                SLOW_NETWORK,
                1.0,
                {"torch": "2.13.0"},
                "gradients are clipped by their global norm",
            ),
        ),
        0.1,
    )
    leading = [
        p
        for p in Proposer(spec, {}).propose(history, 0, 8).proposals
        if p.origin.startswith("optimizer")
    ]
    assert [proposal.origin for proposal in leading] == ["optimizer: lossless, within the step"]
    assert leading[0].strategy.lossless and not leading[0].strategy.cross_step


HUGE = Workload(
    "huge", (Variable("table", (2**17, 2**15), "float32"), Variable("bias", (8,))), (), 0.1, 0.2
)
"""The table has 2^32 elements: more than top_k can number, so that it must be cut for it."""


@pytest.mark.parametrize("search", [Search.RANDOM, Search.AUTOSYNC])
def test_strategies_that_cannot_be_enacted_are_left_out_with_the_reason(search: Search) -> None:
    cluster = Cluster.local(4)
    spec = JobSpec(
        ("torchrun", "train.py"), 4, cluster, search=search, lossy=True, samples_per_round=80
    )
    history = History((Profiled(HUGE, cluster, 1.0, {"torch": "2.13.0"}),), 0.1)
    proposed = Proposer(spec, {}).propose(history, 0, 80)
    assert proposed.considered > 20
    found = re.search(
        r"; left out (\d+) strategies that cannot be enacted, the first because of message \d+ \(.*table",
        proposed.reason,
    )
    assert found is not None and int(found[1]) > 1, proposed.reason
    assert "top_k sends int32 indices, but the message has" in proposed.reason
    for proposal in proposed.proposals:
        assert refusal_reason(plan(proposal.strategy, HUGE, 4)) is None
    again = Proposer(spec, {}).propose(history, 0, 80)
    assert again == proposed


def finished(number: int, key: str, plan_id: str | None, step_s: float) -> TrialFinished:
    role = Role.REFERENCE if plan_id is None else Role.CANDIDATE
    return TrialFinished(
        TrialRequest(number, key, role, 0, 3),
        Measured(((step_s, step_s, step_s),)),
        plan_id,
        float(number),
    )


@pytest.mark.parametrize("search", [Search.BAYES, Search.FUSION])
def test_a_resumed_bayesian_search_goes_on_as_if_it_had_never_stopped(search: Search) -> None:
    # References drift, which changes what earlier trials count as: told again is what was known then.
    spec = JobSpec(("torchrun", "train.py"), 4, SLOW_NETWORK, search=search)
    history = History(
        (
            Profiled(MODEL, SLOW_NETWORK, 1.0, {"torch": "2.13.0"}),
            finished(0, CURRENT_SETUP, None, 0.30),
        ),
        0.1,
    )
    live = Proposer(spec, {})
    for round_ in range(13):  # behind the random points
        proposed = live.propose(history, round_, 1)
        assert Proposer(spec, {}).propose(history, round_, 1) == proposed
        [proposal] = proposed.proposals
        made = plan(proposal.strategy, MODEL, 4)
        number = 2 * round_ + 1
        slow = finished(number, proposal.strategy.id, made.id, 0.2 + 0.01 * len(made.messages))
        history = (
            history.then(proposed)
            .then(slow)
            .then(finished(number + 1, CURRENT_SETUP, None, 0.30 + 0.004 * round_))
        )
