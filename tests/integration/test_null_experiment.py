"""Measurements and comparisons on real processes: equal plans stay equal, and 5 % are found.

Up to 5 of 20 comparisons of equal plans may differ. This catches gross errors only (unequal blocks,
a side that is always first). Simulated comparisons test the rate of false differences:
`test_stopping_when_it_is_precise_leaves_the_error_rate_of_the_comparison`
(tests/unit/test_measurement.py) and
`test_identical_time_distributions_are_called_different_at_most_at_the_stated_rate`
(tests/unit/test_tuner.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from local_world import ForkedRank

from autotune.records import (
    CURRENT_SETUP,
    Comparison,
    Failed,
    FailureKind,
    Measured,
    Role,
    Stopped,
    TrialRequest,
)
from autotune.strategy_space.builders.collectives import per_variable, single_bucket
from autotune.strategy_space.plan import Plan, plan
from autotune.tuning.closing import next_is_tuned
from autotune.tuning.statistics import PairRule, compare, enough_pairs, fewest_values
from autotune.workload import Variable, Workload
from runtime_rewriter.protocol import ContinueTrial, decode_instruction
from runtime_rewriter.world.worker import ProcessSupervisor, WorkerLost
from runtime_rewriter.world.world import World

TIMED = Path(__file__).parents[1] / "scripts" / "train_timed.py"
RANKS = 2
COMPARISONS = 20
MODEL = Workload("Linear", (Variable("bias", (4,)), Variable("weight", (4, 16))))
RULE = PairRule(confidence=0.95, precision=0.01, fewest=fewest_values(0.95), most=8)
BLOCK = TrialRequest(0, CURRENT_SETUP, Role.AB, warmup_steps=1, timed_steps=4)
TRIAL = TrialRequest(
    0, CURRENT_SETUP, Role.REFERENCE, warmup_steps=1, timed_steps=6, most_steps=18, precision=1e-6
)


def compared(
    world: World, tuned: Plan | None, current: Plan | None, rule: PairRule = RULE
) -> Comparison:
    """The closing A/B comparison as the tuner runs it: ABBA blocks until there are enough pairs."""
    ours: list[Measured] = []
    theirs: list[Measured] = []
    while len(ours) != len(theirs) or enough_pairs(ours, theirs, rule) is None:
        is_tuned = next_is_tuned(len(ours), len(theirs))
        block = world.run_trial(BLOCK, tuned if is_tuned else current)
        assert isinstance(block, Measured), block
        (ours if is_tuned else theirs).append(block)
    return compare(ours, theirs, rule.confidence)


@pytest.mark.slow
def test_one_plan_under_two_names_is_called_different_at_most_at_the_stated_rate(
    make_world,
) -> None:
    # Each interval of 95 % excludes the ratio 1 with a probability of at most 5 %. More than 5 of
    # 20
    # do so with a probability of 0.0003: sum over k > 5 of C(20, k) 0.05^k 0.95^(20 - k). More than
    # 4 exports (2.5 % each): 0.0001.
    world = make_world(script=TIMED)
    one, other = plan(single_bucket(MODEL), MODEL, RANKS), plan(single_bucket(MODEL), MODEL, RANKS)
    comparisons = [compared(world, one, other) for _ in range(COMPARISONS)]
    different = [c for c in comparisons if c.high < 1 or c.low > 1]
    exported = [c for c in comparisons if c.high < 1]
    assert len(different) <= 5, different
    assert len(exported) <= 4, exported
    assert world.restarts == 0


@pytest.mark.slow
def test_a_planted_difference_of_5_percent_is_found(make_world) -> None:
    # The slow plan sends one message and the fast one two; the planted difference must exceed
    # theirs.
    fast, slow = plan(per_variable(MODEL), MODEL, RANKS), plan(single_bucket(MODEL), MODEL, RANKS)
    # Longer steps than above, since a busy machine adds some milliseconds to any wait. A quiet
    # machine needs the fewest pairs, a very busy one the most.
    world = make_world("--wait-s", "0.1", "--slow-plan", slow.id, "--factor", "1.05", script=TIMED)
    comparison = compared(world, fast, slow, replace(RULE, most=40))
    assert comparison.high < 1
    assert 0.9 < comparison.ratio < 1


def test_a_trial_takes_further_steps_until_it_is_precise_losing_or_at_the_cap(make_world) -> None:
    """Any interval is as precise as the one trial asks, and too slow for the other."""
    world = make_world(script=TIMED)
    wanted = plan(single_bucket(MODEL), MODEL, RANKS)
    capped = world.run_trial(TRIAL, wanted)
    assert isinstance(capped, Measured)
    assert capped.stopped is Stopped.CAP and [len(row) for row in capped.step_s] == [18, 18]
    assert capped.gradient_error == 0.0
    precise = world.run_trial(replace(TRIAL, precision=1e6), wanted)
    assert isinstance(precise, Measured) and precise.stopped is Stopped.PRECISE
    assert len(precise.slowest_s) == 6
    losing = world.run_trial(replace(TRIAL, losing_s=-1.0), None)
    assert isinstance(losing, Measured) and losing.stopped is Stopped.LOSING
    assert len(losing.slowest_s) == 6
    fixed = world.run_trial(replace(TRIAL, most_steps=0), None)
    assert isinstance(fixed, Measured) and fixed.stopped is None and len(fixed.slowest_s) == 6
    assert world.restarts == 0


def test_a_script_that_ends_between_two_batches_keeps_its_measurement(make_world) -> None:
    world = make_world("--steps", "12", script=TIMED)
    ended = world.run_trial(TRIAL, plan(single_bucket(MODEL), MODEL, RANKS))
    assert isinstance(ended, Measured)
    assert ended.stopped is Stopped.ENDED and len(ended.slowest_s) == 6
    assert isinstance(world.run_trial(replace(TRIAL, most_steps=0), None), Measured)


def test_a_crash_during_further_steps_is_the_trials_failure(make_world, tmp_path) -> None:
    words = ("--fault", "crash", "--fault-step", "15", "--fault-file", str(tmp_path / "crashed"))
    world = make_world(*words)
    failed = world.run_trial(TRIAL, None)
    assert isinstance(failed, Failed) and failed.kind is FailureKind.CRASH
    assert "planted crash" in failed.message
    assert isinstance(world.run_trial(TRIAL, None), Measured)
    assert world.restarts == 1


@pytest.mark.parametrize(("losses", "measured"), [(1, True), (2, False)])
def test_a_worker_lost_during_further_steps_starts_the_trial_once_more(
    make_world, losses, measured
) -> None:
    left = [losses]

    class Frail(ProcessSupervisor):
        def instruct(self, line: str) -> None:
            if isinstance(decode_instruction(line), ContinueTrial) and left[0] > 0:
                left[0] -= 1
                raise WorkerLost("its machine is gone")
            super().instruct(line)

    world = make_world(script=TIMED, supervisor=partial(Frail, ForkedRank))
    outcome = world.run_trial(TRIAL, None)
    if measured:
        assert isinstance(outcome, Measured) and len(outcome.slowest_s) == 18
    else:
        assert isinstance(outcome, Failed)
        assert "lost, and again on other workers: its machine is gone" in outcome.message
    assert world.restarts == 1
