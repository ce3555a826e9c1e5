"""Small models and plans for the tests of the torch runtime."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch_world import seeded

from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import (
    ROOTED,
    Compressor,
    Partition,
    Shard,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.under_way import MessagesUnderWay


class Slow(torch.autograd.Function):
    """Takes `seconds` in the forward and twice as long in the backward pass."""

    @staticmethod
    def forward(context, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * context.seconds)
        return gradient, None


@contextmanager
def taken_in_when_read() -> Iterator[None]:
    """Apply no message of an earlier step before a variable of it is read, however fast it is."""
    next_arrived = MessagesUnderWay.next_arrived
    MessagesUnderWay.next_arrived = lambda self: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        MessagesUnderWay.next_arrived = next_arrived  # type: ignore[method-assign]


class Tied(nn.Module):
    """Tied embedding, dropout, BatchNorm and a scalar: parts that tend to break synchronizers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.2)
        self.back = nn.Linear(7, 6)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.mix(self.embedding(tokens)))))
        return self.head(self.back(hidden)) * self.gain


def batch(rank: int, step: int) -> Tensor:
    """Token ids, different on every rank and step."""
    generator = seeded(1000 * rank + step)
    return torch.randint(0, 11, (8,), generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = batch(rank, step)
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1))


def uniform(
    module: nn.Module,
    world_size: int,
    synchronizer: Synchronizer = Synchronizer.ALL_REDUCE,
    compressor: Compressor = Compressor.NONE,
    partitioned: bool = False,
    groups: int = 3,
) -> Plan:
    """Synchronize every variable in one way, in `groups` messages.

    `partitioned`: cut unevenly along the largest axis. top-k sends a tenth, PowerSGD has rank 1.
    """
    workload = assumed_workload(module)
    rooted = synchronizer in ROOTED
    choices = []
    for number, variable in enumerate(workload.variables):
        partition = cut(variable) if partitioned else None
        shards = tuple(
            Shard(
                synchronizer,
                compressor,
                placement=(number + part) % world_size if rooted else None,
                group=None if rooted else (number + part) % groups,
                priority=part,
                ratio=0.1 if compressor is Compressor.TOP_K else None,
                rank=1 if compressor is Compressor.POWER_SGD else None,
            )
            for part in range(len(partition.sizes) if partition else 1)
        )
        choices.append(VariableStrategy(variable.name, shards, partition))
    return plan(Strategy(tuple(choices)), workload, world_size)


def cut(variable: Variable) -> Partition | None:
    """Two uneven parts along the largest axis; None if that has a single row."""
    if not variable.shape or max(variable.shape) < 2:
        return None
    axis = variable.shape.index(max(variable.shape))
    extent = variable.shape[axis]
    first = extent // 3 or 1
    return Partition(axis, (first, extent - first))


def mixed(module: nn.Module, world_size: int) -> Plan:
    """A different way for every variable, partly cut and partly grouped."""
    workload: Workload = assumed_workload(module)
    kinds = tuple(Synchronizer)
    choices = []
    for number, variable in enumerate(workload.variables):
        partition = cut(variable) if number % 2 else None
        shards = []
        for part in range(len(partition.sizes) if partition else 1):
            kind = kinds[(number + part) % len(kinds)]
            placement = (number + 1) % world_size if kind in ROOTED else None
            shards.append(Shard(kind, placement=placement, group=number % 2, priority=-number))
        choices.append(VariableStrategy(variable.name, tuple(shards), partition))
    return plan(Strategy(tuple(choices)), workload, world_size)
