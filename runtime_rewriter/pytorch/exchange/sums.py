"""The sums that messages are made of: each over the ranks of a rank_groups, in steps on lanes.

Every gradient is scaled by 1/w first and then summed, exactly as torch's DDP does, so that two ranks give the same bits.
A rank outside the rank_groups, or alone in it, has the steps too and nothing to do in them.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.pytorch.exchange.lanes import Lanes, Step
from runtime_rewriter.pytorch.exchange.ranks import RankGroups


class Exchange(Protocol):
    """The collectives of one message. Building one is collective: it may make process groups.

    `values`: flat; this rank's part / w before the steps, the sum over ranks after them.
    """

    values: Tensor

    def steps(self) -> list[tuple[int, Step]]:
        """(lane, step) with ascending lanes; the same lanes on every rank."""


class AllReduce:
    """One step."""

    def __init__(
        self, values: Tensor, lanes: Lanes, rank_groups: RankGroups, lane: int = 0
    ) -> None:
        self.values, self._lane, self._group = values, lane, lanes.group(lane, rank_groups)

    def steps(self) -> list[tuple[int, Step]]:
        return [(self._lane, self._reduce)]

    def _reduce(self) -> dist.Work | None:
        return (
            None
            if self._group is None
            else work_of(dist.all_reduce(self.values, group=self._group, async_op=True))
        )


class ReduceScatterAllGather:
    """Two steps. Needs values whose number is a multiple of the ranks in the rank_groups."""

    def __init__(
        self, values: Tensor, lanes: Lanes, rank_groups: RankGroups, lane: int = 0
    ) -> None:
        self.values, self._lane = values, lane
        self._first, self._second = (
            lanes.group(lane, rank_groups),
            lanes.group(lane + 1, rank_groups),
        )
        members = len(rank_groups.members_of(lanes.ranks.rank)) or 1
        self._shard = values.new_empty(values.numel() // members if members > 1 else 0)

    def steps(self) -> list[tuple[int, Step]]:
        return [(self._lane, self._scatter), (self._lane + 1, self._gather)]

    def _scatter(self) -> dist.Work | None:
        if self._first is None:
            return None
        return work_of(
            dist.reduce_scatter_single(self._shard, self.values, group=self._first, async_op=True)
        )

    def _gather(self) -> dist.Work | None:
        if self._second is None:
            return None
        return work_of(
            dist.all_gather_single(self.values, self._shard, group=self._second, async_op=True)
        )


class PushPull:
    """Parameter server, two steps: every rank sends to the owner, which sums in the rank_groups's order and sends back to each.

    The server's state is the aggregated gradient; the optimizer runs on every rank, so any optimizer and
    gradient clipping stay exact.  The bytes on every link are those of a server that updates parameters.
    """

    def __init__(
        self, values: Tensor, lanes: Lanes, rank_groups: RankGroups, owner: int, lane: int = 0
    ) -> None:
        self.values, self._lane = values, lane
        self._first, self._second = (
            lanes.group(lane, rank_groups),
            lanes.group(lane + 1, rank_groups),
        )
        members = rank_groups.members_of(lanes.ranks.rank)
        self._root = members.index(owner) if self._first is not None else 0
        owns = self._first is not None and lanes.ranks.rank == owner
        self._received = [torch.empty_like(values) for _ in members] if owns else None
        half = values.dtype in (torch.float16, torch.bfloat16)
        self._total = torch.empty_like(values, dtype=torch.float32) if owns and half else None

    def steps(self) -> list[tuple[int, Step]]:
        return [(self._lane, self._push), (self._lane + 1, self._pull)]

    def _push(self) -> dist.Work | None:
        if self._first is None:
            return None
        return work_of(
            dist.gather(
                self.values, self._received, group=self._first, group_dst=self._root, async_op=True
            )
        )

    def _pull(self) -> dist.Work | None:
        if self._second is None:
            return None
        copies = (
            None if self._received is None else [self._summed(self._received)] * len(self._received)
        )
        return work_of(
            dist.scatter(
                self.values, copies, group=self._second, group_src=self._root, async_op=True
            )
        )

    def _summed(self, received: list[Tensor]) -> Tensor:
        """16-bit parts are summed in float32 and rounded once."""
        if self._total is None:
            for part in received[1:]:
                received[0].add_(part)
            return received[0]
        self._total.copy_(received[0])
        for part in received[1:]:
            self._total.add_(part)
        return received[0].copy_(self._total)


class Reduce:
    """One step: a tree or ring of the library's choice carries the sum to the root of each part, one of `roots`."""

    def __init__(
        self,
        values: Tensor,
        lanes: Lanes,
        rank_groups: RankGroups,
        roots: Sequence[int],
        lane: int = 0,
    ) -> None:
        self.values, self._lane, self._group = values, lane, lanes.group(lane, rank_groups)
        self._root = _position(rank_groups.members_of(lanes.ranks.rank), roots)

    def steps(self) -> list[tuple[int, Step]]:
        return [(self._lane, self._reduce)]

    def _reduce(self) -> dist.Work | None:
        return (
            None
            if self._group is None
            else work_of(
                dist.reduce(self.values, group=self._group, group_dst=self._root, async_op=True)
            )
        )


class Broadcast:
    """One step: what the root of each part holds is what all of the part hold afterwards."""

    def __init__(
        self,
        values: Tensor,
        lanes: Lanes,
        rank_groups: RankGroups,
        roots: Sequence[int],
        lane: int = 0,
    ) -> None:
        self.values, self._lane, self._group = values, lane, lanes.group(lane, rank_groups)
        self._root = _position(rank_groups.members_of(lanes.ranks.rank), roots)

    def steps(self) -> list[tuple[int, Step]]:
        return [(self._lane, self._send)]

    def _send(self) -> dist.Work | None:
        return (
            None
            if self._group is None
            else work_of(
                dist.broadcast(self.values, group=self._group, group_src=self._root, async_op=True)
            )
        )


class Chain:
    """Exchanges of the same values, one after the other, on ascending lanes."""

    def __init__(self, *parts: Exchange) -> None:
        self.values, self._parts = parts[0].values, parts

    def steps(self) -> list[tuple[int, Step]]:
        return [step for part in self._parts for step in part.steps()]


def work_of(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a member of the group gets a work handle"
    return work


def _position(members: Sequence[int], roots: Sequence[int]) -> int:
    return next((position for position, rank in enumerate(members) if rank in roots), 0)


def flat_sum(
    synchronizer: Synchronizer,
    values: Tensor,
    lanes: Lanes,
    rank_groups: RankGroups,
    owner: int | None = None,
    first_lane: int = 0,
) -> Exchange:
    """`values` are real and their number is a multiple of the ranks in the rank_groups; `owner` is one of these where there is a root."""
    if synchronizer is Synchronizer.ALL_REDUCE:
        return AllReduce(values, lanes, rank_groups, first_lane)
    if synchronizer is Synchronizer.REDUCE_SCATTER_ALL_GATHER:
        return ReduceScatterAllGather(values, lanes, rank_groups, first_lane)
    assert owner is not None, "a primitive with a root has an owner"
    if synchronizer is Synchronizer.PARAMETER_SERVER:
        return PushPull(values, lanes, rank_groups, owner, first_lane)
    return Chain(
        Reduce(values, lanes, rank_groups, (owner,), first_lane),
        Broadcast(values, lanes, rank_groups, (owner,), first_lane + 1),
    )
