"""What-ifs' primitives change the step time as the same change of the training would."""

from __future__ import annotations

import numpy as np
import pytest
from periodic_training import training

from autotune.dfg.graph import Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base, steady
from autotune.whatif.primitives import add, connect, insert, remove, scale, schedule, select
from autotune.whatif.recording.recorded import recorded_base


def base_of(host_us: float, kernel_us: float, **settings: object) -> Base:
    return recorded_base(training(host_us, kernel_us, **settings), 0)  # type: ignore[arg-type]


def step_us(base: Base) -> float:
    return steady(base).step_s * 1e6


def test_ops_are_selected_by_every_condition() -> None:
    base = base_of(50, 10)
    assert select(base).all()
    names = np.array(base.names.ops)
    assert set(names[select(base, name="gemm", on_device=True)]) == {"gemm_0", "gemm_1", "gemm_2"}
    assert not select(base, name="gemm", on_device=False).any()
    assert set(names[select(base, kinds=[Kind.LAUNCH], name="^cuda")]) == {"cudaLaunchKernel"}
    assert not select(base, layer="nothing has a layer").any()
    with pytest.raises(InvalidInput, match=r"needs a regular expression, but '\(' is none"):
        select(base, name="(")


@pytest.mark.parametrize("kernel_us", [10, 100, 400])
@pytest.mark.parametrize("waits", [False, True])
def test_faster_kernels_take_as_long_as_in_a_training_with_them(
    kernel_us: float, waits: bool
) -> None:
    base = base_of(50, kernel_us, waits=waits)
    faster = scale(base, base.on_device, 0.5)
    assert step_us(faster) == pytest.approx(
        step_us(base_of(50, kernel_us / 2, waits=waits)), rel=0.01
    )


def test_a_factor_must_be_a_duration() -> None:
    base = base_of(50, 10)
    for factor in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="a factor of at least 0"):
            scale(base, base.on_device, factor)


def test_a_removed_kernel_takes_its_launch_along() -> None:
    """Bound by the device it saves the kernel, bound by the host its launch."""
    slow = base_of(50, 400)
    assert step_us(remove(slow, select(slow, name="gemm_1"))) == pytest.approx(800, rel=0.01)
    idle = base_of(50, 10, waits=True)
    removed = remove(idle, select(idle, name="gemm_1"))
    kept = remove(idle, select(idle, name="gemm_1"), launches=False)
    assert step_us(kept) == pytest.approx(step_us(idle), abs=0.1)
    assert step_us(removed) == pytest.approx(step_us(idle) - 5, abs=0.1)
    assert len(removed.launched) == len(idle.launched) - 1


def test_an_inserted_kernel_delays_what_follows_it() -> None:
    slow = base_of(50, 400)
    after = np.flatnonzero(select(slow, name="gemm_1"))
    more = insert(slow, after, np.array([100e-6]), ["memcpy"], Kind.COPY)
    assert step_us(more) == pytest.approx(1300, rel=0.01)
    assert more.names.ops[slow.ops :] == ("memcpy", "launch memcpy")
    order = [more.names.ops[op] for op in more.launched]
    assert order.index("memcpy") == order.index("gemm_1") + 1
    idle = base_of(50, 10, waits=True)
    after = np.flatnonzero(select(idle, name="gemm_0"))
    more = insert(idle, after, np.array([1e-6]), ["tiny"], Kind.COPY)
    assert step_us(more) == pytest.approx(step_us(idle) + 5, abs=0.2)  # its launch


def test_removing_what_was_inserted_restores_the_step() -> None:
    base = base_of(50, 400)
    every = np.flatnonzero(base.on_device)
    more = insert(base, every, np.full(len(every), 50e-6), ["copy"] * len(every), Kind.COPY)
    assert step_us(more) == pytest.approx(1350, rel=0.01)
    assert step_us(remove(more, select(more, name="^copy$"))) == pytest.approx(1200, rel=0.01)


def test_an_op_is_inserted_behind_one_that_is_launched() -> None:
    base = base_of(50, 10)
    host = np.flatnonzero(~base.on_device)[:1]
    with pytest.raises(InvalidInput, match="has no launch"):
        insert(base, host, np.array([1e-6]), ["copy"], Kind.COPY)
    twice = np.repeat(np.flatnonzero(base.on_device)[:1], 2)
    with pytest.raises(InvalidInput, match="one is named twice"):
        insert(base, twice, np.full(2, 1e-6), ["a", "b"], Kind.COPY)


def test_added_ops_take_their_own_queue() -> None:
    """Messages of 300 us behind each of three kernels of 100 us fill a link: 900 us in a step."""
    base = base_of(50, 100)
    kernels = np.flatnonzero(base.on_device)
    linked, messages = add(base, "link", np.full(3, 300e-6), ["m0", "m1", "m2"], Kind.COLLECTIVE)
    linked = connect(linked, kernels, messages)
    assert step_us(linked) == pytest.approx(step_us(base), rel=0.01)  # nothing waits for them
    bound = connect(linked, messages, base.launch[kernels], later=1)
    assert step_us(bound) == pytest.approx(900, rel=0.01)
    last = connect(linked, messages[2], kernels[0], later=1, delay_s=50e-6)
    assert step_us(last) == pytest.approx(100 + 900 + 50, rel=0.01)
    with pytest.raises(InvalidInput, match="leads to the same step or a later one"):
        connect(base, 0, 1, later=-1)
    with pytest.raises(InvalidInput, match="a delay of at least 0"):
        connect(base, 0, 1, delay_s=float("nan"))


def test_a_schedule_lets_the_urgent_message_overtake() -> None:
    """Ready together, the message that the next step reads last goes last (as in P3)."""
    base = base_of(50, 100)
    kernels = np.flatnonzero(base.on_device)
    linked, messages = add(base, "link", np.full(3, 80e-6), ["m0", "m1", "m2"], Kind.COLLECTIVE)
    linked = connect(linked, kernels[-1], messages)
    linked = connect(linked, messages[2], kernels[0], later=1)  # the last one is read first
    linked = connect(linked, messages[0], kernels[2], later=1)
    urgent = schedule(linked, np.isin(np.arange(linked.ops), messages), [2, 1, 0])
    assert step_us(linked) == pytest.approx(300 + 240, rel=0.01)
    assert step_us(urgent) == pytest.approx(300 + 80, rel=0.01)
    with pytest.raises(InvalidInput, match="ops that a queue executes"):
        schedule(base, np.zeros(base.ops, dtype=np.bool_), 0)


def test_a_schedule_of_a_recorded_queue_drops_its_order() -> None:
    base = base_of(5, 100)
    kernels = base.on_device
    freed = schedule(base, kernels, [2, 1, 0])
    assert freed.by_priority[base.queue[kernels]].all()
    same = freed.queue[freed.parent] == freed.queue[freed.child]
    assert not np.any(same & (freed.queue[freed.parent] == base.queue[kernels][0]))
    assert step_us(freed) == pytest.approx(step_us(base), rel=0.01)
