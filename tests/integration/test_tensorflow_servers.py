"""A TensorFlow script on `tf.distribute.Server`s: trials, refusals, and servers that end."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("tensorflow") is None:  # an import takes 7 s
    pytest.skip("the extra tensorflow is not installed", allow_module_level=True)

from tensorflow_ranks import with_tensorflow

from autotune.cluster import Cluster
from autotune.records import Failed, FailureKind, Measured, Role, TrialRequest
from autotune.strategy_space.builders.cross_step import cross_step_all_reduce
from autotune.strategy_space.builders.servers import ps_load_balanced
from autotune.strategy_space.plan import plan

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_tensorflow.py"
RANKS = 2
REQUEST = TrialRequest(0, "strategy-under-test", Role.CANDIDATE, warmup_steps=1, timed_steps=3)
LONG = TrialRequest(0, "s", Role.CANDIDATE, warmup_steps=1, timed_steps=5000)


def plant(path: Path, fault: str) -> None:
    """Let rank 1 fail; the file is complete when it appears."""
    written = path.with_suffix(".written")
    written.write_text(fault)
    written.rename(path)


def test_trials_change_plans_in_one_run_and_failed_servers_cost_a_restart_each(
    make_world, tmp_path
) -> None:
    planted = tmp_path / "planted"
    words = ("100000", str(planted))
    world = make_world(*words, script=SCRIPT, step_timeout_s=20.0, supervisor=with_tensorflow)
    profile = world.profile()
    workload = profile.workload
    assert {one.shape for one in workload.variables} == {(16, 32), (32,), (32, 4), (4,)}
    assert workload.source == "measured" and workload.backward_s > 0
    assert "ends with its updates" in profile.cross_step_refused
    assert "all_reduce" in {one.primitive for one in profile.series}

    cluster = Cluster.local(RANKS)
    served = plan(ps_load_balanced(workload, cluster), workload, RANKS)
    for wanted in (None, served, None):
        outcome = world.run_trial(REQUEST, wanted)
        assert isinstance(outcome, Measured), outcome
        assert len(outcome.step_s) == RANKS
    crossing = cross_step_all_reduce(workload, cluster)
    refused = world.run_trial(REQUEST, plan(crossing, workload, RANKS))
    assert isinstance(refused, Failed) and refused.kind is FailureKind.REFUSED
    assert "a step ends with its updates" in refused.message
    assert world.restarts == 0

    plant(planted, "exit")
    failed = world.run_trial(LONG, served)
    assert isinstance(failed, Failed) and failed.kind is FailureKind.CRASH
    assert failed.rank == 1 and "exit code 7" in failed.message
    assert isinstance(world.run_trial(REQUEST, served), Measured)
    assert world.restarts == 1

    plant(planted, "stop")  # the servers stay alive, but the collective of the step is aborted
    failed = world.run_trial(LONG, None)
    assert isinstance(failed, Failed) and failed.kind is FailureKind.HANG
    assert isinstance(world.run_trial(REQUEST, None), Measured)
    assert world.restarts == 2
