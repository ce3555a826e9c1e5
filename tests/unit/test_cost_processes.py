"""Processes that measure the runtime's costs and fail."""

import pytest

from autotune.errors import LaunchError
from autotune.jobs.campaign.cost_processes import measured_costs


def test_a_process_that_fails_ends_the_measurement(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=r"one ended with exit status 1; its error is printed"):
        measured_costs(1, emulated=True, pause_s=float("inf"))  # refused by an early measurement
    assert "InvalidInput: ready_s" in capfd.readouterr().err


def test_a_measurement_that_takes_too_long_is_ended() -> None:
    with pytest.raises(LaunchError, match=r"within 0 s, but only 0 of 1 processes were done"):
        measured_costs(1, longest_s=0.0)
