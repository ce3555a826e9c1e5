"""A training that goes on after its trials: equal to plain DDP, started once, ended properly."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from short_jobs import (
    FEW_STEPS,
    JOB_S,
    SHORT_PROBE,
    START_S,
    small_model,
    take_interrupts,
    with_tracking_store,
)

from autotune.cluster import Cluster
from autotune.errors import LaunchError
from autotune.jobs.driver import drive
from autotune.records import CURRENT_SETUP, Failed, Measured, Role, TrialRequest
from autotune.sampler.proposer import Proposer
from autotune.storage.store import Store
from autotune.strategy_space.builders.collectives import single_bucket
from autotune.strategy_space.plan import plan
from autotune.tuning.events import Profiled
from autotune.tuning.job import JobSpec
from runtime_rewriter.world.results import TrainingEnded
from runtime_rewriter.world.world import World

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_checkpoints.py"
REQUEST = TrialRequest(0, "strategy-under-test", Role.CANDIDATE, warmup_steps=2, timed_steps=4)
ONE_BUCKET = plan(single_bucket(small_model()), small_model(), 2)
OLD = {"old.pt": b"earlier training"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the script and a checkpoint of an earlier training."""
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(SCRIPT, project)
    for name, content in OLD.items():
        (project / name).write_bytes(content)
    return project


@pytest.fixture
def kept(make_world: Callable[..., World], project: Path) -> Callable[..., World]:
    """`kept(*words)`: the world of a training of the project that goes on after its trials."""

    def make(*words: str) -> World:
        place = {"script": project / SCRIPT.name, "directory": project}
        return make_world(*words, probe_s=0.0, keeps_training=True, **place)

    return make


def checkpoints(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: torch.load(path) for path in folder.glob("*.pt") if path.name not in OLD}


def assert_same_checkpoints(folder: Path, expected: Path) -> None:
    theirs, ours = checkpoints(expected), checkpoints(folder)
    assert theirs.keys() == ours.keys() and "final.pt" in ours
    for name, state in theirs.items():
        assert all(torch.equal(state[key], ours[name][key]) for key in state), name


@pytest.mark.slow
@pytest.mark.job
def test_a_kept_and_resumed_training_ends_as_plain_ddp_does_with_all_checkpoints(
    project, tmp_path, tracking_store
) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(project, alone)
    launch = ["--nproc-per-node", "2", SCRIPT.name, "--steps", "700", "--save-every", "50"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    plain = subprocess.Popen([*torchrun, *launch], cwd=alone, stderr=subprocess.DEVNULL)
    jobs = with_tracking_store(project / "autotune-jobs", tracking_store)
    tune = [sys.executable, "-m", "autotune", "tune", "--json"]
    options = ["--continue", "--search", "random", "--budget-trials", "4", "--top-k", "2"]
    options += [*FEW_STEPS, *SHORT_PROBE]
    pipes = {"cwd": project, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    begun = subprocess.Popen(
        [*tune, *options, "--", "torchrun", *launch], **pipes, preexec_fn=take_interrupts
    )
    printed = itertools.takewhile(lambda line: "round 0: " not in line, begun.stderr)
    assert "profiled" in "".join(printed)
    begun.send_signal(signal.SIGINT)
    assert "`autotune tune --resume` continues" in begun.communicate(timeout=START_S)[1]
    assert begun.returncode == 130 and not (project / "final.pt").exists()
    done = subprocess.run([*tune, "--resume"], **pipes, timeout=JOB_S)
    assert done.returncode == 0, done.stderr
    assert plain.wait(timeout=START_S) == 0
    result = json.loads(done.stdout)
    with Store.open(jobs / "autotune.db") as store:
        events = store.history(result["job"]).events
    assert sum(isinstance(event, Profiled) for event in events) == 1
    # The script reads no checkpoint, so it trained all its steps again. A step is counted at the
    # next forward pass, which the last one lacks.
    assert result["training"] == {"steps": 699, "exit_status": 0, "reason": ""}
    assert result["decision"]["comparison"] is not None
    assert result["files"] == "real files (continue_training)"
    assert "goes on under this decision" in done.stderr
    assert_same_checkpoints(project, alone)
    assert (project / "old.pt").read_bytes() == OLD["old.pt"]
    assert (project / "ended-0").exists() and (project / "ended-1").exists()


def test_training_under_another_plan_gives_the_same_parameters_and_the_scripts_status(
    kept, project, tmp_path
) -> None:
    world = kept("--steps", "60", "--status", "3")
    crossing = replace(ONE_BUCKET, cross_step=True)
    for wanted in (ONE_BUCKET, crossing):
        assert isinstance(world.run_trial(REQUEST, wanted), Measured)
    reported: list[int] = []
    trained = world.train_on(crossing, reported.append)
    assert trained.exit_status == 3 and "the script ended with 3" in trained.reason
    assert reported and world.restarts == 0
    crossed = shutil.copytree(project, tmp_path / "crossed")
    assert kept("--steps", "60").train_on(None, print).exit_status == 0
    assert_same_checkpoints(project, crossed)


def test_a_script_that_ends_before_the_decision_is_not_started_again(
    kept, project, tmp_path
) -> None:
    world = kept("--steps", "40")
    spec = JobSpec(
        ("train.py",), 2, Cluster.local(2), continue_training=True, timed_steps=3, most_steps=3
    )
    with Store.open(tmp_path / "autotune.db") as store:
        store.create_job("job", spec)
        decision = drive("job", spec, store, world, Proposer(spec, {}), [])
    assert decision.strategy_id == CURRENT_SETUP
    assert "ended by itself after 39 steps, before the search was decided" in decision.reason
    with pytest.raises(TrainingEnded):
        world.train_on(None, print)
    assert world.ended_steps == 39 and world.restarts == 0 and (project / "final.pt").exists()


def test_a_crash_ends_the_job_and_keeps_what_was_trained(kept, project, tmp_path) -> None:
    world = kept("--starts", str(tmp_path / "starts"), "--crash-step", "20")
    (project / "best.pt").touch()
    crashed = world.run_trial(replace(REQUEST, timed_steps=30), ONE_BUCKET)
    assert isinstance(crashed, Failed) and "planted crash" in crashed.message
    with pytest.raises(LaunchError, match=r"planted crash.* It is not started again"):
        world.run_trial(REQUEST, None)
    assert world.restarts == 0 and (project / "step-15.pt").exists()


def test_a_terminated_training_gets_the_signal(kept, project) -> None:
    world = kept()

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    assert isinstance(world.run_trial(REQUEST, ONE_BUCKET), Measured)
    with pytest.raises(KeyboardInterrupt):
        world.train_on(None, interrupt)
    world.terminate()
    assert (project / "terminated-0").exists() and (project / "terminated-1").exists()
