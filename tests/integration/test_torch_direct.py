"""Direct exchanges on real ranks: bits, bytes, order of addition, and a rank that dies in one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_plans import uniform
from torch_world import BACKEND, on_ranks, run_world, seeded, set_host

from autotune.errors import SynchronizationError
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.shares import owned_bounds
from autotune.strategy_space.strategy import Compressor, Synchronizer
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.exchange.lanes import Step
from runtime_rewriter.recording.collectives import CollectiveLog

DIRECT = Synchronizer.DIRECT_EXCHANGE
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
ON_GLOO = pytest.mark.skipif(BACKEND == "nccl", reason="NCCL ends the process, and sends in groups")


class Several(nn.Module):
    """Gradients that are its inputs: large, small, empty and scalar."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        shapes: list[tuple[int, ...]] = [(1030, 7), (5,), (0,), ()]
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        products = [(w * g.conj()).sum() for w, g in zip(self.weights, gradients, strict=True)]
        return torch.stack([p.real if p.is_complex() else p for p in products]).sum()


def gradients_of(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Values so large and so small that every order of addition gives different bits."""
    scale = 1.0 if dtype is torch.float16 else 10.0 ** (2 * rank)
    generator = seeded(rank)
    draws = [torch.randn(w.shape, generator=generator) for w in Several(torch.float32).weights]
    return [(draw * scale).to(dtype) for draw in draws]


def synchronized(model: PlannedDataParallel, plan: Plan, rank: int) -> list[Tensor]:
    model.synchronizer.load(plan)
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    model(gradients_of(rank, dtype)).backward()
    return [weight.grad.clone() for weight in model.module.weights]


def plans(module: nn.Module, size: int) -> Iterator[Plan]:
    """Direct exchanges by equal and unequal shares, a single owner, in pieces, and several at
    once."""
    plan = uniform(module, size, DIRECT)
    unequal = tuple(2.0 * (rank + 1) / (size * (size + 1)) for rank in range(size))
    served = tuple(float(rank == 1) for rank in range(size))
    for shares, pieces, in_flight in ((None, 1, 1), (unequal, 3, 2), (served, 2, 8)):
        messages = tuple(replace(m, shares=shares, pieces=pieces) for m in plan.messages)
        yield replace(plan, messages=messages, in_flight=in_flight)


@on_ranks(2, each=DTYPES)
def test_two_ranks_get_the_bits_of_an_all_reduce(rank: int, dtype: torch.dtype) -> None:
    model = PlannedDataParallel(Several(dtype))
    expected = synchronized(model, uniform(model.module, 2), rank)
    for plan in plans(model.module, 2):
        for ours, ring in zip(synchronized(model, plan, rank), expected, strict=True):
            assert torch.equal(ours, ring), plan


@on_ranks(3, 5)
def test_all_ranks_get_the_bits_of_a_sum_in_rank_order(rank: int) -> None:
    size = dist.get_world_size()
    model = PlannedDataParallel(Several(torch.float32))
    scaled = [[g * (1.0 / size) for g in gradients_of(r, torch.float32)] for r in range(size)]
    expected = [reduce(torch.add, of_ranks) for of_ranks in zip(*scaled, strict=True)]
    backwards = [reduce(torch.add, of_ranks[::-1]) for of_ranks in zip(*scaled, strict=True)]
    assert not torch.equal(expected[0], backwards[0])
    for plan in plans(model.module, size):
        for ours, in_order in zip(synchronized(model, plan, rank), expected, strict=True):
            assert torch.equal(ours, in_order), plan
    along = tuple(reversed(range(size)))
    for plan in plans(model.module, size):
        reordered = synchronized(model, replace(plan, ring_order=along), rank)
        assert torch.equal(reordered[0], backwards[0])


@ON_GLOO
@on_ranks(4)
def test_each_byte_is_sent_to_its_owner_and_back_exactly_once(rank: int) -> None:
    model = PlannedDataParallel(Several(torch.float32))
    for plan in plans(model.module, 4):
        synchronized(model, plan, rank)
        log = CollectiveLog()
        with log.watching():
            synchronized(model, plan, rank)
        sent = sum(issued.in_elements for issued in log.issued if issued.op == "send")
        received = sum(issued.in_elements for issued in log.issued if issued.op == "recv_")
        total = owned = 0
        for message in plan.messages:
            total += message.elements
            for piece in range(message.pieces):
                count = message.pieces
                elements = message.elements
                size = (piece + 1) * elements // count - piece * elements // count
                bounds = owned_bounds(size, message.shares, range(4))
                owned += bounds[rank + 1] - bounds[rank]
        # what others own, and own sums to three ranks; the same in the other direction
        assert sent == received == total - owned + 3 * owned


@on_ranks(4)
def test_leaders_of_hosts_own_what_their_ranks_own_together(rank: int) -> None:
    set_host(rank, (2, 2))
    model = PlannedDataParallel(Several(torch.float32))
    exact = [
        sum((g.double() / 4 for g in of_ranks), torch.zeros(()).double())
        for of_ranks in zip(*(gradients_of(r, torch.float32) for r in range(4)), strict=True)
    ]
    for plan in plans(model.module, 4):
        two_level = replace(
            plan, messages=tuple(replace(m, hierarchical=True) for m in plan.messages)
        )
        results = synchronized(model, two_level, rank)
        for ours, sum_ in zip(results, exact, strict=True):
            torch.testing.assert_close(ours.double(), sum_.double(), rtol=1e-4, atol=1e-2)
        everywhere = [torch.empty_like(results[0]) for _ in range(4)]
        dist.all_gather(everywhere, results[0])
        assert all(torch.equal(one, everywhere[0]) for one in everywhere)


@on_ranks(3, each=[Compressor.INT8, Compressor.TOP_K, Compressor.POWER_SGD])
def test_the_owner_sums_what_it_decompressed_and_loses_nothing(
    rank: int, compressor: Compressor
) -> None:
    """What is not sent stays in residuals: over two steps, all of two gradients has been sent."""
    model = PlannedDataParallel(Several(torch.float64))
    plan = uniform(model.module, 3, DIRECT, compressor)
    for shares in (None, (0.5, 0.5, 0.0), (0.0, 0.0, 1.0)):
        model.synchronizer.forget_residuals()
        owned = replace(plan, messages=tuple(replace(m, shares=shares) for m in plan.messages))
        first = synchronized(model, owned, rank)
        everywhere = [torch.empty_like(first[0]) for _ in range(3)]
        dist.all_gather(everywhere, first[0])
        assert all(torch.equal(one, everywhere[0]) for one in everywhere), shares
        whole = uniform(model.module, 3, DIRECT)
        rest = synchronized(model, whole, rank)  # sends the residuals, too
        exact = [
            sum(of_ranks) * 2 / 3
            for of_ranks in zip(*(gradients_of(r, torch.float64) for r in range(3)), strict=True)
        ]
        for a, b, both in zip(first, rest, exact, strict=True):
            torch.testing.assert_close(a + b, both, rtol=1e-9, atol=1e-6)
        assert not model.synchronizer.residuals


def check_death(rank: int, lane: int) -> str:
    """Rank 1 dies when it would start the round of this lane; rank 2 may wait for others only."""
    model = Several(torch.float32)
    synchronizer = attach(model, None, timeout_s=80.0, agreement_timeout_s=60.0)
    plan = uniform(model, 4, DIRECT)
    shares = (1.0, 0.0, 0.0, 0.0)
    messages = tuple(replace(message, pieces=4, shares=shares) for message in plan.messages)
    synchronizer.load(replace(plan, messages=messages, in_flight=2))

    def die(number: int, at: int, step: Step) -> dist.Work | None:
        if rank == 1 and number == 1 and at == lane:
            os._exit(0)
        return step()

    synchronizer.lanes.around = die
    try:
        model(gradients_of(rank, torch.float32)).backward()
    except SynchronizationError as error:
        return str(error)
    return "no error"


@ON_GLOO
@pytest.mark.parametrize("lane", [0, 1])
def test_a_rank_that_dies_within_an_exchange_fails_all_others_in_time(lane: int) -> None:
    started = time.monotonic()
    answers = run_world(check_death, 4, lane)
    assert time.monotonic() - started < 60
    assert answers.pop(1) is None
    assert all("direct_exchange of" in answer for answer in answers), answers
