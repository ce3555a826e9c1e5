"""Byte scaling in real processes: the elements that travel, and agreement on the scale."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_plans import mixed, uniform
from torch_world import run_world

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
    own = (1.0 + 2.0 * rank) / RANKS
    assert all(value in (2.0, own) for value in gradient.flatten().tolist())
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


@pytest.mark.parametrize(
    ("byte_scale", "weights", "rows", "buffers"),
    [(1.0, 1000, 10, 100), (4.0, 250, 3, 25), (3.0, 334, 4, 34)],
)
def test_ddp_itself_sends_one_kth_of_buckets_rows_and_buffers(
    byte_scale: float, weights: int, rows: int, buffers: int
) -> None:
    first, second = run_world(check_ddp, RANKS, byte_scale)
    assert first == (weights, rows, 100), "rank 0 holds its own buffers anyway"
    assert second == (weights, rows, buffers)


def check_plans(rank: int, byte_scale: float) -> list[list[bool]]:
    model = PlannedDataParallel(Flat())
    model.synchronizer.scale_bytes(byte_scale)
    kinds = [
        uniform(model.module, RANKS, kind, compressor)
        for kind in Synchronizer
        for compressor in (Compressor.NONE, Compressor.FP16)
    ]
    found = []
    for plan in [*kinds, mixed(model.module, RANKS)]:
        model.synchronizer.load(plan)
        model.zero_grad()
        model(1.0 + 2.0 * rank).backward()
        found.append(averaged(model.module.weight.grad, rank))
    return found


def test_plans_send_one_kth_of_every_message_by_any_synchronizer() -> None:
    for found in run_world(check_plans, RANKS, 3.0):
        expected = math.ceil(math.ceil(1000 / 3) / RANKS) * RANKS
        for travelled in found:
            assert sum(travelled) == expected and travelled == sorted(travelled, reverse=True)


def check_attached(rank: int) -> tuple[int, int]:
    module = Flat()
    synchronizer = attach(module, None)
    synchronizer.scale_bytes(4.0)
    synchronizer.load(uniform(module, RANKS))
    assert isinstance(module.seen, torch.Tensor)
    with torch.no_grad():
        module.seen.fill_(7.0 - rank)
    module(1.0 + 2.0 * rank).backward()
    return sum(averaged(module.weight.grad, rank)), int((module.seen == 7.0).sum())


def test_a_module_without_ddp_scales_its_gradients_and_buffers() -> None:
    assert run_world(check_attached, RANKS) == [(250, 100), (250, 25)]


def own_hook(state: None, bucket: dist.GradBucket) -> Any:
    raise AssertionError("never called")


own_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def check_refusals(rank: int) -> list[str]:
    told = []
    hooked = PlannedDataParallel(Flat())
    hooked.register_comm_hook(None, own_hook)
    builtin = PlannedDataParallel(Flat())
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    for model in (hooked, builtin):
        with pytest.raises(AutotuneError) as caught:
            model.synchronizer.scale_bytes(2.0)
        told.append(str(caught.value))
    uneven = PlannedDataParallel(Flat())
    if rank == 1:
        uneven.synchronizer.scale_bytes(2.0)
    with pytest.raises(AutotuneError) as caught:
        uneven.synchronizer.load(uniform(uneven.module, RANKS))
    told.append(str(caught.value))
    return told


def test_a_communication_hook_of_the_script_and_different_scales_are_refused() -> None:
    for hooked, builtin, uneven in run_world(check_refusals, RANKS):
        assert (
            "the script registered a communication hook; remove it, or use a byte scale of 1"
            in hooked
        )
        assert builtin == hooked
        assert "rank 1 holds plan-" in uneven and "with bytes divided by 2" in uneven
