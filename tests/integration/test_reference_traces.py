"""Real traces of CUDA and ROCm jobs from several years are read, repaired, replayed, aligned."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from autotune.dfg.chrome_trace import write_chrome_trace
from autotune.dfg.graph import COMPUTATION, Kind
from autotune.dfg.replay import Timeline, replay
from autotune.profiling.alignment import align
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces import TraceJob, read_job
from autotune.profiling.traces.job import assemble

DATA = (
    Path(os.environ.get("AUTOTUNE_REFERENCE_DATA", Path(__file__).parents[3] / "shared" / "data"))
    / "traces"
)
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"the reference traces are not in {DATA}")

STEPS = {
    "ddp_a100": [0.2213, 0.2187, 0.2239],
    "resnet50_v100": [0.1879, 0.1752, 0.1797, 0.1746, 0.1822, 0.1660],
    "resnet_checkpoint_mi300x": [0.01898, 0.01898, 0.01855],
}


@pytest.fixture(scope="module")
def dlrm() -> TraceJob:
    return read_job(DATA / "dlrm_8xv100")


@pytest.fixture(scope="module")
def dlrm_steps(dlrm: TraceJob) -> TracedSteps:
    return TracedSteps(dlrm, align(dlrm, samples=4))


@pytest.fixture(scope="module")
def dlrm_timeline(dlrm_steps: TracedSteps) -> Timeline:
    return replay(dlrm_steps.dfg())


ReplayedSteps = list[tuple[float, Timeline]]
"""The measured seconds of every step of a job, and its replay."""


@pytest.fixture(scope="module")
def replayed() -> Callable[[str], ReplayedSteps]:
    """Each job's steps, read once."""

    def steps_of(name: str) -> ReplayedSteps:
        steps = TracedSteps(read_job(DATA / name))
        return [(steps.measured_s(step), replay(steps.dfg(step))) for step in steps.job.steps]

    return cache(steps_of)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_every_traced_step_is_replayed_within_one_percent(
    replayed: Callable[[str], ReplayedSteps], name: str
) -> None:
    for (measured_s, timeline), expected_s in zip(replayed(name), STEPS[name], strict=True):
        assert measured_s == pytest.approx(expected_s, rel=1e-3)
        assert timeline.makespan_s == pytest.approx(measured_s, rel=0.01)


def test_one_step_predicts_the_others_of_its_job(replayed: Callable[[str], ReplayedSteps]) -> None:
    times = [timeline.makespan_s for _, timeline in replayed("ddp_a100")]
    assert max(times) / min(times) < 1.03


@pytest.mark.parametrize("name", ["alexnet_gpu", "cuda_event_sync_multi_stream"])
def test_small_traces_without_steps_are_one_step(name: str) -> None:
    job = read_job(DATA / "small" / f"{name}.json.gz")
    assert any("whole trace" in repair.what for repair in job.repairs)
    steps = TracedSteps(job)
    assert replay(steps.dfg()).makespan_s == pytest.approx(steps.measured_s(), rel=0.01)


def test_what_is_forward_backward_update_and_communication_is_told(
    replayed: Callable[[str], ReplayedSteps],
) -> None:
    for name in STEPS:
        _, timeline = replayed(name)[-1]
        dfg = timeline.dfg
        device = np.array(
            ["device" in dfg.names.queues[queue] if queue >= 0 else False for queue in dfg.queue]
        )
        seconds = {kind: float(dfg.duration_s[device & (dfg.kind == kind)].sum()) for kind in Kind}
        known = seconds[Kind.FORWARD] + seconds[Kind.BACKWARD] + seconds[Kind.UPDATE]
        assert known > 0.9 * sum(seconds[kind] for kind in COMPUTATION), name
        assert min(seconds[Kind.FORWARD], seconds[Kind.BACKWARD], seconds[Kind.UPDATE]) > 0, name


def test_the_eight_ranks_share_one_clock_and_replay_their_step(
    dlrm: TraceJob, dlrm_steps: TracedSteps, dlrm_timeline: Timeline
) -> None:
    assert (
        dlrm.rank_numbers == tuple(range(8))
        and len(dlrm.joints) == 8
        and all(joint.complete for joint in dlrm.joints)
    )
    assert all("linked to the execution trace" in repair.what for repair in dlrm.repairs)
    aligned = dlrm_steps.aligned
    assert np.abs(aligned.offset_s).max() < 3e-6  # one machine, and whole microseconds
    assert (
        np.all((aligned.low_s <= 1e-6) & (aligned.high_s >= -1e-6)) and aligned.worst_slack_s == 0
    )
    assert dlrm_timeline.makespan_s == pytest.approx(dlrm_steps.measured_s(), rel=0.01)


def test_the_eight_ranks_are_shown_as_one_timeline(dlrm_timeline: Timeline, tmp_path: Path) -> None:
    write_chrome_trace(dlrm_timeline, tmp_path / "all.json.gz")
    with gzip.open(tmp_path / "all.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    sent = [
        event
        for event in events
        if event["ph"] == "X" and event["name"].startswith("ncclKernel_AllReduce")
    ]
    assert len(sent) == 3 * 8 and len({event["pid"] for event in sent}) == 8
    first_s = dlrm_timeline.start_s[
        [name.startswith("ncclKernel_AllReduce") for name in dlrm_timeline.dfg.names.ops]
    ]
    assert (
        len(np.unique(np.round(first_s * 1e6))) == 3
    )  # the members of each run together once all are in


def test_offsets_injected_into_the_eight_ranks_are_found_and_their_harm_is_undone(
    dlrm: TraceJob,
) -> None:
    offsets = np.concatenate([[0.0], np.random.default_rng(1).normal(size=7) * 0.01])
    moved = [
        replace(trace, origin_ns=trace.origin_ns - round(offset * 1e9))
        for trace, offset in zip(dlrm.ranks, offsets, strict=True)
    ]
    job = assemble(moved)
    aligned = align(job, samples=2)
    np.testing.assert_allclose(aligned.offset_s, offsets, atol=3e-6)
    true_s = TracedSteps(dlrm).measured_s()
    raw, better = (
        abs(replay(TracedSteps(job, how).dfg()).makespan_s / true_s - 1) for how in (None, aligned)
    )
    assert better < 0.001 < 0.3 < raw
