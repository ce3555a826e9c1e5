"""`benchmarks.first_trial` refuses to time a phase whose line is missing."""

from __future__ import annotations

import pytest

from benchmarks.first_trial.__main__ import durations

LINES = [
    (1.0, "0:01 starting Ray"),
    (2.0, "0:02 placing the workers"),
    (3.0, "0:03 starting the script on 2 ranks"),
    (4.0, "0:04 probing the links (at most 60 s), then profiling 5 steps"),
    (5.0, "profiled: 62 variables"),
    (6.0, "(1/8) reference 0 took 0.1 s"),
    (7.0, "(1/8) round 0: 6 strategies"),
    (9.0, "(1/8) trial 1 took 0.1 s"),
]


def test_every_phase_of_a_place_is_timed() -> None:
    seconds = durations(LINES, "loopback")
    assert "testbed" not in seconds
    assert (seconds["total"], seconds["until_reference"], seconds["trial"]) == (9.0, 6.0, 2.0)


def test_a_missing_phase_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="loopback: no line ends the phase 'workers'"):
        durations([*LINES[:2], *LINES[3:]], "loopback")
    with pytest.raises(SystemExit, match="four_hosts: no line ends the phase 'testbed'"):
        durations(LINES, "four_hosts")
