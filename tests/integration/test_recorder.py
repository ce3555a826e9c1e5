"""The recorder in real jobs of two ranks over Gloo: what it writes, and that it changes nothing."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections import Counter
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
from autotune.errors import InvalidInput
from autotune.profiling.alignment import align
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces import read_job
from autotune.profiling.traces.job import assemble
from autotune.recordings.graph_file import GRAPH_FILE
from autotune.recordings.job_file import ORDINARY_STEPS, RecordedJob, trace_name
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import Compressor, Synchronizer
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.recording.turns import MOST_BETWEEN

RECORDED, WARMUP = 3, 2
OFFSET_S = 0.25
BEFORE = WARMUP + 5 + 6 + 2
"""Steps before the first recorded one: warm-up, workload, memory, settling."""


class Stateful(nn.Module):
    """A forward pass changes its state: a replaced buffer, a frozen average, an attribute."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(40), requires_grad=False)
        self.hidden = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        self.mean = 0.9 * self.mean + 0.1 * mean.mean()
        self.hidden = 0.5 * self.hidden + mean.sum()
        self.frozen.data.mul_(0.9).add_(mean, alpha=0.1)
        return x + 0.01 * (self.mean + self.hidden.tanh() + self.frozen)


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(24, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 40), nn.Linear(40, 5)
    return nn.Sequential(*layers[:4], Stateful(), *layers[4:])


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
            wrapped, folder=folder, steps=RECORDED, warmup=WARMUP, **{"between": 0, **options}
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
    variables = sum(p.numel() for p in model().parameters() if p.requires_grad)
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
    from autotune.dfg.replay import replay  # brings numba, which no rank needs

    truth = read_job(ddp_job[0])
    assert truth.hosts.source == "job file" and len(truth.joints) >= 3 * RECORDED
    moved = [
        replace(trace, origin_ns=trace.origin_ns - round(n * OFFSET_S * 1e9), host="")
        for n, trace in enumerate(truth.ranks)
    ]
    job = assemble(moved)
    aligned = align(job, samples=0)
    width_s = aligned.high_s[1] - aligned.low_s[1]
    assert aligned.low_s[1] - 1e-6 <= OFFSET_S <= aligned.high_s[1] + 1e-6
    unmoved = align(assemble([replace(trace, host="") for trace in truth.ranks]), samples=0)
    assert width_s == pytest.approx(unmoved.high_s[1] - unmoved.low_s[1], abs=1e-6)
    assert abs(aligned.offset_s[1] - OFFSET_S) <= width_s
    traced = TracedSteps(truth)
    true_s = np.array([traced.measured_s(step) for step in truth.steps])
    raw, better = (
        np.abs([replay(steps.dfg(step)).makespan_s for step in job.steps] / true_s - 1).mean()
        for steps in (TracedSteps(job), TracedSteps(job, aligned))
    )
    assert better < raw / 4


def counted(folder: Path, rank: int) -> tuple[list[Counter[str]], list[str]]:
    """The events by name of every recorded step, and those within ordinary steps."""
    events = [event for event in trace_of(folder, rank)["traceEvents"] if event.get("ph") == "X"]
    steps: list[Counter[str]] = []
    ordinary: list[str] = []
    for mark in sorted(events, key=lambda event: float(event["ts"])):
        is_step = mark["name"].startswith("ProfilerStep#")
        if not is_step and mark["name"] != ORDINARY_STEPS:
            continue
        inside = [
            event["name"]
            for event in events
            if event is not mark and mark["ts"] <= event["ts"] < mark["ts"] + mark["dur"]
        ]
        if is_step:
            steps.append(Counter(inside))
        else:
            ordinary += inside
    return steps, ordinary


def test_ordinary_steps_leave_nothing_in_the_traces_and_change_no_bit(ddp_job, tmp_path) -> None:
    """Each recorded step stays whole, and its graph gives its time."""
    from autotune.dfg.replay import replay  # brings numba, which no rank needs

    steps = BEFORE + RECORDED + 2 * (RECORDED - 1) + 2
    results = run_world(trained, 2, str(tmp_path / "turns"), steps, True, {"between": 2})
    without = run_world(trained, 2, str(tmp_path / "without"), steps, False, {})
    assert {result[0] for result in results} == {result[0] for result in without}
    assert results[0][1:] == (True, "DistributedDataParallel")
    job = RecordedJob.read(tmp_path / "turns")
    assert (job.steps, job.between) == (RECORDED, 2)
    for record in job.ranks:
        assert len(record.ordinary_s) == 2 * (RECORDED - 1)
        (consecutive, *_), none = counted(ddp_job[0], record.rank)
        recorded, ordinary = counted(tmp_path / "turns", record.rank)
        assert recorded == [consecutive] * RECORDED and not ordinary and not none
    traced = TracedSteps(read_job([tmp_path / "turns"]))
    for record in job.ranks:
        alone = TracedSteps(traced.job.alone(record.rank))  # a step of a rank has one clock
        for step, step_s in zip(traced.job.steps, record.step_s, strict=True):
            assert alone.measured_s(step) < step_s + min(record.ordinary_s)
    for step in traced.job.steps:
        assert replay(traced.dfg(step)).makespan_s == pytest.approx(traced.measured_s(step), 0.1)


def until_written(rank: int, folder: str) -> int:
    sys.argv = ["train.py", "--api-key", "bluebottle"]  # of this process alone
    wrapped = DistributedDataParallel(model())
    recorder = autotune.Recorder(wrapped, folder=folder, steps=RECORDED, warmup=WARMUP)
    step = autotune.profile(recorder)(Training(rank, wrapped).step)
    steps = 0
    while not recorder.written:
        step()
        steps += 1
    return steps


def test_all_ranks_choose_the_same_number_of_ordinary_steps(tmp_path) -> None:
    steps = run_world(until_written, 2, str(tmp_path))
    job = RecordedJob.read(tmp_path)
    assert steps == [BEFORE + RECORDED + job.between * (RECORDED - 1)] * 2
    assert job.command == ("train.py", "--api-key", "***")
    assert job.steps == RECORDED and 0 <= job.between <= MOST_BETWEEN
    assert [len(record.ordinary_s) for record in job.ranks] == [job.between * (RECORDED - 1)] * 2
    assert (job.recording_cost is None) == (job.between == 0)


def test_messages_that_cross_the_step_need_all_steps_recorded(tmp_path) -> None:
    run_world(under_a_plan, 2, str(tmp_path), 2, True)
    job = RecordedJob.read(tmp_path)
    assert (job.steps, job.between, job.recording_cost) == (RECORDED, 0, None)
    assert (
        "no ordinary steps between the recorded ones: a recorded step contains messages of the "
        "step before" in job.notes
    )


def ended_early(rank: int, folder: str) -> bool:
    wrapped = DistributedDataParallel(model())
    recorder = autotune.Recorder(
        wrapped, folder=f"{folder}/host{rank}", steps=RECORDED, warmup=WARMUP, between=0
    )
    step = autotune.profile(recorder)(Training(rank, wrapped, clips=True).step)
    for _ in range(BEFORE + 1):
        step()
    recorder.finish()
    step()
    return recorder.written


@pytest.fixture(scope="module")
def two_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of two hosts without a common file system, with files of an earlier recording."""
    folder = tmp_path_factory.mktemp("hosts")
    for host in ("host0", "host1"):
        (folder / host).mkdir()
        for name in (trace_name(2), trace_name(10), GRAPH_FILE):
            (folder / host / name).write_bytes(b"earlier")
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


def under_a_plan(
    rank: int, folder: str, between: int = 0, crossing: bool = False, others: bool = False
) -> str:
    module = model()
    synchronizer = attach(module, replace(plan_of(module), cross_step=crossing))
    recorder = autotune.Recorder(
        module, folder=folder, steps=RECORDED, warmup=WARMUP, between=between
    )
    step = autotune.profile(recorder)(Training(rank, module, others=others).step)
    ordinary = 0 if crossing else between * (RECORDED - 1)
    for _ in range(BEFORE + RECORDED + ordinary):
        step()
    assert recorder.written and synchronizer.plan is not None
    return synchronizer.plan.id


@pytest.mark.parametrize("between", [0, 2])
def test_messages_of_a_plan_carry_its_id_their_number_and_push_apart_from_pull(
    tmp_path, between: int
) -> None:
    plan_id = run_world(under_a_plan, 2, str(tmp_path), between, False, True)[0]
    job = RecordedJob.read(tmp_path)
    assert job.plan is not None and job.plan.id == job.plan_id == plan_id
    for rank in range(2):
        collectives = trace_of(tmp_path, rank)["autotune"]["collectives"]
        assert {one["step"] for one in collectives} == set(range(RECORDED))
        messages = [one for one in collectives if one["step"] == 0 and one["origin"] == "message"]
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
