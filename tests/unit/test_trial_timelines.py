"""Replayed timelines of a decided job: whose, how many, and until when."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from synthetic_job import SyntheticWorld, drive, job_spec, strategy

from autotune.jobs.timelines import LIMIT_S, MOST_STRATEGIES, write_timelines
from autotune.tuning.history import History
from autotune.tuning.job import NO_LIMIT_S

SPEC = job_spec(max_trials=12, max_seconds=NO_LIMIT_S)
WORLD = SyntheticWorld({5: 0.06}, noise=0.01, fails=lambda one: one.strategy_id == strategy(1).id)


def written(folder: Path, history: History, end: Any, times_s: Iterator[float]) -> dict[int, Path]:
    """The timelines, with a clock that shows these times."""
    return write_timelines(
        folder, history, end.decision, SPEC.conditions, clock=lambda: next(times_s)
    )


def test_the_fastest_strategies_have_a_timeline_in_their_first_measured_trial(tmp_path) -> None:
    history, end = drive(SPEC, WORLD)
    files = written(tmp_path / "timelines", history, end, repeat(0.0))
    strategies = {one.request.number: one.request.strategy_id for one in history.trials}
    drawn = [strategies[number] for number in files]
    assert 1 < len(drawn) == len(set(drawn)) <= MOST_STRATEGIES + 1
    assert end.decision.best_candidate_id in drawn and strategy(1).id not in drawn
    for path in files.values():
        with gzip.open(path) as file:
            trace = json.load(file)
        assert 0 < trace["otherData"]["shown_ops"] == trace["otherData"]["ops"]
    again = {path: path.read_bytes() for path in files.values()}
    written(tmp_path / "timelines", history, end, repeat(0.0))
    assert {path: path.read_bytes() for path in files.values()} == again


def test_no_timeline_is_begun_after_the_limit(tmp_path) -> None:
    history, end = drive(SPEC, WORLD)
    folder = tmp_path / "timelines"
    files = written(folder, history, end, iter((0.0, LIMIT_S, LIMIT_S + 1.0)))
    assert list(folder.iterdir()) == list(files.values()) and len(files) == 1
