"""The benchmark of what-ifs takes whatever a folder's times.json holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autotune.whatif.changes.all  # noqa: F401 - registers the what-ifs
from autotune.whatif.registry import combined
from benchmarks.whatif_truth.fit import prediction_interval, robust_costs
from benchmarks.whatif_truth.gpu import Row, keys, what_ifs_of
from benchmarks.whatif_truth.recorded_models import Timed, recorded_models

PLAIN: dict[str, Any] = {
    "name": "fp32",
    "precision": "fp32",
    "optimizer": "foreach",
    "channels_last": False,
    "recompute": False,
    "parts": 1,
    "batch_factor": 1.0,
    "compiled": False,
}


@pytest.mark.parametrize(
    ("changes", "names", "amounts"),
    [
        ({}, "", {}),
        ({"precision": "bf16", "channels_last": True}, "amp+channels_last", {}),
        ({"precision": "bf16", "optimizer": "fused"}, "amp+fused_adam", {}),
        ({"precision": "bf16", "compiled": True}, "amp+fused_elementwise", {}),
        ({"batch_factor": 2.0}, "batch", {"batch": 2.0}),
        ({"parts": 4, "recompute": True}, "recompute+accumulate", {"accumulate": 4.0}),
    ],
)
def test_a_variant_is_a_combination_of_what_ifs(
    changes: dict[str, Any], names: str, amounts: dict[str, float]
) -> None:
    found, given = what_ifs_of(PLAIN | changes)
    assert ("+".join(found), given) == (names, amounts)
    assert not names or len(combined(names)) == len(found)


def test_models_without_a_recording_are_named(tmp_path: Path) -> None:
    row = {"step_ms": 10.0, "step_ms_q10": 9.0, "step_ms_q90": 11.0, "issue_ms": 8.0}
    rows = [row | {"model": model, "variant": PLAIN} for model in ("seen", "unseen", "seen")]
    (tmp_path / "times.json").write_text(json.dumps(rows))
    (tmp_path / "seen.fp32").mkdir()
    (tmp_path / "seen.fp32" / "job.json").write_text("{}")
    models, unrecorded = recorded_models(tmp_path)
    assert [model.name for model in models] == ["seen"] and unrecorded == ["unseen"]
    assert len(models[0].times("fp32")) == 2 and models[0].plain_s == pytest.approx(0.01)


def test_host_bound_variants_are_judged_apart() -> None:
    timed = Timed(PLAIN, 0.010, 0.009, 0.011, 0.005)
    good = Row("m", timed, "amp", 0.020, 0.0101, 0.0099, 0.0103, paper_s=0.012)
    bound = replace(good, timed=replace(timed, issue_s=0.0095), predicted_s=0.020)
    refused = replace(good, refused="no kernels")
    found = keys([good, bound, refused])
    assert found["error_mean"] == pytest.approx(0.01) and found["judged"] == 1
    assert found["skill"] == pytest.approx(0.99)
    assert found["interval_coverage"] == 1 and found["refused"] == 1
    assert found["error_mean_host_bound"] == pytest.approx(1)
    assert found["error_mean_paper"] == pytest.approx(0.2)


def test_costs_are_found_in_spite_of_an_odd_row() -> None:
    columns = [(float(flops), 1) for flops in range(1, 20)]
    seconds = [2e-6 * flops + 5e-6 for flops, _ in columns]
    per_flop, fixed = robust_costs([*columns, (3.0, 1)], [*seconds, 1e-3])
    assert per_flop == pytest.approx(2e-6, rel=0.05)
    assert fixed == pytest.approx(5e-6, rel=0.1)


def test_an_interval_holds_its_values() -> None:
    two = prediction_interval(1.0, [0.9, 1.1], "invented")
    three = prediction_interval(1.0, [0.9, 1.0, 1.1], "invented")
    assert two.optimistic < three.optimistic < 0.9 and three.pessimistic > 1.1
