"""The replay of a traced step gives its time, and a change moves only the ops that depend on it."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_traces import Event, Job, span

from autotune.dfg.graph import Dfg, Kind
from autotune.dfg.replay import replay
from autotune.errors import InvalidInput
from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.formats.rank_trace import RankTrace
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces.job import TraceJob, assemble

A, B = (f"autograd::engine::evaluate_function: {name}" for name in "AB")
COPY = "Memcpy DtoH (Device -> Pageable)"


def trace_of(events: list[Event], **fields: Any) -> RankTrace:
    text = json.dumps({**fields, "traceEvents": events}).encode()
    return read_kineto(BytesIO(text).read, "rank0.json")


def job_of(events: list[Event]) -> TraceJob:
    return assemble([trace_of(events)])


def mark(name: str, ts: float, dur: float) -> Event:
    return span(name, ts, dur, cat="user_annotation")


def call(name: str, ts: float, dur: float, correlation: int) -> Event:
    return span(name, ts, dur, cat="cuda_runtime", correlation=correlation)


def launch(ts: float, correlation: int) -> Event:
    return call("cudaLaunchKernel", ts, 5, correlation)


def kernel(
    name: str, ts: float, dur: float, correlation: int, stream: int = 7, cat: str = "kernel"
) -> Event:
    place = {"correlation": correlation, "stream": stream, "device": 0}
    return {**span(name, ts, dur, stream, cat, **place), "pid": 0}


def starts_us(dfg: Dfg, durations_us: dict[str, float]) -> dict[str, float]:
    """When each op starts, with the durations of some ops changed."""
    duration_s = dfg.duration_s.copy()
    for name, us in durations_us.items():
        duration_s[list(dfg.names.ops).index(name)] = us * 1e-6
    times_us = replay(dfg, duration_s).start_s * 1e6
    return dict(zip(dfg.names.ops, times_us.round(3).tolist(), strict=True))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kernel_us", [20.0, 300.0])
def test_the_replay_of_every_step_gives_its_measured_time(
    tmp_path: Path, ranks: int, kernel_us: float
) -> None:
    job = Job(ranks=ranks, kernel_us=kernel_us, jitter_us=5.0).read(tmp_path)
    steps = TracedSteps(job)
    for step in job.steps:
        measured_s = pytest.approx(steps.measured_s(step), rel=1e-6)
        assert replay(steps.dfg(step)).makespan_s == measured_s
        for rank in job.rank_numbers:
            alone_s = TracedSteps(job.alone(rank)).measured_s(step)
            makespan_s = replay(steps.rank_dfg(rank, step)).makespan_s
            assert makespan_s == pytest.approx(alone_s, rel=1e-6)


Moves = list[tuple[dict[str, float], dict[str, float]]]
"""Changed durations of ops with the starts of ops that they lead to, all in us."""
MOVES: dict[str, tuple[list[Event], Moves]] = {
    "a gap of a thread delays its next op and not the device": (
        [span("a", 0, 10), launch(10, 1), span("b", 115, 10), kernel("k", 18, 30, 1)],
        [({}, {"k": 18, "b": 115}), ({"a": 30}, {"k": 38, "b": 135})],
    ),
    # after the first with the same pause, but no sooner than 3 us after its own launch
    "a kernel follows the one before on its stream, or else its launch": (
        [launch(0, 1), launch(10, 2), kernel("first", 8, 50, 1), kernel("second", 60, 10, 2)],
        [({}, {"second": 60}), ({"first": 20}, {"second": 30}), ({"first": 1}, {"second": 18})],
    ),
    # the last: at 10 us, plus 4 us of the call itself and 3 us after it
    "a synchronization ends some time after the device": (
        [
            *(launch(0, 1), kernel("k", 8, 90, 1)),
            *(call("cudaStreamSynchronize", 10, 92, 2), span("after", 105, 5)),
        ],
        [({}, {"after": 105}), ({"k": 40}, {"after": 55}), ({"k": 1}, {"after": 17})],
    ),
    "a copy to pageable memory holds its call until it is done": (
        [
            *(launch(0, 1), kernel("k", 8, 50, 1), call("cudaMemcpyAsync", 10, 60, 2)),
            *(kernel(COPY, 59, 5, 2, cat="gpu_memcpy"), span("after", 70, 5)),
        ],
        [({}, {"after": 70}), ({"k": 30}, {"after": 50})],
    ),
    "the backward thread is released by the thread that waits for it": (
        [
            *(span("forward", 0, 50), span(A, 60, 100, tid=2), span(B, 170, 100, tid=2)),
            *(mark("Optimizer.step#SGD.step", 280, 40), span("update", 281, 30)),
        ],
        [({"forward": 80}, {A: 90, "update": 311}), ({B: 50}, {"update": 231})],
    ),
}


@pytest.mark.parametrize("rule", MOVES)
def test_a_changed_duration_moves_the_ops_that_depend_on_it(rule: str) -> None:
    events, moves = MOVES[rule]
    dfg = TracedSteps(job_of(events)).dfg()
    for durations_us, expected_us in moves:
        times_us = starts_us(dfg, durations_us)
        assert {name: times_us[name] for name in expected_us} == pytest.approx(
            expected_us, abs=0.1 if durations_us == {"first": 1} else 1e-6
        )
    kinds = dict(zip(dfg.names.ops, dfg.kind, strict=True))
    expected = {COPY: Kind.COPY, "forward": Kind.FORWARD, "update": Kind.UPDATE, B: Kind.BACKWARD}
    assert all(kinds.get(name, kind) == kind for name, kind in expected.items())


def stream_wait(recorded: bool) -> list[Event]:
    events = [
        *(launch(0, 1), kernel("first", 8, 60, 1, stream=7), call("cudaEventRecord", 6, 1, 2)),
        *(call("cudaStreamWaitEvent", 8, 1, 3), launch(10, 4)),
        kernel("second", 70, 20, 4, stream=20),
    ]
    if recorded:
        wait = kernel("Stream Wait Event", 9, 1, 3, stream=20, cat="cuda_sync")
        wait["args"] |= {"cuda_sync_kind": "Stream Wait Event", "wait_on_stream": 7}
        wait["args"]["wait_on_cuda_event_record_corr_id"] = 2
        events.append(wait)
    return events


@pytest.mark.parametrize("recorded", [True, False])
def test_a_stream_that_waits_for_another_is_read_from_events_or_inferred(recorded: bool) -> None:
    steps = TracedSteps(job_of(stream_wait(recorded)))
    assert starts_us(steps.dfg(), {"first": 30})["second"] == 40
    assert steps.rank_ops(0, 0).inferred == (0 if recorded else 1)


def on_device(event: Event, device: int) -> Event:
    return {**event, "pid": device, "args": event["args"] | {"device": device}}


def test_a_wait_is_for_the_stream_of_its_own_device() -> None:
    """Two devices have a stream 7, and the wait was for the one that was launched on first."""
    other = [{**launch(0, 9), "tid": 2}, kernel("other", 6, 20, 9)]
    second = [on_device(e, 1) if "device" in e["args"] else e for e in stream_wait(True)]
    dfg = TracedSteps(job_of(other + second)).dfg()
    assert starts_us(dfg, {"first": 30})["second"] == 40
    assert starts_us(dfg, {"other": 90})["second"] == 70


def test_streams_that_merely_follow_each_other_are_not_tied() -> None:
    events = [event for event in stream_wait(False) if event["name"] != "cudaStreamWaitEvent"]
    assert starts_us(TracedSteps(job_of(events)).dfg(), {"first": 30})["second"] == 70


def gloo(name: str, ts: float, dur: float, tid: int, queue_us: Any) -> Event:
    record = {"transaction": f"0:{tid}", "queue_us": queue_us}
    args = {"Collective name": name, "autotune": record}
    return span(f"gloo:{name}", ts, dur, tid, "user_annotation", **args)


def marked(*events: Event, step_us: float = 200.0) -> list[Event]:
    return [mark(f"ProfilerStep#{n}", n * step_us, step_us) for n in (0, 1)] + list(events)


def test_a_collective_follows_its_call_whichever_thread_began_first() -> None:
    calls = [span("c10d::allreduce_", 0, 10), span("between", 10, 30)]
    calls += [span("c10d::broadcast_", 40, 10), span("end", 390, 1)]
    late, early = gloo("allreduce", 100, 50, 2, 95.0), gloo("broadcast", 60, 30, 3, 15.0)
    job = job_of(marked(*calls, late, early, step_us=400.0))
    assert [one.comm.name for one in job.collectives[0]] == ["all_reduce", "broadcast"]
    graph = TracedSteps(job).rank_ops(0, 0)
    edges = {(graph.ops[parent].name, graph.ops[child].name) for parent, child in graph.edges}
    assert {("c10d::allreduce_", "gloo:allreduce"), ("c10d::broadcast_", "gloo:broadcast")} <= edges
    assert ("c10d::allreduce_", "gloo:broadcast") not in edges


@pytest.mark.parametrize(
    ("queue_us", "step"),
    [(15, 0), (5.0, 1), (-15, 1), ("15", 1), (True, 1), (10**400, 1), (None, 1)],
)
def test_a_valid_queue_time_gives_the_step_that_issued_a_collective(
    queue_us: Any, step: int
) -> None:
    job = job_of(marked(span("c10d::allreduce_", 190, 10), gloo("allreduce", 210, 50, 2, queue_us)))
    assert [one.step for one in job.collectives[0]] == [step]


def test_modules_name_the_layers_of_forward_and_backward_ops() -> None:
    def numbered(name: str, ts: float, dur: float, sequence: int, tid: int = 1) -> Event:
        args: dict[str, Any] = {"Sequence number": sequence}
        return span(name, ts, dur, tid, **args)

    events = [
        mark("DistributedDataParallel.forward", 0, 30),
        span("nn.Module: Linear_0", 0, 20, cat="python_function"),
        *(numbered("aten::linear", 2, 10, 7), numbered("aten::relu", 22, 5, 8)),
        numbered("autograd::engine::evaluate_function: AddmmBackward0", 50, 20, 7, tid=2),
        span("aten::mm", 55, 5, tid=2),
    ]
    dfg = TracedSteps(job_of(events)).dfg()
    layers = [dfg.names.layers[layer] if layer >= 0 else "" for layer in dfg.layer]
    layer_of = dict(zip(dfg.names.ops, layers, strict=True))
    assert layer_of["aten::linear"] == layer_of["aten::mm"] == "Linear_0"
    assert layer_of["aten::relu"] == ""  # the whole forward pass is no layer


def test_a_device_that_lags_behind_its_host_gives_the_time_between_ends() -> None:
    events = []
    for step in range(3):
        at = 100.0 * step
        events += [mark(f"ProfilerStep#{step}", at, 99), launch(at + 10, step + 1)]
        events.append(kernel(f"k{step}", 20 + 250.0 * step, 250, step + 1))
    steps = TracedSteps(job_of(events))
    assert [steps.measured_s(step) for step in (0, 1)] == pytest.approx([260e-6, 250e-6])
    assert replay(steps.dfg(2)).makespan_s == pytest.approx(250e-6)


def test_work_launched_before_the_trace_began_belongs_to_no_step() -> None:
    events = [kernel("earlier", 0, 100, 3), launch(20, 50), kernel("later", 100, 40, 50)]
    dfg = TracedSteps(job_of(events)).dfg()
    assert "earlier" not in dfg.names.ops
    assert replay(dfg).makespan_s == pytest.approx(40e-6)
    graph = job_of([call("cudaGraphLaunch", 0, 5, 50), kernel("captured", 10, 40, 77)])
    assert "captured" in TracedSteps(graph).dfg().names.ops
    assert TracedSteps(graph).rank_ops(0, 0).orphans == 1


def test_the_wait_for_others_is_not_part_of_a_collectives_duration(tmp_path: Path) -> None:
    job = Job(ranks=3, steps=1, layers=1, spread_us=500.0).read(tmp_path)
    dfg = TracedSteps(job).dfg()
    transfers = dfg.duration_s[dfg.kind == Kind.COLLECTIVE]
    np.testing.assert_allclose(transfers, 200e-6, atol=5e-7)
    assert max(one.end_s - one.start_s for rank in job.collectives for one in rank) > 250e-6
    first_layer = np.array([name == "gemm_0" for name in dfg.names.ops])
    faster = dfg.duration_s.copy()
    slowest = int(np.argmax(np.where(first_layer, dfg.duration_s, 0)))
    faster[slowest] = dfg.duration_s[first_layer].min()  # the others no longer wait for it
    assert replay(dfg, faster).makespan_s < replay(dfg).makespan_s - 50e-6


def test_a_root_does_not_wait_for_those_who_receive() -> None:
    args = {"Collective name": "broadcast", "In msg nelems": 8, "dtype": "Float", "Root Rank": 0}
    args |= {"Process Group Ranks": "[0, 1]", "Group size": 2}
    ranks = []
    for rank, (start, end) in enumerate([(20, 30), (50, 90)]):
        broadcast = kernel("ncclKernel_Broadcast_RING_LL(x)", start, end - start, 1)
        broadcast["args"].update(args)
        info = {"rank": rank, "world_size": 2}
        events = [span("begin", 0, 1), launch(0, 1), broadcast]
        ranks.append(trace_of(events, distributedInfo=info))
    dfg = TracedSteps(assemble(ranks)).dfg()
    sent = dfg.kind == Kind.COLLECTIVE
    order = np.argsort(dfg.worker[sent])
    times_s = np.stack([replay(dfg).start_s[sent], dfg.duration_s[sent]], axis=1)[order]
    assert (times_s * 1e6).round().tolist() == [[20, 10], [50, 40]]


def test_collectives_that_lack_a_counterpart_are_reported(tmp_path: Path) -> None:
    job = Job(ranks=2, steps=1).read(tmp_path)
    assert len(job.joints) == 4 and not job.repairs
    rank = job.ranks[1]
    remaining = rank.correlation != rank.correlation[job.collectives[1][2].event]
    columns = "start_s duration_s category lane name correlation external sequence size_bytes"
    names = [*columns.split(), "comm", "sync"]
    cut = {name: getattr(rank, name)[remaining] for name in names}
    less = assemble([job.ranks[0], replace(rank, **cut)])
    assert len(less.joints) == 3
    assert any("no counterpart on ranks 1" in repair.what for repair in less.repairs)


def test_absent_steps_and_ranks_are_refused(tmp_path: Path) -> None:
    job = Job(ranks=2, steps=2).read(tmp_path)
    with pytest.raises(InvalidInput, match="step must be one of 0, 1, but is 5"):
        TracedSteps(job).dfg(5)
    with pytest.raises(InvalidInput, match="rank must be one of 0, 1, but is 2"):
        TracedSteps(job).rank_dfg(2)
    later = tuple(replace(step, number=step.number + 9) for step in job.ranks[1].steps)
    with pytest.raises(InvalidInput, match="a step in common"):
        assemble([job.ranks[0], replace(job.ranks[1], steps=later)])
