"""A script of Horovod is tried; ranks that die or stall fail their trial, and the job goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from short_jobs import small_model

from autotune.errors import LaunchError
from autotune.records import Failed, FailureKind, Measured, Role, TrialRequest
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.plan import plan
from autotune.workload import Library

pytest.importorskip("horovod", reason="`make horovod` builds it")

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_horovod.py"
RANKS = 3
STALL_S = 25
"""Beside four busy processes on two cores, ranks that were well missed a limit of 10 s."""
CYCLE_MS = "20"
"""By default 1: in each cycle Horovod's thread asks all ranks what is ready, also in a stall."""
REQUEST = TrialRequest(0, "strategy-under-test", Role.CANDIDATE, warmup_steps=2, timed_steps=4)


@pytest.fixture(autouse=True)
def long_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", CYCLE_MS)


def test_a_script_is_profiled_and_tried_with_and_without_a_plan(make_world) -> None:
    world = make_world(script=SCRIPT, probe_s=0.0)
    profile = world.profile()
    workload = profile.workload
    assert workload.library is Library.HOROVOD and workload.source == "measured"
    assert profile.cross_step_refused == ""
    for wanted in (None, plan(ddp_default(workload), workload, 2)):
        outcome = world.run_trial(REQUEST, wanted)
        assert isinstance(outcome, Measured), outcome
    assert world.restarts == 0


@pytest.mark.parametrize(
    "planned",
    [pytest.param(False, id="its own operations", marks=pytest.mark.slow), True],
    ids=["its own operations", "a plan"],
)
def test_a_rank_that_dies_or_stalls_in_a_step_fails_the_trial_and_the_next_one_runs(
    planned: bool, make_world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(STALL_S))
    words = (
        "--fault",
        "exit,hang",
        "--fault-step",
        "12",
        "--fault-file",
        str(tmp_path / "planted"),
    )
    world = make_world(*words, script=SCRIPT, ranks=RANKS, step_timeout_s=120.0)
    wanted = plan(ddp_default(small_model()), small_model(), RANKS) if planned else None
    for restarts, (kind, text) in enumerate(
        (
            (FailureKind.CRASH, "rank 2 ended with exit code 7"),
            (FailureKind.HANG, f"within {STALL_S} s"),
        ),
        start=1,
    ):
        failed = world.run_trial(replace(REQUEST, timed_steps=30), wanted)
        assert isinstance(failed, Failed)
        assert (failed.kind, text in failed.message) == (kind, True), failed
        assert isinstance(world.run_trial(REQUEST, wanted), Measured)
        assert world.restarts == restarts


def test_a_script_that_does_not_call_init_is_refused_at_once(make_world) -> None:
    with pytest.raises(LaunchError, match=r"Horovod has not been initialized; use hvd\.init\(\)"):
        make_world("--without-init", script=SCRIPT).run_trial(REQUEST, None)
