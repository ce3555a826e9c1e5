"""Measured costs of the runtime as the replay's constants."""

from __future__ import annotations

import pytest

from autotune.jobs.campaign.domain_features import stored_costs
from autotune.lowering.costs import RuntimeCosts


def test_measured_costs_replace_the_defaults_with_their_source():
    measured = {"fill_s": 1e-3, "write_s": 2e-3, "bucket_s": 3e-3}
    costs = stored_costs(measured, 4)
    assert {name: costs[name] for name in measured} == measured
    assert "4 processes" in costs.sources["write_s"]
    assert costs["issue_s"] == RuntimeCosts()["issue_s"]


def test_old_measurements_imply_what_the_runtime_of_then_did():
    """It wrote back once, made a real update and woke up for each gradient."""
    before = stored_costs({"fill_s": 1e-3, "write_s": 2e-3}, 4)
    assert before["write_s"] == RuntimeCosts()["write_s"]
    assert [before[name] for name in ("fill_s", "real_update", "bucket_s")] == [1e-3, 1.0, 1e-3]
    asleep = stored_costs({"lane_s": 1e-3}, 4)
    assert asleep["lane_s"] + asleep["lane_first_s"] == pytest.approx(1e-3)
    assert 0 < asleep["lane_s"] < asleep["lane_first_s"]
    awake = stored_costs({"lane_s": 1e-4, "lane_first_s": 2e-4}, 4)
    assert (awake["lane_s"], awake["lane_first_s"]) == (1e-4, 2e-4)
    now = stored_costs({"fill_s": 1e-3, "bucket_s": 2e-4, "real_update": 0.0}, 4)
    assert (now["real_update"], now["bucket_s"]) == (0.0, 2e-4)
    assert (before["early_update"], stored_costs({"early_update": 0.0}, 4)["early_update"]) == (
        1,
        0,
    )
