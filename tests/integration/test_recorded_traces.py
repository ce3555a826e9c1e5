"""Traces of two ranks of a DDP job on gloo, whose clocks agree: injected offsets are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch_scripts import run_ranks

from autotune.dfg.graph import Kind
from autotune.dfg.replay import replay
from autotune.profiling.alignment import align
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces import TraceJob, read_job
from autotune.profiling.traces.job import assemble

OFFSET_S = 0.25

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_traced.py"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> TraceJob:
    folder = tmp_path_factory.mktemp("traces")
    done = run_ranks([str(SCRIPT), str(folder)], 2)
    assert done.returncode == 0, done.stderr
    return read_job(folder)


def test_a_recorded_job_is_matched_and_every_step_replayed(recorded: TraceJob) -> None:
    assert (
        len(recorded.steps) == 12
        and recorded.world_size == 2
        and len(set(recorded.hosts.names)) == 1
        and recorded.hosts.source == "traces"
    )
    assert len(recorded.joints) >= 24 and all(joint.complete for joint in recorded.joints)
    traced = TracedSteps(recorded)
    for step in recorded.steps:
        measured_s = traced.measured_s(step)
        assert replay(traced.dfg(step)).makespan_s == pytest.approx(measured_s, rel=0.03)
    kinds = set(traced.dfg().kind.tolist())
    assert {Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE, Kind.COLLECTIVE} <= kinds


def test_the_execution_traces_that_torch_wrote_beside_are_linked_by_id(recorded: TraceJob) -> None:
    assert [trace.schema.partition("-")[0] for trace in recorded.execution_traces] == ["1.1.1"] * 2
    for link, trace, expected in zip(
        recorded.links, recorded.execution_traces, recorded.collectives, strict=True
    ):
        assert link.by_id == link.collectives == len(expected) >= 24 and link.in_order == 0
        nodes = {int(number): index for index, number in enumerate(trace.rf_id.tolist())}
        for one in expected:
            node = nodes[one.functions[0]]
            assert (
                trace.names[trace.name[node]].startswith("gloo:")
                and trace.marks[node].name == one.comm.name
            )
            assert trace.input_bytes[node] == one.comm.size_bytes
    assert not [repair for repair in recorded.repairs if "execution trace" in repair.what]


def test_an_offset_injected_into_a_recorded_job_is_found_within_the_interval(
    recorded: TraceJob,
) -> None:
    moved = [
        replace(trace, origin_ns=trace.origin_ns - round(n * OFFSET_S * 1e9), host="")
        for n, trace in enumerate(recorded.ranks)
    ]
    job = assemble(moved)
    aligned = align(job, samples=4)
    width_s = aligned.high_s[1] - aligned.low_s[1]
    assert aligned.low_s[1] - 1e-6 <= OFFSET_S <= aligned.high_s[1] + 1e-6
    assert abs(aligned.offset_s[1] - OFFSET_S) <= width_s
    unmoved = align(assemble([replace(trace, host="") for trace in recorded.ranks]), samples=4)
    assert width_s == pytest.approx(unmoved.high_s[1] - unmoved.low_s[1], abs=1e-6)
    traced = TracedSteps(recorded)
    true_s = np.array([traced.measured_s(step) for step in recorded.steps])
    raw, better = (
        np.abs([replay(steps.dfg(step)).makespan_s for step in job.steps] / true_s - 1).mean()
        for steps in (TracedSteps(job), TracedSteps(job, aligned))
    )
    assert better < raw / 4


def test_a_known_host_ties_the_clocks_of_its_ranks(recorded: TraceJob) -> None:
    assert abs(align(recorded, samples=0).offset_s[1]) < 1e-4
