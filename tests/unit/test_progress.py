"""What `autotune tune` prints while it works: phases before the first trial, and the time left."""

from __future__ import annotations

import io
import re

from rich.console import Console
from synthetic_job import SyntheticWorld, drive, job_spec

from autotune.commands.render.progress import ConsoleProgress
from autotune.records import Role
from autotune.tuning.events import TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import NO_LIMIT_S, JobSpec


def printed(spec: JobSpec, history: History, phases: bool = False) -> list[str]:
    """The lines of a job with these events."""
    written = io.StringIO()
    progress = ConsoleProgress(spec, Console(file=written, width=200))
    progress.waiting("starting Ray")
    for count in range(1, len(history.events) + 1):
        progress.recorded(history.events[count - 1], history.first(count))
        if phases:
            progress.waiting("another phase")
    return written.getvalue().splitlines()


def left_s(line: str) -> int:
    found = re.search(r"\(ETA (\d+):(\d\d)\)", line)
    assert found, line
    return 60 * int(found[1]) + int(found[2])


def test_the_time_left_is_zero_at_the_end_only_though_the_budget_is_too_small() -> None:
    # Strategies take ten times as long as the blocks that the search reserved time for.
    spec = job_spec(max_seconds=60.0, finalists=1, most_steps=0)
    history, _ = drive(spec, SyntheticWorld(default_s=5.0, current_s=0.5, noise=0.02))
    assert history.elapsed_s > spec.max_seconds
    trials = [event for event in history.events if isinstance(event, TrialFinished)]
    lines = [line for line in printed(spec, history) if "ETA" in line]
    after = [left_s(line) for line in lines][-len(trials) :]
    closing = [trial.request.role is Role.AB for trial in trials]
    assert sum(closing) >= 12
    assert min(after[:-1]) > 0
    assert after[-1] == 0


def test_without_a_limit_of_time_none_is_shown_before_it_can_be_estimated() -> None:
    spec = job_spec(max_seconds=NO_LIMIT_S)
    history, _ = drive(spec, SyntheticWorld({1: 0.09}, noise=0.02))
    lines = printed(spec, history)
    trials = [line for line in lines if re.search(r"reference 0|trial 1 ", line)]
    assert len(trials) == 2
    assert not any("ETA" in line for line in trials)
    assert all(left_s(line) < 3600 for line in lines if "ETA" in line)


def test_phases_are_printed_with_the_time_until_a_candidate_was_tried() -> None:
    spec = job_spec()
    history, _ = drive(spec, SyntheticWorld({1: 0.09}, noise=0.02))
    lines = printed(spec, history, phases=True)
    assert lines[0] == "0:00 starting Ray"
    tried = next(number for number, line in enumerate(lines) if " trial 1 " in line)
    assert "0:00 another phase" in lines[:tried]
    assert "0:00 another phase" not in lines[tried:]
