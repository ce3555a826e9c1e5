"""`autotune profile` on real scripts: its files, its output and its errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import error_output
from short_jobs import START_S

from autotune.cli import main
from autotune.jobs.record import earlier_kept, record, restore_earlier
from autotune.recordings.job_file import JOB_FILE, RecordedJob
from autotune.recordings.memory_file import RecordedMemory
from runtime_rewriter.ports import unclaimed_port
from runtime_rewriter.recording.settings import RecordSettings
from runtime_rewriter.world.script_command import ScriptCommand

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "train_small.py"
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")


def profile(folder: Path, *words: str, command: tuple[str, ...] = TORCHRUN) -> list[str]:
    """The words of the command; those after `--` are the script's."""
    before, script = words[: words.index("--")], words[words.index("--") + 1 :]
    ours = ("profile", "-o", str(folder), "--steps", "3", "--warmup", "1", "--between", "0")
    return [*ours, *before, "--", *command, str(SCRIPT), *script]


def run(
    folder: Path, *words: str, command: tuple[str, ...] = TORCHRUN
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if command[0] == "python":
        environment |= group_of_one()
    whole = [sys.executable, "-m", "autotune", *profile(folder, *words, command=command)]
    return subprocess.run(
        whole, cwd=ROOT, capture_output=True, text=True, timeout=START_S, env=environment
    )


def group_of_one() -> dict[str, str]:
    """A process group as a launcher of the user's own would describe it."""
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unclaimed_port("127.0.0.1")),
    }


ALONE = ("python",)


@pytest.mark.job
def test_a_script_under_torchrun_is_recorded_and_ended(tmp_path, capsys) -> None:
    secret = ("env", "API_KEY=bluebottle", *TORCHRUN)
    done = run(tmp_path / "traces", "--json", "--", "--steps", "100000", command=secret)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    job = RecordedJob.read(tmp_path / "traces")
    assert (summary["world_size"], summary["steps"], summary["exit_status"]) == (2, 3, 0)
    assert summary["next"][1].endswith(" --cluster cluster.yaml")
    assert (
        summary["iteration_s"] == job.iteration_s > 0
        and summary["alone_s"] == job.workload.compute_s
    )
    assert (
        summary["peak_bytes"]
        == RecordedMemory.read(tmp_path / "traces").profile.live_bytes.max()
        > job.workload.grad_bytes
    )
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {
        "job.json",
        "memory.json",
        "rank0.json.gz",
        "rank1.json.gz",
    }
    assert job.command[-2:] == ("--steps", "100000")
    stored = (tmp_path / "traces" / "job.json").read_text()
    assert job.command[1] == "API_KEY=***" and "bluebottle" not in stored + done.stdout
    again = error_output(capsys, *profile(tmp_path / "traces", "--", "--steps", "1"))
    assert "name another --output, or use --overwrite" in again


@pytest.mark.job
@pytest.mark.slow
def test_a_rank_that_crashes_is_reported_with_its_own_words(tmp_path) -> None:
    done = run(tmp_path, "--", "--steps", "100", "--fault", "crash", "--fault-step", "4")
    assert done.returncode == 1
    assert "RuntimeError: planted crash (at " in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_traces_of_others_are_not_deleted_without_overwrite(tmp_path, capsys) -> None:
    trace = tmp_path / "rank0.json.gz"
    trace.write_bytes(b"of torch.profiler")
    refused = error_output(capsys, *profile(tmp_path, "--", "--steps", "1"))
    assert "has a rank0.json.gz" in refused
    assert trace.read_bytes() == b"of torch.profiler"


def test_an_earlier_recording_stays_until_there_is_a_new_one(tmp_path, capsys) -> None:
    trace = tmp_path / "rank0.json.gz"
    trace.write_bytes(b"earlier")
    words = profile(tmp_path, "--overwrite", "--steps", "0", "--", "--steps", "1")
    assert "at least 1 step" in error_output(capsys, *words)
    with pytest.raises(KeyboardInterrupt), earlier_kept(tmp_path):
        assert not trace.exists()
        (tmp_path / "rank1.json.gz").write_bytes(b"half")
        raise KeyboardInterrupt
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"earlier"]
    with earlier_kept(tmp_path):
        trace.write_bytes(b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]


@pytest.mark.job
@pytest.mark.slow
def test_a_script_that_wraps_its_model_again_yields_the_steps_before(tmp_path) -> None:
    done = run(tmp_path / "some", "--no-workload", "--", "--wrap-again", "6")
    assert done.returncode == 0, done.stderr
    assert "recorded 2 steps of 3 asked for on 2 rank(s)" in done.stdout
    done = run(tmp_path / "none", "--no-workload", "--", "--wrap-again", "2")
    assert done.returncode == 1
    assert "it then trains its DDP model 2, but only the first one is recorded" in done.stderr


KILLED = """
import os, pathlib, signal, sys
from autotune.jobs.record import earlier_kept
folder = pathlib.Path(sys.argv[1])
with earlier_kept(folder):
    for name in sys.argv[2:]:
        (folder / name).write_bytes(b"new")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("names", [(), ("rank0.json.gz", JOB_FILE)], ids=["nothing", "a new one"])
def test_an_earlier_recording_comes_back_after_a_kill_unless_there_is_a_new_one(
    tmp_path, capsys, names
) -> None:
    for name in (JOB_FILE, "rank0.json.gz"):
        (tmp_path / name).write_bytes(b"earlier")
    words = [sys.executable, "-c", KILLED, str(tmp_path), *names]
    assert subprocess.run(words, cwd=ROOT, timeout=60).returncode == -signal.SIGKILL
    again = error_output(capsys, *profile(tmp_path, "--", "--steps", "1"))
    assert "has a job.json; name another --output, or use --overwrite" in again
    contents = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    left = b"new" if names else b"earlier"
    assert contents == {JOB_FILE: left, "rank0.json.gz": left}


def test_a_recording_that_a_running_command_has_put_aside_stays_there(tmp_path) -> None:
    (tmp_path / JOB_FILE).write_bytes(b"earlier")
    with pytest.raises(KeyboardInterrupt), earlier_kept(tmp_path):
        restore_earlier(tmp_path)
        assert not (tmp_path / JOB_FILE).exists()
        raise KeyboardInterrupt
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"earlier"]


@pytest.mark.slow
def test_a_script_that_goes_on_ends_by_itself_with_its_own_status(tmp_path) -> None:
    done = run(tmp_path, "--go-on", "--no-workload", "--", "--steps", "8", command=ALONE)
    assert done.returncode == 0, done.stderr
    assert "recorded 3 steps on 1 rank(s)" in done.stdout and "next: autotune replay" in done.stdout
    again = ("--go-on", "--no-workload", "--overwrite", "--", "--steps", "9", "--fault-step", "8")
    for fault, status in (("exit", 7), ("status", 3)):
        ended = run(tmp_path, *again, "--fault", fault, command=ALONE)
        assert ended.returncode == status, ended.stderr
        assert RecordedJob.read(tmp_path).workload is None


@pytest.mark.slow
def test_a_script_that_is_killed_has_the_status_of_a_shell(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, signal, sys\n"
        "pathlib.Path(sys.argv[1]).write_text('{}')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = ScriptCommand(str(script), (str(tmp_path / JOB_FILE),), False, None)
    settings = RecordSettings(folder=str(tmp_path), stop=False, reports=str(tmp_path))
    assert record(command, settings, timeout_s=120.0) == 128 + signal.SIGKILL


@pytest.mark.slow
def test_ordinary_steps_between_recorded_ones_are_stated(tmp_path) -> None:
    done = run(tmp_path, "--no-workload", "--between", "2", "--", "--steps", "100", command=ALONE)
    assert done.returncode == 0, done.stderr
    assert "recorded 3 steps on 1 rank(s), with 2 ordinary steps between two" in done.stdout
    job = RecordedJob.read(tmp_path)
    assert (job.between, len(job.ranks[0].ordinary_s)) == (2, 4)


@pytest.mark.slow
def test_a_script_that_ends_within_the_recording_gives_what_there_is(tmp_path) -> None:
    done = run(
        tmp_path,
        "--no-workload",
        "--",
        "--steps",
        "5",
        "--accumulate",
        "2",
        "--evaluate",
        command=ALONE,
    )
    assert done.returncode == 0, done.stderr
    assert "recorded 2 steps of 3 asked for" in done.stdout
    notes = " ".join(RecordedJob.read(tmp_path).notes)
    assert (
        "an optimizer stepped in 1 of 2 recorded steps" in notes
        and "evaluation ran within recorded steps 0," in notes
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            ("--steps", "2"),
            "the script made 2 steps, but the recording begins after 14 and takes 3; "
            "let it train longer",
        ),
        (
            ("--steps", "5", "--without-ddp"),
            "must build DistributedDataParallel, or call autotune.apply(model) once, "
            "but it ended without",
        ),
    ],
)
def test_a_script_with_too_little_to_record_is_told_so(
    tmp_path, script: tuple[str, ...], message: str
) -> None:
    done = run(tmp_path, "--", *script, command=ALONE)
    assert done.returncode == 1 and message in done.stderr.splitlines()[-1]
    assert tmp_path.exists(), "a folder of the user stays"


def test_a_script_that_hangs_is_ended_and_its_last_output_shown(
    tmp_path, monkeypatch, capsys
) -> None:
    for name, value in group_of_one().items():
        monkeypatch.setenv(name, value)
    hang = ("--timeout", "6s", "--", "--fault", "hang", "--fault-step", "0")
    assert main(profile(tmp_path / "new", *hang, command=ALONE)) == 1
    assert not (tmp_path / "new").exists(), "no empty folder is left"
    assert "nothing was recorded within 6 s (--timeout)" in capsys.readouterr().err


def test_a_script_that_needs_a_launcher_is_told_which(tmp_path, capsys) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    assert main(["profile", "-o", str(tmp_path / "traces"), "--", "python", str(script)]) == 1
    error_text = capsys.readouterr().err
    assert "needs a launcher: start it with torchrun --nproc-per-node 1; " in error_text


def test_the_package_loads_no_framework_for_it() -> None:
    check = "assert 'torch' not in sys.modules"
    code = f"import autotune, sys; {check}; autotune.profile; {check}; autotune.Recorder"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0
