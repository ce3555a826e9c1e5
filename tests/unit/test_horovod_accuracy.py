"""The pure parts of `benchmarks.replay_accuracy.horovod`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autotune.lowering.horovod import HostTimes
from benchmarks.horovod_ranks.start import CaseResult
from benchmarks.replay_accuracy.horovod import between_steps_s, without_logging


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
