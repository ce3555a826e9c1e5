"""Detection of other work on the machine."""

from __future__ import annotations

import pytest

from autotune.jobs.campaign import quiet

BEFORE = "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3 4 5 6 7 8\n"
AFTER = "cpu  160 10 70 880 70 5 5 0 0 0\ncpu0 1 2 3 4 5 6 7 8\n"


def test_busy_and_stolen_shares_of_the_time_between_two_readings():
    """Idle time and waiting for disks are not busy. No tick between two readings counts as busy."""
    stolen_before = "cpu  100 0 50 800 50 0 0 7 0 0\n"
    stolen_after = "cpu  160 10 70 840 50 0 0 77 0 0\n"
    assert quiet.busy_share(BEFORE, AFTER) == pytest.approx(100 / 200)
    assert quiet.busy_share(BEFORE, BEFORE) == 1.0
    assert quiet.stolen_share(stolen_before, stolen_after) == pytest.approx(70 / 200)
    assert quiet.stolen_share(BEFORE, BEFORE) == 0.0


def test_the_wait_ends_with_the_other_work_or_warns_that_this_goes_on():
    messages: list[str] = []
    busy_cores = iter([1.5, 0.9, 0.1])
    quiet.wait_until_quiet(messages.append, lambda seconds: next(busy_cores))
    assert next(busy_cores, None) is None and len(messages) == 1 and "1.5 cores" in messages[0]
    quiet.wait_until_quiet(messages.append, lambda seconds: 1.2)
    assert len(messages) == 3 and "may be wrong" in messages[-1]
