"""What-ifs start from the step without the cost of recording it, where that is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from periodic_training import training

from autotune.errors import InvalidInput
from autotune.whatif.answers.predict import predict
from autotune.whatif.answers.unrecorded import OrdinaryShare, unrecorded
from autotune.whatif.base import Base, steady
from autotune.whatif.kernels.h100_factors import H100
from autotune.whatif.question import Question
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.registry import WhatIf


def host_bound() -> Base:
    return recorded_base(training(300, 10), 0)


def test_the_cost_on_a_known_device_is_removed_with_its_uncertainty() -> None:
    base = replace(host_bound(), device=H100.device)
    start = unrecorded(base, by_recorder=True)
    steps_s = [steady(one).step_s for one in (*start.others, start.base)]
    optimistic_s, pessimistic_s, expected_s = steps_s
    assert optimistic_s < expected_s < pessimistic_s < steady(base).step_s
    assert "cost of recording is removed" in start.note and H100.device in start.note
    found = predict(start.base, [], Question(), start.others)
    assert found.before_s == expected_s


def test_the_cost_follows_from_a_stated_step() -> None:
    base = host_bound()
    recorded_s = steady(base).step_s
    start = unrecorded(base, by_recorder=False, step_s=0.8 * recorded_s)
    assert steady(start.base).step_s == pytest.approx(0.8 * recorded_s, rel=2e-4)
    assert "from the stated unrecorded step" in start.note


def test_the_cost_follows_from_ordinary_steps_between_the_recorded_ones() -> None:
    base = host_bound()
    recorded_s = steady(base).step_s
    share = OrdinaryShare(0.9, 0.85, 0.95)
    start = unrecorded(base, by_recorder=True, ordinary=share)
    found_s = [steady(one).step_s / recorded_s for one in (start.base, *start.others)]
    assert found_s == pytest.approx([0.9, 0.85, 0.95], rel=2e-4)
    assert "from the ordinary steps between the recorded ones" in start.note
    stated = unrecorded(base, by_recorder=True, step_s=0.8 * recorded_s, ordinary=share)
    assert steady(stated.base).step_s == pytest.approx(0.8 * recorded_s, rel=2e-4)


def test_an_end_of_the_interval_that_no_recording_explains_leaves_the_expected_cost() -> None:
    base = host_bound()
    recorded_s = steady(base).step_s
    start = unrecorded(base, by_recorder=True, ordinary=OrdinaryShare(0.9, 0.01, 0.95))
    found_s = [steady(one).step_s / recorded_s for one in (start.base, *start.others)]
    assert found_s == pytest.approx([0.9, 0.95], rel=2e-4)
    assert "cost of recording is removed" in start.note


@pytest.mark.parametrize(
    ("share", "why"),
    [
        (OrdinaryShare(0.98, 0.9, 1.01), "took no longer than the ordinary steps"),
        (OrdinaryShare(0.01, 0.005, 0.02), "99.0% shorter, more than the recorded operators"),
    ],
)
def test_noise_and_what_no_recording_costs_stay(share: OrdinaryShare, why: str) -> None:
    base = host_bound()
    start = unrecorded(base, by_recorder=True, ordinary=share)
    assert start.base is base and not start.others
    assert why in start.note and "speed-ups are those of the recorded training" in start.note


def test_an_impossible_stated_step_is_refused() -> None:
    base = host_bound()
    recorded_s = steady(base).step_s
    with pytest.raises(InvalidInput, match="must be shorter than the recorded one"):
        unrecorded(base, by_recorder=False, step_s=1.1 * recorded_s)
    with pytest.raises(InvalidInput, match="is it of the same training"):
        unrecorded(base, by_recorder=False, step_s=0.01 * recorded_s)


def test_an_unknown_cost_stays_and_the_note_says_so() -> None:
    base = host_bound()
    start = unrecorded(base, by_recorder=False)
    assert start.base is base and not start.others
    assert "speed-ups are those of the recorded training" in start.note
    elsewhere = unrecorded(replace(base, device="another device"), by_recorder=True)
    assert "wait at the end of each step" in elsewhere.note
    assert "speed-ups are those of the recorded training" in elsewhere.note


def test_the_interval_holds_both_ends_of_the_cost() -> None:
    base = replace(host_bound(), device=H100.device)
    start = unrecorded(base, by_recorder=True)

    def no_gaps(base: Base, question: Question) -> Base:
        return replace(base, gap_s=0 * base.gap_s, unknown_gap_s=0 * base.unknown_gap_s)

    what_ifs = [WhatIf("no_gaps", "", "", "", no_gaps)]
    wide = predict(start.base, what_ifs, Question(), start.others)
    narrow = predict(start.base, what_ifs, Question())
    assert wide.speedup_low < narrow.speedup_low or wide.speedup_high > narrow.speedup_high
