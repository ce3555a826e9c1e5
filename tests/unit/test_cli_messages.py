"""Bad input: one clear message on stderr, exit status 2, nothing written."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from autotune.cli import main
from autotune.storage.store import Store

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_small.py"
LAUNCH = ["--", "torchrun", "--nproc-per-node", "2", str(SCRIPT)]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


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
        (
            "command: torchrun x.py\nsearch: genetic",
            "Input should be 'autosync', 'no-simulator', 'random', 'bayes' or 'fusion', "
            "but is 'genetic'",
        ),
        ("- a\n- b", "job.yaml"),
    ],
)
def test_a_wrong_job_file_is_refused_with_field_value_and_rule(
    capsys, tmp_path, yaml, message
) -> None:
    (tmp_path / "job.yaml").write_text(yaml)
    assert message in refused(
        capsys, "tune", str(tmp_path / "job.yaml"), "--directory", str(tmp_path / "jobs")
    )
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune"], "nothing to tune: give a command, for example"),
        (
            ["tune", "--", "torchrun", "--nproc-per-node", "2", "absent.py"],
            "the training script must be a file, but 'absent.py' is not found",
        ),
        (
            ["tune", "--", "torchrun", "--nprocs", "2", str(SCRIPT)],
            "torchrun does not understand its options",
        ),
        (
            ["tune", "--", "bash", "train.sh"],
            "must start with torchrun, python or a script.py, but starts with 'bash'",
        ),
        (
            ["tune", "--", "python", str(SCRIPT)],
            "the number of workers is not known; use torchrun --nproc-per-node N",
        ),
        (
            ["tune", "--", "torchrun", "--nproc-per-node", "1", str(SCRIPT)],
            "between two or more workers, but the command asks for 1",
        ),
        (["tune", "--workers", "4", *LAUNCH], "--workers and torchrun must agree, but are 4 and 2"),
        (
            ["tune", "--simulators", "tree", *LAUNCH],
            "simulators must be some of linear, rnn, gat, but are tree",
        ),
        (["tune", "--warmup-steps", "0", *LAUNCH], "warmup_steps must be at least 1"),
        (["tune", "--master-ports", "9-1", *LAUNCH], "--master-ports needs FIRST-LAST"),
        (["run", "--strategy", "absent.json", *LAUNCH], "cannot read absent.json"),
        (["run", "--strategy", "absent.json"], "nothing to run"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_written(
    capsys, tmp_path, words, message
) -> None:
    if words[0] == "tune":
        words = ["tune", "--directory", str(tmp_path / "jobs"), *words[1:]]
    assert message in refused(capsys, *words)
    assert not (tmp_path / "jobs").exists()


def test_a_cluster_of_another_size_is_refused(capsys, tmp_path) -> None:
    (tmp_path / "cluster.yaml").write_text("hosts: [{name: a, devices: 4}]")
    error = refused(
        capsys,
        "tune",
        "--cluster",
        str(tmp_path / "cluster.yaml"),
        "--directory",
        str(tmp_path / "jobs"),
        *LAUNCH,
    )
    assert (
        "must have as many devices as the job has workers, but has 4 for 2; "
        "change --nproc-per-node or the cluster file" in error
    )


def test_a_directory_that_cannot_be_made_is_refused(capsys, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    error = refused(capsys, "tune", "--directory", str(tmp_path / "file" / "jobs"), *LAUNCH)
    assert "cannot be created" in error and "choose another --directory" in error


def test_a_read_only_directory_is_refused(capsys) -> None:
    error = refused(
        capsys, "tune", "--directory", "/sys", *LAUNCH
    )  # read-only for everybody, root included
    assert (
        "/sys/autotune.db must be readable and writable" in error
        and "check its permissions or give another path" in error
    )


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
    assert "there is no unfinished job" in refused(
        capsys, "tune", "--resume", "--directory", str(tmp_path)
    )
