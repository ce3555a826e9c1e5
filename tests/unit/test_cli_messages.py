"""Bad input: one clear message on stderr, exit status 2, nothing written."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from command_line import error_output

from autotune.cli import main
from autotune.storage.store import Store

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_small.py"
TORCHRUN = ["torchrun", "--nproc-per-node"]
LAUNCH = ["--", *TORCHRUN, "2", SCRIPT]
SEARCHES = "'autosync', 'no-simulator', 'random', 'bayes' or 'fusion', but is 'genetic'"


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("command: [torchrun", "must be YAML, but is not"),
        ("comand: torchrun x.py", "unknown field 'comand'; did you mean 'command'?"),
        (
            "command: torchrun x.py\nbudget_time: soon",
            "budget_time needs a time such as 50us, 30s or 5min, but is 'soon'",
        ),
        ("search: autosync", "field 'command' is required, but missing"),
        ("command: torchrun x.py\nsearch: genetic", f"Input should be {SEARCHES}"),
        ("- a\n- b", "job.yaml"),
    ],
)
def test_a_wrong_job_file_is_refused_with_its_rule(capsys, tmp_path, yaml, message) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml)
    assert message in error_output(capsys, "tune", path, "--directory", tmp_path / "jobs")
    assert not (tmp_path / "jobs").exists()


TUNE = [
    ([], "nothing to tune: give a command, for example"),
    (["--", *TORCHRUN, "2", "absent.py"], "must be a file, but 'absent.py' is not found"),
    (["--", "torchrun", "--nprocs", "2", SCRIPT], "torchrun does not understand its options"),
    (
        ["--", "bash", "train.sh"],
        "python or a script.py, perhaps after env or uv run, but starts with 'bash'",
    ),
    (
        ["--", "python", SCRIPT],
        "the number of workers is not known; use torchrun --nproc-per-node N",
    ),
    (["--", *TORCHRUN, "1", SCRIPT], "between two or more workers, but the command asks for 1"),
    (["--workers", "4", *LAUNCH], "--workers and torchrun must agree, but are 4 and 2"),
    (["--simulators", "tree", *LAUNCH], "must be some of linear, rnn, gat, but are tree"),
    (["--warmup-steps", "0", *LAUNCH], "warmup_steps must be at least 1"),
    (["--losing", "inf", *LAUNCH], "losing must be finite and above 1"),
    (["--precision", "inf", *LAUNCH], "precision must be finite and above 0"),
    (["--deviation", "inf", *LAUNCH], "deviation must be finite and"),
    (
        ["--ab-precision", "1", *LAUNCH],
        "ab_precision must be above 0 and below 1 (0.01 is 1 %), but is 1.0",
    ),
    (["--ab-precision", "inf", *LAUNCH], "ab_precision must be above 0 and below 1"),
    (["--master-ports", "9-1", *LAUNCH], "--master-ports needs FIRST-LAST"),
]
RUN = [(LAUNCH, "cannot read absent.json"), ([], "nothing to run")]


@pytest.mark.parametrize(("words", "message"), TUNE)
def test_a_wrong_command_line_writes_nothing(capsys, tmp_path, words, message) -> None:
    assert message in error_output(capsys, "tune", "--directory", tmp_path / "jobs", *words)
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize(("words", "message"), RUN)
def test_a_run_without_its_strategy_or_command_is_refused(capsys, words, message) -> None:
    assert message in error_output(capsys, "run", "--strategy", "absent.json", *words)


def test_a_cluster_of_another_size_is_refused(capsys, tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("hosts: [{name: a, devices: 4}]")
    options = ("--cluster", path, "--directory", tmp_path / "jobs")
    error = error_output(capsys, "tune", *options, *LAUNCH)
    assert "must have as many devices as the job has workers, but has 4 for 2; " in error
    assert "; change --nproc-per-node or the cluster file" in error


def test_an_unusable_directory_is_refused(capsys, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    error = error_output(capsys, "tune", "--directory", tmp_path / "file" / "jobs", *LAUNCH)
    assert "cannot be created" in error and "choose another --directory" in error
    # /sys is read-only for everybody, root included.
    error = error_output(capsys, "tune", "--directory", "/sys", *LAUNCH)
    assert "/sys/autotune.db must be readable and writable" in error
    assert "check its permissions or give another path" in error


def test_a_store_from_a_newer_version_is_refused_and_left_alone(capsys, tmp_path) -> None:
    Store.open(tmp_path / "autotune.db").close()
    with sqlite3.connect(tmp_path / "autotune.db") as database:
        database.execute("PRAGMA user_version = 99")
    before = (tmp_path / "autotune.db").read_bytes()
    assert main(["show", "--directory", str(tmp_path)]) == 1
    assert "has store version 99, but this autotune reads up to" in capsys.readouterr().err
    assert (tmp_path / "autotune.db").read_bytes() == before


def test_json_errors_are_json_too(capsys, tmp_path) -> None:
    assert main(["show", "--json", "--directory", str(tmp_path)]) == 2
    error = json.loads(capsys.readouterr().out)
    assert error["exit_status"] == 2 and "holds no jobs" in error["error"] and "help" not in error


def test_resuming_without_an_unfinished_job_is_refused(capsys, tmp_path) -> None:
    Store.open(tmp_path / "autotune.db").close()
    error = error_output(capsys, "tune", "--resume", "--directory", tmp_path)
    assert "there is no unfinished job" in error
