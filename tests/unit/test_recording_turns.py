"""How many ordinary steps come between two recorded ones, and what the recording costs then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import InvalidInput
from autotune.recordings.job_file import RankRecord, RecordedJob
from runtime_rewriter.recording.settings import RecordSettings
from runtime_rewriter.recording.turns import (
    EVENT_S,
    MOST_BETWEEN,
    MOST_COST,
    Turns,
    estimated_cost,
    ordinary_steps,
)


def stretch_cost(cost: float, recorded: int, between: int) -> float:
    return recorded * cost / (recorded + between * (recorded - 1))


@given(cost=st.floats(0.0, 0.4), recorded=st.integers(2, 50))
def test_the_fewest_ordinary_steps_keep_the_stretch_at_the_aim(cost: float, recorded: int) -> None:
    between = ordinary_steps(cost, recorded)
    if between < MOST_BETWEEN:
        assert stretch_cost(cost, recorded, between) <= MOST_COST * (1 + 1e-6)
    if between:
        assert stretch_cost(cost, recorded, between - 1) > MOST_COST


def test_cheap_recordings_and_single_steps_have_none() -> None:
    assert ordinary_steps(MOST_COST, 10) == 0
    assert ordinary_steps(0.5, 1) == 0
    assert ordinary_steps(0.11, 10) == 3
    assert ordinary_steps(5.0, 10) == MOST_BETWEEN
    assert estimated_cost(1000, 1000 * EVENT_S / 0.1) == pytest.approx(0.1)
    assert estimated_cost(1000, float("inf")) == 0.0


def test_recorded_and_ordinary_steps_take_turns() -> None:
    turns = Turns(between=2)
    turns.end(undisturbed=True)  # no step has begun
    turns.begin(recording=False)
    turns.end(undisturbed=True)
    assert 0 <= turns.fastest_s < 60
    kinds = []
    for _ in range(7):
        turns.begin(recording=True)
        kinds.append("recorded" if turns.recorded else "ordinary" if turns.ordinary else "none")
        turns.end(undisturbed=False)
    assert kinds == ["recorded", "ordinary", "ordinary"] * 2 + ["recorded"]
    assert len(turns.ordinary_s) == 4 and not (turns.recorded or turns.ordinary)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at least 0 ordinary steps between two recorded ones"):
        RecordSettings(folder="", between=-1)


def job(step_s: Sequence[float], ordinary_s: Sequence[float]) -> RecordedJob:
    ranks = tuple(
        RankRecord(
            rank=rank,
            host="host",
            device="cpu",
            device_name="",
            process_id=1,
            trace=f"rank{rank}.json.gz",
            clocks=(),
            step_s=tuple(step_s),
            ordinary_s=tuple(ordinary_s),
        )
        for rank in range(2)
    )
    return RecordedJob(2, ranks, steps=len(step_s), asked_steps=2, warmup_steps=1, between=3)


def test_a_recorded_step_is_paired_with_the_ordinary_ones_before_and_after_it() -> None:
    ordinary_s = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    of_turns = job([7.0, 8.0, 9.0], ordinary_s)
    assert of_turns.ordinary_pairs == [(7.0, 2.0), (8.0, 3.5), (9.0, 5.0)]
    assert job([7.0, 8.0], ordinary_s[:1]).ordinary_pairs == [(7.0, 1.0), (8.0, 1.0)]
    assert job([7.0], []).ordinary_pairs == []


def test_the_cost_of_a_recording_is_that_of_recorded_and_ordinary_steps_together() -> None:
    assert job([1.1, 1.1], [1.0] * 6).recording_cost == pytest.approx(0.1 * 2 / 8)
    assert job([1.1, 1.1], []).recording_cost is None
    assert job([1.1, 1.1], []).ordinary_s == 0.0
    with pytest.raises(InvalidInput, match="finite"):
        job([1.0, 1.0], [np.inf])
