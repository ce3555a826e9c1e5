"""The parts of recorded steps, from traces small enough to add up by hand."""

from __future__ import annotations

from typing import Any

import pytest
from synthetic_traces import Event, span

from autotune.errors import InvalidInput
from autotune.recordings.job_file import JOB_FILE, ClockPair, RankRecord, RecordedJob
from autotune.recordings.recorded_steps import (
    SeenCollective,
    StepBreakdown,
    collective_rows,
    step_times,
)
from autotune.workload import Variable, Workload


def event(name: str, start_us: float, took_us: float, cat: str = "cpu_op", tid: int = 1) -> Event:
    return span(name, start_us, took_us, tid, cat)


STEP = [
    event("ProfilerStep#0", 0.0, 1000.0, "user_annotation"),
    event("aten::linear", 100.0, 200.0),
    event("aten::addmm", 150.0, 100.0),
    event("autograd::engine::evaluate_function: AddmmBackward0", 400.0, 300.0),
    event("AddmmBackward0", 400.0, 300.0),
    event("c10d::allreduce_", 720.0, 10.0),
]


def test_a_step_is_cut_where_the_backward_pass_begins_and_ends() -> None:
    times = step_times(STEP, [])
    parts_s = (times.forward_s, times.backward_s, times.rest_s)
    assert parts_s == pytest.approx((400e-6, 300e-6, 300e-6))
    assert times.computation_s == pytest.approx(500e-6)


def test_only_what_no_computation_covers_is_exposed() -> None:
    times = step_times(STEP, [(250.0, 450.0), (600.0, 800.0), (650.0, 900.0), (950.0, 1200.0)])
    assert times.communication_s == pytest.approx((200 + 300 + 50) * 1e-6)
    assert times.exposed_s == pytest.approx((100 + 200 + 50) * 1e-6)


def test_an_operator_does_not_count_what_it_calls() -> None:
    times = {op.name: (op.self_s, op.calls) for op in step_times(STEP, []).top_ops}
    assert times["aten::linear"] == (pytest.approx(100e-6), 1.0)
    assert times["aten::addmm"] == (pytest.approx(100e-6), 1.0)
    assert "c10d::allreduce_" not in times


def test_kernels_are_the_computation_where_there_is_a_device() -> None:
    gemm = event("gemm", 500.0, 100.0, "kernel", 7)
    nccl = event("ncclDevKernel_AllReduce", 550.0, 300.0, "kernel", 20)
    times = step_times([*STEP, gemm, nccl], [(550.0, 850.0)])
    assert times.computation_s == pytest.approx(100e-6)
    assert times.exposed_s == pytest.approx(250e-6)


def test_only_steps_with_an_optimizers_step_are_counted_as_updated() -> None:
    def step(start_us: float, *updates_us: float) -> list[Event]:
        moved = [{**one, "ts": one["ts"] + start_us} for one in STEP]
        return moved + [
            event("Optimizer.step#SGD.step", start_us + at_us, 10.0, "user_annotation")
            for at_us in updates_us
        ]

    events = [*step(0.0), *step(1000.0, 800.0, 820.0), *step(2000.0, 999.0)]
    assert step_times(events, []).updated_steps == 2
    assert step_times(step(0.0), []).updated_steps == 0


def test_a_trace_without_marks_gives_an_empty_breakdown() -> None:
    assert step_times(STEP[1:], []) == StepBreakdown()


def collective(
    transaction: str, start_s: float, end_s: float, queue_s: float = 0.0
) -> SeenCollective:
    return SeenCollective(transaction, "bucket 0", "allreduce", 40, 2, start_s, end_s, queue_s)


def test_a_collective_lasts_as_long_as_on_the_rank_that_came_last() -> None:
    first = [collective("0:1", 0.0, 1.0), collective("0:2", 2.0, 2.5, 0.25)]
    second = [collective("0:1", 0.75, 1.0), collective("0:2", 2.0, 2.5)]
    (row,) = collective_rows([first, second], 2)
    assert (row.per_step, row.lasts_s, row.waits_s, row.queue_s) == (1.0, 0.375, 0.375, 0.125)


def recorded() -> RecordedJob:
    variable = Variable("w", (2, 3), ready_s=0.1, needed_s=0.0)
    workload = Workload("Net", (variable,), source="measured")
    ranks = []
    for rank in range(2):
        times = (ClockPair(1, 2),), (0.5, 0.25 + rank, 0.75)
        file = f"rank{rank}.json.gz"
        ranks.append(RankRecord(rank, "host", "cpu", "x", 1, file, *times, 3, 1))
    steps = (3, 3, 3)
    extra: dict[str, Any] = {"buckets": (("w",),), "notes": ("a note",)}
    return RecordedJob(2, tuple(ranks), *steps, workload.id, workload, **extra)


def test_a_recorded_job_is_read_as_it_was_written(tmp_path) -> None:
    job = recorded()
    job.write(tmp_path)
    assert RecordedJob.read(tmp_path) == job
    assert job.iteration_s == 0.75  # of the slowest rank: 0.5, 1.25, 0.75


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ('"rank0.json.gz"', '"../rank0.json.gz"', "must be a file of the folder"),
        ('"world_size": 2', '"world_size": 3', "one record of each of its 3 ranks"),
        ('"steps": 3', '"steps": 4', "must have 4 recorded steps"),
        ('"schema": 1\n}', '"schema": 2\n}', "schema 1, but the file has 2"),
        ('"world_size": 2', '"world_size": 1000000000000', "one record of each of its 10+ ranks"),
        ('"asked_steps": 3', '"asked_steps": -1', "finite figures of at least 0"),
        ('"backward_s": 0.0', '"backward_s": -0.5', "the parts of a step must have finite"),
        ('"untimed": 1', '"untimed": 4', "must be 0 to all 3, but are 4"),
    ],
)
def test_a_job_file_that_was_changed_is_refused(tmp_path, old: str, new: str, rule: str) -> None:
    path = recorded().write(tmp_path)
    assert path.name == JOB_FILE and old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(InvalidInput, match=rule):
        RecordedJob.read(tmp_path)
