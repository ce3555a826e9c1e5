"""Sums of compressed messages with error feedback, written as nodes.

The exchanges are those of the PyTorch runtime (`pytorch/exchange/compressed.py`): the same payloads
travel, are summed in the same order, and leave the same residuals. Payloads travel from rank to
rank: TensorFlow's collectives carry no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autotune.strategy_space.plan import Message, TensorSlice
from autotune.strategy_space.strategy import ROOTED, Compressor
from runtime_rewriter.compression import RowLayout, gains, matrix_shape, picked
from runtime_rewriter.tensorflow.collectives import Carrier, Flat, Sums
from runtime_rewriter.tensorflow.encodings import Encoded, Encoding, Picked, Quantised, finite


@dataclass(frozen=True)
class Compressed:
    """`sums`: at each member. `kept`: what each member has not sent, flat, its next residual."""

    sums: Sums
    kept: Mapping[int, str]


@dataclass(frozen=True)
class Start:
    """PowerSGD's start of a slice on a rank: the tensor that holds it, and how to replace it."""

    value: str
    replace: Callable[[str], None]


StartOf = Callable[[int, TensorSlice], Start]


def compressed_sum(
    carrier: Carrier,
    message: Message,
    sent: Flat,
    shapes: Sequence[Sequence[int]],
    start_of: StartOf,
) -> Compressed:
    """Sum what the members send with the message's compressor. `shapes`: of its slices."""
    if message.compressor is Compressor.POWER_SGD:
        return _PowerSgd(carrier, message, sent, shapes, start_of).result()
    carried = carrier.begun(sent)
    if message.synchronizer in ROOTED:
        assert message.owner is not None
        return _rooted(carrier, _encoding(message, sent, 1), carried, message.owner)
    if message.compressor is Compressor.INT8:
        return _sharded(carrier, carried)
    return _gathered(carrier, _encoding(message, sent, 1), carried)


def _encoding(message: Message, sent: Flat, rows: int) -> Encoding:
    if message.compressor is Compressor.INT8:
        return Quantised(RowLayout.of(sent.elements, rows), sent.dtype)
    assert message.ratio is not None
    return Picked(sent.elements, picked(sent.elements, message.ratio), sent.dtype)


def _encode(
    carrier: Carrier, encoding: Encoding, values: str, sent: Flat, padded_to: int
) -> Encoded:
    padded = carrier.writer.padded(values, padded_to - sent.elements, sent.dtype)
    return encoding.encode(carrier.writer, padded)


def _unpadded(carrier: Carrier, tensor: str, sent: Flat) -> str:
    return carrier.writer.cut(tensor, [0], [sent.elements], sent.dtype)


def _sharded(carrier: Carrier, sent: Flat) -> Compressed:
    """int8 without a root: each member sums the shard that all send it, and encodes the sum.

    The second encoding loses something, too: that joins the residual of the shard's member.
    """
    writer, members = carrier.writer, sent.members
    layout = RowLayout.of(sent.elements, len(members))
    encoding = Quantised(layout, sent.dtype)
    of_sum = Quantised(layout.with_rows(1), sent.dtype)
    encoded, shards = {}, {}
    for rank, tensor in sent.tensors.items():
        with carrier.at(rank):
            encoded[rank] = _encode(carrier, encoding, tensor, sent, layout.elements)
            shards[rank] = writer.split(encoded[rank].payload, [1] * len(members), 0, tf.uint8)
    summed, kept = {}, {}
    for place, rank in enumerate(members):
        with carrier.at(rank):
            received = writer.concat([shards[of][place] for of in members], 0, tf.uint8)
            total = encoding.sum(writer, received, len(members))
            summed[rank] = of_sum.encode(writer, total)
            sizes = [layout.row_elements] * len(members)
            lost = writer.split(encoded[rank].lost, sizes, 0, sent.dtype)
            lost[place] = writer.binary("AddV2", lost[place], summed[rank].lost, sent.dtype)
            kept[rank] = _unpadded(carrier, writer.concat(lost, 0, sent.dtype), sent)
    sums = {}
    for rank in members:
        with carrier.at(rank):
            received = writer.concat([summed[of].payload for of in members], 0, tf.uint8)
            decoded = encoding.decode(writer, received, len(members))
            flat = writer.reshape(decoded, [-1], sent.dtype)
            sums[rank] = _unpadded(carrier, flat, sent)
    return Compressed(sums, kept)


def _gathered(carrier: Carrier, encoding: Encoding, sent: Flat) -> Compressed:
    """top-k without a root: every member gets all payloads."""
    writer, encoded, sums = carrier.writer, {}, {}
    for rank, tensor in sent.tensors.items():
        with carrier.at(rank):
            encoded[rank] = encoding.encode(writer, tensor)
    for rank in sent.members:
        with carrier.at(rank):
            received = writer.concat([one.payload for one in encoded.values()], 0, tf.uint8)
            sums[rank] = encoding.sum(writer, received, len(encoded))
    return Compressed(sums, {rank: one.lost for rank, one in encoded.items()})


def _rooted(carrier: Carrier, encoding: Encoding, sent: Flat, owner: int) -> Compressed:
    """The owner sums the payloads of all, encodes the sum and sends it to all.

    The loss of the second encoding joins the owner's residual.
    """
    writer, length = carrier.writer, sent.elements
    if isinstance(encoding, Quantised):
        length = encoding.layout.elements
    encoded = {}
    for rank, tensor in sent.tensors.items():
        with carrier.at(rank):
            encoded[rank] = _encode(carrier, encoding, tensor, sent, length)
    with carrier.at(owner):
        received = writer.concat([one.payload for one in encoded.values()], 0, tf.uint8)
        total = encoding.encode(writer, encoding.sum(writer, received, len(encoded)))
        lost = writer.binary("AddV2", encoded[owner].lost, total.lost, sent.dtype)
    losses = {rank: one.lost for rank, one in encoded.items()} | {owner: lost}
    sums, kept = {}, {}
    for rank in sent.members:
        with carrier.at(rank):
            sums[rank] = _unpadded(carrier, encoding.sum(writer, total.payload, 1), sent)
            kept[rank] = _unpadded(carrier, losses[rank], sent)
    return Compressed(sums, kept)


class _PowerSgd:
    """Two sums by the message's synchronizer, of P and of Q (see `pytorch/exchange/power_sgd.py`).

    | symbol | meaning | shape |
    |---|---|---|
    | M_r | a slice on rank r with its residual | (n, m) |
    | Q | start: the result of the last step, with columns of length 1 | (m, k) |
    | P | sum over r of M_r Q; then an orthonormal basis of its columns | (n, k) |
    | Q_r, Q' | M_r^T P, and its sum over r | (m, k) |
    """

    def __init__(
        self,
        carrier: Carrier,
        message: Message,
        sent: Flat,
        shapes: Sequence[Sequence[int]],
        start_of: StartOf,
    ) -> None:
        assert message.rank is not None
        self.carrier, self.writer, self.message, self.sent = (
            carrier,
            carrier.writer,
            message,
            sent,
        )
        self.k, self.dtype = message.rank, sent.dtype
        self.sides = [matrix_shape(shape) for shape in shapes]
        self.sizes = [math.prod(shape) for shape in shapes]
        self.factored = [place for place, shape in enumerate(shapes) if gains(shape, self.k)]
        self.starts = {
            rank: {place: start_of(rank, message.slices[place]) for place in self.factored}
            for rank in sent.members
        }

    def result(self) -> Compressed:
        writer, dtype = self.writer, self.dtype
        slices, left = {}, {}
        for rank, tensor in self.sent.tensors.items():
            with self.carrier.at(rank):
                slices[rank] = writer.split(tensor, self.sizes, 0, dtype)
                left[rank] = self._project(rank, slices[rank])
        left_sizes = [
            self.sides[place][0] * self.k if place in self.factored else size
            for place, size in enumerate(self.sizes)
        ]
        left_sums = self._exchange(left, sum(left_sizes))
        whole, bases, own = {}, {}, {}
        for rank, tensor in left_sums.items():
            with self.carrier.at(rank):
                whole[rank] = writer.split(tensor, left_sizes, 0, dtype)
                bases[rank] = {at: self._basis(whole[rank][at]) for at in self.factored}
                own[rank] = self._project_back(slices[rank], bases[rank])
        totals = self._sum_back(own)
        sums, kept = {}, {}
        for rank in self.sent.members:
            with self.carrier.at(rank):
                averaged = list(whole[rank])
                for at, total in totals[rank].items():
                    averaged[at] = self._flat(self._times(bases[rank][at], total, second=True))
                    self._next_start(rank, at, total)
                sums[rank] = writer.concat(averaged, 0, dtype)
                kept[rank] = self._kept(slices[rank], bases[rank], own[rank])
        return Compressed(sums, kept)

    def _project_back(self, slices: Sequence[str], bases: Mapping[int, str]) -> dict[int, str]:
        """Q_r of each factored slice."""
        return {
            at: self._times(self._matrix(slices[at], at), basis, first=True)
            for at, basis in bases.items()
        }

    def _sum_back(self, own: Mapping[int, Mapping[int, str]]) -> dict[int, dict[int, str]]:
        """Q' of each factored slice, at each member."""
        if not self.factored:
            return {rank: {} for rank in own}
        right = {}
        for rank, factors in own.items():
            with self.carrier.at(rank):
                flat = [self._flat(one) for one in factors.values()]
                right[rank] = self.writer.concat(flat, 0, self.dtype)
        sizes = [self.sides[at][1] * self.k for at in self.factored]
        totals: dict[int, dict[int, str]] = {}
        for rank, tensor in self._exchange(right, sum(sizes)).items():
            with self.carrier.at(rank):
                parts = self.writer.split(tensor, sizes, 0, self.dtype)
                totals[rank] = {
                    at: self.writer.reshape(flat, [-1, self.k], self.dtype)
                    for at, flat in zip(self.factored, parts, strict=True)
                }
        return totals

    def _exchange(self, tensors: Mapping[int, str], elements: int) -> Sums:
        flat = Flat(tensors, elements, self.dtype)
        return self.carrier.exchange(flat, self.message.synchronizer, self.message.owner)

    def _project(self, rank: int, slices: Sequence[str]) -> str:
        parts = [
            self._flat(self._times(self._matrix(part, place), self.starts[rank][place].value))
            if place in self.factored
            else part
            for place, part in enumerate(slices)
        ]
        return self.writer.concat(parts, 0, self.dtype)

    def _basis(self, flat: str) -> str:
        matrix = self.writer.reshape(flat, [-1, self.k], self.dtype)
        return self.writer.node("Qr", "basis", [matrix], T=self.dtype, full_matrices=False)

    def _kept(self, slices: Sequence[str], bases: Mapping[int, str], own: Mapping[int, str]) -> str:
        parts = []
        for place, part in enumerate(slices):
            if place not in self.factored:
                parts.append(self.writer.zeros([self.sizes[place]], self.dtype))
                continue
            sent = self._flat(self._times(bases[place], own[place], second=True))
            lost = self.writer.binary("Sub", part, sent, self.dtype)
            parts.append(finite(self.writer, lost, self.dtype))
        return self.writer.concat(parts, 0, self.dtype)

    def _next_start(self, rank: int, place: int, total: str) -> None:
        """Columns of length 1. One of zeros or NaNs would stay so: it keeps the earlier start."""
        writer, dtype, start = self.writer, self.dtype, self.starts[rank][place]
        squares = writer.reduced("Sum", writer.unary("Square", total, dtype), [0], dtype)
        length = writer.unary("Sqrt", squares, dtype)
        zero = writer.constant(0, dtype, "zero")
        positive = writer.binary("Greater", length, zero, dtype)
        usable = writer.node(
            "LogicalAnd", "usable", [positive, writer.unary("IsFinite", length, dtype)]
        )
        start.replace(
            writer.where(usable, writer.binary("RealDiv", total, length, dtype), start.value, dtype)
        )

    def _matrix(self, flat: str, place: int) -> str:
        return self.writer.reshape(flat, self.sides[place], self.dtype)

    def _flat(self, matrix: str) -> str:
        return self.writer.reshape(matrix, [-1], self.dtype)

    def _times(self, left: str, right: str, first: bool = False, second: bool = False) -> str:
        """The product of two matrices, of which the `first` or `second` is transposed."""
        return self.writer.node(
            "MatMul", "product", [left, right], T=self.dtype, transpose_a=first, transpose_b=second
        )
