"""The parts of `benchmarks.replay_accuracy.horovod` that need no ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune.lowering.horovod import HostTimes
from benchmarks.horovod_ranks.start import JOB, CaseResult, job_data
from benchmarks.replay_accuracy.horovod import (
    PROFILED,
    between_steps_s,
    collect,
    measure,
    measured_run,
    without_logging,
)
from benchmarks.replay_accuracy.horovod_runs import RankRun


def rank_with(spaces_s: dict[str, list[float]]) -> dict[str, object]:
    """Results of steps of 1 s with these spaces behind them, in a block of each name."""
    blocks = []
    for what, spaces in spaces_s.items():
        begins = np.cumsum([0.0, *(1 + space for space in spaces)])
        marks = [[begin, begin + 0.3, begin + 0.8, begin + 1] for begin in begins]
        blocks.append({"what": what, "marks_s": marks, "timeline": ""})
    return {"blocks": blocks}


def test_spaces_between_steps_are_those_of_the_slowest_rank() -> None:
    ranks = (
        rank_with({"plain": [0.1, 0.1, 0.4], "logged": [0.7]}),
        rank_with({"plain": [0.2, 0.1, 0.1], "logged": [0.6]}),
    )
    result = CaseResult(ranks, Path())
    assert between_steps_s(result, "plain") == pytest.approx(0.2)
    assert between_steps_s(result, "logged") == pytest.approx(0.7)


def test_what_logging_adds_between_two_steps_is_no_part_of_predicted_ones() -> None:
    times = HostTimes(np.zeros(1), backward_s=1.0, rest_s=0.5)
    assert without_logging(times, 0.2).rest_s == pytest.approx(0.3)
    assert without_logging(times, 0.9).rest_s == 0.0


def stored(run: RankRun, ranks: int) -> None:
    """Write what a finished run of these ranks leaves."""
    run.folder.mkdir(parents=True, exist_ok=True)
    job = job_data(run.workload, run.cases, run.framework)
    (run.folder / JOB).write_text(json.dumps({**job, "folder": str(run.folder)}))
    for case in range(len(run.cases)):
        for rank in range(ranks):
            result = {"blocks": [], "slowest": [float(case)], "calls": []}
            (run.folder / f"case{case}.rank{rank}.json").write_text(json.dumps(result))


def test_a_collected_run_is_read_and_not_run_again(tmp_path: Path) -> None:
    run = measured_run("vgg", PROFILED, tmp_path, "torch")
    assert not run.is_collected
    stored(run, run.cluster.world_size)
    assert run.is_collected
    assert [result.ranks[0]["slowest"] for result in run.results()] == [
        [float(case)] for case in range(len(run.cases))
    ]
    lines: list[str] = []
    collect([run], lines.append)
    assert lines == [f"vgg.{PROFILED}: measured before"]


def test_a_run_of_other_cases_or_without_a_rank_is_not_collected(tmp_path: Path) -> None:
    run = measured_run("vgg", PROFILED, tmp_path, "torch")
    stored(run, run.cluster.world_size - 1)
    assert not run.is_collected
    stored(run, run.cluster.world_size)
    assert not replace(run, cases=run.cases[::-1]).is_collected
    assert not replace(run, framework="tensorflow").is_collected


def test_an_evaluation_names_the_missing_runs_and_measures_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"lacks the runs vgg\.recorded, .*; collect them first"):
        measure(tmp_path, print, only_evaluate=True)
    assert not list(tmp_path.iterdir())
