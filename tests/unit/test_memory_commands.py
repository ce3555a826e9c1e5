"""`--memory` and the peak shown by `optimize` and `replay`, on folders of `autotune profile`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import error_output, json_output, output
from synthetic_cluster import cluster

from autotune.canonical import canonical_json
from autotune.cluster import Cluster
from autotune.commands.render.memory import ShownMemory, memory_data, memory_table
from autotune.errors import InvalidInput
from autotune.lowering.replayed import LoweredSteps
from autotune.memory.accumulation import accumulated, accumulated_workload
from autotune.memory.budget import MemoryBudget
from autotune.memory.peak import highest_peak
from autotune.memory.recomputation import Run
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
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.builders.servers import parameter_server
from autotune.strategy_space.plan import Message, Plan, TensorSlice, plan
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Variable, Workload

LAYERS, WEIGHT, ACTIVATION = 6, 1_000_000, 8_000_000
HOSTS = "name: two\nhosts:\n  - {name: a, bandwidth: 1Gbit/s}\n  - {name: b, bandwidth: 1Gbit/s}\n"
MODEL = Workload(
    "Layers",
    tuple(
        Variable(f"l{n}", (500, 500), ready_s=0.02 * (LAYERS - n), needed_s=0.01 * n)
        for n in reversed(range(LAYERS))
    ),
    (),
    forward_s=0.01 * LAYERS,
    backward_s=0.02 * LAYERS,
    update_s=0.01,
    source="measured",
)


def replica(fixed: FixedShare | None = None) -> RecordedMemory:
    """Layers in a sequence that each keep an activation until their backward pass."""
    segments = [Segment(Phase.FORWARD, 0.01, reads=(f"l{n}",)) for n in range(LAYERS)]
    for n in reversed(range(LAYERS)):
        segments.append(Segment(Phase.BACKWARD, 0.02, readies=(f"l{n}",)))
    segments.append(Segment(Phase.UPDATE, 0.01))
    parameters = Lifetime(2 * LAYERS * WEIGHT, TensorRole.PARAMETER)
    lifetimes, regions = [parameters, Lifetime(LAYERS * WEIGHT, TensorRole.OPTIMIZER)], []
    for n in range(LAYERS):
        end = 2 * LAYERS - 1 - n
        activation = (TensorRole.ACTIVATION, n, end)
        lifetimes.append(Lifetime(ACTIVATION, *activation, region=n))
        lifetimes.append(Lifetime(ACTIVATION // 8, *activation, region=n, returned=True))
        lifetimes.append(Lifetime(WEIGHT, TensorRole.GRADIENT, end, 2 * LAYERS, f"l{n}"))
        regions.append(Region(f"body.{n}", (Pass(n, n, end),), chain="body", position=n))
    step = (tuple(segments), tuple(lifetimes), tuple(regions))
    return RecordedMemory(MemoryProfile(MODEL.id, "meta", *step), batch=8, fixed=fixed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    ranks = tuple(
        RankRecord(rank, "host", "cpu", "x", 1, f"rank{rank}.json", (ClockPair(1, 2),), (0.2,))
        for rank in range(2)
    )
    RecordedJob(2, ranks, 1, 1, 1, MODEL.id, MODEL).write(recorded)
    replica().write(recorded)
    (tmp_path / "cluster.yaml").write_text(HOSTS)
    return recorded


def optimize_words(source: Path, *words: object) -> tuple[object, ...]:
    return ("optimize", source, "--cluster", source.parent / "cluster.yaml", *words)


def test_the_step_fits_the_budget_and_its_price_is_shown(folder, tmp_path, capsys) -> None:
    without_budget = json_output(capsys, *optimize_words(folder))
    free = without_budget["memory"]
    assert free["peak_bytes"] == sum(free["parts_bytes"].values()) and "passes" not in free
    assert free["parts_bytes"]["parameters"] == 2 * LAYERS * WEIGHT
    assert free["parts_bytes"]["activations"] >= LAYERS * ACTIVATION
    budget, report = int(0.8 * free["peak_bytes"]), tmp_path / "best.html"
    limits = ("--memory", budget, "--report", report)
    fitted = json_output(capsys, *optimize_words(folder, *limits))
    memory = fitted["memory"]
    assert memory["peak_bytes"] <= budget == memory["budget_bytes"]
    assert memory["passes"]["recomputed"] or memory["passes"]["micro_batches"] > 1
    assert memory["passes"]["peak_before_bytes"] > budget
    before_s = without_budget["before_step_s"] + memory["passes"]["price_s"]
    assert fitted["before_step_s"] == pytest.approx(before_s)
    page = report.read_text()
    assert "Peak memory of a replica" in page and "redicted price" in page
    text = output(capsys, *optimize_words(folder, "--memory", "1GiB"))
    assert "it fits into 1 GiB as it is" in text and "optimizer state" in text


LOCAL = Cluster.local(2)
BASELINE = plan(ddp_default(MODEL), MODEL, 2)


def budget_of(memory: RecordedMemory, share: float) -> MemoryBudget:
    """A share of the baseline's peak."""
    peak = highest_peak(memory, memory.profile, MODEL, BASELINE, LOCAL).peak_bytes
    return MemoryBudget(memory, LOCAL, int(share * peak))


def test_recomputation_is_chosen_if_micro_batches_are_expensive() -> None:
    """Micro-batches cost almost nothing, unless a large share of a pass does not shrink."""
    chosen = []
    for fixed in (None, FixedShare(0.6, 0.6)):
        within = budget_of(replica(fixed), 0.85)
        optimize(MODEL, LOCAL, memory=within.fit_workload, allowed=within.allows)
        assert within.fit is not None and within.fit.estimate.peak_bytes <= within.budget_bytes
        chosen.append((bool(within.fit.runs), within.fit.parts > 1))
    assert chosen == [(False, True), (True, False)]


def test_every_run_of_regions_is_named_as_one_checkpoint() -> None:
    within = budget_of(replica(FixedShare(0.6, 0.6)), 0.85)
    within.fit_workload(MODEL)
    assert within.fit is not None
    fit = replace(within.fit, runs=(Run(0, 3), Run(5, 5)), parts=1)
    shown = ShownMemory(fit.estimate, within.memory, within.budget_bytes, fit)
    assert "recomputed: body.0 to body.3 as one checkpoint, body.5\n" in memory_table(shown)
    data = memory_data(shown)
    assert data is not None
    first = [f"body.{number}" for number in range(4)]
    assert data["passes"]["runs"] == [first, ["body.5"]]
    assert data["passes"]["recomputed"] == [*first, "body.5"]


def test_plans_whose_buffers_do_not_fit_are_not_allowed() -> None:
    within = budget_of(replica(), 1)
    best = optimize(MODEL, LOCAL, memory=within.fit_workload, allowed=within.allows)
    assert within.allows(BASELINE)
    assert not within.allows(plan(parameter_server(MODEL, LOCAL), MODEL, 2))
    assert within.peak(best.plan).peak_bytes <= within.budget_bytes


def test_the_pass_is_chosen_by_ddps_buckets_with_rows_of_sparse_gradients() -> None:
    (first, *others), memory = MODEL.variables, replica()
    table = replace(first, sparse=True, touched_rows=10.0)
    workload = replace(MODEL, variables=(table, *others))
    rows = plan(with_rows(ddp_default(workload), workload), workload, 2)
    within = MemoryBudget(memory, LOCAL, 2**30)
    within.fit_workload(workload)
    assert within.fit is not None
    assert within.fit.before_step_s == LoweredSteps(workload, LOCAL).step_s(rows)
    before = highest_peak(memory, memory.profile, workload, rows, LOCAL)
    assert within.fit.before.peak_bytes == before.peak_bytes


def direct(shares: tuple[float, ...], hierarchical: bool = False) -> Plan:
    """One message for each variable."""
    return Plan(
        MODEL.id,
        len(shares),
        tuple(
            Message(
                (TensorSlice(one.name, 250_000, rows=500),),
                Synchronizer.DIRECT_EXCHANGE,
                Compressor.NONE,
                "float32",
                shares=shares,
                hierarchical=hierarchical,
            )
            for one in MODEL.variables
        ),
    )


@pytest.mark.parametrize(
    ("hosts", "hierarchical", "members"),
    [((1, 1, 1, 1), False, 4), ((2, 2), False, 4), ((2, 2), True, 2)],
)
def test_the_rank_that_owns_the_shares_of_a_direct_exchange_must_fit(
    hosts: tuple[int, ...], hierarchical: bool, members: int
) -> None:
    """It allocates what all other members send it; rank 0 owns nothing and allocates nothing."""
    memory, on = replica(), cluster(*((devices, 8000) for devices in hosts))
    equal, lopsided = (
        highest_peak(memory, memory.profile, MODEL, direct(shares, hierarchical), on).peak_bytes
        for shares in ((0.25,) * 4, (0.0, 0.0, 0.0, 1.0))
    )
    share = 1 / members
    assert lopsided - equal == (members - 1) * (1 - share) * LAYERS * WEIGHT
    within = MemoryBudget(memory, on, lopsided - 1)
    within.fit_workload(MODEL)
    assert not within.allows(direct((0.0, 0.0, 0.0, 1.0), hierarchical))


def test_micro_batches_pay_their_fixed_share_again() -> None:
    fixed = FixedShare(0.5, 0.2)
    workload = accumulated_workload(MODEL, 4, fixed=fixed)
    forward_s, backward_s = MODEL.forward_s * (0.5 + 0.5 / 4), MODEL.backward_s * (0.2 + 0.8 / 4)
    assert workload.backward_s == pytest.approx(backward_s)
    assert workload.forward_s == pytest.approx(4 * forward_s + 3 * backward_s)
    after = accumulated(replica().profile, 4, fixed=fixed)
    assert workload.compute_s == pytest.approx(float(after.end_s[-1]))
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
def test_a_budget_that_cannot_be_met_or_read_is_refused(folder, capsys, words, message) -> None:
    assert message in error_output(capsys, *optimize_words(folder, *words))


def test_without_recorded_memory_a_budget_is_refused(folder, tmp_path, capsys) -> None:
    """Nothing is guessed."""
    (folder / MEMORY_FILE).unlink()
    assert json_output(capsys, *optimize_words(folder))["memory"] is None
    workload = tmp_path / "workload.json"
    workload.write_text(canonical_json(MODEL))
    no_file, no_folder = "has no memory.json; record it again", "holds no activations"
    for source, reason in ((folder, no_file), (workload, no_folder)):
        error = error_output(capsys, *optimize_words(source, "--memory", "16GB"))
        assert "--memory needs the lifetimes" in error and reason in error


def test_a_recorded_memory_is_read_as_it_was_written_and_bad_ones_are_refused(folder) -> None:
    assert RecordedMemory.read(folder) == replica()
    data = json.loads((folder / MEMORY_FILE).read_text())
    for wrong, rule in (({"batch": 0}, "at least 1 sample"), ({"schema": 99}, "update autotune")):
        (folder / MEMORY_FILE).write_text(json.dumps(data | wrong))
        with pytest.raises(InvalidInput, match=rule):
            RecordedMemory.read(folder)
