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
STRATEGIES = sample_many(WORKLOAD, CLUSTER, SearchSpace.default(lossy=True), 60, 0)


def record(folder: Path, name: str, count: int) -> None:
    """Crossing saves 30 %, a message costs 2 %; every sixth is a reference, the last fails."""
    conditions = Conditions(Network.EMULATED, Accelerators.EMULATED)
    with opened(folder / name) as writer:
        writer.describe(Description(name, "small", "local", WORKLOAD, CLUSTER, {}, 2, ()))
        writer.begin_session(Environment(conditions, {"torch": "2.13.0"}, 2, "x86_64", "6.1"))
        for strategy in STRATEGIES[:count]:
            if len(writer.trials) % 6 == 0:
                writer.append(
                    DatasetTrial(
                        len(writer.trials), REFERENCE, None, None, measured(0.1), 0.2, 1e9, "0"
                    )
                )
            made = plan(strategy, WORKLOAD, 2)
            outcome = measured(0.1 * (0.7 if made.cross_step else 1.0) * 1.02 ** len(made.messages))
            writer.append(
                DatasetTrial(
                    len(writer.trials), "random:lossy", strategy, made, outcome, 0.2, 1e9, "0"
                )
            )
        failed = Failed(FailureKind.HANG, "rank 1 made no step", 1)
        writer.append(
            DatasetTrial(len(writer.trials), "random:lossy", strategy, made, failed, 0.2, 1e9, "0")
        )


def measured(step_s: float) -> Measured:
    return Measured(((step_s, step_s * 1.01, step_s * 0.99),) * 2, overrun=0.0)


@pytest.fixture
def domain(tmp_path: Path) -> Domain:
    record(tmp_path, "small.local", 60)
    return read_domain(tmp_path / "small.local")


def test_the_choices_that_make_the_times_explain_them(
    domain: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "datasets"))
    from influence import explained

    found = explained(domain, 0.001)
    assert found is not None and found.strategies == 60
    assert found.together > 0.9 and found.noise is not None and found.noise < 0.01
    ranked = sorted(found.choices, key=lambda name: -found.choices[name].beyond)
    assert ranked[0] == "across the step"
    assert found.choices["across the step"].beyond > 0.3
    assert all(
        own.beyond < 0.1
        for name, own in found.choices.items()
        if name in ("ring order", "compressor", "issue order")
    )


def test_a_plan_that_was_measured_a_dozen_times_is_one_point_of_the_spread(
    domain: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "datasets"))
    import datasheet

    chosen = domain.candidates[-2]
    again = [
        replace(chosen, number=len(domain.trials) + number, source=f"closing:{number}:a side")
        for number in range(12)
    ]
    sheet = datasheet.sheet_of("small", replace(domain, trials=(*domain.trials, *again)))
    assert sheet.relative == pytest.approx(datasheet.sheet_of("small", domain).relative)
    assert (
        len(sheet.relative) == len({trial.plan_id for trial in domain.candidates})
        and sheet.card.sources["closing"] == 12
    )


def test_too_few_strategies_explain_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "datasets"))
    from influence import FEWEST, explained

    record(tmp_path, "few.local", FEWEST - 1)
    assert explained(read_domain(tmp_path / "few.local"), None) is None


def test_the_datasheet_is_written_twice_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "datasets"))
    import datasheet

    record(tmp_path / "trials", "small.local", 60)
    record(tmp_path / "trials", "few.local", 5)
    found = []
    for out in ("once", "twice"):
        assert datasheet.main([str(tmp_path / "trials"), "--out", str(tmp_path / out)]) == 0
        found.append({path.name: path.read_bytes() for path in (tmp_path / out).rglob("*.*")})
    assert found[0] == found[1] and set(found[0]) == {
        "DATASHEET.md",
        "spread.svg",
        "noise.svg",
        "influence.svg",
    }
    text = " ".join(found[0]["DATASHEET.md"].decode().split())
    for part in (
        "67 trials",
        "13 of the script's own DDP",
        "2 domains",
        "2 failed",
        "| small.local | 61 | 1 |",
        "| across the step |",
    ):
        assert part in text
    for name in ("spread", "noise", "influence"):
        assert ET.fromstring(found[0][f"{name}.svg"]).tag.endswith("svg")


def test_a_domain_of_two_datasets_is_told_apart_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "datasets"))
    import datasheet

    record(tmp_path / "trials", "small.local", 5)
    record(tmp_path / "outcome", "small.local", 6)
    record(tmp_path / "outcome", "other.local", 5)
    sheets = datasheet.sheets_of([tmp_path / "trials", tmp_path / "outcome"])
    assert [sheet.label for sheet in sheets] == [
        "other.local",
        "small.local (outcome)",
        "small.local (trials)",
    ]
    assert "over 2 domains (a model on a cluster), profiled 3 times" in " ".join(
        datasheet.text_of(sheets).split()
    )
