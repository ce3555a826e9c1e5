"""Tracking with real MLflow: a SQLite store, and a server that starts late and is killed."""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path

import pytest
from short_jobs import with_tracking_store
from synthetic_job import WORKLOAD, SyntheticWorld, drive, job_spec, strategy

from autotune.canonical import canonical_json, to_data
from autotune.cli import main
from autotune.cluster import Cluster, Host
from autotune.jobs.timelines import write_timelines
from autotune.jobs.tracking import Tracking, open_tracker
from autotune.jobs.workspace import Workspace
from autotune.records import (
    CURRENT_SETUP,
    Accelerators,
    Comparison,
    Conditions,
    Decision,
    Measured,
    Network,
)
from autotune.sampler.scoring import Scorer
from autotune.simulators.interface import Example, Simulator
from autotune.simulators.registry import SIMULATORS
from autotune.simulators.replay_settings import ReplaySettings
from autotune.storage.store import Store
from autotune.strategy_space.plan import plan
from autotune.tracking.connection import Connection
from autotune.tracking.home_network import HomeNetwork
from autotune.tracking.sender import Sender
from autotune.tracking.tracker import Tracker, mlflow_environment
from autotune.tuning.history import History
from autotune.tuning.instructions import Finish
from autotune.tuning.job import NO_LIMIT_S
from runtime_rewriter.ports import unclaimed_port

WORLD = SyntheticWorld(
    {5: 0.06},
    noise=0.01,
    fails=lambda request: request.strategy_id == strategy(1).id,
    factor=lambda number: 1.6 if 1 <= number <= 5 else 1.0,
)
SPEC = job_spec(max_trials=9, ab_pairs=6, max_seconds=NO_LIMIT_S)
SHORT_WORLD = SyntheticWorld({1: 0.05})
SHORT = job_spec(max_trials=2, ab_pairs=6)
"""For tests of how items are sent, whatever they are: each is a few requests to MLflow."""


pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # MLflow's own use of SQLAlchemy


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch):
    for name, value in mlflow_environment(timeout_s=20, retries=0).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "autotune.db") as store:
        store.create_job("job", SPEC)
        yield store


def observed_job(store, tracker, after=None):
    """A job with failed and disturbed trials; call `after(seq)` for each of its events."""
    whole, decision = _observed(store, tracker, SPEC, WORLD, after)
    assert whole.disturbed
    return whole, decision


def short_job(store, tracker, after=None):
    return _observed(store, tracker, SHORT, SHORT_WORLD, after)


def _observed(store, tracker, spec, world, after):
    """Store each event, then notify the tracker, then call `after(seq)`, as the driver does."""
    whole, end = drive(spec, world)
    assert isinstance(end, Finish)
    history = History((), spec.deviation)
    for seq, event in enumerate(whole.events):
        store.append("job", seq, event)
        history = history.then(event)
        tracker.recorded(event, history)
        if after:
            after(seq)
    store.finish("job", end.decision)
    return whole, end.decision


@dataclass(frozen=True)
class Kept:
    """Results that a job keeps at its end, and its measured strategies."""

    trained: dict[str, Simulator]
    replays: ReplaySettings
    examples: list[Example]


HOSTS = tuple(Host(name, 1, 1.25e6, 1e-4, 1e10, 1e-6, cores=2) for name in "ab")
SLOW = Cluster("slow", HOSTS)
"""Links so slow that the messages, with the costs of the runtime, are seen in the step."""


@cache
def kept() -> Kept:
    """Results of a job whose trials correct the replays of emulated accelerators."""
    emulated = to_data(Conditions(Network.LOOPBACK, Accelerators.EMULATED))
    spec = job_spec(max_trials=12, simulators=["linear"], conditions=emulated)
    driven, _ = drive(spec, SyntheticWorld({5: 0.06}, noise=0.01))
    assert driven.profiled is not None
    on_slow_links = replace(driven.profiled, cluster=SLOW)
    history = History((on_slow_links, *driven.events[1:]), spec.deviation)
    scorer = Scorer(spec, SIMULATORS)
    scorer.calibrate(history)
    trained = scorer.finish(history)
    assert list(trained) == ["linear"]
    return Kept(trained, scorer.replay_settings(history), scorer.examples(history))


def send_everything_again(store):
    """As if the process had died after the server took the items and before they were marked."""
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE outbox SET state = 'waiting' WHERE kind != 'model'")


def assert_tracked_exactly_once(uri, history, decision):
    """Check one parent, one nested run per trial, and series without gaps or repeats."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("sync")
    runs = {
        run.data.tags["autotune.run"]: run for run in client.search_runs([experiment.experiment_id])
    }
    assert (
        len(runs) == len(client.search_runs([experiment.experiment_id])) == 1 + len(history.trials)
    )
    parent = runs["job"]
    assert (
        parent.info.status == "FINISHED"
        and parent.data.tags["autotune.exported"] == decision.strategy_id
    )
    assert parent.data.metrics["trials"] == len(history.trials)
    assert "max_seconds" not in parent.data.params, "there is no limit of time"
    assert parent.data.params["max_trials"] == "9" and parent.data.metrics[
        "time_ratio"
    ] == pytest.approx(decision.comparison.ratio)
    for trial in history.trials:
        number = trial.request.number
        run = runs[f"trial-{number}"]
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.params["strategy_id"] == trial.request.strategy_id
        assert (run.data.tags.get("autotune.disturbed") == "true") == (number in history.disturbed)
        if isinstance(trial.outcome, Measured):
            assert (
                run.info.status == "FINISHED"
                and run.data.metrics["median_s"] == trial.outcome.median_s
            )
            series = client.get_metric_history(run.info.run_id, "step_s")
            assert [
                point.value for point in sorted(series, key=lambda p: p.step)
            ] == trial.outcome.slowest_s.tolist()
        else:
            assert (
                run.info.status == "FAILED"
                and run.data.tags["autotune.failure_message"] == trial.outcome.message
            )
    best = [
        point.value
        for point in sorted(
            client.get_metric_history(parent.info.run_id, "best_so_far_s"), key=lambda p: p.step
        )
    ]
    ranked = [
        History(history.events[: i + 1], 0.15).ranking()
        for i, event in enumerate(history.events)
        if event in history.trials
    ]
    assert best == [ranking[0][1] for ranking in ranked if ranking]
    quality = client.get_metric_history(parent.info.run_id, "ranking/linear/kendall_tau")
    assert [point.step for point in quality] == [
        proposed.round for proposed in history.rounds if proposed.quality
    ]
    return client, parent, runs


def test_a_job_is_tracked_once_with_its_artifacts_however_often_it_is_sent(
    store, tmp_path, tracking_store
):
    with_tracking_store(tmp_path, tracking_store)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracker = Tracker(store, "job", uri, "sync", tmp_path / "artifacts")
    history, decision = observed_job(store, tracker)
    report = tmp_path / "report.html"
    report.write_text("<p>report</p>")
    timelines = write_timelines(tmp_path / "timelines", history, decision, SPEC.conditions)
    tracker.keep({}, [report, tmp_path / "vanished.html"], ReplaySettings(), timelines)
    assert tracker.flush(math.inf) == 0
    assert store.outbox.rejected("job") == [
        f"{tmp_path / 'vanished.html'} is gone, so it cannot be sent"
    ]
    send_everything_again(store)
    assert Tracker(store, "job", uri, "sync", tmp_path / "artifacts").flush(math.inf) == 0
    client, parent, runs = assert_tracked_exactly_once(uri, history, decision)
    assert {item.path for item in client.list_artifacts(parent.info.run_id)} == {
        *("job.json", "workload.json", "cluster.json", "rounds", "decision.json", "report.html")
    }
    best = next(t for t in history.trials if t.request.strategy_id == strategy(5).id)
    run_id = runs[f"trial-{best.request.number}"].info.run_id
    folder = Path(client.download_artifacts(run_id, "", str(tmp_path)))
    assert (folder / "strategy.json").read_text() == strategy(5).to_json()
    assert (folder / "plan.json").read_text() == plan(strategy(5), WORKLOAD, 2).to_json()
    timeline = timelines[best.request.number]
    assert (folder / timeline.name).read_bytes() == timeline.read_bytes()


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_when_the_server_comes_late_and_is_killed(
    store, tmp_path, tracking_store
):
    shutil.copy(tracking_store, tmp_path / "server.db")
    port = unclaimed_port("127.0.0.1")
    uri = f"http://127.0.0.1:{port}"
    now = [0.0]
    tracker = Tracker(
        store, "job", uri, "sync", tmp_path / "unused", retry_after_s=60.0, clock=lambda: now[0]
    )
    servers = []

    def course(seq):
        if seq == 3:
            assert len(store.outbox.waiting("job")) == 5, (
                "nothing can have been sent without a server"
            )
            servers.append(start_server(tmp_path, port))
        elif seq == 5:
            assert len(store.outbox.waiting("job")) == 7, "the breaker must still be open"
            now[0] += 61
        elif seq == 8:
            assert len(store.outbox.waiting("job")) == 0, "after the breaker closed everything goes"
            stop_server(servers.pop())
            now[0] += 61
        elif seq == 11:
            assert len(store.outbox.waiting("job")) > 0

    try:
        history, decision = observed_job(store, tracker, course)
        assert tracker.flush() > 0
        servers.append(start_server(tmp_path, port))
        tracker.keep(kept().trained, [], kept().replays)
        assert tracker.flush(math.inf) == 0
        send_everything_again(store)
        assert tracker.flush(math.inf) == 0
        client, _, _ = assert_tracked_exactly_once(uri, history, decision)
        assert len(client.search_model_versions("name = 'autotune-linear'")) == 1
        assert not store.outbox.rejected("job")
    finally:
        for server in servers:
            stop_server(server)


def test_a_trained_simulator_is_registered_and_predicts_the_same_when_loaded(
    store, tmp_path, tracking_store
):
    import mlflow
    import pandas as pd

    with_tracking_store(tmp_path, tracking_store)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    simulator = kept().trained["linear"]
    assert any(kept().replays.constants.logs.values()), "the calibration must have an effect"
    tracker = Tracker(store, "job", uri, "sync", tmp_path / "artifacts")
    for _ in range(2):  # a job that was killed while it closed keeps its models again
        tracker.keep(kept().trained, [], kept().replays)
    assert tracker.flush(math.inf) == 0
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE outbox SET state = 'waiting' WHERE kind = 'model'")
    unsent = store.path.parent / "unsent-models" / "job" / "linear"
    simulator.save(unsent)
    kept().replays.save(unsent)
    assert tracker.flush(math.inf) == 0 and not store.outbox.rejected("job")
    assert not (store.path.parent / "unsent-models").exists(), "no empty folder is left"

    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    [version] = client.search_model_versions("name = 'autotune-linear'")
    [model] = client.search_logged_models([client.get_experiment_by_name("sync").experiment_id])
    assert version.tags["autotune.tuning.job"] == "job" and model.status == "READY"
    folder = Path(model.artifact_location.removeprefix("file://"))
    required = (folder / "requirements.txt").read_text().split()
    assert f"torch=={version_of('torch').partition('+')[0]}" in required
    assert not [line for line in required if line.startswith("autotune")], "a stranger's package"
    assert not [
        item for item in folder.rglob("*") if item.suffix in (".pkl", ".pickle", ".pt", ".py")
    ]
    loaded = mlflow.pyfunc.load_model(str(folder))
    features = [example.features for example in kept().examples]
    columns = {"strategy": [each.strategy.to_json() for each in features]}
    columns |= {
        "workload": [canonical_json(WORKLOAD)] * len(features),
        "cluster": [canonical_json(SLOW)] * len(features),
    }
    predicted_s = loaded.predict(pd.DataFrame(columns))
    assert predicted_s.tolist() == simulator.predict_step_s(features).tolist()


def test_an_artifact_store_without_its_client_delays_no_job_and_names_the_reason(
    store, tmp_path, tracking_store
):
    """MLflow passes on whatever the clients of artifact stores raise, here for want of boto3."""
    import mlflow

    with_tracking_store(tmp_path, tracking_store)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    mlflow.MlflowClient(tracking_uri=uri).create_experiment("sync", artifact_location="s3://b/a")
    tracker = Tracker(store, "job", uri, "sync", tmp_path / "artifacts", retry_after_s=0.0)
    history, _ = short_job(store, tracker)
    assert tracker.flush() == len(history.events) + 2
    assert "boto3" in tracker.problem and not store.outbox.rejected("job")


def test_a_model_that_was_sent_late_is_not_rejected(store, tmp_path, tracking_store):
    """Its delivery ended on a thread that was left behind, so that it is delivered once more."""
    import mlflow

    with_tracking_store(tmp_path, tracking_store)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracker = Tracker(store, "job", uri, "sync", tmp_path / "artifacts")
    tracker.keep(kept().trained, [], kept().replays)
    *_, model = store.outbox.waiting("job")
    connection = Connection.open(
        uri, "sync", tmp_path / "artifacts", "job", store.created_at("job")
    )
    Sender(store, "job").delivery(model, store.history("job"))(connection)
    assert tracker.flush(math.inf) == 0 and store.outbox.rejected("job") == []
    assert not (store.path.parent / "unsent-models").exists()
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    assert len(client.search_model_versions("name = 'autotune-linear'")) == 1


@contextlib.contextmanager
def another_network():
    """Put this thread into a new network namespace, as of an emulated host, until the end."""
    home = HomeNetwork()
    if ctypes.CDLL(None).unshare(0x40000000) != 0:  # CLONE_NEWNET of linux/sched.h
        pytest.skip("no network namespaces here")
    try:
        yield
    finally:
        home.enter()


def test_items_are_sent_from_the_network_of_the_machine_while_a_testbed_runs(store, tmp_path):
    """The job's thread is inside an emulated host, which has no way to the tracking server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        tracker = Tracker(store, "job", uri, "sync", tmp_path / "unused", item_s=0.3)
        with another_network():
            assert tracker.flush() == 1
        server.settimeout(20)
        server.accept()[0].close()


def test_the_environment_of_the_job_has_no_settings_of_ours_before_an_item_is_sent(
    store, tmp_path, monkeypatch
):
    """The ranks start with it, and a script may use MLflow, too."""
    for name in mlflow_environment():
        monkeypatch.delenv(name)
    workspace = Workspace(tmp_path)
    before = dict(os.environ)
    open_tracker(workspace, store, "job", Tracking(None, "sync"))
    assert dict(os.environ) == before


def test_items_wait_while_their_runs_are_deleted(store, tmp_path, tracking_store):
    """Someone has deleted the job's run in MLflow, and restores it later."""
    import mlflow

    with_tracking_store(tmp_path, tracking_store)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracker = Tracker(store, "job", uri, "sync", tmp_path / "artifacts")
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)

    def deleted(seq):
        experiment = client.get_experiment_by_name("sync")
        if experiment is not None and experiment.lifecycle_stage == "active":
            client.delete_experiment(experiment.experiment_id)

    short_job(store, tracker, deleted)
    assert tracker.flush() > 0 and not store.outbox.rejected("job")
    client.restore_experiment(client.get_experiment_by_name("sync").experiment_id)
    assert tracker.flush(math.inf) == 0 and not store.outbox.rejected("job")


def test_runs_that_were_deleted_for_good_are_created_again(store, tmp_path, tracking_store):
    """As by `mlflow gc`, or on a server whose volume was lost."""
    import mlflow

    with_tracking_store(tmp_path, tracking_store)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracker = Tracker(store, "job", uri, "sync", tmp_path / "artifacts")
    _, decision = short_job(store, tracker)
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)

    def runs() -> list[str]:
        experiment = client.get_experiment_by_name("sync")
        return [run.info.run_id for run in client.search_runs([experiment.experiment_id])]

    before = runs()
    assert before
    for run_id in before:
        client._tracking_client.store._hard_delete_run(run_id)
    assert tracker.flush() > 0 and not store.outbox.rejected("job")
    assert tracker.flush(math.inf) == 0 and not store.outbox.rejected("job")
    created = runs()
    assert set(created).isdisjoint(before)
    tags = [client.get_run(run_id).data.tags for run_id in created]
    [of_job] = [each for each in tags if each["autotune.run"] == "job"]
    assert of_job["autotune.exported"] == decision.strategy_id


def test_jobs_of_two_stores_with_one_id_have_runs_of_their_own(store, tmp_path, tracking_store):
    import mlflow

    with_tracking_store(tmp_path, tracking_store)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    time.sleep(0.002)  # jobs are told apart by the millisecond
    with Store.open(tmp_path / "other.db") as other:
        other.create_job("job", SPEC)
        for each in (store, other):
            tracker = Tracker(each, "job", uri, "sync", tmp_path / "artifacts")
            history, _ = short_job(each, tracker)
            assert tracker.flush(math.inf) == 0 and not each.outbox.rejected("job")
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("sync").experiment_id])
    assert len(runs) == 2 * (1 + len(history.trials))


def test_a_server_without_logged_models_gets_all_the_rest(
    store, tmp_path, tracking_store, monkeypatch
):
    """MLflow 2 answers requests for them by 404."""
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND

    def refuse(*args, **kwargs):
        raise MlflowException("404 Not Found", error_code=ENDPOINT_NOT_FOUND)

    with_tracking_store(tmp_path, tracking_store)
    monkeypatch.setattr(mlflow.MlflowClient, "search_logged_models", refuse)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracker = Tracker(store, "job", uri, "sync", tmp_path / "artifacts")
    tracker.keep(kept().trained, [], kept().replays)
    short_job(store, tracker)
    assert tracker.flush(math.inf) == 0
    assert store.outbox.rejected("job") == ["the server has no logged models, as of MLflow 3"]
    assert not (tmp_path / "unsent-models").exists()


def test_a_request_that_a_proxy_finds_too_large_holds_nothing_up(
    store, tmp_path, tracking_store, monkeypatch
):
    import mlflow
    import requests

    def refuse(*args, **kwargs):
        response = requests.Response()
        response.status_code = 413
        raise requests.HTTPError("Request Entity Too Large", response=response)

    with_tracking_store(tmp_path, tracking_store)
    monkeypatch.setattr(mlflow.MlflowClient, "log_artifact", refuse)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracker = Tracker(store, "job", uri, "sync", tmp_path / "artifacts")
    report = tmp_path / "report.html"
    report.write_text("<p>report</p>")
    tracker.keep({}, [report], ReplaySettings())
    short_job(store, tracker)
    assert tracker.flush(math.inf) == 0
    assert "Request Entity Too Large" in store.outbox.rejected("job")


def test_an_mlflow_that_cannot_be_imported_is_a_problem_of_tracking_alone(
    store, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", None)
    tracker = Tracker(store, "job", f"sqlite:///{tmp_path / 'mlflow.db'}", "sync", tmp_path)
    short_job(store, tracker)
    assert tracker.flush() > 0 and tracker.problem.startswith("MLflow cannot be imported: ")


def test_the_command_counts_rejected_items_apart_from_sent_ones(
    store, tmp_path, capsys, tracking_store
):
    with_tracking_store(tmp_path, tracking_store)
    tracker = Tracker(store, "job", f"sqlite:///{tmp_path / 'mlflow.db'}", "autotune", tmp_path)
    tracker.keep({}, [tmp_path / "vanished.html"], ReplaySettings())
    waiting = len(store.outbox.waiting("job"))
    words = ["track", "job", "--directory", str(tmp_path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"{waiting - 1} items of job job sent" in out
    assert f"1 item was rejected: {tmp_path / 'vanished.html'} is gone" in out


def test_the_command_sends_nothing_while_the_job_runs(store, tmp_path, capsys):
    """The job sends its items itself; two senders would find no run and both create it."""
    with store.lock("job"):
        assert main(["track", "job", "--directory", str(tmp_path)]) == 2
    assert "driven by another process" in capsys.readouterr().err
    assert not (tmp_path / "mlflow.db").exists()


def test_the_command_says_why_items_are_unsent_without_the_password(store, tmp_path, capsys):
    uri = "http://me:bluebottle@127.0.0.1:9"
    words = ["track", "job", "--directory", str(tmp_path), "--tracking-uri", uri]
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "1 are still unsent: MlflowException: " in shown.out and "127.0.0.1:9" in shown.out
    assert "bluebottle" not in shown.out + shown.err
    assert main([*words, "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["problem"].startswith("MlflowException: ")
    assert "bluebottle" not in shown.out + shown.err


def test_the_command_sends_to_the_server_of_the_job(store, tmp_path, capsys):
    Tracking("http://127.0.0.1:9", "sync").keep(Workspace.existing(tmp_path), "job")
    assert main(["track", "job", "--directory", str(tmp_path)]) == 1
    sent = "0 items of job job sent to http://127.0.0.1:9; 1 are still unsent"
    assert sent in capsys.readouterr().out and not (tmp_path / "mlflow.db").exists()


class Received(Connection):
    """A connection that keeps the metrics of the job, and sends nothing."""

    def __init__(self):
        super().__init__(self, "1", "job", datetime.now(UTC))
        self.metrics = []

    def run(self, role, name, tags, elapsed_s):
        return "run"

    def log_job(self, metrics=(), params=None, tags=None, elapsed_s=0.0):
        self.metrics += metrics

    def log_file(self, data, path):
        """Nothing is kept."""

    def set_terminated(self, run_id, status, at_ms):
        """The client's part: nothing is kept."""


@pytest.mark.parametrize("bounded", [True, False])
def test_only_an_interval_with_its_confidence_is_sent(store, bounded):
    compared = Comparison(1.2, 1.1, 1.3, 9, 0.95, bounded)
    store.finish("job", Decision(CURRENT_SETUP, "slower", compared, "strategy-1"))
    item, server = store.outbox.waiting("job")[-1], Received()
    Sender(store, "job").delivery(item, store.history("job"))(server)
    names = {name for name, *_ in server.metrics}
    assert "time_ratio" in names and ("time_ratio_low" in names) is bounded
    assert ("time_ratio_high" in names) is bounded


def test_sending_is_silent_leaves_nothing_behind_and_asks_nobody_else(tmp_path):
    code = """
import math
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from synthetic_job import SyntheticWorld, drive, job_spec
from autotune.storage.store import Store
from autotune.tracking.connection import Connection
from autotune.tracking.sender import Sender
from autotune.tracking.tracker import Tracker

folder = Path(sys.argv[1])
history, end = drive(job_spec(max_trials=2, ab_pairs=6), SyntheticWorld({1: 0.05}))
with Store.open(folder / "autotune.db") as store:
    store.create_job("job", job_spec(max_trials=2, ab_pairs=6))
    for seq, event in enumerate(history.events):
        store.append("job", seq, event)
    store.finish("job", end.decision)
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    assert Tracker(store, "job", uri, "sync", folder / "artifacts").flush(math.inf) == 0
import mlflow.telemetry.client
assert mlflow.telemetry.client.get_telemetry_client() is None
"""
    elsewhere = tmp_path / "cwd"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent.parent)],
        capture_output=True,
        text=True,
        cwd=elsewhere,
        env={name: os.environ[name] for name in os.environ.keys() - mlflow_environment().keys()},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(elsewhere.iterdir())


def test_a_server_that_drips_delays_no_job_and_gets_everything_later(
    store, tmp_path, tracking_store
):
    """Every byte comes within the timeout of a read, and the response never ends."""
    with dripping_server() as uri:
        tracker = Tracker(
            store, "job", uri, "sync", tmp_path / "unused", item_s=0.3, retry_after_s=0.0
        )
        history, decision = observed_job(store, tracker)
        assert len(store.outbox.waiting("job")) == len(history.events) + 2 == tracker.flush()
    with_tracking_store(tmp_path, tracking_store)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert Tracker(store, "job", uri, "sync", tmp_path / "artifacts").flush(math.inf) == 0
    assert_tracked_exactly_once(uri, history, decision)


@contextlib.contextmanager
def dripping_server():
    """Answer every request by one byte of a header every 50 ms, until the block ends."""
    ended = threading.Event()

    class Dripping(http.server.BaseHTTPRequestHandler):
        def handle(self):
            self.request.sendall(b"HTTP/1.1 200 OK\r\nX-Drip: ")
            while not ended.wait(0.05):
                self.request.sendall(b".")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dripping) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        ended.set()
        server.shutdown()


def start_server(folder, port):
    """A real `mlflow server` in a process group of its own; returns when it answers."""
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder / 'server.db'}",
        "--artifacts-destination",
        str(folder / "server-artifacts"),
    ]
    log = (folder / "server.log").open("a")
    # MLflow's own job runners would import all of MLflow in further processes; they are unused.
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(
        command, stdout=log, stderr=log, start_new_session=True, cwd=folder, env=environment
    )
    log.close()
    for _ in range(240):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return server
        except (urllib.error.URLError, OSError):
            assert server.poll() is None, (folder / "server.log").read_text()
            time.sleep(0.25)
    stop_server(server)
    raise AssertionError("the server did not answer within a minute")


def stop_server(server):
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
