"""`benchmarks.whatif_large` ends at once, with the reason, if a child does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.whatif_large import cost, replay_all


def die(path: Path) -> None:
    os._exit(3)


def test_a_child_that_crashes_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="die ended with status 3 and no figures"):
        cost(die, Path())


def test_a_replay_that_fails_has_no_figures(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="autotune replay of the trace ended with status 2"):
        replay_all(tmp_path / "missing.json")


def look(path: Path) -> None:
    assert path.is_dir()


def test_work_that_ends_has_its_processor_time_and_memory() -> None:
    seconds, megabytes = cost(look, Path())
    assert seconds > 0 and megabytes > 1
