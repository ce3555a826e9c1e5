"""Rows of a sparse gradient by direct exchange: each row travels to the owner of its range.

| symbol | meaning | shape |
|---|---|---|
| m | ranks that exchange | - |
| bounds | member i owns the rows `bounds[i]` to `bounds[i + 1]` of the variable | (m + 1,) |

The owner adds the rows of all ranks in the order of the group, and sends the union of its range to
all. Counts are gathered before each of the two rounds, since they differ between ranks and steps.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.peer_sends import grouped, joined, others, receives, sends
from runtime_rewriter.pytorch.exchange.ranks import RankGroups
from runtime_rewriter.pytorch.exchange.row_sums import RowStage, Source
from runtime_rewriter.pytorch.exchange.rows import GradientRows, RowBuffers, joined_rows, summed
from runtime_rewriter.pytorch.exchange.sums import work_of


class OwnedRows(RowStage):
    """One round: counts to all, then rows from rank to rank."""

    def __init__(
        self,
        source: Source,
        buffers: RowBuffers,
        lanes: Lanes,
        groups: RankGroups,
        lane: int,
        bounds: Sequence[int],
    ) -> None:
        """Collective. `bounds`: of the owners' rows, in the order of this rank's group."""
        super().__init__(source, buffers, lanes, groups, lane)
        members = groups.members_of(lanes.ranks.rank)
        self._others = others(members, lanes.ranks.rank)
        self._place = members.index(lanes.ranks.rank) if members else 0
        self._bounds = torch.tensor(bounds, device=lanes.device.device)
        self._queued, self._tag = lanes.queued, lanes.new_tag()
        self._buffers_of: dict[int, Tensor] = {}

    def _gather(self, counts: Tensor) -> dist.Work | None:
        """Start to gather the counts of all members, as rows of a matrix."""
        if self._count_group is None:
            return None
        self._counts = counts.new_empty((self._members, counts.numel()))
        return work_of(self._gather_counts(self._counts.view(-1), counts, self._count_group))

    def _start(
        self, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]]
    ) -> dist.Work | None:
        assert self._row_group is not None
        self._kept = sent  # a stream may still read from them
        if self._queued:
            return grouped(self._row_group, sent, received)
        works = receives(self._row_group, received, self._tag)
        return joined(works + sends(self._row_group, sent, self._tag), self._row_group)

    def _release(self) -> None:
        self._device.keep(*(part for _, part in self._kept), *self._buffers_of.values())
        self._kept = []

    def _unpacked(self, place: int, count: int, form: int) -> GradientRows:
        buffer = self._buffers_of.get(place)
        if buffer is None:
            buffer = self._buffers.empty(0)
        return self._buffers.unpacked(buffer, count, count, form)


class RowsToOwners(OwnedRows):
    """`result`: the sum over the ranks of the rows that this rank owns, which may be none."""

    def _exchange_counts(self, count: Tensor) -> dist.Work | None:
        if self._count_group is None:
            return None
        self._cuts = torch.searchsorted(self._rows.indices, self._bounds)
        return self._gather(torch.cat([self._cuts.diff(), count[1:]]))

    def _send_rows(self) -> dist.Work | None:
        if self._row_group is None:
            return None
        self._device.keep(self._counts)
        self._matrix: list[list[int]] = self._counts.tolist()  # rows for each owner, then the form
        parts = [self._between(start, stop) for start, stop in pairwise(self._cuts.tolist())]
        sent = [
            (owner, self._buffers.packed(parts[owner], parts[owner].count))
            for owner in self._others
            if parts[owner].count
        ]
        own = parts[self._place]
        self._buffers_of = {
            other: self._buffers.empty(count)
            for other in self._others
            if (count := self._matrix[other][self._place])
        }
        received = list(self._buffers_of.items())
        self._buffers_of[self._place] = self._buffers.packed(own, own.count)
        return self._start(sent, received)

    def _between(self, start: int, stop: int) -> GradientRows:
        rows = self._rows
        return GradientRows(rows.indices[start:stop], rows.values[start:stop], rows.form)

    def result(self) -> GradientRows:
        if self._row_group is None:
            return self._rows
        self._release()
        total = summed(
            [
                self._unpacked(place, counts[self._place], counts[-1])
                for place, counts in enumerate(self._matrix)
            ]
        )
        self._buffers_of = {}
        return total


class RowsFromOwners(OwnedRows):
    """`result`: the sums of all owners, rounded to the dtype that travels."""

    def _exchange_counts(self, count: Tensor) -> dist.Work | None:
        return self._gather(count)

    def _send_rows(self) -> dist.Work | None:
        own = self._buffers.packed(self._rows, self._rows.count)
        self._matrix = [[self._rows.count, int(self._rows.form)]]
        if self._row_group is None:
            self._place, self._kept, self._buffers_of = 0, [], {0: own}
            return None
        self._device.keep(self._counts)
        self._matrix = self._counts.tolist()
        self._buffers_of = {
            owner: self._buffers.empty(self._matrix[owner][0])
            for owner in self._others
            if self._matrix[owner][0]
        }
        received = list(self._buffers_of.items())
        self._buffers_of[self._place] = own
        to_all = self._others if self._rows.count else []
        return self._start([(other, own) for other in to_all], received)

    def result(self) -> GradientRows:
        self._release()
        rows = joined_rows(
            [self._unpacked(place, count, form) for place, (count, form) in enumerate(self._matrix)]
        )
        self._buffers_of = {}
        return rows
