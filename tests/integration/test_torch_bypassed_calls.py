"""Backward passes of a plain module: those behind its call are synchronized, others are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_torch_native import random_buckets
from torch import Tensor, nn
from torch_plans import mixed
from torch_world import on_ranks

from autotune.errors import SynchronizationError
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.hooks import GradientSynchronizer


@on_ranks(2, each=[False, True])
def test_a_plain_module_whose_call_is_bypassed_is_refused_at_its_step(
    rank: int, native: bool
) -> None:
    module = nn.Linear(3, 2)
    synchronizer = attach(module, random_buckets(module, 1) if native else mixed(module, 2))
    assert (synchronizer.native is not None) == native
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates the state of the optimizer
    with synchronizer.no_sync():
        module.forward(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    module.forward(torch.ones(1, 3)).sum().backward()
    with pytest.raises(SynchronizationError, match=r"its methods and \.forward bypass"):
        optimizer.step()
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    synchronizer.close()


def bare(native: bool) -> tuple[nn.Sequential, GradientSynchronizer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    synchronizer = attach(module, random_buckets(module, 1) if native else mixed(module, 2))
    assert (synchronizer.native is not None) == native
    return module, synchronizer, torch.optim.SGD(module.parameters(), 0.1)


def rows(rank: int) -> Tensor:
    return torch.full((1, 3), 1.0 + rank)


@on_ranks(2, each=[False, True])
def test_a_plain_module_that_is_bypassed_after_calls_is_refused_at_its_step(
    rank: int, native: bool
) -> None:
    module, synchronizer, optimizer = bare(native)
    for bypass in (module.forward, lambda x: module[1](torch.cat([x, x[:, :1]], 1))):
        for _ in range(2):
            optimizer.zero_grad()
            module(rows(rank)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        bypass(rows(rank)).sum().backward()
        with pytest.raises(SynchronizationError, match=r"its methods and \.forward bypass"):
            optimizer.step()
    module(rows(rank)).sum().backward()  # averages what the bypassing pass has left
    optimizer.step()
    assert_same_on_all_ranks(module)
    synchronizer.close()


def assert_same_on_all_ranks(module: nn.Module) -> None:
    for parameter in module.parameters():
        of_first = parameter.detach().clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(parameter, of_first)


@on_ranks(2, each=[False, True])
def test_other_passes_in_the_step_of_a_call_are_the_scripts_affair(rank: int, native: bool) -> None:
    module, synchronizer, optimizer = bare(native)

    def penalty() -> Tensor:
        return torch.stack([p.square().sum() for p in module.parameters()]).sum()

    for penalty_first in (False, True):
        optimizer.zero_grad()
        with torch.no_grad():
            module.eval()(rows(rank))
        if penalty_first:
            penalty().backward()
        module.train()(rows(rank)).square().sum().backward()
        if not penalty_first:
            penalty().backward()
        optimizer.step()
    optimizer.step()  # once more with the same gradients
    optimizer.zero_grad()
    module.forward(rows(rank)).sum().backward()  # by the input, say
    optimizer.zero_grad()
    output = module(rows(rank))
    output.sum().backward()
    halves = [torch.optim.SGD(part.parameters(), 0.1) for part in module]
    for half in halves:
        half.step()
    optimizer.zero_grad()
    penalty().backward()
    with synchronizer.no_sync():
        optimizer.step()
    assert_same_on_all_ranks(module)
    optimizer.zero_grad()
    with synchronizer.no_sync():
        output = module(rows(rank))
    output.sum().backward()
    module(rows(rank)).sum().backward()
    optimizer.step()
    assert_same_on_all_ranks(module)
    optimizer.zero_grad()
    output = module(rows(rank))
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()  # local, as under DDP
    optimizer.step()
    synchronizer.close()


@on_ranks(2, each=[False, True])
def test_a_step_inside_the_backward_pass_of_a_plain_module_is_refused(
    rank: int, native: bool
) -> None:
    module, _, optimizer = bare(native)
    weight = next(module.parameters())
    weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    with pytest.raises(SynchronizationError, match="runs inside the backward pass"):
        module(rows(rank)).sum().backward()
