"""`autotune profile` on a TensorFlow program, and `autotune replay` of what it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import output

from autotune.cli import main
from autotune.errors import LaunchError
from autotune.profiling.graph.traced_workload import workload_of
from autotune.profiling.traces.job import read_job
from autotune.recordings.graph_file import GRAPH_FILE, NodePhase
from autotune.recordings.job_file import RecordedJob

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")
pytestmark = pytest.mark.timeout(600)  # a busy machine needs more than the default

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "train_tensorflow.py"
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")
STEPS, TIMEOUT_S = 3, 400.0
VARIABLES = {
    f"sequential/{name}"
    for name in ("dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias")
}


def profile_words(
    folder: Path,
    *words: str,
    command: tuple[str, ...] = ("python",),
    script: Path = SCRIPT,
    script_steps: int = 100000,
) -> list[str]:
    ours = ["profile", "-o", str(folder), "--steps", str(STEPS), "--warmup", "1", *words]
    return [*ours, "--", *command, str(script), str(script_steps), str(folder / "planted")]


def profile(folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autotune", *profile_words(folder, *words, **options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_a_program_that_no_launcher_starts_is_recorded_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json.loads(output(capsys, *profile_words(tmp_path / "traces", "--json")))
    job = RecordedJob.read(tmp_path / "traces")
    assert (summary["world_size"], summary["steps"], summary["exit_status"]) == (1, STEPS, 0)
    assert job.backend == "tensorflow"
    assert job.workload is not None
    assert {variable.name for variable in job.workload.variables} == VARIABLES
    assert min(job.workload.forward_s, job.workload.backward_s, job.workload.update_s) > 0
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {
        "job.json",
        "rank0.json.gz",
        GRAPH_FILE,
    }
    recorded = read_job(tmp_path / "traces")
    assert recorded.graph is not None
    phases = {node.phase for node in recorded.graph.nodes}
    assert phases >= {NodePhase.FORWARD, NodePhase.BACKWARD, NodePhase.UPDATE}
    read = workload_of(recorded).workload
    assert {variable.name for variable in read.variables} == VARIABLES
    assert main(["replay", str(tmp_path / "traces"), "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert abs(replayed["replay_error"]) < 0.01


@pytest.mark.slow
def test_the_servers_of_all_ranks_are_recorded_by_rank_0(tmp_path: Path) -> None:
    done = profile(tmp_path / "traces", command=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert "recorded 3 steps on 2 rank(s)" in done.stdout
    assert "connection closed" not in done.stderr
    job = RecordedJob.read(tmp_path / "traces")
    sums = [row for row in job.collectives if row.op == "all_reduce"]
    assert [row.ranks for row in sums] == [2]
    assert job.plan is not None
    assert sums[0].size_bytes == job.plan.messages[0].grad_bytes
    recorded = read_job(tmp_path / "traces")
    assert recorded.rank_numbers == (0, 1)
    assert sum(joint.name == "all_reduce" for joint in recorded.joints) == STEPS
    assert main(["replay", str(tmp_path / "traces")]) == 0


@pytest.mark.slow
def test_one_replica_of_mirrored_workers_is_recorded_and_all_go_on_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "traces" / "planted"
    results.mkdir(parents=True)
    script = SCRIPT.with_name("train_mirrored.py")
    done = profile(tmp_path / "traces", "--go-on", command=TORCHRUN, script=script, script_steps=4)
    assert done.returncode == 0, done.stderr
    job = RecordedJob.read(tmp_path / "traces")
    assert (job.world_size, job.steps, job.collectives) == (1, STEPS, ())
    assert "one replica is recorded alone" in job.notes[-1]
    assert job.workload is not None
    (table,) = (one for one in job.workload.variables if one.sparse)
    assert job.mirrored
    assert table.touched_rows is not None and 1 <= table.touched_rows < table.rows
    assert len(job.workload.variables) == 5
    first, second = (np.load(results / f"worker_{worker}.npz") for worker in range(2))
    assert len(first.files) == 6
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name])
    assert main(["replay", str(tmp_path / "traces"), "--json"]) == 0
    assert abs(json.loads(capsys.readouterr().out)["replay_error"]) < 0.01


@pytest.mark.slow
def test_a_program_that_ends_within_the_recording_gives_what_there_is(tmp_path: Path) -> None:
    done = profile(tmp_path / "traces", script_steps=6)
    assert done.returncode == 0, done.stderr
    assert "recorded 2 steps of 3 asked for on 1 rank(s)" in done.stdout


def test_a_program_that_ends_before_is_refused_with_the_numbers(tmp_path: Path) -> None:
    from runtime_rewriter.tensorflow.script_recorder import ScriptRecorder

    nothing_ran: Any = None
    recorder = ScriptRecorder(nothing_ran, "model", {}, tmp_path, asked_steps=3, warmup=1)
    with pytest.raises(LaunchError, match="made 0 steps, but the first recorded one comes after 3"):
        recorder.finish()
