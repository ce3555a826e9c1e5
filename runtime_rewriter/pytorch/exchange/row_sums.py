"""Sums of sparse gradients: rows are gathered, added where they meet, and handed out.

`all_gather`: every rank gets the rows of all and adds them itself.  `gather_scatter`: a parameter server gathers the rows,
adds them and sends the union back to each (Parallax, EuroSys 2019, sec. 3).  The numbers of rows travel first, since they
differ from rank to rank and from step to step; buffers have room for the most that any rank has.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.strategy_space.plan import Message
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.pytorch.exchange.hierarchical import PlanGroups
from runtime_rewriter.pytorch.exchange.lanes import Lanes, Step
from runtime_rewriter.pytorch.exchange.ranks import RankGroups
from runtime_rewriter.pytorch.exchange.rows import GradientRows, RowBuffers, summed
from runtime_rewriter.pytorch.exchange.sums import work_of

Source = Callable[[], GradientRows]
"""The rows that this rank has once the earlier steps have completed."""


class GatherRows:
    """Two steps: numbers, then rows, to all of the part or to its root, one of `roots`.

    `result`: the sum, on those that got the rows; on the others their own rows. Building one is collective.
    """

    def __init__(
        self,
        source: Source,
        buffers: RowBuffers,
        lanes: Lanes,
        rank_groups: RankGroups,
        lane: int,
        roots: Sequence[int] | None = None,
    ) -> None:
        self._source, self._buffers, self._lane, self._device = source, buffers, lane, lanes.device
        self._counting, self._moving = (
            lanes.group(lane, rank_groups),
            lanes.group(lane + 1, rank_groups),
        )
        members = rank_groups.members_of(lanes.ranks.rank)
        self._members = len(members)
        self._root = _root(members, roots) if roots is not None else None
        self._receives = self._root is None or members[self._root : self._root + 1] == (
            lanes.ranks.rank,
        )
        self._capacity = 0
        self._sent: Tensor | None = None

    def steps(self) -> list[tuple[int, Step]]:
        return [(self._lane, self._count), (self._lane + 1, self._move)]

    def _count(self) -> dist.Work | None:
        self._rows = self._source()
        self._device.keep(self._rows.indices, self._rows.values)
        self._capacity, self._received = 0, self._buffers.empty(0)
        if self._counting is None:
            return None
        mine = torch.tensor([self._rows.count, self._rows.form], device=self._device.device)
        self._counts = mine.new_empty(2 * self._members)
        return work_of(
            dist.all_gather_single(self._counts, mine, group=self._counting, async_op=True)
        )

    def _move(self) -> dist.Work | None:
        if self._moving is None:
            return None
        self._device.keep(self._counts)
        self._told: list[list[int]] = self._counts.view(-1, 2).tolist()
        self._capacity = max(count for count, _ in self._told)
        if self._capacity == 0:
            return None
        # Kept until the result is read: a stream may still read what it sends when nobody else needs it any more.
        self._sent = sent = self._buffers.packed(self._rows, self._capacity)
        self._received = sent.new_empty((self._members if self._receives else 0) * sent.numel())
        if self._root is None:
            return work_of(
                dist.all_gather_single(self._received, sent, group=self._moving, async_op=True)
            )
        parts = list(self._received.view(self._members, -1)) if self._receives else None
        return work_of(
            dist.gather(sent, parts, group=self._moving, group_dst=self._root, async_op=True)
        )

    def result(self) -> GradientRows:
        """Once the steps have completed."""
        sent, self._sent = self._sent, None
        if sent is not None:
            self._device.keep(sent)
        if self._moving is None or not self._receives:
            return self._rows
        self._device.keep(self._received)
        buffers = (
            self._received.view(self._members, -1)
            if self._capacity
            else [self._received] * self._members
        )
        return summed(
            [
                self._buffers.unpacked(buffer, self._capacity, *told)
                for buffer, told in zip(buffers, self._told, strict=True)
            ]
        )


class SpreadRows:
    """Two steps: the number, then the rows, from the root of each part to all of it; each by itself with `star`.

    `result`: the root's rows, rounded to what travels on every rank, also on one that is alone. Building one is collective.
    """

    def __init__(
        self,
        source: Source,
        buffers: RowBuffers,
        lanes: Lanes,
        rank_groups: RankGroups,
        roots: Sequence[int],
        lane: int,
        star: bool = False,
    ) -> None:
        self._source, self._buffers, self._lane, self._device, self._star = (
            source,
            buffers,
            lane,
            lanes.device,
            star,
        )
        self._counting, self._moving = (
            lanes.group(lane, rank_groups),
            lanes.group(lane + 1, rank_groups),
        )
        members = rank_groups.members_of(lanes.ranks.rank)
        self._members, self._root = len(members), _root(members, roots)
        self._sends = members[self._root : self._root + 1] == (lanes.ranks.rank,)
        self._sent: Tensor | None = None

    def steps(self) -> list[tuple[int, Step]]:
        return [(self._lane, self._count), (self._lane + 1, self._move)]

    def _count(self) -> dist.Work | None:
        self._rows = self._source()
        self._device.keep(self._rows.indices, self._rows.values)
        if self._counting is None:
            return None
        self._told = torch.tensor([self._rows.count, self._rows.form], device=self._device.device)
        return work_of(
            dist.broadcast(self._told, group=self._counting, group_src=self._root, async_op=True)
        )

    def _move(self) -> dist.Work | None:
        if self._moving is None:
            self._number, self._form = self._rows.count, int(self._rows.form)
            self._buffer = self._buffers.packed(self._rows, self._number)
            return None
        self._device.keep(self._told)
        self._number, self._form = self._told.tolist()
        self._buffer = (
            self._buffers.packed(self._rows, self._number)
            if self._sends
            else self._buffers.empty(self._number)
        )
        if self._number == 0:
            return None
        if not self._star:
            return work_of(
                dist.broadcast(
                    self._buffer, group=self._moving, group_src=self._root, async_op=True
                )
            )
        mine, self._buffer = self._buffer, torch.empty_like(self._buffer)
        self._sent = mine if self._sends else None  # kept as in `GatherRows`
        copies = [mine] * self._members if self._sends else None
        return work_of(
            dist.scatter(
                self._buffer, copies, group=self._moving, group_src=self._root, async_op=True
            )
        )

    def result(self) -> GradientRows:
        """Once the steps have completed."""
        sent, self._sent = self._sent, None
        if sent is not None:
            self._device.keep(sent)
        self._device.keep(self._buffer)
        return self._buffers.unpacked(self._buffer, self._number, self._number, self._form)


def _root(members: Sequence[int], roots: Sequence[int]) -> int:
    return next((position for position, rank in enumerate(members) if rank in roots), 0)


def row_sum(
    message: Message, source: Source, buffers: RowBuffers, lanes: Lanes, plan_groups: PlanGroups
) -> tuple[list[tuple[int, Step]], Source]:
    """The steps of a sparse message, and where the sum over all ranks is after them. Collective."""
    two_level, owner = plan_groups.two_level(message), message.owner
    among = plan_groups.leaders(owner) if two_level else plan_groups.world
    leaders = among.parts[0]
    lane, result = 0, source
    steps: list[tuple[int, Step]] = []

    def add(stage: GatherRows | SpreadRows) -> None:
        nonlocal lane, result
        steps.extend(stage.steps())
        lane, result = lane + 2, stage.result

    if two_level:
        assert plan_groups.hosts is not None
        add(GatherRows(result, buffers, lanes, plan_groups.hosts, lane, leaders))
    if message.synchronizer is Synchronizer.PARAMETER_SERVER:
        assert owner is not None, "a parameter server has an owner"
        add(GatherRows(result, buffers, lanes, among, lane, (owner,)))
        add(SpreadRows(result, buffers, lanes, among, (owner,), lane, star=True))
    else:
        add(GatherRows(result, buffers, lanes, among, lane))
    if two_level:
        assert plan_groups.hosts is not None
        add(SpreadRows(result, buffers, lanes, plan_groups.hosts, leaders, lane))
    return steps, result
