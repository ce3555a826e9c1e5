"""The step that what-ifs start from: the recorded one, without the cost of recording it if known.

The cost is known in three cases. Recordings of `autotune profile` and `autotune.Recorder` on a GPU
wait for the device at the end of each step. What the profiler takes per operator was measured on
the devices of the factor tables. On CPUs, ordinary steps lie between the recorded ones. For any
trace, the user may state how long a step takes unrecorded. In both cases the profiler's time per
operator follows from the unrecorded step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.units import format_seconds
from autotune.whatif.base import Base, steady
from autotune.whatif.kernels.h100_factors import H100
from autotune.whatif.question import Factor, Reading
from autotune.whatif.recording.recording_cost import (
    RecordingCost,
    recorded_events,
    without_end_wait,
    without_recording,
)

CALL_SHARE = H100.recording.call_s.expected / H100.recording.operator_s.expected
"""What a profiler takes for a call into the driver, over what it takes for an operator."""
MOST_OPERATOR_S = 1e-3
SAME_STEP = 1e-4
"""Relative difference up to which the step agrees with the stated one."""
MOST_HALVINGS = 40


@dataclass(frozen=True, eq=False)
class Start:
    """`base`: the expected step. `others`: those of the ends of an uncertain recording cost.

    `note`: what was removed, or that nothing was, for people.
    """

    base: Base
    others: tuple[Base, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class OrdinaryShare:
    """Time of an ordinary step / that of a recorded one, with an interval."""

    expected: float
    low: float
    high: float


def unrecorded(
    base: Base,
    *,
    by_recorder: bool,
    step_s: float | None = None,
    ordinary: OrdinaryShare | None = None,
) -> Start:
    """The start of what-ifs on a recorded `base`.

    `by_recorder`: whether `autotune.Recorder` made the recording. `step_s`: how long a step takes
    unrecorded, None if the user does not state it. `ordinary`: from the steps between the recorded
    ones, None if there are none. Raises `InvalidInput` for a `step_s` that is not below the
    recorded step, or that no cost of recording explains.
    """
    recorded_s = steady(base).step_s
    if step_s is not None:
        start, operator_s = _calibrated(base, by_recorder, step_s, recorded_s)
        how = f"{format_seconds(operator_s)} per operator, from the stated unrecorded step"
        return Start(start, (), _removed_note(how, recorded_s, start))
    if ordinary is not None:
        return _between_ordinary_steps(base, ordinary, recorded_s)
    if by_recorder and base.device == H100.device:
        cost = H100.recording
        start, *others = (
            without_recording(base, cost, reading)
            for reading in (Reading.EXPECTED, Reading.OPTIMISTIC, Reading.PESSIMISTIC)
        )
        how = (
            f"{format_seconds(cost.operator_s.expected)} per operator and "
            f"{format_seconds(cost.call_s.expected)} per call, measured on {base.device}, and the "
            "recorder's wait at the end of each step"
        )
        return Start(start, tuple(others), _removed_note(how, recorded_s, start))
    unknown = (
        "speed-ups are those of the recorded training: what the profiler takes on this machine is "
        "unknown; state an unrecorded step with --unrecorded-step"
    )
    if by_recorder and base.on_device.any():
        unwaiting = without_end_wait(base)
        how = "the recorder's wait at the end of each step"
        note = _removed_note(how, recorded_s, unwaiting)
        return Start(unwaiting, (), f"{note}; {unknown}")
    return Start(base, (), unknown)


def _between_ordinary_steps(base: Base, ordinary: OrdinaryShare, recorded_s: float) -> Start:
    """The start without what a recorded step took longer than its neighbours, if it did."""
    stays = "speed-ups are those of the recorded training: "
    between = "the ordinary steps between the recorded ones"
    if ordinary.high >= 1:
        return Start(base, (), f"{stays}its steps took no longer than {between}, within the noise")
    try:
        start, operator_s = _calibrated(base, True, ordinary.expected * recorded_s, recorded_s)
    except InvalidInput:
        shorter = f"{1 - ordinary.expected:.1%} shorter, more than the recorded operators explain"
        return Start(base, (), f"{stays}{between} were {shorter}")
    how = f"{format_seconds(operator_s)} per operator, from {between}"
    note = _removed_note(how, recorded_s, start)
    ends = []
    for share in (ordinary.low, ordinary.high):
        # An end of a wide interval that no cost explains says nothing about the expected one.
        with contextlib.suppress(InvalidInput):
            ends.append(_calibrated(base, True, share * recorded_s, recorded_s)[0])
    return Start(start, tuple(ends), note)


def _removed_note(what: str, recorded_s: float, unrecorded: Base) -> str:
    return (
        f"the cost of recording is removed ({what}): a step takes "
        f"{format_seconds(steady(unrecorded).step_s)} instead of {format_seconds(recorded_s)}"
    )


def _calibrated(
    base: Base, by_recorder: bool, step_s: float, recorded_s: float
) -> tuple[Base, float]:
    """The base whose step takes `step_s`, and the profiler's seconds per operator."""
    if not 0 < step_s < recorded_s:
        raise InvalidInput(
            f"an unrecorded step must be shorter than the recorded one of "
            f"{format_seconds(recorded_s)}, but --unrecorded-step is {format_seconds(step_s)}"
        )
    begins, _ = recorded_events(base)

    def without(operator_s: float) -> Base:
        cost = RecordingCost(_sure(operator_s), _sure(CALL_SHARE * operator_s))
        free = without_recording(base, cost) if operator_s else base
        return without_end_wait(free) if by_recorder else free

    return _bisected(without, step_s, int(begins.sum()))


def _bisected(
    without: Callable[[float], Base], step_s: float, operators: int
) -> tuple[Base, float]:
    """The base and the cost at which the step takes `step_s`; more cost leaves a shorter step."""
    low_s, high_s = 0.0, MOST_OPERATOR_S
    unrecorded = without(low_s)
    if steady(unrecorded).step_s <= step_s:
        return unrecorded, low_s
    least_s = steady(without(high_s)).step_s
    if least_s > step_s * (1 + SAME_STEP):
        raise InvalidInput(
            f"an unrecorded step must be one that the cost of recording {operators} operators "
            f"explains, at least {format_seconds(least_s)}, but --unrecorded-step is "
            f"{format_seconds(step_s)}; is it of the same training?"
        )
    for _ in range(MOST_HALVINGS):
        middle_s = (low_s + high_s) / 2
        unrecorded = without(middle_s)
        error = steady(unrecorded).step_s / step_s - 1
        if abs(error) <= SAME_STEP:
            break
        low_s, high_s = (middle_s, high_s) if error > 0 else (low_s, middle_s)
    return unrecorded, middle_s


def _sure(seconds: float) -> Factor:
    return Factor(seconds, seconds, seconds, "from the stated unrecorded step")
