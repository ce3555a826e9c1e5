"""Sends and receives in a recording of three ranks over Gloo: of a script, and of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch_world import BACKEND, run_world, seeded

import autotune
from autotune.profiling.alignment import align
from autotune.profiling.alignment.same_clock import SAME_S
from autotune.profiling.formats.rank_trace import RankTrace
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces import read_job
from autotune.profiling.traces.job import TraceJob, assemble
from autotune.profiling.traces.matching import POINT_TO_POINT
from autotune.recordings.job_file import RecordedJob
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import Compressor, Synchronizer
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.attached import attach

STEPS, WARMUP, BETWEEN = 3, 1, 1
OFFSET_S = 0.25
ANY = 5
"""Tag of the messages that rank 0 receives from any rank."""

pytestmark = pytest.mark.skipif(BACKEND == "nccl", reason="NCCL sends in groups of its kernels")


def plan_of(module: nn.Module) -> Plan:
    """A direct exchange of which rank 0 owns nothing, and an all-reduce on the same group."""
    workload = assumed_workload(module)
    slices = [TensorSlice(variable.name, variable.elements) for variable in workload.variables]
    direct = Message(tuple(slices[:2]), Synchronizer.DIRECT_EXCHANGE, Compressor.NONE, "float32")
    summed = Message(tuple(slices[2:]), Synchronizer.ALL_REDUCE, Compressor.NONE, "float32")
    return Plan(workload.id, 3, (replace(direct, shares=(0.0, 0.5, 0.5)), summed))


def trained(rank: int, folder: str) -> None:
    """Rank 0 gathers by hand, so that each rank makes another number of sends and receives."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 5))
    attach(module, plan_of(module))
    optimizer, data = torch.optim.SGD(module.parameters(), lr=0.05), seeded(rank)
    leaders = dist.new_group([1, 2])
    recorder = autotune.Recorder(
        module, folder=folder, steps=STEPS, warmup=WARMUP, between=BETWEEN, workload=False
    )

    @autotune.profile(recorder)
    def step() -> None:
        optimizer.zero_grad()
        module(torch.randn(8, 24, generator=data)).square().mean().backward()
        optimizer.step()
        value = torch.zeros(4 + rank)
        if rank == 0:
            for other in (2, 1):
                dist.recv(torch.empty(4 + other), src=other)
            dist.recv(torch.empty(6), tag=ANY)
        else:
            dist.send(value, dst=0)
            dist.broadcast(torch.ones(3), src=2, group=leaders)
        if rank == 2:
            dist.send(value, dst=0, tag=ANY)
        dist.all_reduce(torch.ones(9))

    while not recorder.written:
        step()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    run_world(trained, 3, str(folder))
    assert RecordedJob.read(folder).between == BETWEEN
    return folder


def test_a_send_leads_to_its_receive_and_no_message_moves_the_number_of_a_collective(
    folder: Path,
) -> None:
    job = read_job(folder)
    matched: Counter[str] = Counter()
    for joint in job.joints:
        comms = {place: job.collectives[place][index].comm for place, index in joint.members}
        assert len({comm.size_bytes for comm in comms.values()}) == 1 and joint.complete
        matched[joint.name if joint.name not in POINT_TO_POINT else "pair"] += 1
        if joint.name in POINT_TO_POINT:
            (receiver,) = comms.keys() - {joint.root}
            assert joint.is_pair and comms[joint.root].peer == receiver
            assert comms[receiver].name == "recv" and comms[receiver].peer == joint.root
    # of a step: two gathered by hand; the other ranks' shares to two owners, and two sums to each
    # of the others; a message of the plan and one of the script
    assert matched["pair"] == STEPS * (2 + 4 + 4) and matched["all_reduce"] == STEPS * 2
    everything = [one.comm for of_rank in job.collectives for one in of_rank if one.step >= 0]
    sent = sum(comm.name in POINT_TO_POINT for comm in everything)
    assert sent == 2 * matched["pair"] + 2 * STEPS  # and those from any rank, without a pair


def test_the_root_of_a_sub_group_is_a_rank_of_the_world(folder: Path) -> None:
    job = read_job(folder)
    broadcasts = [joint for joint in job.joints if joint.name == "broadcast"]
    assert len(broadcasts) == STEPS and {joint.root for joint in broadcasts} == {2}


def test_the_graph_of_a_step_gives_its_time_and_waits_for_senders(folder: Path) -> None:
    from autotune.dfg.replay import replay  # brings numba, which no rank needs

    traced = TracedSteps(read_job(folder))
    for step in traced.job.steps:
        dfg = traced.dfg(step)
        assert replay(dfg).makespan_s == pytest.approx(traced.measured_s(step), 0.1)
        gates = [name for name in dfg.names.ops if name.startswith("all in ") and "#" in name]
        assert len(gates) == 2 + 4 + 4


def test_messages_alone_align_clocks_that_were_moved(folder: Path) -> None:
    ranks = read_job(folder).ranks
    unmoved, aligned = (
        align(_messages_only(assemble(_with_offsets(ranks, offset_s))), samples=2)
        for offset_s in (0.0, OFFSET_S)
    )
    true_s, width_s = OFFSET_S * np.arange(3), aligned.high_s - aligned.low_s
    assert np.all(aligned.low_s - SAME_S <= true_s) and np.all(true_s <= aligned.high_s + SAME_S)
    np.testing.assert_allclose(width_s, unmoved.high_s - unmoved.low_s, atol=SAME_S)
    assert np.all(np.abs(aligned.offset_s - true_s) <= width_s + SAME_S)
    assert np.all(aligned.spread_s[1:] > 0)


def _with_offsets(ranks: Sequence[RankTrace], offset_s: float) -> list[RankTrace]:
    """The traces as if rank n were on a host of its own, whose clock is n offsets ahead."""
    return [
        replace(trace, origin_ns=trace.origin_ns - round(n * offset_s * 1e9), host="")
        for n, trace in enumerate(ranks)
    ]


def _messages_only(job: TraceJob) -> TraceJob:
    return replace(job, joints=tuple(joint for joint in job.joints if joint.is_pair))
