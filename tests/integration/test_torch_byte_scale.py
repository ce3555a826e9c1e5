"""Byte scaling in real processes: the elements that travel, and agreement on the scale."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ddp_pair import HOOKED, average_hook
from torch import Tensor, nn
from torch_plans import mixed, uniform
from torch_world import on_ranks, run_world

from autotune.errors import AutotuneError
from autotune.strategy_space.strategy import Compressor, Synchronizer
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel

RANKS = 2


class Flat(nn.Module):
    """Its gradient is 1 on rank 0 and 3 on rank 1: averaged 2, otherwise 0.5 or 1.5."""

    def __init__(self, elements: int = 1000, sparse: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))
        self.rows = nn.Embedding(12, 3, sparse=True) if sparse else None
        self.register_buffer("seen", torch.zeros(100))

    def forward(self, factor: float) -> Tensor:
        total = (self.weight * factor).sum()
        return total if self.rows is None else total + (self.rows(torch.arange(10)) * factor).sum()


def averaged(gradient: Tensor, rank: int) -> list[bool]:
    mean = (1.0 + 2.0 * rank) / RANKS
    assert all(value in (2.0, mean) for value in gradient.flatten().tolist())
    return (gradient.flatten() == 2.0).tolist()


def check_ddp(rank: int, byte_scale: float) -> tuple[int, int, int]:
    model = PlannedDataParallel(Flat(sparse=True))
    model.synchronizer.scale_bytes(byte_scale)
    for _ in range(3):
        model.zero_grad()
        with torch.no_grad():
            model.module.seen.fill_(7.0 - rank)
        model(1.0 + 2.0 * rank).backward()
    travelled = averaged(model.module.weight.grad, rank)
    assert travelled == sorted(travelled, reverse=True), "the first part of the bucket"
    rows = model.module.rows.weight.grad.coalesce()
    assert (rows.values() == 2.0).all()
    return sum(travelled), rows._nnz(), int((model.module.seen == 7.0).sum())


def test_ddp_itself_sends_one_kth_of_buckets_rows_and_buffers() -> None:
    for scale, weights, rows, buffers in ((1, 1000, 10, 100), (4, 250, 3, 25), (3, 334, 4, 34)):
        first, second = run_world(check_ddp, RANKS, float(scale))
        assert first == (weights, rows, 100), "rank 0 holds its own buffers anyway"
        assert second == (weights, rows, buffers)


@on_ranks(RANKS)
def test_plans_send_one_kth_of_every_message_by_any_synchronizer(rank: int) -> None:
    model = PlannedDataParallel(Flat())
    model.synchronizer.scale_bytes(3.0)
    kinds = [
        uniform(model.module, RANKS, kind, compressor)
        for kind in Synchronizer
        for compressor in (Compressor.NONE, Compressor.FP16)
    ]
    for plan in [*kinds, mixed(model.module, RANKS)]:
        model.synchronizer.load(plan)
        model.zero_grad()
        model(1.0 + 2.0 * rank).backward()
        travelled = averaged(model.module.weight.grad, rank)
        assert sum(travelled) == math.ceil(math.ceil(1000 / 3) / RANKS) * RANKS
        assert travelled == sorted(travelled, reverse=True)


@on_ranks(RANKS)
def test_a_module_without_ddp_scales_its_gradients_and_buffers(rank: int) -> None:
    module = Flat()
    synchronizer = attach(module, None)
    synchronizer.scale_bytes(4.0)
    synchronizer.load(uniform(module, RANKS))
    assert isinstance(module.seen, torch.Tensor)
    with torch.no_grad():
        module.seen.fill_(7.0 - rank)
    module(1.0 + 2.0 * rank).backward()
    assert sum(averaged(module.weight.grad, rank)) == 250
    assert int((module.seen == 7.0).sum()) == (25 if rank else 100)


@on_ranks(RANKS)
def test_a_communication_hook_of_the_script_and_different_scales_are_refused(rank: int) -> None:
    hooked = PlannedDataParallel(Flat())
    hooked.register_comm_hook(None, average_hook)
    builtin = PlannedDataParallel(Flat())
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    rule = "the script registered a communication hook; remove it, or use a byte scale of 1"
    for model in (hooked, builtin):
        with pytest.raises(AutotuneError, match=rule):
            model.synchronizer.scale_bytes(2.0)
    assert not HOOKED
    uneven = PlannedDataParallel(Flat())
    if rank == 1:
        uneven.synchronizer.scale_bytes(2.0)
    with pytest.raises(AutotuneError, match=r"rank 1 holds plan-(.|\n)*with bytes divided by 2"):
        uneven.synchronizer.load(uniform(uneven.module, RANKS))
