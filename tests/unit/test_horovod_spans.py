"""Logged calls of Horovod become collectives of a trace, matched across ranks."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest

from autotune.dfg.replay import replay
from autotune.profiling.formats.collective_args import comm_of
from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.formats.rank_trace import Category
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces.job import assemble
from autotune.recordings.horovod_calls import HorovodCall
from autotune.recordings.job_file import ClockPair
from runtime_rewriter.recording.horovod_spans import add_spans
from runtime_rewriter.recording.trace_file import TraceClock

CLOCK = TraceClock(ClockPair(0, 0), ClockPair(10**9, 10**9), 0)
MS = 1e-3


def call(name: str, step: int, called_s: float, complete_s: float | None) -> HorovodCall:
    return HorovodCall(
        name=name,
        op="all_reduce",
        tensors=1,
        size_bytes=4000,
        dtype="float32",
        step=step,
        called_s=called_s,
        returned_s=called_s,
        incomplete_s=called_s,
        complete_s=complete_s,
    )


def trace_of(rank: int, late_s: float = 0.0) -> tuple[dict[str, Any], list[Any]]:
    """A step with an op and two all-reduces that are under way at once."""
    events = [
        {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur}
        for cat, name, ts, dur in (
            ("user_annotation", "ProfilerStep#0", 0, 20_000),
            ("cpu_op", "aten::mm", 10, 1000 + late_s * 1e6),
            ("cpu_op", "aten::add_", 15_000, 800),
        )
    ]
    info = {"rank": rank, "world_size": 2}
    content: dict[str, Any] = {"traceEvents": events, "distributedInfo": info}
    calls = [
        call("b", 0, 2 * MS + late_s, 10 * MS),
        call("a", 0, 3 * MS + late_s, 12 * MS),
        call("cut off", 0, 4 * MS, None),
        call("before the recording", -1, 1 * MS, 2 * MS),
    ]
    return content, list(add_spans(content, calls, CLOCK, rank, 2))


def test_a_complete_call_is_a_span_from_enqueuing_to_completion() -> None:
    content, seen = trace_of(0)
    assert [(one.label, one.size_bytes, one.ranks) for one in seen] == [
        ("horovod b", 4000, 2),
        ("horovod a", 4000, 2),
    ]
    assert (seen[0].start_s, seen[0].end_s) == pytest.approx((2 * MS, 10 * MS))
    spans = [event for event in content["traceEvents"] if event["name"].startswith("horovod:")]
    assert [span["tid"] for span in spans] == ["horovod 0", "horovod 1"]  # they overlap


def test_a_gather_has_the_size_of_its_result() -> None:
    content: dict[str, Any] = {"traceEvents": []}
    gather = replace(call("rows", 0, 1 * MS, 2 * MS), op="all_gather")
    (seen,) = add_spans(content, [gather], CLOCK, 0, 4)
    (span,) = content["traceEvents"]
    comm = comm_of(span["name"], Category.HOST_MARK, span["args"])
    assert comm is not None
    assert comm.size_bytes == seen.size_bytes == 4 * gather.size_bytes


def test_calls_of_all_ranks_match_and_replay() -> None:
    traces = []
    for rank in (0, 1):
        content, _ = trace_of(rank, late_s=rank * MS)
        text = json.dumps(content).encode()
        traces.append(read_kineto(io.BytesIO(text).read, f"rank{rank}.json"))
    job = assemble(traces)
    assert [(joint.name, joint.complete, joint.mutual) for joint in job.joints] == [
        ("all_reduce", True, True)
    ] * 2
    steps = TracedSteps(job)
    assert replay(steps.dfg()).makespan_s == pytest.approx(steps.measured_s())
