"""A repeated part of the step costs what a training with this part twice costs."""

from __future__ import annotations

import numpy as np
import pytest
from periodic_training import training

from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base, steady
from autotune.whatif.primitives import select
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.recording.repetition import passes, repeat


def step_us(base: Base) -> float:
    return steady(base).step_s * 1e6


@pytest.mark.parametrize("kernel_us", [10, 400])
@pytest.mark.parametrize("waits", [False, True])
def test_a_repeated_part_takes_its_time_again(kernel_us: float, waits: bool) -> None:
    base = recorded_base(training(50, kernel_us, waits=waits), 0)
    host, device = (base.queue_order(queue) for queue in np.unique(base.queue))
    ops = np.zeros(base.ops, dtype=np.bool_)
    ops[device[:2]] = True
    names = [base.names.ops[op] for op in host]
    first = names.index("aten::linear_0")
    ops[host[first : names.index("aten::linear_2", first)]] = True
    assert (base.launch != NONE)[device].all()
    again, copy = repeat(base, ops)
    longer = recorded_base(training(50, kernel_us, kernels=5, waits=waits), 0)
    assert step_us(again) == pytest.approx(step_us(longer), rel=0.02)
    assert again.ops == base.ops + ops.sum()
    assert (again.launch[copy[device[:2]]] == copy[base.launch[device[:2]]]).all()
    assert len(again.launched) == len(base.launched) + 2
    third, _ = repeat(again, np.isin(np.arange(again.ops), copy))
    assert step_us(third) > step_us(again)


def test_a_whole_step_can_be_repeated() -> None:
    base = recorded_base(training(50, 400), 0)
    again, _ = repeat(base, select(base))
    assert step_us(again) == pytest.approx(2 * step_us(base), rel=0.01)


def test_the_order_of_a_queue_is_that_of_its_edges() -> None:
    base = recorded_base(training(50, 400), 0)
    (stream,) = np.unique(base.queue[base.on_device])
    names = [base.names.ops[op] for op in base.queue_order(int(stream))]
    assert names == ["gemm_0", "gemm_1", "gemm_2"]


def test_passes_need_kernels_of_known_kinds() -> None:
    base = recorded_base(training(50, 400), 0)
    assert not np.isin(base.kind, (Kind.FORWARD, Kind.BACKWARD))[base.on_device].any()
    with pytest.raises(InvalidInput, match="does not tell those of the forward"):
        passes(base)
