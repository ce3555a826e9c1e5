"""The world with emulated accelerators: profile, trials, restarts, refusals and byte scaling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from autotune.errors import InvalidInput, LaunchError
from autotune.records import Accelerators, Conditions, Failed, Measured, Network, Role, TrialRequest
from autotune.strategy_space.builders.collectives import ddp_default, single_bucket
from autotune.strategy_space.plan import Plan, plan
from autotune.workload import Variable, Workload
from runtime_rewriter.world.world import World

RANKS = 2
REQUEST = TrialRequest(0, "strategy-under-test", Role.CANDIDATE, warmup_steps=1, timed_steps=3)
EMULATED = Conditions(Network.LOOPBACK, Accelerators.EMULATED)


@pytest.fixture
def make_world(make_world: Callable[..., World]) -> Callable[..., World]:
    return partial(make_world, conditions=EMULATED, probe_s=1.0)


def slow_profile() -> Workload:
    """The model of the script, at 0.2 s a step, which it really makes in some milliseconds."""
    shapes = {
        "0.weight": (64, 32),
        "0.bias": (64,),
        "2.weight": (64, 64),
        "2.bias": (64,),
        "3.weight": (8, 64),
        "3.bias": (8,),
    }
    variables = tuple(
        Variable(name, shape, ready_s=0.02 * (i + 1))
        for i, (name, shape) in enumerate(reversed(shapes.items()))
    )
    return Workload(
        "Sequential", variables, forward_s=0.05, backward_s=0.13, update_s=0.02, source="measured"
    )


def planned() -> Plan:
    return plan(ddp_default(slow_profile()), slow_profile(), RANKS)


def assert_emulated(outcome: Measured | Failed) -> None:
    """As slow as the profile, with real work far below it."""
    assert isinstance(outcome, Measured)
    assert min(min(row) for row in outcome.step_s) >= 0.199
    assert outcome.overrun is not None and outcome.overrun >= 0


def test_a_given_profile_is_waited_for_under_ddp_and_plans_and_the_links_are_probed(
    make_world,
) -> None:
    world = make_world(given_profile=slow_profile())
    profile = world.profile()
    assert profile.workload == slow_profile() and profile.series and profile.cores > 0
    assert profile.cross_step_refused == ""
    for wanted in (
        None,
        planned(),
        plan(single_bucket(slow_profile()), slow_profile(), RANKS),
        None,
    ):
        outcome = world.run_trial(REQUEST, wanted)
        assert_emulated(outcome)
        assert outcome.gradient_error == (0.0 if wanted else None), (
            "the numerics gate compares real transfers"
        )
    assert world.restarts == 0


def test_why_the_script_cannot_cross_the_step_is_known_with_a_given_profile_too(make_world) -> None:
    clipping = make_world("--clip", given_profile=slow_profile()).profile()
    assert (
        clipping.workload == slow_profile()
        and "as clipping by the global norm does" in clipping.cross_step_refused
    )


def test_a_measured_profile_is_waited_for(make_world) -> None:
    world = make_world()
    workload = world.profile().workload
    assert workload.source == "measured" and workload.id == slow_profile().id
    outcome = world.run_trial(REQUEST, planned())
    assert isinstance(outcome, Measured) and outcome.overrun is not None
    assert min(outcome.slowest_s) >= workload.compute_s * 0.99


def test_after_a_crash_the_script_is_recorded_again_and_emulated_without_another_profile(
    make_world, tmp_path
) -> None:
    words = ["--fault", "crash", "--fault-step", "9", "--fault-file", str(tmp_path / "planted")]
    world = make_world(*words)
    world.emulate(slow_profile())
    assert isinstance(world.run_trial(replace(REQUEST, timed_steps=12), planned()), Failed)
    assert_emulated(world.run_trial(REQUEST, planned()))
    assert world.restarts == 1


def test_a_resumed_job_emulates_with_its_stored_profile(make_world) -> None:
    world = make_world()
    world.model_id()
    world.emulate(slow_profile())
    assert_emulated(world.run_trial(REQUEST, None))
    world.close()
    again = make_world()
    again.emulate(slow_profile())
    assert_emulated(again.run_trial(REQUEST, planned()))


def test_steps_of_a_batch_that_took_more_steps_keep_their_overrun(make_world) -> None:
    world = make_world()
    world.emulate(slow_profile())
    outcome = world.run_trial(replace(REQUEST, most_steps=6, precision=1e-9), None)
    assert_emulated(outcome)
    assert len(outcome.step_s[0]) > REQUEST.timed_steps


def test_the_profile_of_another_model_is_refused_before_any_trial(make_world) -> None:
    other = replace(slow_profile(), model="Other", variables=slow_profile().variables[1:])
    with pytest.raises(
        LaunchError,
        match=r"must be of the running model model-\w+, but is of model-\w+ \('Other', 5 variables\)",
    ):
        make_world(given_profile=other).profile()


def test_a_profile_without_times_is_refused_in_one_message(make_world) -> None:
    untimed = replace(
        slow_profile(), variables=tuple(replace(v, ready_s=None) for v in slow_profile().variables)
    )
    with pytest.raises(InvalidInput, match="emulated accelerators need ready_s of every variable"):
        make_world(given_profile=untimed)


def test_with_scaled_bytes_the_gate_is_left_out_and_the_links_are_told_for_whole_bytes(
    make_world,
) -> None:
    world = make_world(conditions=Conditions(Network.EMULATED, Accelerators.REAL, byte_scale=4.0))
    profile = world.profile()
    assert {one.primitive for one in profile.series} >= {"all_reduce", "push_pull"}
    for wanted in (None, planned()):
        outcome = world.run_trial(REQUEST, wanted)
        assert isinstance(outcome, Measured)
        assert outcome.gradient_error is None and outcome.overrun is None
