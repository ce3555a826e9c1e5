"""The operations that a probe times: calls that return when this rank's part is done.

A size is the argument of `CollectiveFit.seconds`: the whole tensor before the operation. For gather
and scatter it is one rank's tensor, since a push sends all of it from every rank. For
reduce-scatter and all-gather it is the tensor that is split into, or joined from, one shard per
rank; for all-to-all the tensor that is split.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.ranks import RankGroups, SynchronizerGroups
from runtime_rewriter.pytorch.exchange.sums import flat_sum

Operation = Callable[[], None]
Preparation = Callable[[SynchronizerGroups, int, Device], Operation]


def _exchange(synchronizer: Synchronizer) -> Preparation:
    """All steps of a plan's message, including its owner's sum. Direct exchanges: equal owners."""

    def prepare(ranks: SynchronizerGroups, size_bytes: int, device: Device) -> Operation:
        elements = max(size_bytes // 4 // ranks.size, 1) * ranks.size
        values = torch.zeros(elements, device=device.device)
        steps = flat_sum(
            synchronizer, values, Lanes(ranks, device), RankGroups.world(ranks.size), 0
        ).steps()

        def operation() -> None:
            for _, step in steps:
                work = step()
                if work is not None:
                    work.wait()

        return operation

    return prepare


def _reduce_scatter(ranks: SynchronizerGroups, size_bytes: int, device: Device) -> Operation:
    whole, shard = _whole_and_shard(ranks, size_bytes, device)
    return lambda: _none(dist.reduce_scatter_single(shard, whole, group=ranks.first))


def _all_gather(ranks: SynchronizerGroups, size_bytes: int, device: Device) -> Operation:
    whole, shard = _whole_and_shard(ranks, size_bytes, device)
    return lambda: _none(dist.all_gather_single(whole, shard, group=ranks.first))


def _all_to_all(ranks: SynchronizerGroups, size_bytes: int, device: Device) -> Operation:
    sent, _ = _whole_and_shard(ranks, size_bytes, device)
    received = torch.empty_like(sent)
    return lambda: _none(dist.all_to_all_single(received, sent, group=ranks.first))


def _gather(ranks: SynchronizerGroups, size_bytes: int, device: Device) -> Operation:
    tensor = torch.zeros(size_bytes // 4, device=device.device)
    parts = [torch.empty_like(tensor) for _ in range(ranks.size)] if ranks.rank == 0 else None
    return lambda: _none(dist.gather(tensor, parts, group=ranks.first, group_dst=0))


def _scatter(ranks: SynchronizerGroups, size_bytes: int, device: Device) -> Operation:
    tensor = torch.zeros(size_bytes // 4, device=device.device)
    parts = [torch.zeros_like(tensor)] * ranks.size if ranks.rank == 0 else None
    return lambda: _none(dist.scatter(tensor, parts, group=ranks.first, group_src=0))


def _broadcast(ranks: SynchronizerGroups, size_bytes: int, device: Device) -> Operation:
    tensor = torch.zeros(size_bytes // 4, device=device.device)
    return lambda: _none(dist.broadcast(tensor, group=ranks.first, group_src=0))


def _reduce(ranks: SynchronizerGroups, size_bytes: int, device: Device) -> Operation:
    tensor = torch.zeros(size_bytes // 4, device=device.device)
    return lambda: _none(dist.reduce(tensor, group=ranks.first, group_dst=0))


def _whole_and_shard(
    ranks: SynchronizerGroups, size_bytes: int, device: Device
) -> tuple[torch.Tensor, torch.Tensor]:
    elements = max(size_bytes // 4 // ranks.size, 1)
    whole = torch.zeros(elements * ranks.size, device=device.device)
    return whole, torch.zeros(elements, device=device.device)


def _none(_: object) -> None:
    """Drop the work handle of a blocking collective."""


OPERATIONS: dict[str, Preparation] = {
    "all_reduce": _exchange(Synchronizer.ALL_REDUCE),
    "direct_exchange": _exchange(Synchronizer.DIRECT_EXCHANGE),
    "push_pull": _exchange(Synchronizer.PARAMETER_SERVER),
    "reduce_scatter_all_gather": _exchange(Synchronizer.REDUCE_SCATTER_ALL_GATHER),
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
"""In order of importance: a probe that runs out of time lacks the last ones."""

COLLECTED = ("push_pull", "gather", "scatter")
"""One rank has a whole tensor of each of the others."""
ON_THE_WORLD = ("gather", "scatter", "all_to_all")
EVERYWHERE = tuple(name for name in OPERATIONS if name not in ON_THE_WORLD)
"""Used by plans on any group. The halves of a push and pull, and the operation that only int8
needs, are timed on the world alone."""
UNDER_LOAD = ("all_reduce", "push_pull", "reduce_scatter_all_gather")
"""Operations of messages during the backward pass."""
