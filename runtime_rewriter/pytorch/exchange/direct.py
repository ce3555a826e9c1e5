"""The uncompressed direct exchange: each rank sums the share of a message that it owns.

| symbol | meaning | shape |
|---|---|---|
| m | ranks that exchange | - |
| values | gradient / w before, the sum after | (elements,) |
| parts | views of `values`, one per owner, some empty | m of them |
| inbox | the other ranks' values of this rank's part | (m - 1, own elements) |
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.strategy_space.shares import Shares, owned_bounds
from runtime_rewriter.pytorch.exchange.lanes import Lanes, Step
from runtime_rewriter.pytorch.exchange.owned_sum import OwnedSum
from runtime_rewriter.pytorch.exchange.peer_sends import TwoRounds, others
from runtime_rewriter.pytorch.exchange.ranks import RankGroups


class DirectExchange:
    """Three steps: parts to their owners, the owners' sums to all, and their arrival.

    The owner adds in the order of the group, so all ranks get the same bits at any timing. The
    optimizer runs on every rank, so any optimizer and gradient clipping stay exact.
    """

    def __init__(
        self,
        values: Tensor,
        lanes: Lanes,
        groups: RankGroups,
        shares: Shares | None,
        first_lane: int,
    ) -> None:
        """Collective: it may create process groups."""
        self.values = values
        self._first_lane = first_lane
        members = groups.members_of(lanes.ranks.rank)
        places = others(members, lanes.ranks.rank)
        parts = parts_of(values, shares, members)
        place = members.index(lanes.ranks.rank) if places else 0
        self._own = parts[place] if places else values[:0]
        self._alone = members == (lanes.ranks.rank,)
        self._summed = False  # between the halves, if someone has asked for the sum
        inbox = self._own.new_empty((len(places), self._own.numel()))
        from_members = dict(zip(places, inbox, strict=True)) if self._own.numel() else {}
        summands = from_members | {place: self._own}
        self._summands = [summands[number] for number in sorted(summands)]
        half = values.dtype in (torch.float16, torch.bfloat16) and bool(from_members)
        self._total = torch.empty_like(self._own, dtype=torch.float32) if half else None
        owners = filled((other, parts[other]) for other in places)
        self._rounds = TwoRounds(
            lanes,
            groups,
            first_lane,
            to_owners=owners,
            from_members=list(from_members.items()),
            to_members=[(other, self._own) for other in from_members],
            from_owners=owners,
        )

    def steps(self) -> list[tuple[int, Step]]:
        steps: tuple[Step, ...] = (self._push, self._pull, self._arrive)
        return list(enumerate(steps, self._first_lane))

    @property
    def owned(self) -> OwnedSum | None:
        """This rank's share."""
        if self._alone:
            return OwnedSum(1, 0, lambda: self.values)
        start = int(self._own.storage_offset()) - int(self.values.storage_offset())
        return OwnedSum(1, start, self._sum)

    # Recordings name the steps of a message after the functions that start them.

    def _push(self) -> dist.Work | None:
        return self._rounds.push()

    def _pull(self) -> dist.Work | None:
        if not self._summed:
            self._sum()
        self._summed = False
        return self._rounds.pull()

    def _sum(self) -> Tensor:
        total = sum_in_order(self._summands, self._total)
        if total is not self._own:
            self._own.copy_(total)
        self._summed = True
        return self._own

    def _arrive(self) -> None:
        """The lane has waited for the sums: only so does a message know that it has arrived."""


def parts_of(
    values: Tensor, shares: Shares | None, members: Sequence[int], block: int = 1
) -> list[Tensor]:
    """Cut the flat `values` into the part of each member, in the members' order."""
    bounds = owned_bounds(values.numel(), shares, members, block) if members else [0]
    return [values[start:stop] for start, stop in pairwise(bounds)]


def filled(parts: Iterable[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """The parts that have elements."""
    return [(place, part) for place, part in parts if part.numel()]


def sum_in_order(parts: Sequence[Tensor], total: Tensor | None) -> Tensor:
    """Sum into the first part. `total`: float32 buffer in which 16-bit parts are summed first."""
    into = parts[0] if total is None else total.copy_(parts[0])
    for part in parts[1:]:
        into.add_(part)
    return into if total is None else parts[0].copy_(total)
