"""Files that earlier versions wrote still open, with the same content and the same ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from autotune.canonical import canonical_json, to_data
from autotune.cli import main
from autotune.cluster_file import read_cluster
from autotune.export import read_export
from autotune.storage.store import Store
from autotune.strategy_space.plan import plan
from autotune.tuning.tuner import next_instruction

STORED = Path(__file__).parents[1] / "stored" / "v0.1"
EXPECTED: dict[str, Any] = json.loads((STORED / "expected.json").read_text())
JOBS = ("finished", "emulated", "interrupted")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the stored jobs: opening a store may migrate it."""
    return Path(shutil.copytree(STORED / "jobs", tmp_path / "jobs"))


@pytest.mark.parametrize("job_id", JOBS)
def test_a_stored_job_has_the_same_settings_trials_and_plans(directory: Path, job_id: str) -> None:
    expected = EXPECTED[job_id]
    with Store.open(directory / "autotune.db") as store:
        history, spec = store.history(job_id), store.job(job_id)
        assert store.job_status(job_id) == expected["status"]
        assert to_data(store.decision(job_id)) == expected["decision"]
    settings = spec.to_data()  # newer ones have their defaults
    assert {name: settings[name] for name in expected["spec"]} == expected["spec"]
    trials = [[trial.request.strategy_id, trial.plan_id] for trial in history.trials]
    assert trials == expected["trials"]
    assert history.measured_s == expected["measured_s"]
    assert history.profiled is not None
    workload = history.profiled.workload
    assert workload.id == expected["workload"]
    plans = {
        strategy_id: plan(proposal.strategy, workload, spec.workers).id
        for strategy_id, proposal in history.proposals.items()
    }
    assert plans == expected["plans"]


def test_an_interrupted_job_continues_with_the_same_trial(directory: Path) -> None:
    with Store.open(directory / "autotune.db") as store:
        instruction = next_instruction(store.job("interrupted"), store.history("interrupted"))
    name, data = EXPECTED["interrupted"]["next"]
    assert type(instruction).__name__ == name
    assert to_data(instruction) == data


@pytest.mark.parametrize("job_id", JOBS)
def test_show_opens_a_stored_job(
    directory: Path, job_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", job_id, "--json", "--directory", str(directory)]) == 0
    shown = json.loads(capsys.readouterr().out)
    trials = [[trial["request"]["strategy_id"], trial["plan_id"]] for trial in shown["trials"]]
    assert trials == EXPECTED[job_id]["trials"]


def test_a_stored_export_has_the_same_strategy_and_plan(directory: Path, tmp_path: Path) -> None:
    export = read_export(STORED / "exported.json")
    assert export.strategy.id == EXPECTED["export"]["strategy"]
    assert export.plan().id == EXPECTED["export"]["plan"]
    again = tmp_path / "again.json"
    words = ["export", "emulated", f"--strategy={export.strategy.id}", "--output", str(again)]
    assert main([*words, "--directory", str(directory)]) == 0
    assert json.loads(again.read_text()) == json.loads((STORED / "exported.json").read_text())


def test_a_stored_recording_replays_to_the_same_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(STORED / "recorded"), "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    expected = EXPECTED["replay"]
    assert replayed["iteration_s"] == expected["iteration_s"]
    assert replayed["memory"]["peak_bytes"] == expected["peak_bytes"]
    assert replayed["matched_collectives"] == expected["matched_collectives"]


def test_a_stored_cluster_file_is_the_same_cluster() -> None:
    assert read_cluster(STORED / "probed.yaml").id == EXPECTED["cluster"]


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred:UserWarning")  # of MLflow itself
def test_a_logged_simulator_loads_and_predicts_the_same(directory: Path) -> None:
    """The stored model names `autotune.tracked_simulator` as its loader."""
    mlflow = pytest.importorskip("mlflow")
    pandas = pytest.importorskip("pandas")
    with Store.open(directory / "autotune.db") as store:
        history = store.history("emulated")
    assert history.profiled is not None
    setting = (canonical_json(history.profiled.workload), canonical_json(history.profiled.cluster))
    rows = [(canonical_json(p.strategy), *setting) for p in history.proposals.values()]
    table = pandas.DataFrame(rows, columns=["strategy", "workload", "cluster"])
    model = mlflow.pyfunc.load_model(str(STORED / "simulator"))
    assert model.predict(table) == pytest.approx(EXPECTED["emulated"]["predicted_s"]["linear"])
