"""The part of the benchmark on this CPU keeps its rows and learns the optimizer's factor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from periodic_training import training

from autotune.dfg.graph import Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base, steady
from autotune.whatif.recording.recorded import recorded_base
from benchmarks.whatif_truth.cpu_cluster import Turns, at_step
from benchmarks.whatif_truth.cpu_factors import RecordedPair, predicted_speedup
from benchmarks.whatif_truth.cpu_rows import CpuRow, KeptRows, keys


def with_optimizer(seconds: float, rest: float = 1.0) -> Base:
    """The first op of the host is the optimizer; `rest`: factor on everything else."""
    base = recorded_base(training(host_us=100, kernel_us=1), 0)
    first = int(np.flatnonzero(~base.on_device)[0])
    kind, duration_s = base.kind.copy(), rest * base.duration_s
    kind[first], duration_s[first] = Kind.UPDATE, seconds
    gap_s = rest * base.gap_s
    gap_s[first] = 0.0
    return replace(base, kind=kind, duration_s=duration_s, gap_s=gap_s)


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


def test_a_slower_machine_cancels_out_of_the_optimizer_s_factor() -> None:
    model = with_optimizer(100e-6)
    pair = RecordedPair(with_optimizer(80e-6), with_optimizer(2 * 20e-6, rest=2.0))
    step_s = steady(model).step_s
    speedup = predicted_speedup(model, [pair])
    assert step_s / speedup == pytest.approx(step_s - 75e-6, rel=1e-6)
    with pytest.raises(InvalidInput, match="none of 0 other recordings"):
        predicted_speedup(model, [])


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
