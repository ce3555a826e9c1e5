"""An unmodified script of MultiWorkerMirroredStrategy: trials and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("tensorflow") is None:  # an import takes 7 s
    pytest.skip("the extra tensorflow is not installed", allow_module_level=True)

import numpy as np
from tensorflow_ranks import TensorflowProcess, with_tensorflow
from torch_scripts import run_ranks

from autotune.cluster import Cluster
from autotune.records import (
    Accelerators,
    Conditions,
    Failed,
    FailureKind,
    Measured,
    Network,
    Role,
    TrialRequest,
)
from autotune.strategy_space.builders.collectives import per_variable
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.builders.servers import ps_load_balanced
from autotune.strategy_space.plan import plan
from runtime_rewriter.mirrored.scripts import HEARTBEAT_S

SCRIPTS = Path(__file__).parents[1] / "scripts"
SCRIPT, PAIR = SCRIPTS / "train_mirrored.py", SCRIPTS / "mirrored_pair.py"
PAIR_S = 500.0
RANKS = 2
pytestmark = pytest.mark.timeout(600)  # of a test with the pair's training, on a busy machine
REQUEST = TrialRequest(0, "strategy-under-test", Role.CANDIDATE, warmup_steps=1, timed_steps=3)


def test_trials_change_the_messages_of_the_script_s_own_step(make_world, tmp_path) -> None:
    world = make_world(
        "100000",
        str(tmp_path),
        script=SCRIPT,
        step_timeout_s=120.0,
        probe_s=0.0,
        supervisor=with_tensorflow,
    )
    profile = world.profile()
    workload = profile.workload
    rows = [one for one in workload.variables if one.sparse]
    assert [one.shape for one in rows] == [(20, 4)]
    assert rows[0].touched_rows is not None and 1 <= rows[0].touched_rows <= 20
    assert workload.source == "measured" and workload.backward_s > 0
    dense = {one.name for one in workload.variables} - {rows[0].name}
    assert [set(bucket) for bucket in profile.current_buckets] == [dense]

    apart = plan(with_rows(per_variable(workload), workload), workload, RANKS)
    for wanted in (apart, None, apart):  # the profile was of the script's own messages
        outcome = world.run_trial(REQUEST, wanted)
        assert isinstance(outcome, Measured), outcome
        assert len(outcome.step_s) == RANKS
        assert outcome.gradient_error == (None if wanted is None else 0.0)
    served = plan(
        with_rows(ps_load_balanced(workload, Cluster.local(RANKS)), workload), workload, RANKS
    )
    refused = world.run_trial(REQUEST, served)
    assert isinstance(refused, Failed) and refused.kind is FailureKind.REFUSED
    assert "meet in all-reduces" in refused.message
    assert world.restarts == 0


@pytest.mark.slow
def test_emulated_accelerators_play_the_step_with_real_messages(make_world, tmp_path) -> None:
    world = make_world(
        "100000",
        str(tmp_path),
        script=SCRIPT,
        step_timeout_s=120.0,
        start_timeout_s=240.0,
        probe_s=15.0,
        supervisor=with_tensorflow,
        conditions=Conditions(Network.LOOPBACK, Accelerators.EMULATED),
    )
    profile = world.profile()
    assert profile.mirrored
    assert {one.primitive for one in profile.series} == {"all_reduce", "all_gather"}
    assert all(len(one.points) >= 2 and one.points[0].seconds > 0 for one in profile.series)
    slow = replace(profile.workload, forward_s=0.05, backward_s=0.2, update_s=0.05)
    world.emulate(slow)
    rows = plan(with_rows(per_variable(slow), slow), slow, RANKS)
    for wanted in (None, rows):
        outcome = world.run_trial(REQUEST, wanted)
        assert isinstance(outcome, Measured), outcome
        assert outcome.overrun is not None
        assert outcome.gradient_error == (None if wanted is None else 0.0)
        assert min(outcome.slowest_s) >= slow.compute_s * 0.99
    assert world.restarts == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """The folder of two workers; see `mirrored_pair.py`."""
    folder = tmp_path_factory.mktemp("pair")
    words = [str(PAIR), str(SCRIPT), str(folder)]
    done = run_ranks(words, RANKS, PAIR_S, TensorflowProcess)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def trained(pair) -> dict[str, list[np.ndarray]]:
    """What the workers have trained, by the name of the file."""
    names = ("own", "planned", "cast", "alone")
    files = [path for name in names for path in pair.glob(f"{name}_*.npz")]
    return {path.stem: list(np.load(path).values()) for path in files}


def test_plans_that_change_every_step_train_what_the_script_trains_itself(trained) -> None:
    for rank in range(RANKS):
        for own, planned in zip(trained[f"own_{rank}"], trained[f"planned_{rank}"], strict=True):
            np.testing.assert_array_equal(own, planned)  # two workers: sums in any order are equal
    for first, second in zip(trained["own_0"], trained["own_1"], strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_second_function_of_the_same_step_keeps_the_script_s_own_messages(trained) -> None:
    for rank in range(RANKS):
        for own, alone in zip(trained[f"own_{rank}"], trained[f"alone_{rank}"], strict=True):
            np.testing.assert_array_equal(own, alone)


def test_a_worker_on_a_busy_machine_is_not_given_up(pair) -> None:
    for rank in range(RANKS):
        noted = json.loads((pair / f"noted_{rank}.json").read_text())
        assert noted["heartbeat_ms"] == HEARTBEAT_S * 1000


def test_the_gate_compares_a_plan_with_the_script_s_own_messages(pair) -> None:
    for rank in range(RANKS):
        gate = json.loads((pair / f"noted_{rank}.json").read_text())["gate"]
        (exact, exact_error), (cast, cast_error), (wrong, wrong_error) = gate
        assert exact and exact_error == 0.0
        assert cast and 0 < cast_error < 2e-2
        assert not wrong and 1e-8 < wrong_error < 1e-4


def test_messages_of_fp16_train_almost_the_same(trained) -> None:
    own, cast = trained["own_0"][1:], trained["cast_0"][1:]
    for one, other in zip(own, cast, strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-2, atol=5e-4)
    assert any(not np.array_equal(one, other) for one, other in zip(own, cast, strict=True))


def test_steps_that_are_no_single_call_are_refused_with_what_to_write(pair) -> None:
    for rank in range(RANKS):
        noted = json.loads((pair / f"noted_{rank}.json").read_text())
        # the second step came after a prediction, and the one of a smaller batch was traced
        assert noted["clean"] == [True, False, True, True, False, True]
        assert noted["norm"] == ""
        assert "for batch in dataset: train_step(batch)" in noted["twice"]
        assert "it sums gradients several times" in noted["twice"]
        assert "summed in a loop or branch" in noted["loop"]
        assert "remove the inner @tf.function" in noted["inner"]
        assert "decorate the function with @tf.function" in noted["eager"]
        assert "train in step, but the servers of tf.distribute.P" in noted["servers"]
