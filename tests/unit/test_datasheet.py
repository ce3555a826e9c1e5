"""The datasheet, from a small dataset whose step times are known functions of the strategies."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_job import WORKLOAD

from autotune.cluster import Cluster
from autotune.dataset.folder import Description, read_domain
from autotune.dataset.trials import REFERENCE, DatasetTrial, Domain, Environment
from autotune.dataset.writing import opened
from autotune.records import Accelerators, Conditions, Failed, FailureKind, Measured, Network
from autotune.sampler.random import sample_many
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace

ROOT = Path(__file__).parents[2]
CLUSTER = Cluster.local(2)
STRATEGIES = sample_many(WORKLOAD, CLUSTER, SearchSpace.default(lossy=True), 120, 0)


@pytest.fixture(autouse=True)
def datasets_on_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "datasets"))


def record(folder: Path, name: str, count: int) -> Domain:
    """Crossing saves 30 %, a message costs 2 %; every sixth is a reference, the last fails."""
    conditions = Conditions(Network.EMULATED, Accelerators.EMULATED)
    with opened(folder / name) as writer:

        def append(source, strategy, plan, step):
            number = len(writer.trials)
            writer.append(DatasetTrial(number, source, strategy, plan, step, 0.2, 1e9, "0"))

        writer.describe(Description(name, "small", "local", WORKLOAD, CLUSTER, {}, 2, ()))
        writer.begin_session(Environment(conditions, {"torch": "2.13.0"}, 2, "x86_64", "6.1"))
        for strategy in STRATEGIES[:count]:
            if len(writer.trials) % 6 == 0:
                append(REFERENCE, None, None, measured(0.1))
            planned = plan(strategy, WORKLOAD, 2)
            base_s = 0.1 * (0.7 if planned.cross_step else 1.0)
            step = measured(base_s * 1.02 ** len(planned.messages))
            append("random:lossy", strategy, planned, step)
        failed = Failed(FailureKind.HANG, "rank 1 made no step", 1)
        append("random:lossy", strategy, planned, failed)
    return read_domain(folder / name)


def measured(step_s: float) -> Measured:
    return Measured(((step_s, step_s * 1.01, step_s * 0.99),) * 2, overrun=0.0)


@pytest.fixture
def domain(tmp_path: Path) -> Domain:
    return record(tmp_path, "small.local", 60)


def test_the_choices_that_cause_the_times_explain_them(tmp_path: Path):
    from influence import explained

    domain = record(tmp_path, "small.local", len(STRATEGIES))
    result = explained(domain, 0.001)
    plans = {trial.plan_id for trial in domain.candidates}
    assert result.strategies == len(plans) > 100 and result.together > 0.9 and result.noise < 0.01
    beyond = {name: influence.beyond for name, influence in result.choices.items()}
    assert max(beyond, key=beyond.__getitem__) == "across the step"
    assert beyond["across the step"] > 0.3
    without_effect = beyond.keys() & {"ring order", "compressor", "issue order"}
    assert all(beyond[name] < 0.1 for name in without_effect)


def test_a_plan_measured_a_dozen_times_is_one_point_of_the_spread(domain: Domain):
    import datasheet

    chosen, count = domain.candidates[-2], len(domain.trials)
    again = [replace(chosen, number=count + n, source=f"closing:{n}:a side") for n in range(12)]
    sheet = datasheet.sheet_of("small", replace(domain, trials=(*domain.trials, *again)))
    assert sheet.relative == pytest.approx(datasheet.sheet_of("small", domain).relative)
    assert len(sheet.relative) == len({trial.plan_id for trial in domain.candidates})
    assert sheet.card.sources["closing"] == 12


def test_too_few_strategies_explain_nothing(tmp_path: Path):
    from influence import FEWEST, explained

    assert explained(record(tmp_path, "few.local", FEWEST - 1), None) is None


def test_the_datasheet_is_written_twice_with_the_same_bytes(tmp_path: Path):
    import datasheet

    trials = tmp_path / "trials"
    record(trials, "small.local", 60)
    record(trials, "few.local", 5)

    def written(name: str) -> dict[str, bytes]:
        assert datasheet.main([str(trials), "--out", str(tmp_path / name)]) == 0
        return {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.*")}

    files = written("once")
    charts = {"spread.svg", "noise.svg", "influence.svg"}
    assert files == written("twice") and set(files) == {"DATASHEET.md", *charts}
    text = " ".join(files["DATASHEET.md"].decode().split())
    counts = ("67 trials", "13 of the script's own DDP", "2 domains", "2 failed")
    for part in (*counts, "| small.local | 61 | 1 |", "| across the step |"):
        assert part in text
    for name in charts:
        assert ET.fromstring(files[name]).tag.endswith("svg")


def test_a_domain_in_two_datasets_is_named_with_its_dataset(tmp_path: Path):
    import datasheet

    record(tmp_path / "trials", "small.local", 5)
    record(tmp_path / "outcome", "small.local", 6)
    record(tmp_path / "outcome", "other.local", 5)
    sheets = datasheet.sheets_of([tmp_path / "trials", tmp_path / "outcome"])
    labels = ["other.local", "small.local (outcome)", "small.local (trials)"]
    assert [sheet.label for sheet in sheets] == labels
    folders = [tmp_path / "trials", ROOT / "datasets" / "outcome_ratios"]
    text = " ".join(datasheet.text_of(sheets, folders).split())
    assert (
        "by this command: python datasets/datasheet.py trials datasets/outcome_ratios ## What it is"
        in text
    )
    assert "over 2 domains (a model on a cluster), profiled 3 times" in text
