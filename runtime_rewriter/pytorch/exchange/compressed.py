"""Sums of compressed messages with error feedback: int8, top-k and PowerSGD over any circle, by any primitive.

Before the steps `values` hold v_r = g_r / w + e_r on every rank, after them the sum of what was sent, the same bits on every
rank. In between, as soon as a rank's `values` hold what it did not send, `feedback.keep` makes that its residual.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from autotune.strategy_space.plan import Message
from autotune.strategy_space.strategy import ERROR_FEEDBACK, ROOTED, Compressor, Synchronizer
from runtime_rewriter.pytorch.exchange.lanes import Lanes, Step
from runtime_rewriter.pytorch.exchange.power_sgd import LowRank, gains, initial_start, matrix_shape
from runtime_rewriter.pytorch.exchange.quantise import QuantisedRows, RowLayout
from runtime_rewriter.pytorch.exchange.ranks import Circle
from runtime_rewriter.pytorch.exchange.residuals import Feedback
from runtime_rewriter.pytorch.exchange.sums import Exchange, flat_sum, work_of
from runtime_rewriter.pytorch.exchange.top_k import PickedRows, picked


class Payload(Protocol):
    """Rows of bytes, one per rank or part, uint8 of shape (R, row bytes)."""

    bytes: Tensor

    def encode_(self, values: Tensor) -> None:
        """Say `values` as well as the bytes can, and leave in them what they do not say."""

    def sum_into(self, out: Tensor) -> None:
        """The sum of what the rows say, in row order."""


def padded_elements(message: Message, ranks: int) -> int:
    """How many elements the values of a message need so that `ranks` of them can sum it: a multiple of these, and whole blocks."""
    multiple = -(-message.elements // ranks) * ranks
    if message.compressor is not Compressor.INT8:
        return multiple
    return max(
        multiple,
        RowLayout.of(message.elements, 1 if message.synchronizer in ROOTED else ranks).elements,
    )


def flat_exchange(
    message: Message,
    values: Tensor,
    lanes: Lanes,
    circle: Circle,
    feedback: Feedback,
    first_lane: int = 0,
) -> Exchange:
    """The sum over the circle with the message's compressor. Collective; `values` have `padded_elements`.

    A rank that is alone in its circle sends nothing, so its values stay as they are.
    """
    members = circle.part_of(lanes.ranks.rank)
    if message.compressor not in ERROR_FEEDBACK:
        return flat_sum(message.synchronizer, values, lanes, circle, message.owner, first_lane)
    if message.compressor is Compressor.POWER_SGD:
        return PowerSgd(message, values, lanes, circle, feedback, first_lane)
    if len(members) > 1:
        feedback.feed(range(len(message.slices)))
    if message.synchronizer in ROOTED:
        return Rooted(message, values, lanes, circle, feedback, first_lane)
    kind = Quantised if message.compressor is Compressor.INT8 else Picked
    return kind(message, values, lanes, circle, feedback, first_lane)


class Quantised:
    """int8 without a root, three steps: every rank sums a shard of what all have sent it, and sends its sum to all.

    Two roundings: what the second one loses joins the residual of the rank that owns the shard.
    """

    def __init__(
        self,
        message: Message,
        values: Tensor,
        lanes: Lanes,
        circle: Circle,
        feedback: Feedback,
        lane: int,
    ) -> None:
        members = circle.part_of(lanes.ranks.rank)
        self.values, self._lane, self._feedback = values, lane, feedback
        self._groups = lanes.group(lane, circle), lanes.group(lane + 1, circle)
        layout = RowLayout.of(message.elements, max(1, len(members)))
        self._all, self._padding = values[: layout.elements], values[message.elements :]
        own = members.index(lanes.ranks.rank) if members else 0
        self._shard = self._all.view(layout.rows, -1)[own]
        self._sent, self._received = (
            QuantisedRows(layout, values.dtype, values.device) for _ in range(2)
        )
        self._sum = QuantisedRows(layout.with_rows(1), values.dtype, values.device)
        self._total = values.new_empty(layout.elements // layout.rows)

    def steps(self) -> list[tuple[int, Step]]:
        return [
            (self._lane, self._send),
            (self._lane + 1, self._send_sum),
            (self._lane + 2, self._finish),
        ]

    def _send(self) -> dist.Work | None:
        if self._groups[0] is None:
            return None
        self._padding.zero_()
        self._sent.encode_(self._all)
        return work_of(
            dist.all_to_all_single(
                self._received.bytes, self._sent.bytes, group=self._groups[0], async_op=True
            )
        )

    def _send_sum(self) -> dist.Work | None:
        if self._groups[1] is None:
            return None
        self._received.sum_into(self._total)
        self._sum.encode_(self._total)
        self._shard += self._total
        self._feedback.keep()
        return work_of(
            dist.all_gather_single(
                self._received.bytes, self._sum.bytes, group=self._groups[1], async_op=True
            )
        )

    def _finish(self) -> dist.Work | None:
        if self._groups[0] is not None:
            self._received.decode(self._all)
        return None


class Picked:
    """top-k without a root, two steps: every rank sends what it picked to all, and all sum it in the circle's order."""

    def __init__(
        self,
        message: Message,
        values: Tensor,
        lanes: Lanes,
        circle: Circle,
        feedback: Feedback,
        lane: int,
    ) -> None:
        members = circle.part_of(lanes.ranks.rank)
        self.values, self._lane, self._feedback = values, lane, feedback
        self._group = lanes.group(lane, circle)
        self._all = values[: message.elements]
        self._sent, self._received = (
            _payload(message, values, rows) for rows in (1, max(1, len(members)))
        )

    def steps(self) -> list[tuple[int, Step]]:
        return [(self._lane, self._send), (self._lane + 1, self._finish)]

    def _send(self) -> dist.Work | None:
        if self._group is None:
            return None
        self._sent.encode_(self._all)
        self._feedback.keep()
        return work_of(
            dist.all_gather_single(
                self._received.bytes, self._sent.bytes, group=self._group, async_op=True
            )
        )

    def _finish(self) -> dist.Work | None:
        if self._group is not None:
            self._received.sum_into(self._all)
        return None


class Rooted:
    """int8 or top-k over an owner, three steps: it sums what all have sent, compresses the sum and sends it to all.

    What the second compression loses joins the owner's residual. A library's reduce cannot add compressed values, so that
    both primitives with a root gather; the way back is a parameter server's or a broadcast.
    """

    def __init__(
        self,
        message: Message,
        values: Tensor,
        lanes: Lanes,
        circle: Circle,
        feedback: Feedback,
        lane: int,
    ) -> None:
        members = circle.part_of(lanes.ranks.rank)
        self.values, self._lane, self._feedback = values, lane, feedback
        self._groups = lanes.group(lane, circle), lanes.group(lane + 1, circle)
        self._pushed = message.synchronizer is Synchronizer.PARAMETER_SERVER
        self._sent = _payload(message, values, 1)
        length = (
            RowLayout.of(message.elements, 1).elements
            if message.compressor is Compressor.INT8
            else message.elements
        )
        self._all, self._padding = values[:length], values[message.elements :]
        assert message.owner is not None, "a primitive with a root has an owner"
        self._root = members.index(message.owner) if self._groups[0] is not None else 0
        owns = self._groups[0] is not None and lanes.ranks.rank == message.owner
        self._received = _payload(message, values, len(members)) if owns else None
        self._total = values.new_empty(length if owns else 0)

    def steps(self) -> list[tuple[int, Step]]:
        return [
            (self._lane, self._send),
            (self._lane + 1, self._send_sum),
            (self._lane + 2, self._finish),
        ]

    def _send(self) -> dist.Work | None:
        if self._groups[0] is None:
            return None
        self._padding.zero_()
        self._sent.encode_(self._all)
        if self._received is None:
            self._feedback.keep()
        rows = None if self._received is None else list(self._received.bytes)
        return work_of(
            dist.gather(
                self._sent.bytes[0],
                rows,
                group=self._groups[0],
                group_dst=self._root,
                async_op=True,
            )
        )

    def _send_sum(self) -> dist.Work | None:
        group = self._groups[1]
        if group is None:
            return None
        if self._received is not None:
            self._received.sum_into(self._total)
            self._sent.encode_(self._total)
            self._all += self._total
            self._feedback.keep()
        row = self._sent.bytes[0]
        if not self._pushed:
            return work_of(dist.broadcast(row, group=group, group_src=self._root, async_op=True))
        copies = None if self._received is None else [row] * len(self._received.bytes)
        return work_of(dist.scatter(row, copies, group=group, group_src=self._root, async_op=True))

    def _finish(self) -> dist.Work | None:
        if self._groups[0] is not None:
            self._sent.sum_into(self._all)
        return None


class PowerSgd:
    """Two sums by the message's primitive, of P and of Q (see `power_sgd`), and a step at the end."""

    def __init__(
        self,
        message: Message,
        values: Tensor,
        lanes: Lanes,
        circle: Circle,
        feedback: Feedback,
        lane: int,
    ) -> None:
        self.values, self._feedback = values, feedback
        members = circle.part_of(lanes.ranks.rank)
        assert message.rank is not None
        rank, shapes = message.rank, feedback.shapes

        def start_of(number: int) -> Tensor:
            part = message.slices[number]
            seeded = f"{part.variable}|{part.axis}|{part.start}|{rank}"
            return feedback.residuals.factor(
                part,
                rank,
                lambda: initial_start(seeded, matrix_shape(shapes[number])[1], rank, values),
            )

        factored = [number for number, shape in enumerate(shapes) if gains(shape, rank)]
        self._alone = len(members) < 2
        if not self._alone:
            feedback.feed(factored)
        self._low = LowRank(values, shapes, rank, max(1, len(members)), start_of)
        self._left = flat_sum(
            message.synchronizer, self._low.left, lanes, circle, message.owner, lane
        ).steps()
        after = self._left[-1][0] + 1
        right = (
            flat_sum(message.synchronizer, self._low.right, lanes, circle, message.owner, after)
            if factored
            else None
        )
        self._right = right.steps() if right is not None else []

    def steps(self) -> list[tuple[int, Step]]:
        # Not kept: steps that know this message would keep it, and its buffers, until Python next looks for cycles.
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
    """The steps, of which the first one prepares what it sends."""
    (lane, start), *others = steps

    def prepared() -> dist.Work | None:
        if alone:
            return None
        prepare()
        return start()

    return [(lane, prepared), *others]


def _payload(message: Message, values: Tensor, rows: int) -> Payload:
    """Rows that each stand for the whole message."""
    if message.compressor is Compressor.INT8:
        return QuantisedRows(
            RowLayout.of(message.elements, 1).with_rows(rows), values.dtype, values.device
        )
    assert message.ratio is not None
    return PickedRows(rows, picked(message.elements, message.ratio), values.dtype, values.device)
