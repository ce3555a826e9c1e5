"""Sums of compressed messages with error feedback, over any group of ranks and by any synchronizer.

Before the steps, `values` hold v_r = g_r / w + e_r on every rank. After them they hold the sum of
what was sent, with the same bits on every rank. In between, as soon as a rank's `values` hold what
it did not send, `feedback.keep` stores that as its residual.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.strategy_space.plan import Message
from autotune.strategy_space.strategy import ROOTED, Compressor, Synchronizer
from runtime_rewriter.compression import gains, matrix_shape, seed_name
from runtime_rewriter.pytorch.exchange.direct import parts_of
from runtime_rewriter.pytorch.exchange.lanes import Lanes, Step
from runtime_rewriter.pytorch.exchange.owned_sum import OwnedSum
from runtime_rewriter.pytorch.exchange.payloads import (
    owned_block,
    owned_payload,
    row_layout,
    sharded_payload,
    whole_payload,
)
from runtime_rewriter.pytorch.exchange.peer_sends import TwoRounds, others
from runtime_rewriter.pytorch.exchange.power_sgd import LowRank, start_tensor
from runtime_rewriter.pytorch.exchange.ranks import RankGroups
from runtime_rewriter.pytorch.exchange.residuals import Feedback
from runtime_rewriter.pytorch.exchange.sums import Exchange, flat_sum, work_of


def flat_exchange(
    message: Message,
    values: Tensor,
    lanes: Lanes,
    groups: RankGroups,
    feedback: Feedback,
    first_lane: int = 0,
) -> Exchange:
    """Build the sum over the groups with the message's compressor. Collective.

    `values` have `padded_elements`. A rank alone in its group sends nothing and keeps its values.
    """
    members = groups.members_of(lanes.ranks.rank)
    if not message.compressor.error_feedback:
        kind, owner, shares = message.synchronizer, message.owner, message.shares
        return flat_sum(kind, values, lanes, groups, owner, first_lane, shares)
    if message.compressor is Compressor.POWER_SGD:
        return PowerSgd(message, values, lanes, groups, feedback, first_lane)
    if len(members) > 1:
        feedback.feed(range(len(message.slices)))
    return _exchange_of(message)(message, values, lanes, groups, feedback, first_lane)


def _exchange_of(message: Message) -> type[PayloadExchange]:
    if message.synchronizer in ROOTED:
        return Rooted
    if message.synchronizer is Synchronizer.DIRECT_EXCHANGE:
        return Owned
    return Sharded if message.compressor.is_quantiser else Gathered


class PayloadExchange(ABC):
    """Collectives that carry payloads, one per lane, and a last step that decodes them."""

    collectives: ClassVar[int]
    owned: OwnedSum | None = None  # the sum that all ranks see is what its last step decodes

    def __init__(
        self,
        message: Message,
        values: Tensor,
        lanes: Lanes,
        groups: RankGroups,
        feedback: Feedback,
        lane: int,
    ) -> None:
        self.values = values
        self._lane = lane
        self._feedback = feedback
        self._lanes, self._rank_groups = lanes, groups
        self._members = groups.members_of(lanes.ranks.rank)
        self._groups = [lanes.group(lane + number, groups) for number in range(self.collectives)]
        self._padding = values[message.elements :]
        self._prepare(message, lanes.ranks.rank)

    @abstractmethod
    def _prepare(self, message: Message, rank: int) -> None:
        """Allocate the buffers of this rank."""

    def steps(self) -> list[tuple[int, Step]]:
        steps = (*self._sends(), self._finish)
        takes_part = len(self._members) > 1
        return [(self._lane + n, step if takes_part else _idle) for n, step in enumerate(steps)]

    @abstractmethod
    def _sends(self) -> tuple[Step, ...]:
        """The collectives; called, as `_finish`, only where the rank is not alone."""

    @abstractmethod
    def _finish(self) -> None: ...


def _idle() -> None:
    """A step of a rank without others."""


class Sharded(PayloadExchange):
    """A quantiser without a root, three steps.

    Every rank sums the shard that all ranks send it, encodes the sum and sends it to all. The
    second encoding loses something, too: that joins the residual of the shard's rank.
    """

    collectives = 2

    def _prepare(self, message: Message, rank: int) -> None:
        layout = row_layout(message, max(1, len(self._members)))
        self._all = self.values[: layout.elements]
        place = self._members.index(rank) if self._members else 0
        self._shard = self._all.view(layout.rows, -1)[place]
        self._sent = sharded_payload(message, layout, self.values)
        self._received = sharded_payload(message, layout, self.values)
        self._sum = sharded_payload(message, layout.with_rows(1), self.values)
        self._total = self.values.new_empty(layout.elements // layout.rows)

    def _sends(self) -> tuple[Step, ...]:
        return self._send, self._send_sum

    def _send(self) -> dist.Work:
        self._padding.zero_()
        self._sent.encode_(self._all)
        into, sent = self._received.bytes, self._sent.bytes
        return work_of(dist.all_to_all_single(into, sent, group=self._groups[0], async_op=True))

    def _send_sum(self) -> dist.Work:
        self._received.sum_into(self._total)
        self._sum.encode_(self._total)
        self._shard += self._total
        self._feedback.keep()
        into, sent = self._received.bytes, self._sum.bytes
        return work_of(dist.all_gather_single(into, sent, group=self._groups[1], async_op=True))

    def _finish(self) -> None:
        self._received.decode(self._all)


class Gathered(PayloadExchange):
    """top-k without a root, two steps: every rank gets all payloads and sums them in group
    order."""

    collectives = 1

    def _prepare(self, message: Message, rank: int) -> None:
        self._all = self.values[: message.elements]
        self._sent = whole_payload(message, 1, self.values)
        self._received = whole_payload(message, max(1, len(self._members)), self.values)

    def _sends(self) -> tuple[Step, ...]:
        return (self._send,)

    def _send(self) -> dist.Work:
        self._sent.encode_(self._all)
        self._feedback.keep()
        into, sent = self._received.bytes, self._sent.bytes
        return work_of(dist.all_gather_single(into, sent, group=self._groups[0], async_op=True))

    def _finish(self) -> None:
        self._received.sum_into(self._all)


class Rooted(PayloadExchange):
    """A quantiser or top-k over an owner, three steps.

    The owner sums the payloads of all, encodes the sum and sends it to all. The loss of
    the second encoding joins the owner's residual. A library's reduce cannot add payloads, so both
    synchronizers with a root gather. They differ on the way back: scatter or broadcast.
    """

    collectives = 2

    def _prepare(self, message: Message, rank: int) -> None:
        length = message.elements
        if message.compressor.is_quantiser:
            length = row_layout(message, 1).elements
        self._all = self.values[:length]
        self._pushed = message.synchronizer is Synchronizer.PARAMETER_SERVER
        self._sent = whole_payload(message, 1, self.values)
        assert message.owner is not None, "a synchronizer with a root has an owner"
        takes_part = len(self._members) > 1
        self._root = self._members.index(message.owner) if takes_part else 0
        owns = takes_part and rank == message.owner
        self._received = whole_payload(message, len(self._members), self.values) if owns else None
        self._total = self.values.new_empty(length if owns else 0)

    def _sends(self) -> tuple[Step, ...]:
        return self._send, self._send_sum

    def _send(self) -> dist.Work:
        self._padding.zero_()
        self._sent.encode_(self._all)
        if self._received is None:
            self._feedback.keep()
        rows = None if self._received is None else list(self._received.bytes)
        sent, group = self._sent.bytes[0], self._groups[0]
        return work_of(dist.gather(sent, rows, group=group, group_dst=self._root, async_op=True))

    def _send_sum(self) -> dist.Work:
        if self._received is not None:
            self._received.sum_into(self._total)
            self._sent.encode_(self._total)
            self._all += self._total
            self._feedback.keep()
        row, group, root = self._sent.bytes[0], self._groups[1], self._root
        if not self._pushed:
            return work_of(dist.broadcast(row, group=group, group_src=root, async_op=True))
        copies = None if self._received is None else [row] * len(self._received.bytes)
        return work_of(dist.scatter(row, copies, group=group, group_src=root, async_op=True))

    def _finish(self) -> None:
        self._sent.sum_into(self._all)


class Owned(PayloadExchange):
    """A quantiser or top-k by direct exchange, three steps.

    Each rank encodes every owner's part by itself. The owner sums what it decoded, encodes the sum
    and sends it to all. The loss of the second encoding joins the owner's residual.
    """

    collectives = 2

    def _prepare(self, message: Message, rank: int) -> None:
        members, places = self._members, others(self._members, rank)
        place = members.index(rank) if places else 0
        block = owned_block(message)
        self._parts = parts_of(self.values, message.shares, members, block) if places else []
        self._sent = {
            number: owned_payload(message, 1, part)
            for number, part in enumerate(self._parts)
            if part.numel()
        }
        self._own = self._parts[place] if place in self._sent else self.values[:0]
        self._place, self._received = place, None
        from_members: list[tuple[int, Tensor]] = []
        if place in self._sent:
            self._received = owned_payload(message, len(members), self._own)
            from_members = [(other, self._received.bytes[other]) for other in places]
        self._total = torch.empty_like(self._own)
        owners = [(other, self._sent[other].bytes[0]) for other in places if other in self._sent]
        self._rounds = TwoRounds(
            self._lanes,
            self._rank_groups,
            self._lane,
            to_owners=owners,
            from_members=from_members,
            to_members=[(other, self._sent[place].bytes[0]) for other, _ in from_members],
            from_owners=owners,
        )

    def _sends(self) -> tuple[Step, ...]:
        return self._send, self._send_sum

    def _send(self) -> dist.Work | None:
        self._padding.zero_()
        for number, payload in self._sent.items():
            payload.encode_(self._parts[number])
        if self._received is not None:
            self._received.bytes[self._place].copy_(self._sent[self._place].bytes[0])
        return self._rounds.push()

    def _send_sum(self) -> dist.Work | None:
        if self._received is not None:
            self._received.sum_into(self._total)
            self._sent[self._place].encode_(self._total)
            self._own += self._total
        self._feedback.keep()
        return self._rounds.pull()

    def _finish(self) -> None:
        for number, payload in self._sent.items():
            payload.sum_into(self._parts[number])


class PowerSgd:
    """Two sums by the message's synchronizer, of P and of Q (see `power_sgd`), and a last step.

    PowerSGD has no payload: the second sum needs the result of the first one, its factors are
    plain tensors that the backend's own sums add, and each slice keeps a start for the next step.
    """

    owned: OwnedSum | None = None

    def __init__(
        self,
        message: Message,
        values: Tensor,
        lanes: Lanes,
        groups: RankGroups,
        feedback: Feedback,
        lane: int,
    ) -> None:
        self.values, self._feedback = values, feedback
        members = groups.members_of(lanes.ranks.rank)
        assert message.rank is not None
        rank, shapes = message.rank, feedback.shapes

        def start_of(number: int) -> Tensor:
            part = message.slices[number]
            seeded = seed_name(part, rank)
            return feedback.residuals.factor(
                part,
                rank,
                lambda: start_tensor(seeded, matrix_shape(shapes[number])[1], rank, values),
            )

        factored = [number for number, shape in enumerate(shapes) if gains(shape, rank)]
        self._alone = len(members) < 2
        if not self._alone:
            feedback.feed(factored)
        self._low = LowRank(values, shapes, rank, max(1, len(members)), start_of)

        def steps_of(factors: Tensor, first_lane: int) -> list[tuple[int, Step]]:
            kind, owner, shares = message.synchronizer, message.owner, message.shares
            return flat_sum(kind, factors, lanes, groups, owner, first_lane, shares).steps()

        self._left = steps_of(self._low.left, lane)
        self._right = steps_of(self._low.right, self._left[-1][0] + 1) if factored else []

    def steps(self) -> list[tuple[int, Step]]:
        # Not an attribute: the steps refer to this object, and a cycle would keep its buffers
        # until Python's next garbage collection.
        steps = _before(self._left, self._low.project, self._alone)
        if self._right:
            steps += _before(self._right, self._project_back, self._alone)
        return [*steps, (steps[-1][0] + 1, self._finish)]

    def _project_back(self) -> None:
        self._low.project_back()
        self._feedback.keep()

    def _finish(self) -> dist.Work | None:
        if not self._alone:
            self._low.restore()
        return None


def _before(
    steps: list[tuple[int, Step]], prepare: Callable[[], None], alone: bool
) -> list[tuple[int, Step]]:
    """Return the steps; the first one prepares its values before it starts."""
    (lane, start), *others = steps

    def prepared() -> dist.Work | None:
        if alone:
            return None
        prepare()
        return start()

    return [(lane, prepared), *others]
