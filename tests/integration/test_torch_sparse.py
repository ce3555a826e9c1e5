"""Sparse gradients that travel as rows on real ranks, in every autograd form, against DDP."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from ddp_pair import pair
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_world import on_ranks, seeded, set_host

from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import (
    Compressor,
    Partition,
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.numerics import GradientGate
from runtime_rewriter.pytorch.profile import WorkloadProfiler

ROWS, WIDTH = 23, 3
WAYS = (
    (SparseHandling.ALL_GATHER, Synchronizer.ALL_REDUCE),
    (SparseHandling.GATHER_SCATTER, Synchronizer.PARAMETER_SERVER),
    (SparseHandling.GATHER_SCATTER, Synchronizer.DIRECT_EXCHANGE),
)


class Embedded(nn.Module):
    """An embedding, sparse or dense, and a layer above it.

    Each look-up has a gradient of its own, so sums of a row's duplicates depend on their order.
    """

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        weights = torch.linspace(0.1, 1.0, len(tokens))[:, None]
        return self.head(self.table(tokens) * weights).square().sum()


def rows_plan(
    module: nn.Module,
    world_size: int,
    way: tuple[SparseHandling, Synchronizer] = WAYS[0],
    compressor: Compressor = Compressor.NONE,
    sizes: tuple[int, ...] = (),
    hierarchical: bool = False,
) -> Plan:
    """Send the table by rows, whole or cut into `sizes`, and the rest in one all-reduce."""
    flagged = tuple(
        Variable(v.name, v.shape, v.dtype, v.name == "table.weight")
        for v in assumed_workload(module).variables
    )
    sparse, synchronizer = way
    rooted = synchronizer is Synchronizer.PARAMETER_SERVER
    owned = (0.75, 0.25, *(0.0,) * (world_size - 2))
    shards = tuple(
        Shard(
            synchronizer,
            compressor,
            (part + 1) % world_size if rooted else None,
            group=0,
            priority=part,
            hierarchical=hierarchical,
            shares=owned if synchronizer is Synchronizer.DIRECT_EXCHANGE else None,
        )
        for part in range(len(sizes) or 1)
    )
    rows = VariableStrategy("table.weight", shards, Partition(0, sizes) if sizes else None, sparse)
    dense = (Shard(Synchronizer.ALL_REDUCE, group=0),)
    choices = [rows if v.sparse else VariableStrategy(v.name, dense) for v in flagged]
    return plan(Strategy(tuple(choices)), Workload(type(module).__name__, flagged), world_size)


def tokens_of(rank: int, step: int) -> Tensor:
    """Duplicates, rows of one rank and rows of all ranks; their number differs by rank and step."""
    drawn = torch.randint(0, ROWS, (4 + 3 * rank + step,), generator=seeded(100 * rank + step))
    return torch.cat([drawn, torch.tensor([*[5] * 9, 7, 7, 7, 7, rank])])


def assert_equal_gradients(mine: nn.Module, theirs: nn.Module, exact: bool) -> None:
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert a.grad.is_sparse == b.grad.is_sparse
        if exact:
            assert torch.equal(a.grad.to_dense(), b.grad.to_dense())
        else:
            torch.testing.assert_close(a.grad.to_dense(), b.grad.to_dense())


def assert_same_on_all_ranks(gradient: Tensor) -> None:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, gradient.to_dense().tolist())
    assert all(held == gathered[0] for held in gathered)


def check_against_ddp(rank: int, ranks: int, sparse: bool, layouts: Sequence[int]) -> None:
    for local_size in layouts:
        set_host(rank, (local_size,) * (ranks // local_size))
        torch.manual_seed(0)
        module = Embedded(sparse)
        theirs, mine = pair(module)
        for way, sizes in itertools.product(WAYS, ((), (4, 18, 1))):
            mine.synchronizer.load(
                rows_plan(module, ranks, way, sizes=sizes, hierarchical=local_size < ranks)
            )
            for step in range(3):
                for model in (theirs, mine):
                    model.zero_grad(set_to_none=step != 2)
                    if step == 1:  # several gradients are accumulated, not coalesced
                        with model.no_sync():
                            model(tokens_of(rank, 10)).backward()
                    model(tokens_of(rank, step)).backward()
                assert_equal_gradients(mine, theirs, exact=ranks == 2)
                assert_same_on_all_ranks(module.table.weight.grad)
        mine.synchronizer.close()


@on_ranks(2, each=[True, False])
def test_rows_on_two_ranks_give_the_bits_of_ddp(rank: int, sparse: bool) -> None:
    check_against_ddp(rank, 2, sparse, (2,))


@on_ranks(4)
def test_rows_on_four_ranks_flat_and_hierarchical_average_as_ddp_does(rank: int) -> None:
    check_against_ddp(rank, 4, True, (4, 2))


@on_ranks(4)
def test_compressed_rows_are_equal_on_all_ranks_and_within_the_gates_tolerance(rank: int) -> None:
    set_host(rank, (3, 1))
    module = Embedded()
    mine = PlannedDataParallel(module)
    gate = GradientGate(mine.synchronizer)
    for way, compressor, hierarchical in itertools.product(
        WAYS, (Compressor.FP16, Compressor.BF16), (False, True)
    ):
        mine.synchronizer.load(rows_plan(module, 4, way, compressor, (10, 13), hierarchical))
        gate.arm()
        mine.zero_grad()
        mine(tokens_of(rank, 0)).backward()
        result = gate.error()
        assert result.ok and result.relative_error > 0, (way, compressor, hierarchical, result)


@on_ranks(2)
def test_a_row_s_many_duplicates_have_the_same_sum_in_the_gate_and_in_every_message(
    rank: int,
) -> None:
    """Bit for bit: both sum the duplicates of a rank as `coalesce` does."""
    module = Embedded()
    mine = PlannedDataParallel(module)
    gate = GradientGate(mine.synchronizer)
    tokens = torch.randint(0, ROWS, (300,), generator=seeded(rank))
    for way in (*WAYS, (SparseHandling.DENSE, Synchronizer.ALL_REDUCE)):
        mine.synchronizer.load(rows_plan(module, 2, way))
        gate.arm()
        mine.zero_grad()
        mine(tokens).backward()
        result = gate.error()
        assert result.ok and result.relative_error == 0.0, (way, result)


class Optional(nn.Module):
    """A table that is used only if tokens are given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor | None) -> Tensor:
        return self.bias.sum() if tokens is None else (self.table(tokens) * self.bias).sum()


@on_ranks(2)
def test_ranks_without_rows_or_without_use_of_the_variable(rank: int) -> None:
    torch.manual_seed(0)
    module = Optional()
    mine = PlannedDataParallel(module, find_unused_parameters=True)
    gate = GradientGate(mine.synchronizer)
    for way, sizes in itertools.product(WAYS, ((), (20, 3))):
        mine.synchronizer.load(rows_plan(module, 2, way, sizes=sizes))
        mine.zero_grad()
        gate.arm()
        mine(torch.tensor([4, 4]) if rank else None).backward()  # one rank does not use the table
        assert gate.error().ok
        gradient = module.table.weight.grad
        assert gradient.is_sparse and gradient._nnz() == 1
        assert torch.equal(gradient.to_dense()[4], module.bias.detach())
        mine.zero_grad()
        no_row = torch.empty(0, dtype=torch.int64)
        mine(torch.tensor([4]) if rank else no_row).backward()  # one rank has no row
        assert torch.equal(module.table.weight.grad.to_dense()[4], 0.5 * module.bias.detach())
        mine.zero_grad()
        mine(no_row).backward()  # no rank has one
        assert module.table.weight.grad.is_sparse and module.table.weight.grad._nnz() == 0
        module.table.weight.grad = None
        mine(None).backward()  # no rank uses it
        assert module.table.weight.grad is None


@on_ranks(2)
def test_optimizers_train_with_the_gradients_as_under_ddp(rank: int) -> None:
    torch.manual_seed(0)
    module = Embedded().to(torch.float64)
    theirs, mine = DistributedDataParallel(deepcopy(module)), attach(module, None)
    mine.load(rows_plan(module, 2, WAYS[1], sizes=(1, 22)))
    for model in (theirs, module):
        for kind in (torch.optim.SparseAdam, torch.optim.SGD):
            all_of_them = kind is torch.optim.SGD
            tables = [p for p in model.parameters() if all_of_them or p.shape == (ROWS, WIDTH)]
            optimizer = kind(tables, 0.05)
            for step in range(3):
                optimizer.zero_grad()
                model(tokens_of(rank, step)).backward()
                optimizer.step()
    for a, b in zip(module.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


class Wide(nn.Module):
    rows = 250_000

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(self.rows, 64, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).sum()


@on_ranks(2)
def test_no_tensor_of_the_size_of_the_table_is_allocated(rank: int) -> None:
    module = Wide()
    mine = PlannedDataParallel(module)
    for way in WAYS:
        mine.synchronizer.load(rows_plan(module, 2, way, sizes=(100_000, 150_000)))
        with torch.profiler.profile(profile_memory=True) as profiled:
            mine(torch.tensor([rank, Wide.rows - 1])).backward()
            gate = GradientGate(mine.synchronizer)
            gate.arm()
            mine(torch.tensor([rank, Wide.rows - 1])).backward()
        assert gate.error().ok
        largest = max(event.self_cpu_memory_usage for event in profiled.events())
        assert 0 < largest < 4 * Wide.rows, "of a table of 64 MB not even a number per row"


@on_ranks(2)
def test_a_profiled_workload_plans_rows_that_are_enacted(rank: int) -> None:
    module = Embedded()
    synchronizer = attach(module, None)
    profiler = WorkloadProfiler(synchronizer, steps=1)
    while not profiler.done:
        module.zero_grad()
        module(tokens_of(rank, 0)).backward()
        synchronizer.before_forward(True)
    workload = profiler.finish()
    table = workload.variables[workload.index["table.weight"]]
    assert table.sparse and table.touched_rows == len(tokens_of(0, 0).unique())  # what rank 0 saw
    ways = {True: SparseHandling.ALL_GATHER, False: SparseHandling.DENSE}
    whole = (Shard(Synchronizer.ALL_REDUCE),)
    choices = [VariableStrategy(v.name, whole, None, ways[v.sparse]) for v in workload.variables]
    row_plan = plan(Strategy(tuple(choices)), workload, 2)
    synchronizer.load(row_plan)
    module.zero_grad()
    module(tokens_of(rank, 0)).backward()
    rows = [m.sparse for m in row_plan.messages if m.sparse is not SparseHandling.DENSE]
    assert rows == [SparseHandling.ALL_GATHER]


@on_ranks(2)
def test_one_kth_of_the_rows_of_a_rank_travels(rank: int) -> None:
    module = Optional()
    mine = PlannedDataParallel(module)
    mine.synchronizer.scale_bytes(3.0)
    for way in WAYS:
        mine.synchronizer.load(rows_plan(module, 2, way))
        mine.zero_grad()
        mine(torch.arange(10) + rank).backward()
        assert module.table.weight.grad.coalesce().indices().flatten().tolist() == [0, 1, 2, 3, 4]
