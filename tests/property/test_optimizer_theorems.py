"""Theorems 1 to 3 of dPRO against a replay of their chain of two ops and two tensors."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import Kind
from autotune.dfg.replay import replay
from autotune.optimizer.theorems import (
    both_fusions_pay,
    end_tensor_fused_s,
    op_fusion_pays,
    tensor_fusion_pays,
)

TIMES = st.integers(0, 40).map(lambda number: number / 8)
"""Sums of eighths are exact, so that equal times are equal."""


def end_s(start: float, p1: float, p2: float, free: float, t1: float, t2: float) -> float:
    """T without any fusion."""
    return max(max(free, start + p1) + t1, start + p1 + p2) + t2


def end_op_fused_s(start: float, fused: float, free: float, t1: float, t2: float) -> float:
    """T with the ops fused and the tensors not: both are ready when the fused op ends."""
    return max(free, start + fused) + t1 + t2


def tensor_fusion_pays_printed(first_end: float, computed: float, t2: float, t12: float) -> bool:
    """Theorem 2 as printed: e1 > c2 + t12 - t2."""
    return first_end > computed + t12 - t2


def replayed_end_s(
    ops_s: list[float], tensors_s: list[float], ready: list[int], start_s: float, free_s: float
) -> float:
    """The end of the last tensor; tensor i is sent behind op `ready[i]`, one at a time."""
    builder = DfgBuilder()
    device, channel = builder.queue("device"), builder.queue("channel")
    op = builder.op("before", device, start_s, Kind.BACKWARD)
    tensor = builder.op("sent before", channel, free_s, Kind.COLLECTIVE)
    computed = []
    for number, duration_s in enumerate(ops_s):
        op = builder.op(f"p{number}", device, duration_s, Kind.BACKWARD, [op])
        computed.append(op)
    for number, duration_s in enumerate(tensors_s):
        behind = [tensor, computed[ready[number]]]
        tensor = builder.op(f"q{number}", channel, duration_s, Kind.COLLECTIVE, behind)
    timeline = replay(builder.build())
    return float(timeline.end_s[tensor])


@settings(deadline=None)  # the first replay is compiled
@given(*[TIMES] * 8)
def test_the_closed_forms_match_the_replay(start, p1, p2, fused, free, t1, t2, t12) -> None:
    both, end = start + p1 + p2, start + fused
    for ops, tensors, ready, expected_s in (
        ([p1, p2], [t1, t2], [0, 1], end_s(start, p1, p2, free, t1, t2)),
        ([fused], [t1, t2], [0, 0], end_op_fused_s(start, fused, free, t1, t2)),
        ([p1, p2], [t12], [1], end_tensor_fused_s(both, free, t12)),
        ([fused], [t12], [0], end_tensor_fused_s(end, free, t12)),
    ):
        assert replayed_end_s(ops, tensors, ready, start, free) == expected_s


@given(*[TIMES] * 7)
def test_theorem_1_holds_if_the_fused_op_is_no_shorter_than_its_first(
    start, p1, p2, fused, free, t1, t2
) -> None:
    apart, together = end_s(start, p1, p2, free, t1, t2), end_op_fused_s(start, fused, free, t1, t2)
    if op_fusion_pays(p1, p2, fused, t1):
        assert together <= apart
    elif fused >= p1:
        assert together >= apart


def test_theorem_1_rejects_too_much_if_the_fused_op_is_shorter() -> None:
    assert not op_fusion_pays(4, 1, 2, 3.5)
    assert end_op_fused_s(0, 2, 0, 3.5, 1) < end_s(0, 4, 1, 0, 3.5, 1)


def test_theorem_1_concerns_the_second_tensor_and_not_the_step() -> None:
    """The fusion delays both tensors, but a third op's large tensor, which ends the step, gains."""
    p, fused, t = [2.0, 2.0, 2.0], 3.0, [2.0, 0.5, 4.0]
    assert not op_fusion_pays(p[0], p[1], fused, t[0])
    assert end_op_fused_s(0, fused, 0, t[0], t[1]) > end_s(0, p[0], p[1], 0, t[0], t[1])
    assert replayed_end_s([fused, 2.0], t, [0, 0, 1], 0, 0) < replayed_end_s(p, t, [0, 1, 2], 0, 0)


@given(*[TIMES] * 7)
@example(start=0, p1=0, p2=0, free=1, t1=0, t2=0, t12=0)
def test_theorem_2_holds_as_printed_under_its_assumptions(start, p1, p2, free, t1, t2, t12) -> None:
    computed = start + p1 + p2
    first_end = max(free, start + p1) + t1
    assume(t12 >= t2)  # a larger message costs no less
    assume(t12 < t1 + t2 or free <= computed)
    apart, together = end_s(start, p1, p2, free, t1, t2), end_tensor_fused_s(computed, free, t12)
    assert tensor_fusion_pays_printed(first_end, computed, t2, t12) is (together < apart)


@settings(deadline=None)
@given(*[TIMES] * 7)
@example(start=0, p1=1, p2=1, free=9, t1=1, t2=1, t12=3)
def test_theorem_2_without_its_assumptions_matches_the_replay(
    start, p1, p2, free, t1, t2, t12
) -> None:
    """In the example the channel is busy, and the messages cost more together."""
    first_end = max(free, start + p1) + t1
    fused_s = replayed_end_s([p1, p2], [t12], [1], start, free)
    pays = fused_s < replayed_end_s([p1, p2], [t1, t2], [0, 1], start, free)
    assert tensor_fusion_pays(first_end, start + p1 + p2, t2, t12, free) is pays


@pytest.mark.parametrize(("free", "t1", "t2", "t12"), [(9, 1, 1, 3), (0, 0, 2, 1)])
def test_theorem_2_as_printed_fails_without_its_assumptions(free, t1, t2, t12) -> None:
    """A busy channel with expensive joint messages; then a larger message that costs less."""
    p1, p2 = (1, 1) if free else (0, 1)
    first_end = max(free, p1) + t1
    shorter = end_tensor_fused_s(p1 + p2, free, t12) < end_s(0, p1, p2, free, t1, t2)
    printed = tensor_fusion_pays_printed(first_end, p1 + p2, t2, t12)
    assert tensor_fusion_pays(first_end, p1 + p2, t2, t12, free) is shorter
    assert printed is not shorter or free == 0


@given(*[TIMES] * 8)
def test_theorem_3_holds_if_no_fusion_costs_more_than_its_parts(
    start, p1, p2, fused, free, t1, t2, t12
) -> None:
    both = end_tensor_fused_s(start + fused, free, t12)
    if both_fusions_pay(p1, p2, fused, t1, t2, t12):
        assert both <= end_tensor_fused_s(start + p1 + p2, free, t12)
        assert both <= end_op_fused_s(start, fused, free, t1, t2)


def test_theorem_3_fails_without_either_assumption() -> None:
    assert not both_fusions_pay(1, 1, 3, 1, 1, 2)
    assert end_tensor_fused_s(3, 0, 2) > end_tensor_fused_s(2, 0, 2)
    assert not both_fusions_pay(1, 1, 1, 1, 1, 3)
    assert end_tensor_fused_s(1, 0, 3) > end_op_fused_s(0, 1, 0, 1, 1)
