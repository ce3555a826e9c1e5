"""Measured costs of the runtime as the replay's constants."""

from __future__ import annotations

from autotune.jobs.campaign.domain_features import stored_costs
from autotune.lowering.costs import RuntimeCosts


def test_measured_costs_replace_the_defaults_with_their_source() -> None:
    costs = stored_costs({"fill_s": 1e-3, "write_s": 2e-3, "bucket_s": 3e-3}, 4)
    assert (costs["fill_s"], costs["write_s"], costs["bucket_s"]) == (1e-3, 2e-3, 3e-3)
    assert (
        "4 processes" in costs.sources["write_s"] and costs["issue_s"] == RuntimeCosts()["issue_s"]
    )


def test_old_measurements_of_one_write_back_are_ignored() -> None:
    before = stored_costs({"fill_s": 1e-3, "write_s": 2e-3}, 4)
    assert before["fill_s"] == 1e-3 and before["write_s"] == RuntimeCosts()["write_s"]


def test_old_measurements_imply_real_updates_and_a_wake_up_per_gradient() -> None:
    before, now = (
        stored_costs({"fill_s": 1e-3}, 4),
        stored_costs({"fill_s": 1e-3, "bucket_s": 2e-4, "real_update": 0.0}, 4),
    )
    assert (before["real_update"], before["bucket_s"]) == (1.0, 1e-3)
    assert (now["real_update"], now["bucket_s"]) == (0.0, 2e-4)
