"""`--memory`, and the peaks that `optimize` and `replay` show for recorded folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.canonical import canonical_json
from autotune.cli import main
from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.memory.accumulation import accumulated, accumulated_workload
from autotune.memory.budget import MemoryBudget
from autotune.memory.peak import highest_peak
from autotune.optimizer.optimize import optimize
from autotune.recordings.job_file import ClockPair, RankRecord, RecordedJob
from autotune.recordings.memory_file import MEMORY_FILE, RecordedMemory
from autotune.recordings.memory_profile import (
    FixedShare,
    Lifetime,
    MemoryProfile,
    Pass,
    Phase,
    Region,
    Segment,
    TensorRole,
)
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.builders.servers import parameter_server
from autotune.strategy_space.plan import plan
from autotune.workload import Variable, Workload

LAYERS, WEIGHT, ACTIVATION = 6, 1_000_000, 8_000_000
HOSTS = "name: two\nhosts:\n  - {name: a, bandwidth: 1Gbit/s}\n  - {name: b, bandwidth: 1Gbit/s}\n"
MODEL = Workload(
    "Layers",
    tuple(
        Variable(f"l{number}", (500, 500), ready_s=0.02 * (LAYERS - number), needed_s=0.01 * number)
        for number in range(LAYERS - 1, -1, -1)
    ),
    (),
    0.01 * LAYERS,
    0.02 * LAYERS,
    0.01,
    source="measured",
)


def replica(fixed: FixedShare | None = None) -> RecordedMemory:
    """Layers in a sequence that each keep an activation until their backward pass."""
    forward = [Segment(Phase.FORWARD, 0.01, reads=(f"l{number}",)) for number in range(LAYERS)]
    backward = [
        Segment(Phase.BACKWARD, 0.02, readies=(f"l{number}",))
        for number in range(LAYERS - 1, -1, -1)
    ]
    ends = [2 * LAYERS - 1 - number for number in range(LAYERS)]
    lifetimes = [
        Lifetime(2 * LAYERS * WEIGHT, TensorRole.PARAMETER),
        Lifetime(LAYERS * WEIGHT, TensorRole.OPTIMIZER),
    ]
    for number, end in enumerate(ends):
        lifetimes.append(Lifetime(ACTIVATION, TensorRole.ACTIVATION, number, end, region=number))
        lifetimes.append(
            Lifetime(
                ACTIVATION // 8, TensorRole.ACTIVATION, number, end, region=number, returned=True
            )
        )
        lifetimes.append(Lifetime(WEIGHT, TensorRole.GRADIENT, end, 2 * LAYERS, f"l{number}"))
    regions = tuple(
        Region(f"body.{n}", (Pass(n, n, end),), chain="body", position=n)
        for n, end in enumerate(ends)
    )
    profile = MemoryProfile(
        MODEL.id,
        "meta",
        (*forward, *backward, Segment(Phase.UPDATE, 0.01)),
        tuple(lifetimes),
        regions,
    )
    return RecordedMemory(profile, batch=8, fixed=fixed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "recorded"
    found.mkdir()
    ranks = tuple(
        RankRecord(rank, "host", "cpu", "x", 1, f"rank{rank}.json", (ClockPair(1, 2),), (0.2,))
        for rank in range(2)
    )
    RecordedJob(2, ranks, 1, 1, 1, MODEL.id, MODEL).write(found)
    replica().write(found)
    (tmp_path / "cluster.yaml").write_text(HOSTS)
    return found


def optimized(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert (
        main(
            [
                "optimize",
                str(folder),
                "--cluster",
                str(folder.parent / "cluster.yaml"),
                "--json",
                *words,
            ]
        )
        == 0
    )
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_the_step_is_fitted_and_the_price_is_reported(folder, tmp_path, capsys) -> None:
    free = optimized(folder, capsys)["memory"]
    assert free["peak_bytes"] == sum(free["parts_bytes"].values()) and "passes" not in free
    assert (
        free["parts_bytes"]["parameters"] == 2 * LAYERS * WEIGHT
        and free["parts_bytes"]["activations"] >= LAYERS * ACTIVATION
    )
    budget, report = int(0.8 * free["peak_bytes"]), tmp_path / "best.html"
    found = optimized(folder, capsys, "--memory", str(budget), "--report", str(report))
    memory = found["memory"]
    assert memory["peak_bytes"] <= budget == memory["budget_bytes"]
    assert memory["passes"]["recomputed"] or memory["passes"]["micro_batches"] > 1
    assert memory["passes"]["peak_before_bytes"] > budget
    assert found["before_step_s"] == pytest.approx(
        optimized(folder, capsys)["before_step_s"] + memory["passes"]["price_s"]
    )
    page = report.read_text()
    assert "Peak memory of a replica" in page and "redicted price" in page
    assert (
        main(
            [
                "optimize",
                str(folder),
                "--cluster",
                str(tmp_path / "cluster.yaml"),
                "--memory",
                "1GiB",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "it fits into 1 GiB as it is" in text and "optimizer state" in text


def test_expensive_micro_batches_favor_recomputation() -> None:
    """With a large fixed share of the passes, recomputation is cheaper."""
    cluster = Cluster.local(2)
    chosen = []
    for fixed in (None, FixedShare(0.6, 0.6)):
        memory = replica(fixed)
        peak = highest_peak(
            memory, memory.profile, MODEL, plan(ddp_default(MODEL), MODEL, 2), cluster
        ).peak_bytes
        within = MemoryBudget(memory, cluster, int(0.85 * peak))
        optimize(MODEL, cluster, memory=within.fit_workload, allowed=within.allows)
        assert within.fit is not None and within.fit.estimate.peak_bytes <= within.budget_bytes
        chosen.append((bool(within.fit.runs), within.fit.parts > 1))
    assert chosen == [(False, True), (True, False)]


def test_plans_whose_buffers_do_not_fit_are_not_allowed() -> None:
    memory, cluster = replica(), Cluster.local(2)
    before, servers = (
        plan(made, MODEL, 2) for made in (ddp_default(MODEL), parameter_server(MODEL, cluster))
    )
    within = MemoryBudget(
        memory, cluster, highest_peak(memory, memory.profile, MODEL, before, cluster).peak_bytes
    )
    found = optimize(MODEL, cluster, memory=within.fit_workload, allowed=within.allows)
    assert within.allows(before) and not within.allows(servers)
    assert within.peak(found.plan).peak_bytes <= within.budget_bytes


def test_micro_batches_pay_their_fixed_share_again() -> None:
    fixed = FixedShare(0.5, 0.2)
    workload = accumulated_workload(MODEL, 4, fixed=fixed)
    forward_s, backward_s = MODEL.forward_s * (0.5 + 0.5 / 4), MODEL.backward_s * (0.2 + 0.8 / 4)
    assert workload.backward_s == pytest.approx(backward_s)
    assert workload.forward_s == pytest.approx(4 * forward_s + 3 * backward_s)
    assert workload.compute_s == pytest.approx(
        float(accumulated(replica().profile, 4, fixed=fixed).end_s[-1])
    )
    with pytest.raises(InvalidInput, match="0 to 1"):
        FixedShare(1.1, 0.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory", "20MB"), "at least"),
        (("--memory", "a lot"), "--memory needs a size such as 16GB or 512MiB, but is 'a lot'"),
        (("--memory", "0"), "--memory must be at least 1 byte"),
    ],
)
def test_a_budget_that_cannot_be_met_or_read_is_refused(
    folder, capsys, words: tuple[str, ...], message: str
) -> None:
    assert (
        main(["optimize", str(folder), "--cluster", str(folder.parent / "cluster.yaml"), *words])
        == 2
    )
    assert message in capsys.readouterr().err


def test_a_budget_without_recorded_memory_is_refused(folder, tmp_path, capsys) -> None:
    (folder / MEMORY_FILE).unlink()
    assert optimized(folder, capsys)["memory"] is None
    workload = tmp_path / "workload.json"
    workload.write_text(canonical_json(MODEL))
    for source, why in (
        (folder, "has no memory.json; record it again"),
        (workload, "holds no activations"),
    ):
        assert (
            main(
                [
                    "optimize",
                    str(source),
                    "--cluster",
                    str(tmp_path / "cluster.yaml"),
                    "--memory",
                    "16GB",
                ]
            )
            == 2
        )
        error = capsys.readouterr().err
        assert "--memory needs the lifetimes" in error and why in error


def test_recorded_memory_round_trips_and_invalid_files_are_refused(folder) -> None:
    assert RecordedMemory.read(folder) == replica()
    data = json.loads((folder / MEMORY_FILE).read_text())
    (folder / MEMORY_FILE).write_text(json.dumps(data | {"batch": 0}))
    with pytest.raises(InvalidInput, match="at least 1 sample"):
        RecordedMemory.read(folder)
    (folder / MEMORY_FILE).write_text(json.dumps(data | {"schema": 99}))
    with pytest.raises(InvalidInput, match="update autotune"):
        RecordedMemory.read(folder)
