"""Secrets in commands and messages are masked, and nothing else is."""

from __future__ import annotations

import stat
import sys
from dataclasses import replace

import pytest

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.jobs.settings import Settings
from autotune.jobs.tracking import TRACKING_FILE, Tracking, open_tracker
from autotune.jobs.tune import COMMAND_FILE, created_job, resumed_job
from autotune.jobs.workspace import Workspace
from autotune.masking import masked, masked_command, secrets_of
from autotune.records import Conditions, Network
from autotune.storage.store import Store
from autotune.tuning.job import JobSpec
from runtime_rewriter.rank.ending import describe
from runtime_rewriter.world.script_command import ScriptCommand

SECRET = "s3cretvalue"

COMMANDS = {
    f"python t.py --hf-token {SECRET} --lr 1": "python t.py --hf-token *** --lr 1",
    f"python t.py --api_key={SECRET}": "python t.py --api_key=***",
    f"env WANDB_API_KEY={SECRET} A=1 python t.py": "env WANDB_API_KEY=*** A=1 python t.py",
    f"python t.py postgres://me:{SECRET}@host/db": "python t.py postgres://me:***@host/db",
    "python t.py hf_abcdefghijkl": "python t.py ***",
    "python text.py --key x --mix x": "python text.py --key *** --mix x",
    "python t.py --max-tokens 512 --tokenizer bert": (
        "python t.py --max-tokens 512 --tokenizer bert"
    ),
    "python t.py --monkey 3 --keys 4": "python t.py --monkey 3 --keys 4",
    "python t.py --token --verbose": "python t.py --token --verbose",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_telling_values_of_a_command_are_masked(command: str) -> None:
    assert " ".join(masked_command(command.split())) == COMMANDS[command]


def test_values_are_masked_wherever_they_turn_up() -> None:
    values = secrets_of(["--token", SECRET, "--key", "abc"], {"DB_PASSWORD": "hunter22", "A": "1"})
    assert values == {SECRET, "hunter22"}
    message = f"401 for {SECRET} and hunter22 at https://u:pw@h/x, abc"
    assert masked(message, values) == "401 for *** and *** at https://u:***@h/x, abc"


def test_the_working_folder_of_a_shell_is_no_secret(monkeypatch) -> None:
    environment = {"PWD": "/home/u/project", "OLDPWD": "/home/u/old", "DB_PWD": "hunter22"}
    assert secrets_of([], environment) == {"hunter22"}
    monkeypatch.setenv("PWD", "/home/u/project")
    error = RuntimeError("no file /home/u/project/data")
    assert describe(error) == "RuntimeError: no file /home/u/project/data"


def test_a_scripts_exception_is_described_without_secrets(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", SECRET])
    monkeypatch.setenv("DB_PASSWORD", "hunter22")
    error = RuntimeError(f"401 for {SECRET} and hunter22 at https://u:pw@h/x")
    assert describe(error) == "RuntimeError: 401 for *** and *** at https://u:***@h/x"


def test_only_a_private_file_keeps_the_tracking_uri_of_a_job(tmp_path) -> None:
    workspace = Workspace.create(tmp_path / "jobs")
    given = Tracking(f"http://me:{SECRET}@mlf:5000", "mine")
    Tracking().keep(workspace, "job")
    assert not workspace.job("job").exists()
    given.keep(workspace, "job")
    (file,) = workspace.job("job").iterdir()
    assert file.name == TRACKING_FILE and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Tracking().of_job(workspace, "job") == given
    assert Tracking(None, "other").of_job(workspace, "job") == Tracking(given.uri, "other")
    assert Tracking().of_job(workspace, "another") == Tracking()
    with Store.open(workspace.store_path) as store:
        tracker = open_tracker(workspace, store, "job", Tracking().of_job(workspace, "job"))
        assert tracker.uri == given.uri
        tracker = open_tracker(workspace, store, "another", Tracking())
        assert tracker.uri == workspace.default_tracking_uri


def test_a_job_without_a_tracking_uri_takes_that_of_the_environment() -> None:
    variables = {"MLFLOW_TRACKING_URI": "http://mlf:5000"}
    expected = Tracking("http://mlf:5000", "mine")
    assert Tracking(None, "mine").with_environment(variables) == expected
    assert Tracking("http://given").with_environment(variables) == Tracking("http://given")
    assert Tracking().with_environment({"MLFLOW_TRACKING_URI": ""}) == Tracking()


def test_only_a_private_file_keeps_the_command_of_a_job(tmp_path) -> None:
    words = ("python", "t.py", "--token", SECRET)
    local = Conditions(Network.LOOPBACK)
    spec = JobSpec(words, 2, Cluster.local(2), conditions=local)
    workspace = Workspace.create(tmp_path / "jobs")
    script = ScriptCommand("t.py", words[2:], False, None)
    with Store.open(workspace.store_path) as store:
        with created_job(workspace, store, Settings(spec, script), "one") as job:
            assert job.command == words and SECRET not in job.spec.command
        assert SECRET not in store.job("one").command
        with resumed_job(workspace, store, "one", None) as job:
            assert job.command == words
        file = workspace.job("one") / COMMAND_FILE
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        plain = replace(spec, command=("python", "t.py"))
        with created_job(workspace, store, Settings(plain, script), "two"):
            pass
        assert not (workspace.job("two") / COMMAND_FILE).exists()
        file.unlink()
        rule = "the command of job 'one' has secrets"
        with pytest.raises(InvalidInput, match=rule), resumed_job(workspace, store, "one", None):
            pass
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert SECRET.encode() not in stored
