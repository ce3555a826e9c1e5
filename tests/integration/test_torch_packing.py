"""Large gradients, packed alone, and small ones, packed together, give DDP's bits."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_plans import uniform
from torch_world import run_world, seeded

from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.exchange.transfer import BATCHED_BYTES


def check_packing(rank: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 200), nn.Linear(200, 200), nn.Linear(200, 5))
    sizes = [4 * parameter.numel() for parameter in module.parameters()]
    assert (
        min(sizes) < BATCHED_BYTES < max(sizes) / 2
    )  # the larger of the two parts that `uniform` cuts is large, too
    theirs, mine = DistributedDataParallel(copy.deepcopy(module)), PlannedDataParallel(module)
    for groups in (1, 2):
        for partitioned in (False, True):
            mine.synchronizer.load(uniform(module, 2, partitioned=partitioned, groups=groups))
            for step in range(2):
                inputs = torch.randn(4, 3, generator=seeded(10 * rank + step))
                for model in (theirs, mine):
                    model.zero_grad()
                    model(inputs).square().sum().backward()
                for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
                    assert torch.equal(a.grad, b.grad)


def test_large_and_small_gradients_of_one_message_are_averaged_as_ddp_does() -> None:
    run_world(check_packing, 2)
