"""`autotune tune` with a real script, Ray, MLflow and files; kill -9 loses nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import error_output, json_output, output
from short_jobs import FEW_STEPS, JOB_S, SHORT_PROBE, START_S, with_tracking_store
from torch_scripts import run_script

from autotune.cli import main
from autotune.export import read_export
from autotune.records import CURRENT_SETUP, Measured
from autotune.storage.store import Store
from autotune.tracking.tracker import mlflow_environment
from runtime_rewriter.world.ray_folder import FOLDER_VARIABLE, processes_of

pytestmark = [
    pytest.mark.job,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of MLflow
]
ROOT = Path(__file__).parents[2]
SMALL = ROOT / "tests" / "scripts" / "train_small.py"
APPLYING = SMALL.with_name("train_apply.py")
SMALL_IMAGES = ("--image-size", "16", "--batch-size", "4")
TRIALS = [
    "--budget-trials",
    "8",
    "--top-k",
    "4",
    "--samples-per-round",
    "20",
    *FEW_STEPS,
    "--seed",
    "1",
]


def autotune(
    *words: str, timeout_s: float = JOB_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autotune", *words]
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **environment},
    )


def tune_words(
    directory: Path, script: Path, *script_words: str, options: tuple[str, ...] = ()
) -> list[str]:
    return [
        "tune",
        "--directory",
        str(directory),
        *TRIALS,
        *options,
        "--",
        "torchrun",
        "--nproc-per-node",
        "2",
        str(script),
        *script_words,
    ]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, tracking_store: Path) -> tuple[Path, dict]:
    """One small job on the ResNet example, run once for the tests that look at what it left."""
    directory = with_tracking_store(tmp_path_factory.mktemp("jobs"), tracking_store)
    # A deadline for the probe that a busy machine meets: one test looks at what it measured.
    probe = ("--probe-time", "20s")
    options = ("--json", "--job", "resnet", "--simulators", "linear", *SHORT_PROBE, *probe)
    words = tune_words(
        directory,
        ROOT / "examples" / "resnet_digits.py",
        *SMALL_IMAGES,
        "--width",
        "8",
        "--epochs",
        "5000",
        options=options,
    )
    done = autotune(*words)
    assert done.returncode == 0, done.stderr
    # A busy machine may not have sent everything to MLflow by the end of the job.
    assert tracked(directory, "resnet")["rejected"] == []
    return directory, json.loads(done.stdout)


def tracked(directory: Path, job: str) -> dict[str, Any]:
    """Send a job's outbox in this process, which needs MLflow anyway; return the result."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as environment, contextlib.redirect_stdout(printed):
        for name, value in mlflow_environment().items():  # else the command would leave them
            environment.setenv(name, value)
        status = main(["track", job, "--directory", str(directory), "--json"])
    assert status == 0, printed.getvalue()
    result: dict[str, Any] = json.loads(printed.getvalue())
    return result


def test_the_resnet_example_is_tuned_and_leaves_an_export_and_a_report(tuned) -> None:
    directory, result = tuned
    export = read_export(Path(result["best"]))
    assert export.world_size == 2 and export.model == "ResNet"
    assert (export.strategy.id if export.strategy else CURRENT_SETUP) == result["decision"][
        "strategy_id"
    ]
    report = Path(result["report"]).read_text()
    assert "<html" in report and "src=" not in report and 'href="http' not in report
    assert result["files"] == "copy-on-write view" and result["files"] in report
    with Store.open(directory / "autotune.db") as store:
        history = store.history("resnet")
        assert len(history.candidates) >= 8
        assert history.profiled is not None and history.profiled.workload.source == "measured"
        assert {fit.primitive for fit in history.profiled.cluster.fits} >= {
            "all_reduce",
            "direct_exchange",
        }
        uncompressed = [
            t for t in history.trials if t.plan_id is not None and isinstance(t.outcome, Measured)
        ]
        assert uncompressed and all(trial.outcome.gradient_error == 0.0 for trial in uncompressed)


def test_every_trial_of_the_job_is_a_nested_run_in_mlflow(tuned) -> None:
    from mlflow import MlflowClient

    directory, result = tuned
    client = MlflowClient(result["tracking_uri"])
    experiment = client.get_experiment_by_name("autotune")
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    nested = [
        run for run in runs if run.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id
    ]
    with Store.open(directory / "autotune.db") as store:
        assert len(nested) == len(store.history("resnet").trials)
    assert len(parents) == 1
    tried = next(run for run in nested if run.data.params["strategy_id"] != CURRENT_SETUP)
    assert {item.path for item in client.list_artifacts(tried.info.run_id)} >= {
        "strategy.json",
        "plan.json",
    }
    assert "median_s" in tried.data.metrics
    artifacts = [path.path for run in nested for path in client.list_artifacts(run.info.run_id)]
    timelines = sorted(path.name for path in (directory / "resnet" / "timelines").iterdir())
    assert timelines and timelines == sorted(path for path in artifacts if "timeline" in path)


def test_show_and_export_answer_from_the_store(tuned, tmp_path, capsys) -> None:
    directory, result = tuned
    listed = json_output(capsys, "show", "--directory", directory)
    assert [job["id"] for job in listed["jobs"]] == ["resnet"]
    shown = json_output(capsys, "show", "resnet", "--directory", directory)
    assert shown["decision"] == result["decision"]
    candidate = next(
        t["request"]["strategy_id"] for t in shown["trials"] if t["request"]["role"] == "candidate"
    )
    chosen = tmp_path / "chosen.json"
    stored = ("--strategy", candidate, "--directory", str(directory))
    assert autotune("export", "resnet", *stored, "-o", str(chosen)).returncode == 0
    assert read_export(chosen).strategy.id == candidate


@pytest.fixture
def exported(tuned, tmp_path, capsys) -> tuple[Path, str]:
    """A candidate of the job, and its id."""
    directory, _ = tuned
    shown = json_output(capsys, "show", "resnet", "--directory", directory)
    candidate = shown["trials"][1]["request"]["strategy_id"]
    chosen = tmp_path / "chosen.json"
    output(capsys, "export", "--strategy", candidate, "--directory", directory, "-o", chosen)
    return chosen, candidate


def run_words(export: Path, workers: int) -> list[str]:
    script = [str(ROOT / "examples" / "resnet_digits.py"), *SMALL_IMAGES, "--max-steps", "6"]
    launch = ["torchrun", "--standalone", "--nproc-per-node", str(workers)]
    return ["run", "--strategy", str(export), "--", *launch, *script, "--width", "8"]


@pytest.mark.slow
def test_an_exported_strategy_runs_in_the_unchanged_script(exported) -> None:
    """`test_interrupts.py` runs another export so, without a job."""
    chosen, candidate = exported
    command = [sys.executable, "-m", "autotune", *run_words(chosen, 2)]
    ran = run_script(command, cwd=ROOT, timeout=JOB_S)
    assert ran.returncode == 0, ran.stderr
    assert candidate in ran.stdout


def test_an_exported_strategy_is_refused_for_another_number_of_workers(exported, capsys) -> None:
    refused = error_output(capsys, *run_words(exported[0], 3))
    assert "world size of 2, but the command asks for 3 workers" in refused


@pytest.mark.slow
def test_the_gpt_example_is_tuned_with_lossy_strategies_and_without_a_simulator(
    tmp_path, tracking_store
) -> None:
    with_tracking_store(tmp_path, tracking_store)
    options = ("--json", "--lossy", "--search", "no-simulator", *SHORT_PROBE)
    small = ("--width", "96", "--layers", "2", "--vocabulary", "500")
    short = ("--batch-size", "2", "--block-size", "32", "--epochs", "5000")
    words = tune_words(tmp_path, ROOT / "examples" / "gpt_text.py", *small, *short, options=options)
    done = autotune(*words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["decision"]["comparison"]["pairs"] >= 6


@pytest.mark.slow
def test_kill_9_at_random_moments_loses_no_finished_trial_and_repeats_none(
    tmp_path, tracking_store
) -> None:
    with_tracking_store(tmp_path, tracking_store)
    moments = random.Random(7)
    options = ("--job", "killed", "--simulators", "linear", *SHORT_PROBE)
    command = [
        sys.executable,
        "-m",
        "autotune",
        *tune_words(tmp_path, SMALL, "--width", "256", options=options),
    ]
    resume = [
        sys.executable,
        "-m",
        "autotune",
        "tune",
        "--resume",
        "killed",
        "--directory",
        str(tmp_path),
    ]
    last_events: list = []
    for attempt in range(2):
        process = subprocess.Popen(
            command if attempt == 0 else resume,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        wait_for_more_events(tmp_path, len(last_events), process)
        time.sleep(moments.uniform(0.0, 1.5))
        [folder] = ray_folders_of(process)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=START_S)
        wait_until_gone(folder)
        events = stored_events(tmp_path)
        assert events[: len(last_events)] == last_events
        last_events = events
    done = subprocess.run(
        [*resume, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=JOB_S
    )
    assert done.returncode == 0, done.stderr
    events = stored_events(tmp_path)
    assert events[: len(last_events)] == last_events
    with Store.open(tmp_path / "autotune.db") as store:
        history = store.history("killed")
    requests = [trial.request for trial in history.trials]
    assert [request.number for request in requests] == list(range(len(requests)))
    incumbents = {(one.round, one.incumbent) for one in history.rounds}  # measured again in pairs
    first_tries = [
        request.strategy_id
        for request in requests
        if request.role == "candidate" and request.attempt == 0
        if (request.round, request.strategy_id) not in incumbents
    ]
    assert len(first_tries) == len(set(first_tries))


def ray_folders_of(process: subprocess.Popen) -> set[Path]:
    """The folder of local Ray that the children of a job were started with."""
    folders = set()
    for child in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (child / "stat").read_text().rpartition(")")[2].split()[1]
            for entry in (child / "environ").read_bytes().split(b"\0"):
                name, _, value = entry.decode(errors="replace").partition("=")
                if int(parent) == process.pid and name == FOLDER_VARIABLE:
                    folders.add(Path(value))
    return folders


def wait_until_gone(folder: Path) -> None:
    """Nothing but the guard of the folder ends what a killed job leaves."""
    deadline = time.monotonic() + 60
    while folder.exists() or list(processes_of(folder)):
        assert time.monotonic() < deadline, list(processes_of(folder))
        time.sleep(0.2)


def stored_events(directory: Path) -> list:
    with Store.open(directory / "autotune.db") as store:
        return (
            list(store.history("killed").events)
            if any(job.id == "killed" for job in store.jobs())
            else []
        )


def wait_for_more_events(directory: Path, before: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if (directory / "autotune.db").exists() and len(stored_events(directory)) > before:
            return
        time.sleep(0.2)
    raise AssertionError(f"no new event within {START_S:.0f} s, exit status {process.poll()}")


@pytest.mark.slow
def test_a_dead_mlflow_server_does_not_stop_a_bayesian_search_and_the_runs_are_sent_later(
    tmp_path, tracking_store, monkeypatch, capsys
) -> None:
    """On a script with the line `autotune.apply`, which is tuned as one with DDP is.

    The job keeps the server of the environment in which it began.
    """
    with_tracking_store(tmp_path, tracking_store)
    options = ("--json", "--search", "bayes", "--job", "offline", *SHORT_PROBE)
    words = tune_words(tmp_path, APPLYING, options=options)
    done = autotune(*words, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    unsent = json.loads(done.stdout)["unsent_tracking_items"]
    assert unsent > 8
    shown = json_output(capsys, "show", "offline", "--directory", tmp_path)
    with Store.open(tmp_path / "autotune.db") as store:
        trials = store.history("offline").trials
    assert len(shown["trials"]) == len(trials)
    tried = [one.outcome for one in trials if one.request.role == "candidate"]
    assert tried and all(isinstance(outcome, Measured) for outcome in tried)
    for name, value in mlflow_environment().items():  # else the command would leave them
        monkeypatch.setenv(name, value)
    assert main(["track", "offline", "--directory", str(tmp_path)]) == 1
    again = capsys.readouterr().out
    assert f"{unsent} are still unsent" in again
    assert "0 items of job offline sent to http://127.0.0.1:9" in again
    elsewhere = ("--tracking-uri", f"sqlite:///{tmp_path / 'mlflow.db'}")
    later = autotune("track", "offline", "--directory", str(tmp_path), *elsewhere, "--json")
    assert later.returncode == 0, later.stderr
    assert json.loads(later.stdout) == {
        "job": "offline",
        "sent": unsent,
        "unsent": 0,
        "problem": "",
        "rejected": [],
        "exit_status": 0,
    }
