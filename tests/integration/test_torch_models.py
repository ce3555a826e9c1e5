"""Hard models against torch's own DDP: unused parameters, checkpoints, dtypes, sparse gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from ddp_pair import assert_close, gradients, pair
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_plans import mixed, uniform
from torch_world import on_ranks

from autotune.errors import SynchronizationError
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.pytorch.ddp import PlannedDataParallel


class BranchingModel(nn.Module):
    """Uses a branch that depends on rank and step."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        for number in use:
            x = self.branches[number](x)
        return x


USES: list[list[tuple[int, ...]]] = [[(0, 1), (0, 1)], [(0,), (1,)], [(2, 0), (0,)]]
USES += [[(0,), (0,)], [(1, 2), (1,)], [(2,), (2,)]]
"""[step][rank]"""
RS = Synchronizer.REDUCE_SCATTER_ALL_GATHER


@on_ranks(2)
def test_unused_parameters_are_treated_as_in_ddp(rank: int) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(BranchingModel(), find_unused_parameters=True)
    plans = [mixed(mine.module, 2), None, uniform(mine.module, 2, RS)]
    untouched: dict[nn.Module, list[list[bool]]] = {theirs: [], mine: []}
    for model in (theirs, mine):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for step in range(12):
            if isinstance(model, PlannedDataParallel):
                model.synchronizer.load(plans[step % 3])
            optimizer.zero_grad()
            x = torch.full((2, 4), float(rank + step + 1))
            if step % 4 == 3:
                with model.no_sync():
                    model(x, (1,)).square().sum().backward()
            model(x, USES[step % len(USES)][rank]).square().sum().backward()
            untouched[model].append([parameter.grad is None for parameter in model.parameters()])
            optimizer.step()
    assert untouched[mine] == untouched[theirs] and any(any(row) for row in untouched[mine])
    assert_close(list(mine.parameters()), list(theirs.parameters()))


@on_ranks(2)
def test_a_static_graph_with_unused_parameters_needs_no_option(rank: int) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(BranchingModel(), static_graph=True)
    plans = [mixed(mine.module, 2), uniform(mine.module, 2), None, None, mixed(mine.module, 2)]
    for model in (theirs, mine):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for step in range(10):
            if model is mine:
                mine.synchronizer.load(plans[step % 5])
            optimizer.zero_grad()
            model(torch.full((2, 4), float(rank + step + 1)), (2, 0)).square().sum().backward()
            optimizer.step()
        assert all(parameter.grad is None for parameter in model.module.branches[1].parameters())
    assert_close(list(mine.parameters()), list(theirs.parameters()))


@on_ranks(2)
def test_unused_parameters_without_the_option_raise_on_every_rank(rank: int) -> None:
    model = PlannedDataParallel(BranchingModel())
    model.synchronizer.load(uniform(model.module, 2, RS))
    rule = r"2 did not: branches.2.weight, branches.2.bias.*find_unused_parameters=True"
    model(torch.ones(2, 4), (0, 1)).sum().backward()
    with pytest.raises(SynchronizationError, match=rule):
        model(torch.ones(2, 4), (0, 1))


class Checkpointed(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.inner, x, use_reentrant=True)
        return self.last(x)


@on_ranks(2)
def test_reentrant_checkpoints_synchronize_or_name_the_fix(rank: int) -> None:
    torch.manual_seed(0)
    for times, arguments in ((1, {}), (2, {"static_graph": True})):
        theirs, mine = pair(Checkpointed(times), **arguments)
        mine.synchronizer.load(uniform(mine.module, 2, RS, groups=4))
        for step in range(3):
            for model in (theirs, mine):
                model.zero_grad()
                model(torch.full((2, 4), float(rank + step))).square().sum().backward()
            assert_close(gradients(mine), gradients(theirs))
    twice = PlannedDataParallel(Checkpointed(2))
    twice.synchronizer.load(uniform(twice.module, 2, RS))
    with pytest.raises(SynchronizationError, match="use_reentrant=False"):
        twice(torch.ones(2, 4)).sum().backward()


class Odd(nn.Module):
    """Uncommon dtypes, layouts and extents."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        image = x.expand(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        parts = (self.wide, self.narrow, self.complex.abs(), self.empty)
        other = sum(part.sum().double() for part in parts)
        return self.convolution(image).square().sum() * (1 + other.float()) * self.frozen.sum()


@on_ranks(2)
def test_uncommon_dtypes_layouts_and_empty_parameters_match_ddp(rank: int) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(Odd())
    for kind, partitioned in itertools.product(Synchronizer, (False, True)):
        mine.synchronizer.load(uniform(mine.module, 2, kind, partitioned=partitioned))
        for model in (theirs, mine):
            model.zero_grad()
            model(torch.tensor(float(rank + 1))).backward()
        assert_close(gradients(mine), gradients(theirs))
        assert mine.module.convolution.weight.grad.is_contiguous(memory_format=torch.channels_last)


@on_ranks(2)
def test_sparse_gradients_travel_dense_and_stay_sparse_for_the_optimizer(rank: int) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2)))
    mine.synchronizer.load(uniform(mine.module, 2, Synchronizer.PARAMETER_SERVER, partitioned=True))
    for model in (theirs, mine):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.tensor([rank, step, 5])).square().sum().backward()
            assert model.module[0].weight.grad.is_sparse
            optimizer.step()
    assert_close(list(mine.parameters()), list(theirs.parameters()))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=True)
        self.out = nn.Linear(3, 2)

    def forward(self, words: Tensor, weights: Tensor) -> Tensor:
        return self.out(self.table(words) * weights.unsqueeze(1))


@on_ranks(2)
def test_rows_of_a_sparse_gradient_stay_when_their_values_are_zero(rank: int) -> None:
    """Row 5 has a gradient at first and one of zeros later, on one rank; row 8 never has any."""
    torch.manual_seed(0)
    theirs, mine = pair(Masked())
    mine.synchronizer.load(uniform(mine.module, 2, Synchronizer.ALL_REDUCE, partitioned=True))
    for model in (theirs, mine):
        table, out = model.module.table, model.module.out
        rows_only = torch.optim.SparseAdam(table.parameters(), 0.1)
        optimizers = [rows_only, torch.optim.SGD(out.parameters(), 0.1)]
        for step in range(3):
            model.zero_grad()
            words = torch.tensor([rank, step + 2, 5 if rank else 4])
            model(words, torch.tensor([1.0, 1.0, float(step == 0)])).square().sum().backward()
            rows = table.weight.grad.coalesce().indices()[0].tolist()
            assert rows == sorted({0, 1, step + 2, 4, 5})
            for optimizer in optimizers:
                optimizer.step()
    assert_close(list(mine.parameters()), list(theirs.parameters()))
