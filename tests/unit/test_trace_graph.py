"""The replay of a traced step gives its time, and a change moves only the ops that depend on it."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_traces import Job

from autotune.dfg.graph import Dfg, Kind
from autotune.dfg.replay import replay
from autotune.errors import InvalidInput
from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces.job import TraceJob, assemble, read_job


def job_of(events: list[dict[str, Any]], **fields: Any) -> TraceJob:
    text = json.dumps({**fields, "traceEvents": events}).encode()
    return assemble([read_kineto(BytesIO(text).read, "rank0.json")])


def host(
    name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op", **args: Any
) -> dict[str, Any]:
    times = {"ts": ts, "dur": dur}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, **times, "args": args}


def numbered(sequence: int) -> dict[str, Any]:
    return {"Sequence number": sequence}


def call(name: str, ts: float, dur: float, correlation: int, tid: int = 1) -> dict[str, Any]:
    return host(name, ts, dur, tid, "cuda_runtime", correlation=correlation)


def kernel(
    name: str, ts: float, dur: float, correlation: int, stream: int = 7, cat: str = "kernel"
) -> dict[str, Any]:
    return {
        **host(name, ts, dur, stream, cat, correlation=correlation, stream=stream, device=0),
        "pid": 0,
    }


def starts_us(dfg: Dfg, **durations_us: float) -> dict[str, float]:
    """When each op starts, with the durations of some ops changed."""
    duration_s = dfg.duration_s.copy()
    for name, us in durations_us.items():
        duration_s[list(dfg.names.ops).index(name)] = us * 1e-6
    found = replay(dfg, duration_s)
    return {
        name: round(float(start) * 1e6, 3)
        for name, start in zip(dfg.names.ops, found.start_s, strict=True)
    }


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kernel_us", [20.0, 300.0])
def test_the_replay_of_every_step_gives_its_measured_time(
    tmp_path: Path, ranks: int, kernel_us: float
) -> None:
    job = Job(ranks=ranks, kernel_us=kernel_us, jitter_us=5.0).read(tmp_path)
    for step in job.steps:
        assert replay(TracedSteps(job).dfg(step)).makespan_s == pytest.approx(
            TracedSteps(job).measured_s(step), rel=1e-6
        )
        for rank in job.rank_numbers:
            assert replay(TracedSteps(job).rank_dfg(rank, step)).makespan_s == pytest.approx(
                TracedSteps(job.alone(rank)).measured_s(step), rel=1e-6
            )


def test_a_gap_of_a_thread_delays_its_next_op_and_not_the_device() -> None:
    events = [
        host("a", 0, 10),
        call("cudaLaunchKernel", 10, 5, 1),
        host("b", 115, 10),
        kernel("k", 18, 30, 1),
        kernel("never", 2000, 1, 9),
    ]
    dfg = TracedSteps(job_of(events[:4])).dfg()
    assert starts_us(dfg)["k"] == 18 and starts_us(dfg)["b"] == 115
    longer = starts_us(dfg, a=30)
    assert longer["k"] == 38 and longer["b"] == 135


def test_a_kernel_that_waits_for_its_stream_follows_the_one_before_and_else_its_launch() -> None:
    events = [
        call("cudaLaunchKernel", 0, 5, 1),
        call("cudaLaunchKernel", 10, 5, 2),
        kernel("first", 8, 50, 1),
        kernel("second", 60, 10, 2),
    ]
    dfg = TracedSteps(job_of(events)).dfg()
    assert starts_us(dfg)["second"] == 60
    assert starts_us(dfg, first=20)["second"] == 30  # with the same pause behind it
    assert starts_us(dfg, first=1)["second"] == pytest.approx(
        18, abs=0.1
    )  # no sooner than its own launch lets it: 3 us as the first's


def test_a_synchronization_takes_what_is_left_of_it_once_the_device_is_done() -> None:
    events = [
        call("cudaLaunchKernel", 0, 5, 1),
        kernel("k", 8, 90, 1),
        call("cudaStreamSynchronize", 10, 92, 2),
        host("after", 105, 5),
    ]
    dfg = TracedSteps(job_of(events)).dfg()
    assert starts_us(dfg)["after"] == 105
    assert starts_us(dfg, k=40)["after"] == 55
    assert starts_us(dfg, k=1)["after"] == pytest.approx(17)  # 10 + 4 of its own + 3 behind it


def test_a_copy_to_pageable_memory_holds_its_call_until_it_is_done() -> None:
    events = [
        call("cudaLaunchKernel", 0, 5, 1),
        kernel("k", 8, 50, 1),
        call("cudaMemcpyAsync", 10, 60, 2),
        kernel("Memcpy DtoH (Device -> Pageable)", 59, 5, 2, cat="gpu_memcpy"),
        host("after", 70, 5),
    ]
    dfg = TracedSteps(job_of(events)).dfg()
    assert starts_us(dfg)["after"] == 70 and starts_us(dfg, k=30)["after"] == 50
    assert dfg.kind[list(dfg.names.ops).index("Memcpy DtoH (Device -> Pageable)")] == Kind.COPY


def stream_wait(told: bool) -> list[dict[str, Any]]:
    events = [
        call("cudaLaunchKernel", 0, 5, 1),
        kernel("first", 8, 60, 1, stream=7),
        call("cudaEventRecord", 6, 1, 2),
        call("cudaStreamWaitEvent", 8, 1, 3),
        call("cudaLaunchKernel", 10, 5, 4),
        kernel("second", 70, 20, 4, stream=20),
    ]
    if told:
        args = {
            "cuda_sync_kind": "Stream Wait Event",
            "wait_on_stream": 7,
            "wait_on_cuda_event_record_corr_id": 2,
            "correlation": 3,
        }
        events.append(
            {
                **host("Stream Wait Event", 9, 1, 20, "cuda_sync", stream=20, device=0, **args),
                "pid": 0,
            }
        )
    return events


@pytest.mark.parametrize("told", [True, False])
def test_a_stream_that_waits_for_another_is_known_from_events_or_inferred(told: bool) -> None:
    job = job_of(stream_wait(told))
    assert starts_us(TracedSteps(job).dfg(), first=30)["second"] == 40
    assert TracedSteps(job).rank_ops(0, 0).inferred == (0 if told else 1)


def test_streams_that_merely_follow_each_other_are_not_tied() -> None:
    events = [event for event in stream_wait(False) if event["name"] != "cudaStreamWaitEvent"]
    assert starts_us(TracedSteps(job_of(events)).dfg(), first=30)["second"] == 70


def test_the_thread_that_runs_backward_is_released_by_the_one_that_waits_for_it() -> None:
    events = [
        host("forward", 0, 50),
        host("autograd::engine::evaluate_function: A", 60, 100, tid=2),
        host("autograd::engine::evaluate_function: B", 170, 100, tid=2),
        host("Optimizer.step#SGD.step", 280, 40, cat="user_annotation"),
        host("update", 281, 30),
    ]
    dfg = TracedSteps(job_of(events)).dfg()
    longer = starts_us(dfg, forward=80)
    assert longer["autograd::engine::evaluate_function: A"] == 90 and longer["update"] == 311
    assert starts_us(dfg, **{"autograd::engine::evaluate_function: B": 50})["update"] == 231
    kinds = dict(zip(dfg.names.ops, dfg.kind, strict=True))
    assert kinds["forward"] == Kind.FORWARD and kinds["update"] == Kind.UPDATE
    assert kinds["autograd::engine::evaluate_function: B"] == Kind.BACKWARD


def gloo(name: str, ts: float, dur: float, tid: int, queue_us: Any) -> dict[str, Any]:
    own = {"transaction": f"0:{tid}", "queue_us": queue_us}
    return host(
        f"gloo:{name}",
        ts,
        dur,
        tid,
        "user_annotation",
        **{"Collective name": name, "autotune": own},
    )


def marked(*events: dict[str, Any], step_us: float = 200.0) -> list[dict[str, Any]]:
    return [
        host(f"ProfilerStep#{number}", number * step_us, step_us, cat="user_annotation")
        for number in (0, 1)
    ] + list(events)


def test_a_collective_follows_the_call_that_issued_it_whichever_thread_began_first() -> None:
    calls = [
        host("c10d::allreduce_", 0, 10),
        host("between", 10, 30),
        host("c10d::broadcast_", 40, 10),
        host("end", 390, 1),
    ]
    late, early = gloo("allreduce", 100, 50, 2, 95.0), gloo("broadcast", 60, 30, 3, 15.0)
    job = job_of(marked(*calls, late, early, step_us=400.0))
    assert [one.comm.name for one in job.collectives[0]] == ["all_reduce", "broadcast"]
    found = TracedSteps(job).rank_ops(0, 0)
    edges = {(found.ops[parent].name, found.ops[child].name) for parent, child in found.edges}
    assert {("c10d::allreduce_", "gloo:allreduce"), ("c10d::broadcast_", "gloo:broadcast")} <= edges
    assert ("c10d::allreduce_", "gloo:broadcast") not in edges


@pytest.mark.parametrize(
    ("queue_us", "step"),
    [(15, 0), (5.0, 1), (-15, 1), ("15", 1), (True, 1), (10**400, 1), (None, 1)],
)
def test_a_collective_belongs_to_the_step_it_was_issued_in_where_that_is_told(
    queue_us: Any, step: int
) -> None:
    job = job_of(marked(host("c10d::allreduce_", 190, 10), gloo("allreduce", 210, 50, 2, queue_us)))
    assert [one.step for one in job.collectives[0]] == [step]


def test_modules_name_the_layers_of_forward_and_backward_ops() -> None:
    events = [
        host("DistributedDataParallel.forward", 0, 30, cat="user_annotation"),
        host("nn.Module: Linear_0", 0, 20, cat="python_function"),
        host("aten::linear", 2, 10, **numbered(7)),
        host("aten::relu", 22, 5, **numbered(8)),
        host("autograd::engine::evaluate_function: AddmmBackward0", 50, 20, tid=2, **numbered(7)),
        host("aten::mm", 55, 5, tid=2),
    ]
    dfg = TracedSteps(job_of(events)).dfg()
    layers = {
        name: dfg.names.layers[layer] if layer >= 0 else ""
        for name, layer in zip(dfg.names.ops, dfg.layer, strict=True)
    }
    assert layers["aten::linear"] == layers["aten::mm"] == "Linear_0"
    assert layers["aten::relu"] == ""  # the whole forward pass is no layer


def test_a_device_that_lags_behind_its_host_gives_the_time_between_ends() -> None:
    events = []
    for step in range(3):
        at = 100.0 * step
        events += [
            host(f"ProfilerStep#{step}", at, 99, cat="user_annotation"),
            call("cudaLaunchKernel", at + 10, 5, step + 1),
        ]
        events.append(kernel(f"k{step}", 20 + 250.0 * step, 250, step + 1))
    job = job_of(events)
    assert TracedSteps(job).measured_s(1) == pytest.approx(250e-6) and TracedSteps(job).measured_s(
        0
    ) == pytest.approx(260e-6)
    assert replay(TracedSteps(job).dfg(2)).makespan_s == pytest.approx(250e-6)


def test_work_launched_before_the_trace_began_belongs_to_no_step() -> None:
    events = [
        kernel("earlier", 0, 100, 3),
        call("cudaLaunchKernel", 20, 5, 50),
        kernel("own", 100, 40, 50),
    ]
    job = job_of(events)
    assert "earlier" not in TracedSteps(job).dfg().names.ops
    assert replay(TracedSteps(job).dfg()).makespan_s == pytest.approx(40e-6)
    graph = job_of([call("cudaGraphLaunch", 0, 5, 50), kernel("captured", 10, 40, 77)])
    assert (
        "captured" in TracedSteps(graph).dfg().names.ops
        and TracedSteps(graph).rank_ops(0, 0).orphans == 1
    )


def test_waiting_for_others_is_no_duration_of_a_collective(tmp_path: Path) -> None:
    job = Job(ranks=3, steps=1, layers=1, spread_us=500.0).read(tmp_path)
    dfg = TracedSteps(job).dfg()
    transfers = dfg.duration_s[dfg.kind == Kind.COLLECTIVE]
    np.testing.assert_allclose(transfers, 200e-6, atol=5e-7)
    waited = max(one.end_s - one.start_s for own in job.collectives for one in own)
    assert waited > 250e-6
    slow = int(np.argmax(np.where([name == "gemm_0" for name in dfg.names.ops], dfg.duration_s, 0)))
    faster = dfg.duration_s.copy()
    faster[slow] = np.sort(dfg.duration_s[[name == "gemm_0" for name in dfg.names.ops]])[0]
    assert (
        replay(dfg, faster).makespan_s < replay(dfg).makespan_s - 50e-6
    )  # the others no longer wait for it


def test_a_root_does_not_wait_for_those_who_receive() -> None:
    def rank(number: int, start: float, end: float) -> dict[str, Any]:
        said = {
            "Collective name": "broadcast",
            "In msg nelems": 8,
            "dtype": "Float",
            "Root Rank": 0,
            "Process Group Ranks": "[0, 1]",
            "Group size": 2,
        }
        events = [
            call("cudaLaunchKernel", 0, 5, 1),
            kernel("ncclKernel_Broadcast_RING_LL(x)", start, end - start, 1),
        ]
        events[1]["args"].update(said)
        return {
            "distributedInfo": {"rank": number, "world_size": 2},
            "traceEvents": [host("begin", 0, 1), *events],
        }

    job = assemble(
        [
            read_kineto(BytesIO(json.dumps(rank(n, *at)).encode()).read, f"{n}")
            for n, at in enumerate([(20, 30), (50, 90)])
        ]
    )
    dfg = TracedSteps(job).dfg()
    by_worker = {
        int(w): (round(float(s) * 1e6), round(float(d) * 1e6))
        for k, w, s, d in zip(
            dfg.kind, dfg.worker, replay(dfg).start_s, dfg.duration_s, strict=True
        )
        if k == Kind.COLLECTIVE
    }
    assert by_worker == {0: (20, 10), 1: (50, 40)}


def test_collectives_that_lack_a_counterpart_are_told(tmp_path: Path) -> None:
    job = Job(ranks=2, steps=1).read(tmp_path)
    assert len(job.joints) == 4 and not job.repairs
    kept = job.ranks[1].correlation[job.collectives[1][2].event]
    keep = job.ranks[1].correlation != kept
    cut = {
        name: getattr(job.ranks[1], name)[keep]
        for name in ("start_s", "duration_s", "category", "lane", "name", "correlation")
    }
    cut |= {
        name: getattr(job.ranks[1], name)[keep]
        for name in ("external", "sequence", "size_bytes", "comm", "sync")
    }
    less = assemble([job.ranks[0], replace(job.ranks[1], **cut)])
    assert len(less.joints) == 3 and any(
        "no counterpart on ranks 1" in repair.what for repair in less.repairs
    )


def test_steps_and_ranks_that_are_not_there_are_refused(tmp_path: Path) -> None:
    job = Job(ranks=2, steps=2).read(tmp_path)
    with pytest.raises(InvalidInput, match="step must be one of 0, 1, but is 5"):
        TracedSteps(job).dfg(5)
    with pytest.raises(InvalidInput, match="rank must be one of 0, 1, but is 2"):
        TracedSteps(job).rank_dfg(2)
    with pytest.raises(InvalidInput, match="a step in common"):
        assemble(
            [
                job.ranks[0],
                replace(
                    job.ranks[1],
                    steps=tuple(replace(s, number=s.number + 9) for s in job.ranks[1].steps),
                ),
            ]
        )
    (tmp_path / "job.json").write_text(
        json.dumps({"ranks": [{"rank": 0, "host": "a"}, {"rank": 1, "host": "b"}]})
    )
    assert read_job(tmp_path).hosts.names == ("a", "b")
