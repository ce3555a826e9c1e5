"""Ranks on `tf.distribute.Server`s: a script's trials, servers that end, and a client per rank."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from bare_export import bare_export

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

import tensorflow as tf
import torch.distributed as dist
from isolated_servers import WAIT_S
from keras.optimizers import Adam
from short_jobs import START_S, small_model
from tensorflow_checks import assert_close
from tensorflow_programs import averaged_steps, batches_of, train_as_client, two_layers
from tensorflow_ranks import TensorflowProcess, with_tensorflow
from test_fork_servers import assert_prepared
from torch_scripts import run_script
from torch_world import run_world

import autotune
from autotune.cluster import Cluster
from autotune.errors import InvalidInput, PlanMismatch
from autotune.records import Failed, FailureKind, Measured, Role, TrialRequest
from autotune.strategy_space.builders.collectives import all_reduce_chunks
from autotune.strategy_space.builders.cross_step import cross_step_all_reduce
from autotune.strategy_space.builders.servers import ps_load_balanced
from autotune.strategy_space.plan import plan
from runtime_rewriter.ports import unclaimed_port
from runtime_rewriter.rank.exported import ExportSession
from runtime_rewriter.rank.mirrored_model import steer_mirrored
from runtime_rewriter.rendezvous import meet
from runtime_rewriter.tensorflow.distribute import distribute
from runtime_rewriter.tensorflow.graph_workload import workload_of
from runtime_rewriter.tensorflow.servers import JOB, LOOPBACK

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_tensorflow.py"
RANKS = 2
STEPS = 5
TOLERANCE = 1e-5
"""Largest error, as a share of a variable's largest value: ranks add gradients in another order
than one device."""
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
    world = make_world(*words, script=SCRIPT, step_timeout_s=60.0, supervisor=with_tensorflow)
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


def test_a_client_on_each_rank_trains_as_one_client_does() -> None:
    program = two_layers(Adam(1e-2))
    training, start = program.capture(), {n: v.numpy() for n, v in program.variables.items()}
    batches, workload = batches_of(program, 16, STEPS), workload_of(training, "model")
    planned = plan(all_reduce_chunks(workload, 8), workload, RANKS)
    tasks = [f"/job:{JOB}/replica:0/task:{rank}/device:CPU:0" for rank in range(RANKS)]
    graph = distribute(training, planned, tasks)
    trained = run_world(
        train_as_client,
        RANKS,
        unclaimed_port("127.0.0.1"),
        graph,
        batches,
        start,
        process=TensorflowProcess,
    )
    expected = averaged_steps(program, batches, RANKS)
    for values in trained:
        assert_close(values, expected, TOLERANCE)


def joined_by_own_export(rank: int, port: int, folder: Path) -> list[str]:
    """By the one line, and under `autotune run` with MultiWorkerMirroredStrategy.

    For `run_world` on two ranks. `port`: a free one, where rank 0 waits for the other.
    """
    dist.destroy_process_group()
    export = folder / f"rank{rank}.json"
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    with pytest.raises(PlanMismatch) as by_line:
        autotune.distribute(tf.function(len), export)
    peers = meet(rank, RANKS, LOOPBACK, port, WAIT_S)
    with pytest.raises(PlanMismatch) as mirrored:
        steer_mirrored(ExportSession(export), ExitStack(), peers)
    return [str(by_line.value), str(mirrored.value)]


def test_ranks_with_other_exports_are_refused_before_the_first_step(tmp_path) -> None:
    workload = small_model()
    strategies = (all_reduce_chunks(workload, 1), all_reduce_chunks(workload, 8))
    plans = [plan(strategy, workload, RANKS) for strategy in strategies]
    for rank, (strategy, planned) in enumerate(zip(strategies, plans, strict=True)):
        export = bare_export(workload, strategy, RANKS, plan_id=planned.id)
        export.write(tmp_path / f"rank{rank}.json")
    port = unclaimed_port("127.0.0.1")
    texts = run_world(joined_by_own_export, RANKS, port, tmp_path, process=TensorflowProcess)
    both = f"but rank 0 holds {plans[0].id}, rank 1 holds {plans[1].id}"
    assert all(both in text for of_rank in texts for text in of_rank)


@pytest.mark.slow
def test_nothing_of_the_script_runs_on_servers_and_exit_handlers_see_trained_variables(
    tmp_path: Path,
) -> None:
    """A `finally` on a server would save untrained variables over the trained ones."""
    script = SCRIPT.with_name("train_tensorflow_saving.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", str(script), str(tmp_path)]
    done = run_script(command, cwd=tmp_path, timeout=START_S)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"exit-0.npy", "finally-0"}
    # Each of three steps takes a fifth of what is missing to 1.
    assert np.load(tmp_path / "exit-0.npy") == pytest.approx(1 - 0.8**3)


def test_a_step_that_is_no_function_of_tensorflow_is_refused(monkeypatch) -> None:
    """Its Python would run once, and not in every step."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"LOCAL_RANK": "0", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=r"must be a tf.function.* but len is none"):
        autotune.distribute(len)
    with pytest.raises(InvalidInput, match=r"must be a tf.function.* but len is none"):
        autotune.distribute(partial(len))


def test_a_forked_process_has_imported_tensorflow_and_helpers() -> None:
    assert_prepared(TensorflowProcess, "tensorflow", "keras")
