"""Sums of sparse gradients: rows are gathered, added by index, and sent back.

With `all_gather` every rank gets the rows of all ranks and adds them itself. With `gather_scatter`
a parameter server gathers the rows, adds them and sends the union back (Parallax, EuroSys 2019,
sec. 3); `owned_rows` has the same by direct exchange. The row counts are sent first, since they
differ between ranks and steps. Buffers have room for the largest count of any rank.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from runtime_rewriter.pytorch.exchange.lanes import Lanes, Step
from runtime_rewriter.pytorch.exchange.ranks import RankGroups
from runtime_rewriter.pytorch.exchange.rows import GradientRows, RowBuffers, summed
from runtime_rewriter.pytorch.exchange.sums import root_of, work_of

Source = Callable[[], GradientRows]
"""Returns the rows of this rank, once the earlier steps have completed."""


class RowStage(ABC):
    """Two steps on consecutive lanes: counts, then rows. Building one is collective.

    `roots`: one of them is the root of each group. None: every rank of a group gets all rows.
    """

    def __init__(
        self,
        source: Source,
        buffers: RowBuffers,
        lanes: Lanes,
        groups: RankGroups,
        lane: int,
        roots: Sequence[int] | None = None,
    ) -> None:
        self._source = source
        self._buffers = buffers
        self._lane = lane
        self._device = lanes.device
        self._count_group = lanes.group(lane, groups)
        self._row_group = lanes.group(lane + 1, groups)
        self._gather_counts, self._gather_rows = lanes.all_gather(groups), lanes.all_gather(groups)
        members = groups.members_of(lanes.ranks.rank)
        self._members = len(members)
        self._root = None if roots is None else root_of(members, roots)
        is_root = self._root is not None and members[self._root :][:1] == (lanes.ranks.rank,)
        self._is_root = is_root
        # The buffer that is sent lives until `result`: a stream may still read from it.
        self._sent: Tensor | None = None

    def steps(self) -> list[tuple[int, Step]]:
        return [(self._lane, self._send_count), (self._lane + 1, self._send_rows)]

    def _send_count(self) -> dist.Work | None:
        self._rows = self._source()
        self._device.keep(self._rows.indices, self._rows.values)
        count = torch.tensor([self._rows.count, self._rows.form], device=self._device.device)
        return self._exchange_counts(count)

    @abstractmethod
    def _exchange_counts(self, count: Tensor) -> dist.Work | None:
        """`count`: number and form of this rank's rows."""

    @abstractmethod
    def _send_rows(self) -> dist.Work | None: ...

    @abstractmethod
    def result(self) -> GradientRows:
        """Once the steps have completed."""

    def _release_sent(self) -> None:
        sent, self._sent = self._sent, None
        if sent is not None:
            self._device.keep(sent)


class GatherRows(RowStage):
    """Rows go to every rank of the group, or to its root.

    `result`: the sum on ranks that receive rows; their own rows on the others.
    """

    def _exchange_counts(self, count: Tensor) -> dist.Work | None:
        self._capacity = 0
        self._received = self._buffers.empty(0)
        if self._count_group is None:
            return None
        self._counts = count.new_empty(2 * self._members)
        group = self._count_group
        return work_of(self._gather_counts(self._counts, count, group))

    @property
    def _receives(self) -> bool:
        return self._root is None or self._is_root

    def _send_rows(self) -> dist.Work | None:
        group = self._row_group
        if group is None:
            return None
        self._device.keep(self._counts)
        self._count_and_form: list[list[int]] = self._counts.view(-1, 2).tolist()
        self._capacity = max(count for count, _ in self._count_and_form)
        if self._capacity == 0:
            return None
        self._sent = sent = self._buffers.packed(self._rows, self._capacity)
        received = sent.new_empty((self._members if self._receives else 0) * sent.numel())
        self._received = received
        if self._root is None:
            return work_of(self._gather_rows(received, sent, group))
        parts = list(received.view(self._members, -1)) if self._receives else None
        return work_of(dist.gather(sent, parts, group=group, group_dst=self._root, async_op=True))

    def result(self) -> GradientRows:
        self._release_sent()
        if self._row_group is None or not self._receives:
            return self._rows
        self._device.keep(self._received)
        buffers: Sequence[Tensor] = [self._received] * self._members
        if self._capacity:
            buffers = list(self._received.view(self._members, -1))
        pairs = zip(buffers, self._count_and_form, strict=True)
        return summed(
            [
                self._buffers.unpacked(buffer, self._capacity, count, form)
                for buffer, (count, form) in pairs
            ]
        )


class SpreadRows(RowStage):
    """Rows go from the root of each group to all of it, by scatter if `star`, else by broadcast.

    `result`: the root's rows, rounded to the dtype that travels on every rank, even if alone.
    """

    star = False

    def _exchange_counts(self, count: Tensor) -> dist.Work | None:
        self._count = count
        group, root = self._count_group, self._root
        if group is None:
            return None
        return work_of(dist.broadcast(count, group=group, group_src=root, async_op=True))

    def _send_rows(self) -> dist.Work | None:
        group, root = self._row_group, self._root
        if group is None:
            self._number, self._form = self._rows.count, int(self._rows.form)
            self._buffer = self._buffers.packed(self._rows, self._number)
            return None
        self._device.keep(self._count)
        self._number, self._form = self._count.tolist()
        if self._is_root:
            self._buffer = self._buffers.packed(self._rows, self._number)
        else:
            self._buffer = self._buffers.empty(self._number)
        if self._number == 0:
            return None
        if not self.star:
            buffer = self._buffer
            return work_of(dist.broadcast(buffer, group=group, group_src=root, async_op=True))
        packed, self._buffer = self._buffer, torch.empty_like(self._buffer)
        self._sent = packed if self._is_root else None
        copies = [packed] * self._members if self._is_root else None
        return work_of(
            dist.scatter(self._buffer, copies, group=group, group_src=root, async_op=True)
        )

    def result(self) -> GradientRows:
        self._release_sent()
        self._device.keep(self._buffer)
        return self._buffers.unpacked(self._buffer, self._number, self._number, self._form)


class ScatterRows(SpreadRows):
    """Rows go from a parameter server to each rank by itself."""

    star = True
