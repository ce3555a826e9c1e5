"""The base of what-ifs repeats a step: its replay gives the distance of equal kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from periodic_training import training
from synthetic_traces import Job, span

from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.traces.job import assemble
from autotune.whatif.base import LAUNCH_QUEUE, MOST_COPIES, Base, bounds_s, steady
from autotune.whatif.recording.recorded import recorded_base


def with_kernels(base: Base, factor: float) -> Base:
    return replace(base, duration_s=np.where(base.on_device, factor, 1.0) * base.duration_s)


@pytest.mark.parametrize("kernel_us", [20.0, 300.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_replayed_distance_is_that_of_the_trace(
    tmp_path: Path, ranks: int, kernel_us: float
) -> None:
    job = Job(ranks=ranks, kernel_us=kernel_us, jitter_us=5.0, steps=5).read(tmp_path)
    for place in range(ranks):
        base = recorded_base(job, place)
        assert steady(base).step_s == pytest.approx(base.measured_s, rel=1e-6)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("host_us", "kernel_us"), [(50.0, 10.0), (50.0, 200.0)])
def test_a_step_without_kernels_takes_as_long_as_its_host(
    host_us: float, kernel_us: float, waits: bool
) -> None:
    """What the device hides is not lost: with fast kernels the host is the bottleneck."""
    base = recorded_base(training(host_us, kernel_us, waits=waits), 0)
    assert steady(base).step_s == pytest.approx(base.measured_s, rel=1e-6)
    host_only_s = (3 * host_us + 4 + 2 * waits) * 1e-6
    assert steady(with_kernels(base, 0.0)).step_s == pytest.approx(host_only_s, rel=0.04)


def test_slower_kernels_become_the_bottleneck() -> None:
    base = recorded_base(training(host_us=50, kernel_us=10), 0)
    slow_s = steady(with_kernels(base, 20.0)).step_s
    assert slow_s == pytest.approx(3 * 200e-6, rel=0.01)


def test_loading_is_hidden_while_the_device_is_busy() -> None:
    slow = recorded_base(training(host_us=50, kernel_us=400, load_us=500), 0)
    assert steady(slow).step_s == pytest.approx(1200e-6, rel=0.01)
    assert steady(with_kernels(slow, 0.0)).step_s == pytest.approx(654e-6, rel=0.01)


def test_the_host_runs_ahead_by_the_launch_queue_at_most() -> None:
    """A step of many launches: the last launch waits until the queue has room."""
    kernels = LAUNCH_QUEUE + 200
    base = recorded_base(training(host_us=10, kernel_us=20, kernels=kernels), 0)
    result = steady(base)
    last_copy = base.ops * (result.copies - 1)
    launch = base.launch[base.launched[-1]] + last_copy
    before = base.launched[-1 - LAUNCH_QUEUE] + last_copy
    assert result.timeline.start_s[launch] >= result.timeline.end_s[before]
    assert result.step_s == pytest.approx(kernels * 20e-6, rel=0.01)


def test_waits_without_a_known_cause_bound_the_step_time() -> None:
    """A kernel begins 200 us after everything that it is known to wait for."""
    base = recorded_base(training(host_us=50, kernel_us=10, waits=True, late_us=200), 0)
    assert base.unknown_s == pytest.approx(200e-6, rel=0.01)
    least_s, stays_s = bounds_s(base)
    assert stays_s == pytest.approx(base.measured_s, rel=1e-6)
    usual = recorded_base(training(host_us=50, kernel_us=10, waits=True), 0)
    assert least_s == pytest.approx(usual.measured_s, rel=0.01)


@pytest.mark.parametrize(("world_size", "left"), [(1, 0), (2, 1)])
def test_collectives_of_a_single_rank_send_nothing(world_size: int, left: int) -> None:
    """Gloo's threads do them although there is nobody to send to."""
    group = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1000}
    events = [
        event
        for step in range(3)
        for event in (
            span(f"ProfilerStep#{step}", 1000.0 * step, 990, cat="user_annotation"),
            span("aten::mm", 1000.0 * step + 1, 900),
            span("gloo:all_reduce", 1000.0 * step + 500, 30, tid=2, **group),  # type: ignore[arg-type]
        )
    ]
    info = {"rank": 0, "world_size": world_size, "backend": "gloo"}
    text = json.dumps({"distributedInfo": info, "traceEvents": events}).encode()
    base = recorded_base(assemble([read_kineto(BytesIO(text).read, "rank0.json")]), 0)
    assert ((base.kind == Kind.COLLECTIVE) & (base.queue != NONE)).sum() == left
    assert steady(base).step_s == pytest.approx(base.measured_s, rel=1e-6)


def test_threads_of_a_backend_are_idle_until_something_is_issued() -> None:
    """No call shows who issued the collective, but a faster host makes a step faster."""
    group = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1000}
    events = [
        event
        for step in range(3)
        for event in (
            span(f"ProfilerStep#{step}", 1000.0 * step, 990, cat="user_annotation"),
            span("aten::mm", 1000.0 * step + 1, 400),
            span("aten::add", 1000.0 * step + 410, 500),
            span("gloo:all_reduce", 1000.0 * step + 500, 30, tid=2, **group),  # type: ignore[arg-type]
        )
    ]
    text = json.dumps({"traceEvents": events}).encode()
    base = recorded_base(assemble([read_kineto(BytesIO(text).read, "rank0.json")]), 0)
    step_s = steady(base).step_s
    assert step_s == pytest.approx(base.measured_s, rel=1e-6)
    faster = replace(base, duration_s=base.duration_s / 2)
    assert steady(faster).step_s == pytest.approx(step_s - 450e-6, rel=0.01)


def test_a_replay_goes_on_until_no_queue_is_behind() -> None:
    """The stream pauses for longer than the host's step; the host gets ahead for some steps."""
    base = recorded_base(training(host_us=100, kernel_us=10), 0)
    assert steady(base).copies == base.copies()
    gap_s = base.gap_s.copy()
    gap_s[base.launched[-1]] = 400e-6
    pausing = replace(base, gap_s=gap_s, last=int(base.launch[base.launched[-1]]))
    assert steady(pausing).copies == MOST_COPIES > base.copies()


def test_one_step_is_not_enough() -> None:
    with pytest.raises(InvalidInput, match="needs two complete, consecutive training steps"):
        recorded_base(training(50, 10, steps=1), 0)


def test_pauses_in_front_of_late_launches_are_no_gaps_of_the_stream() -> None:
    """The stream idles for 8 us before each launch. Without the host's work it need not."""
    base = recorded_base(training(host_us=10, kernel_us=2, kernels=8), 0)
    free = replace(
        base,
        duration_s=np.where(base.on_device, base.duration_s, 0.0),
        gap_s=np.where(base.on_device, base.gap_s, 0.0),
    )
    assert steady(free).step_s == pytest.approx(8 * 2e-6, rel=0.01)
