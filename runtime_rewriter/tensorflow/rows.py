"""Nodes for the rows of a sparse gradient: values and the indices of their rows."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from runtime_rewriter.tensorflow.node_writing import GraphWriter


def add_rows(
    writer: GraphWriter,
    values: str,
    indices: str,
    rows: int | str,
    dtype: tf.DType,
    index_dtype: tf.DType,
) -> str:
    """Return a dense tensor of `rows` rows in which rows of equal index are added up.

    `rows` is a number or the name of an int32 tensor.
    """
    count = rows if isinstance(rows, str) else writer.constant(rows, tf.int32, "rows")
    inputs = [values, indices, count]
    return writer.node(
        "UnsortedSegmentSum", "dense", inputs, T=dtype, Tindices=index_dtype, Tnumsegments=tf.int32
    )


def merge_rows(
    writer: GraphWriter, values: str, indices: str, dtype: tf.DType, index_dtype: tf.DType
) -> tuple[str, str]:
    """Return one row per distinct index: the sum of the rows with this index."""
    unique = writer.node("Unique", "distinct", [indices], T=index_dtype, out_idx=tf.int32)
    count = writer.node("Size", "count", [unique], T=index_dtype, out_type=tf.int32)
    return add_rows(writer, values, f"{unique}:1", count, dtype, tf.int32), unique


def every_row(writer: GraphWriter, rows: int, index_dtype: tf.DType) -> str:
    """Return the indices 0 to `rows` - 1."""
    bounds = {"first": 0, "end": rows, "step": 1}
    inputs = [writer.constant(value, index_dtype, name) for name, value in bounds.items()]
    return writer.node("Range", "every_row", inputs, Tidx=index_dtype)


def select_rows(
    writer: GraphWriter,
    values: str,
    indices: str,
    between: tuple[int, int],
    dtype: tf.DType,
    index_dtype: tf.DType,
) -> tuple[str, str]:
    """Return the rows whose index lies in `between`, its end excluded."""
    first, end = (writer.constant(bound, index_dtype, "bound") for bound in between)
    after = writer.node("GreaterEqual", "after", [indices, first], T=index_dtype)
    before = writer.node("Less", "before", [indices, end], T=index_dtype)
    inside = writer.node("LogicalAnd", "inside", [after, before])
    where = writer.node("Where", "where", [inside], T=tf.bool)
    places = writer.reshape(where, [-1], tf.int64)
    return (_taken(writer, values, places, dtype), _taken(writer, indices, places, index_dtype))


def rows_with_values(
    writer: GraphWriter,
    tensor: str,
    first: int,
    shape: Sequence[int],
    dtype: tf.DType,
    index_dtype: tf.DType,
) -> tuple[str, str]:
    """Return the rows of a dense tensor that are not zero, and their indices from `first` on."""
    flat = writer.reshape(tensor, [shape[0], -1], dtype)
    largest = writer.reduced("Max", writer.unary("Abs", flat, dtype), [1], dtype)
    zero = writer.constant(0, dtype, "zero")
    filled = writer.node("NotEqual", "filled", [largest, zero], T=dtype)
    where = writer.node("Where", "where", [filled], T=tf.bool)
    places = writer.reshape(where, [-1], tf.int64)
    rows = _taken(writer, tensor, places, dtype)
    offset = writer.constant(first, index_dtype, "first")
    indices = writer.binary(
        "AddV2", writer.cast(places, tf.int64, index_dtype), offset, index_dtype
    )
    return rows, indices


def _taken(writer: GraphWriter, tensor: str, places: str, dtype: tf.DType) -> str:
    inputs = [tensor, places, writer.constant(0, tf.int32, "axis")]
    return writer.node(
        "GatherV2", "rows", inputs, Tparams=dtype, Tindices=tf.int64, Taxis=tf.int32, batch_dims=0
    )
