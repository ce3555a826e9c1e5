"""Nodes that encode a message as bytes and decode it: int8 and top-k.

The definitions are those of the PyTorch runtime (`pytorch/exchange/quantise.py` and `top_k.py`),
down to the order of roundings. A payload is a uint8 tensor, (rows, bytes of a row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tensorflow as tf

from runtime_rewriter.compression import LEVELS, RowLayout
from runtime_rewriter.tensorflow.node_writing import GraphWriter

_MAGNITUDES = {tf.float32: (tf.int32, 0x7FFFFFFF), tf.float64: (tf.int64, 0x7FFFFFFFFFFFFFFF)}
"""Without their sign the bits of IEEE 754 numbers are ordered as their magnitudes, and NaN comes
last."""


@dataclass(frozen=True)
class Encoded:
    """A payload, and what it loses, in the shape of what was encoded; 0 where that is not
    finite."""

    payload: str
    lost: str


class Encoding(Protocol):
    """An encoding of flat tensors of one length. All methods write to the writer's device."""

    def encode(self, writer: GraphWriter, values: str) -> Encoded:
        """Encode a flat tensor: one row, or one per part that travels to another rank."""

    def sum(self, writer: GraphWriter, payload: str, rows: int) -> str:
        """Return the sum of the decoded rows, flat, added up in their order."""


@dataclass(frozen=True)
class Quantised:
    """int8: rows of `layout`, each its scales and then its levels."""

    layout: RowLayout
    dtype: tf.DType

    def encode(self, writer: GraphWriter, values: str) -> Encoded:
        """Encode the flat `values`, of `layout.elements` elements, as `layout.rows` rows."""
        layout, dtype = self.layout, self.dtype
        shape = [layout.rows, layout.blocks, layout.block]
        blocks = writer.reshape(values, shape, dtype)
        largest = writer.reduced("Max", writer.unary("Abs", blocks, dtype), [2], dtype)
        levels = writer.constant(LEVELS, dtype, "levels")
        scale = writer.binary("RealDiv", largest, levels, dtype)
        # An infinite scale becomes NaN: 0 times infinity is NaN, but 5 times infinity is not.
        scale = writer.binary("AddV2", scale, writer.binary("Sub", scale, scale, dtype), dtype)
        zero, one = (writer.constant(value, dtype) for value in (0, 1))
        tiny = writer.constant(np.finfo(dtype.as_numpy_dtype).tiny, dtype, "tiny")
        # Smaller values stay in the residual, so that 1 / scale is finite.
        scale = writer.where(writer.binary("Less", scale, tiny, dtype), zero, scale, dtype)
        is_zero = writer.node("Equal", "is_zero", [scale, zero], T=dtype)
        inverse = writer.where(is_zero, zero, writer.binary("RealDiv", one, scale, dtype), dtype)
        scaled = writer.binary("Mul", blocks, self._per_block(writer, inverse), dtype)
        rounded = writer.unary("Round", scaled, dtype)
        decoded = writer.binary("Mul", rounded, self._per_block(writer, scale), dtype)
        lost = finite(writer, writer.binary("Sub", blocks, decoded, dtype), dtype)
        scale_bytes = _as_bytes(writer, scale, dtype, layout.rows)
        bytes_ = writer.cast(rounded, dtype, tf.int8)
        level_bytes = _as_bytes(writer, bytes_, tf.int8, layout.rows)
        return Encoded(
            writer.concat([scale_bytes, level_bytes], 1, tf.uint8),
            writer.reshape(lost, [-1], dtype),
        )

    def decode(self, writer: GraphWriter, payload: str, rows: int) -> str:
        """Return the decoded rows, (rows, elements of a row)."""
        layout, dtype = self.layout, self.dtype
        sizes = [layout.blocks * dtype.size, layout.row_elements]
        scale_bytes, level_bytes = writer.split(payload, sizes, 1, tf.uint8)
        scale = _of_bytes(writer, scale_bytes, [rows, layout.blocks], dtype)
        levels = _of_bytes(writer, level_bytes, [rows, layout.blocks, layout.block], tf.int8)
        values = writer.cast(levels, tf.int8, dtype)
        decoded = writer.binary("Mul", values, self._per_block(writer, scale), dtype)
        return writer.reshape(decoded, [rows, layout.row_elements], dtype)

    def sum(self, writer: GraphWriter, payload: str, rows: int) -> str:
        decoded = self.decode(writer, payload, rows)
        parts = writer.split(decoded, [1] * rows, 0, self.dtype)
        total = parts[0]
        for part in parts[1:]:
            total = writer.binary("AddV2", total, part, self.dtype)
        return writer.reshape(total, [-1], self.dtype)

    def _per_block(self, writer: GraphWriter, scale: str) -> str:
        return writer.node(
            "ExpandDims",
            "per_block",
            [scale, writer.constant(2, tf.int32, "axis")],
            T=self.dtype,
            Tdim=tf.int32,
        )


@dataclass(frozen=True)
class Picked:
    """top-k: the `k` largest magnitudes of `elements` values, then their int32 positions."""

    elements: int
    k: int
    dtype: tf.DType

    def encode(self, writer: GraphWriter, values: str) -> Encoded:
        dtype = self.dtype
        integer, without_sign = _MAGNITUDES[dtype]
        mask = writer.constant(without_sign, integer, "without_sign")
        bits = writer.bitcast(values, dtype, integer)
        magnitudes = writer.binary("BitwiseAnd", bits, mask, integer)
        inputs = [magnitudes, writer.constant(self.k, tf.int32, "k")]
        top = writer.node("TopKV2", "largest", inputs, T=integer, sorted=True)
        places = f"{top}:1"  # of equal magnitudes the first ones
        taken = writer.node(
            "GatherV2",
            "picked",
            [values, places, writer.constant(0, tf.int32, "axis")],
            Tparams=dtype,
            Tindices=tf.int32,
            Taxis=tf.int32,
            batch_dims=0,
        )
        emptied = writer.node(
            "TensorScatterUpdate",
            "left",
            [values, writer.reshape(places, [-1, 1], tf.int32), writer.zeros([self.k], dtype)],
            T=dtype,
            Tindices=tf.int32,
        )
        both = [_as_bytes(writer, taken, dtype, 1), _as_bytes(writer, places, tf.int32, 1)]
        return Encoded(writer.concat(both, 1, tf.uint8), finite(writer, emptied, dtype))

    def sum(self, writer: GraphWriter, payload: str, rows: int) -> str:
        sizes = [self.k * self.dtype.size, self.k * tf.int32.size]
        value_bytes, place_bytes = writer.split(payload, sizes, 1, tf.uint8)
        values = _of_bytes(writer, value_bytes, [rows * self.k], self.dtype)
        places = _of_bytes(writer, place_bytes, [rows * self.k], tf.int32)
        count = writer.constant(self.elements, tf.int32, "elements")
        return writer.node(
            "UnsortedSegmentSum",
            "picked_sum",
            [values, places, count],
            T=self.dtype,
            Tindices=tf.int32,
            Tnumsegments=tf.int32,
        )


def finite(writer: GraphWriter, values: str, dtype: tf.DType) -> str:
    """Replace infinities and NaNs by 0: an overflow is sent once and does not stay for ever."""
    is_finite = writer.unary("IsFinite", values, dtype)
    return writer.where(is_finite, values, writer.constant(0, dtype, "zero"), dtype)


def _as_bytes(writer: GraphWriter, values: str, dtype: tf.DType, rows: int) -> str:
    return writer.reshape(writer.bitcast(values, dtype, tf.uint8), [rows, -1], tf.uint8)


def _of_bytes(writer: GraphWriter, values: str, shape: Sequence[int], dtype: tf.DType) -> str:
    size = dtype.size
    cut = [*shape, size] if size > 1 else list(shape)
    return writer.bitcast(writer.reshape(values, cut, tf.uint8), tf.uint8, dtype)
