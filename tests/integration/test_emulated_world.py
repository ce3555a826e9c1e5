"""The world with emulated accelerators: profile, trials, restarts, refusals and byte scaling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from short_jobs import small_model

from autotune.errors import InvalidInput, LaunchError
from autotune.records import Accelerators, Conditions, Failed, Measured, Network, Role, TrialRequest
from autotune.strategy_space.builders.collectives import ddp_default, single_bucket
from autotune.strategy_space.plan import plan
from runtime_rewriter.world.world import World

RANKS = 2
REQUEST = TrialRequest(0, "strategy-under-test", Role.CANDIDATE, warmup_steps=1, timed_steps=3)
EMULATED = Conditions(Network.LOOPBACK, Accelerators.EMULATED)


@pytest.fixture
def make_world(make_world: Callable[..., World]) -> Callable[..., World]:
    return partial(make_world, conditions=EMULATED, probe_s=1.0)


PROFILE = small_model(emulated=True)


PLAN = plan(ddp_default(PROFILE), PROFILE, RANKS)


def assert_emulated(outcome: Measured | Failed) -> None:
    """As slow as the profile, with real work far below it."""
    assert isinstance(outcome, Measured)
    assert min(min(row) for row in outcome.step_s) >= 0.199
    assert outcome.overrun is not None and outcome.overrun >= 0


def test_a_given_profile_is_emulated_under_ddp_and_plans_and_links_are_probed(make_world) -> None:
    world = make_world(given_profile=PROFILE, probe_s=60.0)  # enough for a busy machine
    profile = world.profile()
    assert profile.workload == PROFILE and profile.series and profile.cores > 0
    assert profile.cross_step_refused == "" and profile.further_models == 0
    for wanted in (None, PLAN, plan(single_bucket(PROFILE), PROFILE, RANKS), None):
        outcome = world.run_trial(REQUEST, wanted)
        assert_emulated(outcome)
        assert outcome.gradient_error == (0.0 if wanted else None)
    assert world.restarts == 0


def test_a_given_profile_also_states_what_the_script_does_besides(make_world) -> None:
    clipping = make_world("--clip", "--further-model", given_profile=PROFILE).profile()
    assert clipping.workload == replace(PROFILE, reads_norms=True)
    assert clipping.cross_step_refused == "" and clipping.further_models == 1


def test_a_measured_profile_is_emulated(make_world) -> None:
    world = make_world()
    workload = world.profile().workload
    assert workload.source == "measured" and workload.id == PROFILE.id
    outcome = world.run_trial(REQUEST, PLAN)
    assert isinstance(outcome, Measured) and outcome.overrun is not None
    assert min(outcome.slowest_s) >= workload.compute_s * 0.99


def test_after_a_crash_the_script_is_recorded_again_and_emulated_without_another_profile(
    make_world, tmp_path
) -> None:
    words = ["--fault", "crash", "--fault-step", "9", "--fault-file", str(tmp_path / "planted")]
    world = make_world(*words)
    world.emulate(PROFILE)
    assert isinstance(world.run_trial(replace(REQUEST, timed_steps=12), PLAN), Failed)
    assert_emulated(world.run_trial(REQUEST, PLAN))
    assert world.restarts == 1


def test_a_resumed_job_emulates_with_its_stored_profile(make_world) -> None:
    world = make_world()
    world.model_id()
    world.emulate(PROFILE)
    assert_emulated(world.run_trial(REQUEST, None))
    world.close()
    again = make_world()
    again.emulate(PROFILE)
    assert_emulated(again.run_trial(REQUEST, PLAN))


def test_further_steps_of_a_trial_have_an_overrun(make_world) -> None:
    world = make_world()
    world.emulate(PROFILE)
    outcome = world.run_trial(replace(REQUEST, most_steps=6, precision=1e-9), None)
    assert_emulated(outcome)
    assert len(outcome.step_s[0]) > REQUEST.timed_steps


def test_the_profile_of_another_model_is_refused_before_any_trial(make_world) -> None:
    other = replace(PROFILE, model="Other", variables=PROFILE.variables[1:])
    reason = r"must be of the running model model-\w+, but is of model-\w+ \('Other', 5 variables\)"
    with pytest.raises(LaunchError, match=reason):
        make_world(given_profile=other).profile()


def test_a_profile_without_times_is_refused_in_one_message(make_world) -> None:
    untimed = small_model()
    with pytest.raises(InvalidInput, match="emulated accelerators need ready_s of every variable"):
        make_world(given_profile=untimed)


def test_with_scaled_bytes_the_gate_is_left_out_and_links_have_all_series(make_world) -> None:
    conditions = Conditions(Network.EMULATED, Accelerators.REAL, byte_scale=4.0)
    world = make_world(conditions=conditions, probe_s=60.0)  # enough for a busy machine
    profile = world.profile()
    assert {one.primitive for one in profile.series} >= {"all_reduce", "push_pull"}
    for wanted in (None, PLAN):
        outcome = world.run_trial(REQUEST, wanted)
        assert isinstance(outcome, Measured)
        assert outcome.gradient_error is None and outcome.overrun is None
