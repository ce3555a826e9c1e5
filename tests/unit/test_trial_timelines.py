"""Replayed timelines of a decided job: whose, how many, and until when."""

from __future__ import annotations

import gzip
import json

from synthetic_job import SyntheticWorld, drive, job_spec, strategy

from autotune.jobs.timelines import LIMIT_S, MOST_STRATEGIES, write_timelines
from autotune.tuning.job import NO_LIMIT_S

SPEC = job_spec(max_trials=12, max_seconds=NO_LIMIT_S)
WORLD = SyntheticWorld({5: 0.06}, noise=0.01, fails=lambda one: one.strategy_id == strategy(1).id)


def test_the_fastest_strategies_have_a_timeline_in_their_first_measured_trial(tmp_path) -> None:
    history, end = drive(SPEC, WORLD)
    files = write_timelines(tmp_path / "timelines", history, end.decision, SPEC.conditions)
    strategies = {one.request.number: one.request.strategy_id for one in history.trials}
    written = [strategies[number] for number in files]
    assert 1 < len(written) == len(set(written)) <= MOST_STRATEGIES + 1
    assert end.decision.best_candidate_id in written and strategy(1).id not in written
    for path in files.values():
        with gzip.open(path) as file:
            trace = json.load(file)
        assert 0 < trace["otherData"]["shown_ops"] == trace["otherData"]["ops"]
    again = {path: path.read_bytes() for path in files.values()}
    write_timelines(tmp_path / "timelines", history, end.decision, SPEC.conditions)
    assert {path: path.read_bytes() for path in files.values()} == again


def test_no_timeline_is_begun_after_the_limit(tmp_path) -> None:
    history, end = drive(SPEC, WORLD)
    times_s = iter((0.0, LIMIT_S, LIMIT_S + 1.0))
    folder = tmp_path / "timelines"
    files = write_timelines(
        folder, history, end.decision, SPEC.conditions, clock=lambda: next(times_s)
    )
    assert list(folder.iterdir()) == list(files.values()) and len(files) == 1
