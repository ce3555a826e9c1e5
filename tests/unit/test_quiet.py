"""Detection of other work on the machine."""

from __future__ import annotations

import pytest

from autotune.jobs.campaign import quiet

BEFORE = "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3 4 5 6 7 8\n"
AFTER = "cpu  160 10 70 880 70 5 5 0 0 0\ncpu0 1 2 3 4 5 6 7 8\n"


def test_the_busy_share_is_all_but_idle_time_and_waiting_for_disks() -> None:
    assert quiet.busy_share(BEFORE, AFTER) == pytest.approx(100 / 200)
    assert (
        quiet.busy_share(BEFORE, BEFORE) == 1.0
    )  # no tick between them: nothing says that it is quiet


def test_the_stolen_share_is_what_the_host_gave_to_others() -> None:
    assert quiet.stolen_share(
        "cpu  100 0 50 800 50 0 0 7 0 0\n", "cpu  160 10 70 840 50 0 0 77 0 0\n"
    ) == pytest.approx(70 / 200)
    assert quiet.stolen_share(BEFORE, BEFORE) == 0.0


def test_the_wait_ends_with_the_other_work_and_says_so_where_that_does_not_end() -> None:
    told: list[str] = []
    found = iter([1.5, 0.9, 0.1])
    quiet.wait_until_quiet(told.append, lambda seconds: next(found))
    assert next(found, None) is None and len(told) == 1 and "1.5 cores" in told[0]
    quiet.wait_until_quiet(told.append, lambda seconds: 1.2)
    assert len(told) == 3 and "may be wrong" in told[-1]
