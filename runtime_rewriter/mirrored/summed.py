"""Sums the gradients of one step by the messages of a plan, as ops of the step that is traced.

The script's own collectives carry the messages. TensorFlow starts them one after the other, in the
order in which they are traced: each holds the strategy's ordering token until it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autotune.errors import InvalidInput, InvalidStrategy
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.mirrored import MIRRORED, mirrored_refusal
from autotune.strategy_space.plan import Plan, TensorSlice
from autotune.strategy_space.strategy import Compressor
from autotune.workload import Variable

_WIRE = {Compressor.FP16: tf.float16, Compressor.BF16: tf.bfloat16}
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_GATHERED = tf.float16
"""TensorFlow gathers no bfloat16, whose bits travel as this type of the same size."""


@dataclass(frozen=True)
class Collectives:
    """The script's own: `all_reduce` sums a dense tensor, `gather` concatenates rows."""

    all_reduce: Callable[[Any], Any]
    gather: Callable[[Any], Any]
    world_size: int


def refuse_model(variables: Sequence[Variable]) -> None:
    """Raise `InvalidInput` for gradients that no plan can send."""
    for one in variables:
        if one.dtype not in _DTYPES:
            raise InvalidInput(
                f"TensorFlow's collectives must sum {', '.join(_DTYPES)}, but the gradient of "
                f"{one.name!r} is {one.dtype}; train it with another dtype"
            )


def refuse(plan: Plan, variables: Sequence[Variable], world_size: int) -> None:
    """Raise `InvalidStrategy` for a plan that these collectives cannot enact."""
    if plan.world_size != world_size:
        raise InvalidStrategy(
            f"the plan is for {plan.world_size} ranks, but {world_size} workers train"
        )
    planned = {part.variable for message in plan.messages for part in message.slices}
    if planned != {one.name for one in variables}:
        different = sorted(planned ^ {one.name for one in variables})
        raise InvalidStrategy(
            f"a plan must name exactly the variables with gradients, but differs in {different[0]}"
        )
    sparse = {one.name for one in variables if one.sparse}
    if reason := refusal_reason(plan) or mirrored_refusal(plan, sparse):
        raise InvalidStrategy(f"{MIRRORED} cannot enact this plan: {reason}")


def summed(plan: Plan, gradients: Mapping[str, Any], collectives: Collectives) -> dict[str, Any]:
    """Return the sum over all workers of each gradient, by variable."""
    pieces: dict[str, list[tuple[TensorSlice, Any]]] = defaultdict(list)
    for message in plan.messages:
        first = message.slices[0]
        rows = gradients[first.variable]
        if isinstance(rows, tf.IndexedSlices):
            sent = rows if first.axis is None else _padded(_rows(rows, first))
            gathered = _gathered(sent, message.compressor, collectives)
            unpadded = gathered if first.axis is None else _where(gathered, gathered.indices >= 0)
            pieces[first.variable].append((first, unpadded))
            continue
        parts = [_slice(gradients[part.variable], part) for part in message.slices]
        flat = tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
        total = _sent(flat, message.compressor, collectives)
        sizes = [part.elements for part in message.slices]
        for part, local, piece in zip(
            message.slices, parts, tf.split(total, sizes) if sizes[1:] else [total], strict=True
        ):
            pieces[part.variable].append((part, tf.reshape(piece, local.shape)))
    return {name: _joined(of_variable) for name, of_variable in pieces.items()}


def _joined(pieces: Sequence[tuple[TensorSlice, Any]]) -> Any:
    ordered = sorted(pieces, key=lambda one: one[0].start)
    axis = ordered[0][0].axis
    tensors = [tensor for _, tensor in ordered]
    if axis is None:
        return tensors[0]
    if isinstance(tensors[0], tf.IndexedSlices):
        # Rows of equal index are in one slice, so they keep their order.
        return tf.IndexedSlices(
            tf.concat([one.values for one in tensors], 0),
            tf.concat([one.indices for one in tensors], 0),
            tensors[0].dense_shape,
        )
    return tf.concat(tensors, axis)


def _rows(rows: Any, part: TensorSlice) -> Any:
    """Those of a slice."""
    return _where(rows, (rows.indices >= part.start) & (rows.indices < part.stop))


def _where(rows: Any, wanted: Any) -> Any:
    return tf.IndexedSlices(
        tf.boolean_mask(rows.values, wanted),
        tf.boolean_mask(rows.indices, wanted),
        rows.dense_shape,
    )


def _padded(rows: Any) -> Any:
    """With a first row of zeros at -1: TensorFlow crashes where no worker has a row to gather."""
    first = [[1, 0], *[[0, 0]] * (rows.values.shape.rank - 1)]
    return tf.IndexedSlices(
        tf.pad(rows.values, first),
        tf.pad(rows.indices, first[:1], constant_values=-1),
        rows.dense_shape,
    )


def _gathered(rows: Any, compressor: Compressor, collectives: Collectives) -> Any:
    wire = _WIRE.get(compressor, rows.dtype)
    sent = tf.cast(rows.values, wire)
    if wire == tf.bfloat16:
        sent = tf.bitcast(sent, _GATHERED)
    gathered = collectives.gather(tf.IndexedSlices(sent, rows.indices, rows.dense_shape))
    values = tf.bitcast(gathered.values, wire) if wire == tf.bfloat16 else gathered.values
    return tf.IndexedSlices(tf.cast(values, rows.dtype), gathered.indices, gathered.dense_shape)


def _slice(gradient: Any, part: TensorSlice) -> Any:
    if part.axis is None:
        return gradient
    begin, size = [0] * gradient.shape.rank, gradient.shape.as_list()
    begin[part.axis], size[part.axis] = part.start, part.stop - part.start
    return tf.slice(gradient, begin, size)


def _sent(flat: Any, compressor: Compressor, collectives: Collectives) -> Any:
    """Sum `flat`. What is cast is divided before, so that no sum leaves the range of the cast."""
    wire = _WIRE.get(compressor)
    if wire is None or wire == flat.dtype:
        return collectives.all_reduce(flat)
    shared = tf.cast(flat / collectives.world_size, wire)
    return tf.cast(collectives.all_reduce(shared), flat.dtype) * collectives.world_size
