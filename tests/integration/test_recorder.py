"""The recorder in real jobs of two ranks over Gloo: what it writes, and that it changes nothing."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_world import BACKEND, run_world, seeded

import autotune
from autotune.dfg.replay import replay
from autotune.errors import InvalidInput
from autotune.profiling.alignment import align
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces import read_job
from autotune.profiling.traces.job import assemble
from autotune.recordings.job_file import RecordedJob, trace_name
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import Compressor, Synchronizer
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel

RECORDED, WARMUP = 3, 2
OFFSET_S = 0.25
BEFORE = WARMUP + 5 + 6 + 2
"""Steps before the first recorded one: warm-up, workload, memory, settling."""


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(24, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 40), nn.Linear(40, 5)
    )


def digest(module: nn.Module) -> str:
    state = b"".join(
        value.detach().cpu().numpy().tobytes() for value in module.state_dict().values()
    )
    return hashlib.sha256(state).hexdigest()


class Training:
    """One step of a script; with `others` it also sends something itself, on its own group."""

    def __init__(
        self, rank: int, wrapped: nn.Module, others: bool = True, clips: bool = False
    ) -> None:
        self.wrapped, self.others, self.clips = wrapped, others, clips
        self.data = seeded(rank)
        self.optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        self.group = dist.new_group([1, 0], group_desc="script's")

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.wrapped(torch.randn(8, 24, generator=self.data)).square().mean()
        loss.backward()
        if self.clips:
            nn.utils.clip_grad_value_(self.wrapped.parameters(), 1.0)
        self.optimizer.step()
        if self.others:
            dist.broadcast(torch.ones(6), src=1, group=self.group)
        return loss.item()


def trained(
    rank: int, folder: str, steps: int, record: bool, options: dict[str, Any]
) -> tuple[str, bool, str]:
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.004)
    training = Training(rank, wrapped)
    step, recorder = training.step, None
    if record:
        recorder = autotune.Recorder(
            wrapped, folder=folder, steps=RECORDED, warmup=WARMUP, **options
        )
        step = autotune.profile(recorder)(step)
    for _ in range(steps):
        step()
    return digest(wrapped), recorder is not None and recorder.written, type(wrapped).__name__


@pytest.fixture(scope="module")
def ddp_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("recorded")
    return folder, run_world(trained, 2, str(folder), BEFORE + RECORDED + 2, True, {})


def trace_of(folder: Path, rank: int) -> dict[str, Any]:
    with gzip.open(folder / trace_name(rank)) as file:
        trace: dict[str, Any] = json.load(file)
    return trace


def test_training_gives_the_same_bits_and_the_ddp_is_its_own_again(ddp_job, tmp_path) -> None:
    _, with_recorder = ddp_job
    without = run_world(trained, 2, str(tmp_path), BEFORE + RECORDED + 2, False, {})
    assert {result[0] for result in with_recorder} == {result[0] for result in without}
    assert with_recorder[0][1:] == (True, "DistributedDataParallel")
    assert not list(tmp_path.iterdir())


def test_every_rank_has_its_trace_with_the_asked_steps(ddp_job) -> None:
    folder, _ = ddp_job
    job = RecordedJob.read(folder)
    assert (job.world_size, job.steps, job.backend, job.cross_step_refused) == (
        2,
        RECORDED,
        BACKEND,
        "",
    )
    for rank in range(2):
        trace = trace_of(folder, rank)
        assert (trace["distributedInfo"]["rank"], trace["distributedInfo"]["world_size"]) == (
            rank,
            2,
        )
        marks = [
            event["name"]
            for event in trace["traceEvents"]
            if event["name"].startswith("ProfilerStep#")
        ]
        assert marks == [f"ProfilerStep#{number}" for number in range(RECORDED)]
        assert any(event["name"] == "aten::addmm" for event in trace["traceEvents"])


def test_buckets_buffers_and_the_scripts_own_collectives_have_the_same_transactions_on_both_ranks(
    ddp_job,
) -> None:
    folder, _ = ddp_job
    collectives = [trace_of(folder, rank)["autotune"]["collectives"] for rank in range(2)]
    fields = ("transaction", "op", "origin", "bytes", "step")
    first, second = ([[one[key] for key in fields] for one in of_rank] for of_rank in collectives)
    assert first == second and len({one[0] for one in first}) == len(first)
    assert all(
        "start_us" in one and one["end_us"] >= one["start_us"] and one["queue_us"] >= 0
        for of_rank in collectives
        for one in of_rank
    )
    in_step = [one for one in collectives[0] if one["step"] == 1]
    buckets = [one for one in in_step if one["origin"] == "bucket"]
    variables = sum(p.numel() for p in model().parameters())
    assert len(buckets) > 1 and sum(one["in_elements"] for one in buckets) == variables
    assert [one["bucket"] for one in buckets] == list(range(len(buckets)))
    (scripts_own,) = (one for one in in_step if one["origin"] == "script")
    assert (scripts_own["op"], scripts_own["bytes"], sorted(scripts_own["ranks"])) == (
        "broadcast_",
        24,
        [0, 1],
    )
    assert Path(scripts_own["site"].rpartition(":")[0]).name == Path(__file__).name
    assert {one["op"] for one in in_step if one["origin"] == "buffers"} == {"broadcast_"}


def test_the_workload_and_the_buckets_belong_to_the_model(ddp_job) -> None:
    job = RecordedJob.read(ddp_job[0])
    assert job.workload is not None and job.workload.source == "measured"
    assert job.model_id == job.workload.id == assumed_workload(model()).id
    assert all(0 < v.ready_s <= job.workload.backward_s for v in job.workload.variables)
    assert sorted(name for bucket in job.buckets for name in bucket) == sorted(
        v.name for v in job.workload.variables
    )
    rows = [row for row in job.collectives if row.label.startswith("bucket")]
    assert len(rows) == len(job.buckets) and all(
        row.per_step == 1 and row.lasts_s > 0 for row in rows
    )
    sizes = {variable.name: variable.grad_bytes for variable in job.workload.variables}
    assert [row.size_bytes for row in rows] == [
        sum(sizes[name] for name in bucket) for bucket in job.buckets
    ]


def test_injected_offsets_are_found_and_the_replay_of_aligned_traces_is_better(ddp_job) -> None:
    truth = read_job(ddp_job[0])
    assert truth.hosts.source == "job file" and len(truth.joints) >= 3 * RECORDED
    moved = [
        replace(trace, origin_ns=trace.origin_ns - round(n * OFFSET_S * 1e9), host="")
        for n, trace in enumerate(truth.ranks)
    ]
    job = assemble(moved)
    aligned = align(job, samples=0)
    width_s = aligned.high_s[1] - aligned.low_s[1]
    assert aligned.low_s[1] - 1e-6 <= OFFSET_S <= aligned.high_s[1] + 1e-6 and width_s < 0.05
    assert abs(aligned.offset_s[1] - OFFSET_S) <= width_s
    true_s = np.array([TracedSteps(truth).measured_s(step) for step in truth.steps])
    raw, better = (
        np.abs(
            [replay(TracedSteps(job, how).dfg(step)).makespan_s for step in job.steps] / true_s - 1
        ).mean()
        for how in (None, aligned)
    )
    assert better < raw / 4


def ended_early(rank: int, folder: str) -> bool:
    wrapped = DistributedDataParallel(model())
    recorder = autotune.Recorder(
        wrapped, folder=f"{folder}/host{rank}", steps=RECORDED, warmup=WARMUP
    )
    step = autotune.profile(recorder)(Training(rank, wrapped, clips=True).step)
    for _ in range(BEFORE + 1):
        step()
    recorder.finish()
    step()
    return recorder.written


@pytest.fixture(scope="module")
def two_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of two hosts without a common file system; one has an earlier trace."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "host0").mkdir()
    (folder / "host0" / trace_name(1)).write_bytes(b"earlier")
    assert run_world(ended_early, 2, str(folder)) == [True, True]
    return [folder / f"host{rank}" for rank in range(2)]


def test_what_was_recorded_until_now_can_be_written(two_folders) -> None:
    job = RecordedJob.read(two_folders[0])
    assert (job.steps, job.asked_steps) == (1, RECORDED)
    assert "gradients are changed between backward() and step()" in job.cross_step_refused


def test_every_host_has_the_job_and_its_own_traces_and_all_folders_together_are_one_job(
    two_folders, ddp_job
) -> None:
    first, second = two_folders
    assert RecordedJob.read(first) == RecordedJob.read(second)
    assert sorted(path.name for path in first.iterdir()) == [
        "job.json",
        "memory.json",
        trace_name(0),
        trace_name(1),
    ]
    assert sorted(path.name for path in second.iterdir()) == [
        "job.json",
        "memory.json",
        trace_name(1),
    ]
    job = read_job(two_folders)
    assert job.rank_numbers == (0, 1) and job.joints
    assert "a trace that was given more than once is read once" in [
        repair.what for repair in job.repairs
    ]
    assert read_job([first / trace_name(0), second / trace_name(1)]).rank_numbers == (0, 1)
    with pytest.raises(InvalidInput, match="must be of one recording"):
        read_job([first, ddp_job[0]])


def raising(rank: int, folder: str) -> str:
    wrapped = DistributedDataParallel(model())
    recorder = autotune.Recorder(wrapped, folder=folder, steps=RECORDED, warmup=WARMUP)
    training = Training(rank, wrapped)
    fails = iter([False] * (BEFORE + 1) + [True])

    @autotune.profile(recorder)
    def step() -> float:
        if next(fails):
            raise ValueError("planted")
        return training.step()

    with pytest.raises(ValueError, match="planted"):
        while True:
            step()
    training.step()
    return type(wrapped).__name__


def test_a_step_that_raises_ends_the_recording_and_nothing_else(tmp_path) -> None:
    assert run_world(raising, 2, str(tmp_path)) == ["DistributedDataParallel"] * 2
    assert not list(tmp_path.iterdir())


def plan_of(module: nn.Module) -> Plan:
    """A parameter server for the first half of the variables, one all-reduce for the rest."""
    workload = assumed_workload(module)
    slices = [TensorSlice(variable.name, variable.elements) for variable in workload.variables]
    half = len(slices) // 2
    messages = (
        Message(
            tuple(slices[:half]), Synchronizer.PARAMETER_SERVER, Compressor.NONE, "float32", owner=1
        ),
        Message(tuple(slices[half:]), Synchronizer.ALL_REDUCE, Compressor.NONE, "float32"),
    )
    return Plan(workload.id, 2, messages)


def under_a_plan(rank: int, folder: str) -> str:
    module = model()
    synchronizer = attach(module, plan_of(module))
    recorder = autotune.Recorder(module, folder=folder, steps=RECORDED, warmup=WARMUP)
    step = autotune.profile(recorder)(Training(rank, module, others=False).step)
    for _ in range(BEFORE + RECORDED):
        step()
    assert recorder.written and synchronizer.plan is not None
    return synchronizer.plan.id


def test_messages_of_a_plan_carry_its_id_their_number_and_push_apart_from_pull(tmp_path) -> None:
    plan_id = run_world(under_a_plan, 2, str(tmp_path))[0]
    job = RecordedJob.read(tmp_path)
    assert job.plan is not None and job.plan.id == job.plan_id == plan_id
    for rank in range(2):
        messages = [
            one
            for one in trace_of(tmp_path, rank)["autotune"]["collectives"]
            if one["step"] == 0 and one["origin"] == "message"
        ]
        steps = sorted(
            (one["message"], one["lane"], one["part"], one["op"], one["plan"]) for one in messages
        )
        assert steps == [
            (0, 0, "push", "gather_", plan_id),
            (0, 1, "pull", "scatter_", plan_id),
            (1, 0, "reduce", "allreduce_", plan_id),
        ]
        assert all("start_us" in one for one in messages)


class OwnDdp(DistributedDataParallel):
    """A script's own class."""


def refused(rank: int) -> str:
    with pytest.raises(InvalidInput, match="but is a OwnDdp") as raised:
        autotune.Recorder(OwnDdp(model()))
    with pytest.raises(InvalidInput, match="at least 1 step"):
        autotune.Recorder(PlannedDataParallel(model()), steps=0)
    dist.barrier()  # rank 0 has the store, which the other one still needs to make its groups
    return str(raised.value)


def test_a_ddp_of_another_class_and_no_steps_are_refused() -> None:
    assert len(run_world(refused, 2)) == 2
