"""The part of the benchmark on this CPU keeps its rows and takes turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from periodic_training import training

from autotune.whatif.base import steady
from autotune.whatif.recording.recorded import recorded_base
from benchmarks.whatif_truth.cpu import Run, rows
from benchmarks.whatif_truth.cpu_cluster import CHANGES, Turns, at_step
from benchmarks.whatif_truth.cpu_rows import CpuRow, KeptRows, keys


def test_a_kept_row_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = CpuRow("gpt_text", "amp", 2.0, 1.0, 1.25, load=3.0)
    KeptRows(path).add(row)
    kept = KeptRows(path)
    assert kept.of("gpt_text", "amp") == row and kept.of("gpt_text", "fused_adam") is None
    kept.add(CpuRow("gpt_text", "fused_adam", reason="no optimizer"))
    found = keys(KeptRows(path).rows)
    assert found["error_mean_cpu"] == pytest.approx(0.2)
    assert found["refused_cpu"] == 1 and found["load_max_cpu"] == 3.0


def test_a_load_in_some_of_the_rounds_does_not_count() -> None:
    """Rounds under load slow all down, bursts of load only some turns."""
    turns = Turns(
        [1.0, 4.0, 9.0, 2.0, 1.0], {"distributed": [1.5, 6.0, 1.5, 3.0, 8.0]}, {}, load=8.0
    )
    row = turns.row("gpt_text", "distributed")
    assert (row.baseline_s, row.measured_s) == (1.0, 1.5)
    base = recorded_base(training(host_us=100, kernel_us=1), 0)
    step_s = steady(base).step_s
    assert steady(at_step(base, 2 * step_s)).step_s == pytest.approx(2 * step_s)


def test_without_a_cluster_its_rows_have_the_reason_and_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the run sets it
    run = Run(tmp_path, ["gpt_text"], ["distributed"], no_cluster=lambda: "a testbed needs root")
    found = rows(run)
    assert [row.change for row in found] == list(CHANGES)
    assert {row.reason for row in found} == {"a testbed needs root"}
    assert keys(found) == {"changes_cpu": 0, "refused_cpu": len(CHANGES)}
    assert KeptRows(tmp_path / "rows.jsonl").rows == []
    measured = CpuRow("gpt_text", CHANGES[0], 2.0, 1.0, 1.25)
    KeptRows(tmp_path / "rows.jsonl").add(measured)
    assert rows(run)[0] == measured and len(rows(run)) == len(CHANGES)
