"""Uncompressed sums of a message over groups of ranks, as collectives on consecutive lanes.

Every gradient is first scaled by 1/w and then summed, as in torch's DDP, so two ranks give the same
bits. A rank outside the groups, or alone in its own, has the same steps and does nothing in them.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.strategy_space.shares import Shares
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.pytorch.exchange.direct import DirectExchange, sum_in_order
from runtime_rewriter.pytorch.exchange.lanes import Collective, Lanes, Step
from runtime_rewriter.pytorch.exchange.owned_sum import OwnedSum
from runtime_rewriter.pytorch.exchange.ranks import RankGroups


class Exchange(Protocol):
    """The collectives of one message. Building one is collective: it may create process groups.

    `values`: flat; before the steps this rank's gradient / w, after them the sum over the ranks.
    """

    values: Tensor

    @property
    def owned(self) -> OwnedSum | None:
        """None: the sum is complete only after all steps."""

    def steps(self) -> list[tuple[int, Step]]:
        """(lane, step) by ascending lane; the same lanes on every rank."""


class Collectives:
    """Collectives on consecutive lanes, each over this rank's process group there."""

    def __init__(
        self,
        values: Tensor,
        lanes: Lanes,
        groups: RankGroups,
        first_lane: int,
        *collectives: Collective,
        owned: OwnedSum | None = None,
    ) -> None:
        self.values, self.owned = values, owned
        self._steps: list[tuple[int, Step]] = []
        for lane, collective in enumerate(collectives, first_lane):
            group = lanes.group(lane, groups)
            self._steps.append((lane, partial(_start, collective, group)))

    def steps(self) -> list[tuple[int, Step]]:
        return self._steps


def _start(collective: Collective, group: dist.ProcessGroup | None) -> dist.Work | None:
    return None if group is None else work_of(collective(group))


def work_of(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a member of the group gets a work handle"
    return work


class Chain:
    """Exchanges of the same values, one after the other, on ascending lanes."""

    def __init__(self, *parts: Exchange, owned: OwnedSum | None = None) -> None:
        self.values, self.owned = parts[0].values, owned
        self._parts = parts

    def steps(self) -> list[tuple[int, Step]]:
        return [step for part in self._parts for step in part.steps()]


def flat_sum(
    synchronizer: Synchronizer,
    values: Tensor,
    lanes: Lanes,
    groups: RankGroups,
    owner: int | None = None,
    first_lane: int = 0,
    shares: Shares | None = None,
) -> Exchange:
    """Build the sum by `synchronizer`. Collective.

    `values` are real. For reduce-scatter their number is a multiple of the ranks in a group.
    `owner`: the root. `shares`: those of a direct exchange.
    """
    if synchronizer is Synchronizer.ALL_REDUCE:
        return _all_reduce(values, lanes, groups, first_lane)
    if synchronizer is Synchronizer.REDUCE_SCATTER_ALL_GATHER:
        return _reduce_scatter_all_gather(values, lanes, groups, first_lane)
    if synchronizer is Synchronizer.DIRECT_EXCHANGE:
        return DirectExchange(values, lanes, groups, shares, first_lane)
    assert owner is not None, "a synchronizer with a root has an owner"
    if synchronizer is Synchronizer.PARAMETER_SERVER:
        return _parameter_server(values, lanes, groups, owner, first_lane)
    return Chain(
        reduce(values, lanes, groups, (owner,), first_lane),
        broadcast(values, lanes, groups, (owner,), first_lane + 1),
        owned=_whole(values, lanes.ranks.rank == owner),
    )


def _whole(values: Tensor, owns: bool) -> OwnedSum:
    """After one step, one rank owns the sum of all values."""
    part = values if owns else values[:0]
    return OwnedSum(1, 0, lambda: part)


# Recordings name the steps of a message after the functions that start them.


def _all_reduce(values: Tensor, lanes: Lanes, groups: RankGroups, lane: int) -> Exchange:
    # Every member has the sum; the first one counts as its owner.
    owned = _whole(values, lanes.ranks.rank in groups.members_of(lanes.ranks.rank)[:1])
    return Collectives(values, lanes, groups, lane, lanes.all_reduce(values, groups), owned=owned)


def _reduce_scatter_all_gather(
    values: Tensor, lanes: Lanes, groups: RankGroups, first_lane: int
) -> Exchange:
    ranks = groups.members_of(lanes.ranks.rank)
    members = len(ranks) or 1
    shard = values.new_empty(values.numel() // members if members > 1 else 0)
    place = ranks.index(lanes.ranks.rank) if members > 1 else 0
    own = values if len(ranks) == 1 else shard
    owned = OwnedSum(1, place * shard.numel(), lambda: own)

    def scatter(group: dist.ProcessGroup) -> dist.Work | None:
        return work_of(dist.reduce_scatter_single(shard, values, group=group, async_op=True))

    def gather(group: dist.ProcessGroup) -> dist.Work | None:
        return work_of(dist.all_gather_single(values, shard, group=group, async_op=True))

    return Collectives(values, lanes, groups, first_lane, scatter, gather, owned=owned)


def _parameter_server(
    values: Tensor, lanes: Lanes, groups: RankGroups, owner: int, first_lane: int
) -> Exchange:
    """Every rank sends to the owner, which sums in group order and sends the sum back to each.

    The server's state is the aggregated gradient. The optimizer runs on every rank, so any
    optimizer and gradient clipping stay exact. The bytes on every link are those of a server that
    updates parameters.
    """
    members = groups.members_of(lanes.ranks.rank)
    root = root_of(members, (owner,))
    owns = len(members) > 1 and lanes.ranks.rank == owner
    received = [torch.empty_like(values) for _ in members] if owns else None
    half = values.dtype in (torch.float16, torch.bfloat16)
    total = torch.empty_like(values, dtype=torch.float32) if owns and half else None
    summed: list[Tensor] = []  # between the halves, if someone has asked for the sum

    def own_sum() -> Tensor:
        if received is None:
            return values if members == (owner,) else values[:0]
        summed.append(sum_in_order(received, total))
        return summed[0]

    def push(group: dist.ProcessGroup) -> dist.Work | None:
        work: dist.Work | None = dist.gather(
            values, received, group=group, group_dst=root, async_op=True
        )
        return work

    def pull(group: dist.ProcessGroup) -> dist.Work | None:
        copies = None
        if received is not None:
            whole = summed.pop() if summed else sum_in_order(received, total)
            copies = [whole] * len(received)
        work: dist.Work | None = dist.scatter(
            values, copies, group=group, group_src=root, async_op=True
        )
        return work

    owned = OwnedSum(1, 0, own_sum)
    return Collectives(values, lanes, groups, first_lane, push, pull, owned=owned)


def reduce(
    values: Tensor, lanes: Lanes, groups: RankGroups, roots: Sequence[int], lane: int = 0
) -> Exchange:
    """Sum to the root of each group, which is one of `roots`, by the library's tree or ring."""
    root = root_of(groups.members_of(lanes.ranks.rank), roots)

    def reduce(group: dist.ProcessGroup) -> dist.Work | None:
        return work_of(dist.reduce(values, group=group, group_dst=root, async_op=True))

    return Collectives(values, lanes, groups, lane, reduce)


def broadcast(
    values: Tensor, lanes: Lanes, groups: RankGroups, roots: Sequence[int], lane: int = 0
) -> Exchange:
    """Copy the values of each group's root to the whole group."""
    root = root_of(groups.members_of(lanes.ranks.rank), roots)

    def send(group: dist.ProcessGroup) -> dist.Work | None:
        return work_of(dist.broadcast(values, group=group, group_src=root, async_op=True))

    return Collectives(values, lanes, groups, lane, send)


def root_of(members: Sequence[int], roots: Sequence[int]) -> int:
    """The place among `members` of the first one that is in `roots`; 0 if none is."""
    return next((place for place, rank in enumerate(members) if rank in roots), 0)
