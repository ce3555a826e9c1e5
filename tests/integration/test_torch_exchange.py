"""Hierarchical messages and ring orders on real ranks: sums, order of addition, unknown hosts."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
import weakref
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_plans import mixed, uniform
from torch_world import BACKEND, on_ranks, run_world, seeded, set_host

from autotune.errors import InvalidStrategy
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import ROOTED, Compressor, Synchronizer
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.exchange import lanes
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.hierarchical import PlanGroups
from runtime_rewriter.pytorch.exchange.lanes import Lanes, Step
from runtime_rewriter.pytorch.exchange.ranks import RankGroups, SynchronizerGroups
from runtime_rewriter.pytorch.exchange.residuals import Residuals
from runtime_rewriter.pytorch.exchange.transfer import Transfer
from runtime_rewriter.pytorch.numerics import GradientGate

ON_GLOO = pytest.mark.skipif(
    BACKEND == "nccl", reason="NCCL has no order of the ring, no threads of lanes and no limit"
)

RANKS = 4


def hierarchical(plan: Plan) -> Plan:
    return replace(plan, messages=tuple(replace(m, hierarchical=True) for m in plan.messages))


class Whole(nn.Module):
    """Integer gradients, whose sum is exact in any order, of large and small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(130, 131))
        self.small = nn.Parameter(torch.zeros(5))
        self.scalar = nn.Parameter(torch.zeros(()))

    def forward(self, rank: int) -> Tensor:
        large = (self.large * (torch.arange(131.0) + 4 * rank)).sum()
        small = (self.small * torch.arange(5.0) * (rank - 2)).sum()
        return large + small + self.scalar * (rank + 1) * 8


@on_ranks(RANKS, each=[(2, 2), (3, 1), (4,), (1, 1, 1, 1)])
def test_hierarchical_messages_sum_over_all_hosts_by_every_synchronizer(
    rank: int, layout: tuple[int, ...]
) -> None:
    set_host(rank, layout)
    module = Whole()
    model = PlannedDataParallel(module)
    assert model.synchronizer.lanes._groups == {}
    large, small = (torch.arange(131.0) + 6).expand(130, 131), torch.arange(5.0) * -0.5
    plans = [
        uniform(module, RANKS, kind, compressor, partitioned)
        for kind, compressor, partitioned in itertools.product(
            Synchronizer, (Compressor.NONE, Compressor.FP16), (False, True)
        )
    ]
    for plan in (*plans, mixed(module, RANKS)):
        model.synchronizer.load(hierarchical(plan))
        for _ in range(2):
            model.zero_grad()
            model(rank).backward()
            assert torch.equal(module.large.grad, large), plan.messages[0]
            assert torch.equal(module.small.grad, small) and float(module.scalar.grad) == 20.0
    assert bool(model.synchronizer.lanes._groups) == (len(layout) in (2, 3))


@on_ranks(RANKS)
def test_hierarchical_sums_are_within_the_gates_tolerance_along_any_ring(rank: int) -> None:
    set_host(rank, (3, 1))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(50, 300), nn.Tanh(), nn.Linear(300, 7))
    model = PlannedDataParallel(module)
    gate = GradientGate(model.synchronizer)
    for order, kind, compressor in itertools.product(
        (None, (2, 0, 3, 1)), Synchronizer, (Compressor.NONE, Compressor.BF16)
    ):
        plan = hierarchical(uniform(module, RANKS, kind, compressor))
        model.synchronizer.load(replace(plan, ring_order=order))
        gate.arm()
        model.zero_grad()
        model(torch.randn(8, 50, generator=seeded(rank))).square().sum().backward()
        assert gate.error().ok, (kind, compressor, order, gate.error())


UNKNOWN_HOSTS: dict[str, list[tuple[str, str] | None]] = {
    "on rank 1 they are not set and not set": [("0", "1"), None],
    "those of rank 1 contradict": [("0", "2"), ("0", "1")],
    "those of rank 0 contradict": [("0", "2"), ("1", "3")],
    "on rank 0 they are 1 and 2": [("1", "2"), ("0", "2")],
}


@on_ranks(2)
def test_hosts_that_are_unknown_or_contradictory_are_refused_on_every_rank(rank: int) -> None:
    for error, places in UNKNOWN_HOSTS.items():
        for name, value in zip(
            ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), places[rank] or ("", ""), strict=True
        ):
            os.environ.pop(name, None)
            os.environ |= {name: value} if value else {}
        model = PlannedDataParallel(Whole())
        flat = uniform(model.module, 2)
        model.synchronizer.load(flat)
        with pytest.raises(InvalidStrategy, match=error):
            model.synchronizer.load(hierarchical(flat))
        assert model.synchronizer.plan == flat
        model(rank).backward()
        assert float(model.module.scalar.grad) == 12.0


class Values(nn.Module):
    """Its gradient is its input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def gradient_of(rank: int) -> Tensor:
    """Values so large and so small that every order of addition gives different bits."""
    return torch.randn(16 * RANKS, generator=seeded(rank)) * 10.0 ** (3 * rank)


def along(order: tuple[int, ...]) -> Tensor:
    """The sum by gloo's ring: chunk c starts at the rank before position c and goes back to c."""
    chunks = [(gradient_of(rank) * (1.0 / RANKS)).chunk(RANKS) for rank in range(RANKS)]
    passed = [
        [chunks[order[(c - 1 - hop) % RANKS]][c] for hop in range(RANKS)] for c in range(RANKS)
    ]
    return torch.cat([reduce(torch.add, parts) for parts in passed])


def check_ring(rank: int, kind: Synchronizer, *orders: tuple[int, ...]) -> list[Tensor]:
    model = PlannedDataParallel(Values(16 * RANKS))
    sums = []
    for order in orders:
        model.synchronizer.load(replace(uniform(model.module, RANKS, kind), ring_order=order))
        model.zero_grad()
        model(gradient_of(rank)).backward()
        sums.append(model.module.weight.grad)
    return sums


@ON_GLOO
@on_ranks(RANKS)
def test_gloo_adds_along_the_ring_order_of_the_plan(rank: int) -> None:
    orders = [(0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)]
    expected = [along(order) for order in orders]
    assert not torch.equal(expected[0], expected[1]) and not torch.equal(expected[0], expected[2])
    sums = check_ring(rank, Synchronizer.ALL_REDUCE, *orders)
    for order, a, b in zip(orders, sums, expected, strict=True):
        assert torch.equal(a, b), order


@on_ranks(RANKS)
def test_a_ring_order_leaves_owners_and_sums_as_they_are(rank: int) -> None:
    exact = torch.stack([gradient_of(rank).double() / RANKS for rank in range(RANKS)]).sum(0)
    for kind in list(Synchronizer)[1:]:
        (result,) = check_ring(rank, kind, (1, 3, 0, 2))
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-4)


@on_ranks(RANKS)
def test_a_subgroup_of_the_world_has_its_own_hosts_and_rings(rank: int) -> None:
    set_host(rank, (1, 3))
    members = (1, 2, 3) if rank else (0,)
    groups = [dist.new_group([0]), dist.new_group([1, 2, 3])]
    model = PlannedDataParallel(Values(6), process_group=groups[min(rank, 1)])
    if rank == 2:
        dist.new_group([2], use_local_synchronization=True)  # numbers of groups differ by rank
    plan = uniform(model.module, len(members), Synchronizer.PARAMETER_SERVER)
    for order in (None, tuple(reversed(range(len(members))))):
        model.synchronizer.load(replace(hierarchical(plan), ring_order=order))
        model.zero_grad()
        model(torch.full((6,), float(rank))).backward()
        assert model.module.weight.grad.tolist() == [2.0 if rank else 0.0] * 6
    dist.barrier()
    model.synchronizer.close()


def open_lanes(limit: int | None) -> tuple[Lanes, RankGroups]:
    ranks = SynchronizerGroups.of(None, 20.0, 20.0)
    lanes = Lanes(ranks, Device(torch.device("cpu")))
    lanes.limit = limit
    return lanes, RankGroups.world(ranks.size)


@ON_GLOO
@on_ranks(2, each=[None, 1, 2])
def test_every_lane_runs_in_plan_order_even_if_a_message_skips_lanes(
    rank: int, limit: int | None
) -> None:
    lanes, rank_groups = open_lanes(limit)
    groups = [lanes.group(lane, rank_groups) for lane in range(3)]
    started: list[int] = []
    late, overlapping = threading.Event(), threading.Event()

    def step(number: int, lane: int, value: Tensor) -> Step:
        def start() -> dist.Work | None:
            if lane == 1 and number == 0 and rank == 0:
                # Its next step comes late, but not later than that of the message after it.
                assert late.wait(30)
            if lane == 2:
                started.append(number)
            if (number, lane) == (1, 0):
                overlapping.set()
            return dist.all_reduce(value, group=groups[lane], async_op=True)

        return start

    values = [torch.full((100,), float(rank)) for _ in range(2)]
    first = lanes.run([(lane, step(0, lane, values[0])) for lane in (0, 1, 2)])
    second = lanes.run([(lane, step(1, lane, values[1])) for lane in (0, 2)])
    assert not (first.arrived or second.arrived) or rank == 1
    assert overlapping.wait(20)  # a late step holds up its own lane only
    late.set()
    second.wait()
    first.wait()
    assert first.arrived and second.arrived
    assert values[0].tolist() == [4.0] * 100 and values[1].tolist() == [2.0] * 100

    def failing() -> dist.Work | None:
        raise RuntimeError("this step fails")

    failed = lanes.run([(1, failing), (2, step(2, 2, values[0]))])
    with pytest.raises(RuntimeError, match="this step fails"):
        failed.wait()
    assert failed.arrived
    lanes.close()
    assert started == [0, 1]


def check_limit(rank: int, limit: int, direct: bool) -> list[int]:
    """How many messages were unfinished on a lane when each message began there.

    Rank 1's come late: nothing ends before rank 0 has started as many as it may.
    """
    lanes, rank_groups = open_lanes(None if direct else limit)
    lanes.direct_limit = limit if direct else None
    group, values = lanes.group(0, rank_groups), [torch.ones(10) for _ in range(4)]
    under_way: list[int] = []
    works: list[dist.Work] = []
    full = threading.Event()

    def step(value: Tensor) -> Step:
        def start() -> dist.Work | None:
            under_way.append(sum(not work.is_completed() for work in works))
            works.append(dist.all_reduce(value, group=group, async_op=True))
            if len(works) == limit:
                full.set()
            return works[-1]

        return start

    if rank == 1:
        dist.recv(torch.zeros(1), 0)
    flights = [lanes.run([(0, step(value))], direct=direct) for value in values]
    if rank == 0:
        assert full.wait(20)
        dist.send(torch.zeros(1), 1)
    for flight in flights:
        flight.wait()
    lanes.close()
    return under_way


@ON_GLOO
@pytest.mark.parametrize(("limit", "direct"), [(1, False), (2, False), (2, True)])
def test_a_lane_keeps_at_most_the_limit_of_messages_in_flight(limit: int, direct: bool) -> None:
    waiting, late = run_world(check_limit, 2, limit, direct)
    assert waiting[:limit] == list(range(limit))
    assert max(waiting) == limit - 1 and max(late) <= limit - 1


@ON_GLOO
@on_ranks(2)
def test_behind_rows_messages_of_another_kind_wait_until_the_rows_have_arrived(rank: int) -> None:
    """Others of rows wait for the first lane only, which carries the counts."""
    lanes, rank_groups = open_lanes(1)
    groups = [lanes.group(lane, rank_groups) for lane in range(2)]
    begun: list[str] = []
    late = threading.Event()

    def steps(name: str) -> list[tuple[int, Step]]:
        def start(lane: int) -> dist.Work | None:
            if rank == 1 and (name, lane) == ("rows", 1):
                assert late.wait(20)
            begun.append(f"{name} {lane}")
            return dist.all_reduce(torch.ones(100), group=groups[lane], async_op=True)

        def added() -> dist.Work | None:
            return None

        return [(0, partial(start, 0)), (1, partial(start, 1)), (2, added)]

    flights = [lanes.run(steps(name), rows=True) for name in ("rows", "more rows")]
    dense = lanes.run(steps("dense")[:1])
    time.sleep(0.3)  # in which it would start
    late.set()
    for flight in (*flights, dense):
        flight.wait()
    assert begun.index("dense 0") > begun.index("more rows 1")
    lanes.close()


@ON_GLOO
@on_ranks(3)
def test_process_groups_of_earlier_plans_are_destroyed(rank: int) -> None:
    lanes.KEPT_GROUPS = 4
    model = PlannedDataParallel(Values(8))
    counts = []
    for order in (*itertools.permutations(range(3)), (0, 1, 2), (2, 1, 0)):
        plan = uniform(model.module, 3, Synchronizer.PARAMETER_SERVER)
        model.synchronizer.load(replace(plan, ring_order=order))
        model.zero_grad()
        model(torch.full((8,), float(rank))).backward()
        assert model.module.weight.grad.tolist() == [1.0] * 8
        counts.append(len(dist.distributed_c10d._world.pg_names))
    model.synchronizer.close()
    assert max(counts) == counts[-1] == counts[2] and counts[0] < counts[2]


@ON_GLOO
@on_ranks(2, each=[None, 1, 2])
def test_a_deleted_message_frees_its_buffers_at_once(rank: int, limit: int | None) -> None:
    """Without the garbage collector: buffers are as large as the gradients and change often."""
    lanes, rank_groups = open_lanes(limit)
    parameters = {"v": torch.zeros(64, 32)}
    residuals = Residuals(parameters, rank, 2)
    settings: dict[Compressor, dict[str, Any]] = {
        Compressor.TOP_K: {"ratio": 0.1},
        Compressor.POWER_SGD: {"rank": 2},
    }
    gc.disable()
    for compressor, kind in itertools.product(Compressor, Synchronizer):
        slices = (TensorSlice("v", 64 * 32, rows=64),)
        owner = 0 if kind in ROOTED else None
        fields = {"owner": owner, **settings.get(compressor, {})}
        message = Message(slices, kind, compressor, "float32", **fields)
        transfer = Transfer(0, message, parameters, residuals, lanes, PlanGroups(rank_groups))
        transfer.pack([torch.ones(64, 32)] * len(transfer.batched), 0.5)
        transfer.issue()
        flight = weakref.ref(transfer._flights[0])  # holds works, which may hold copies
        transfer.wait()
        for thread in tuple(lanes._threads.values()):
            thread.submit(int).result()  # until then a thread may hold the last item it ran
        assert flight() is None, (compressor, kind)
        buffer = weakref.ref(transfer.views[0][1])
        del transfer
        assert buffer() is None, (compressor, kind)
    gc.enable()
