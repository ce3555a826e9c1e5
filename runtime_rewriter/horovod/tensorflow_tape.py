"""Averages a tape's gradients by the loaded plan, or by Horovod itself, in one traced graph.

The graph has a branch for Horovod's own operations and one for ours, and a variable that chooses.
TensorFlow lowers the branch: each gradient passes as soon as it is computed, so both ways overlap
the backward pass, and Horovod's own operations keep their names.

In our branch a Python function without state reports each gradient, and a last one waits for all
averages. Functions with state would run one after the other in the script's order. Each takes the
chosen way as an input: the graph optimizer would call a function of constants, once and for all.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph

from autotune.errors import InvalidInput
from runtime_rewriter.horovod.tensorflow_synchronizer import TensorflowSynchronizer

EAGER_REFUSAL = (
    "{what}: the step is eager, so there is no function to replace; put it into a tf.function"
)
_BRANCHES = "autotune_averages"
OWN_BRANCH = f"{_BRANCHES}_false"
"""In the name of the function of Horovod's own operations."""
Own = Callable[[], Sequence[Any]]
"""Horovod's own averages, in the order of the gradients."""
LOOP_REFUSAL = (
    "a step must begin in Python, where plans are switched, but the script computes gradients in a "
    "loop inside a tf.function; call a tf.function of one step in a Python loop (with Keras, leave "
    "steps_per_execution at 1)"
)


def averaged_eagerly(
    synchronizer: TensorflowSynchronizer, positions: Sequence[int], gradients: Sequence[Any]
) -> list[Any]:
    """The averages by the loaded plan. None stays None, unless another rank has a gradient."""
    synchronizer.check_missing(_missing(positions, gradients))
    synchronizer.backward_starts()
    for position, gradient in zip(positions, gradients, strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            synchronizer.ready(position, gradient.values.numpy(), gradient.indices.numpy())
        elif gradient is not None:
            synchronizer.ready(position, gradient.numpy())
    averages = synchronizer.finish()
    return [
        _like(gradient, averages[position])
        for position, gradient in zip(positions, gradients, strict=True)
    ]


def _missing(positions: Sequence[int], gradients: Sequence[Any]) -> frozenset[int]:
    pairs = zip(positions, gradients, strict=True)
    return frozenset(position for position, gradient in pairs if gradient is None)


def _like(gradient: Any, average: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(average)
    values, indices = average
    rows = tf.cast(tf.convert_to_tensor(indices), gradient.indices.dtype)
    return tf.IndexedSlices(tf.convert_to_tensor(values), rows, gradient.dense_shape)


def averaged_in_graph(
    synchronizer: TensorflowSynchronizer,
    positions: Sequence[int],
    gradients: Sequence[Any],
    target: Any,
    own: Own,
) -> list[Any]:
    """The averages by the plan that is loaded when the graph runs, or `own` without one."""
    planned = synchronizer.planned.read_value()

    def ours() -> list[Any]:
        return _planned(synchronizer, positions, gradients, target, planned)

    def horovods() -> list[Any]:
        averages = own()
        return [
            tf.zeros(synchronizer.parameters[position].shape, _dtype(synchronizer, position))
            if average is None  # Horovod itself waits for ever for this rank's gradient
            else average
            for position, average in zip(positions, averages, strict=True)
        ]

    _record_on_request(synchronizer, positions, gradients)
    averages: list[Any] = tf.cond(planned, ours, horovods, name=_BRANCHES)
    return averages


def _record_on_request(
    synchronizer: TensorflowSynchronizer, positions: Sequence[int], gradients: Sequence[Any]
) -> None:
    """Hand out the local gradients when `synchronizer.recording` is true."""
    flat: list[Any] = []
    owners: list[int] = []
    for position, gradient in zip(positions, gradients, strict=True):
        if gradient is not None:
            parts = (
                [gradient.values, gradient.indices]
                if isinstance(gradient, tf.IndexedSlices)
                else [gradient]
            )
            flat += parts
            owners += [position] * len(parts)

    def record(*arrays: Any) -> Any:
        synchronizer.record(owners, arrays)
        return np.int32(0)

    tf.cond(
        synchronizer.recording.read_value(),
        lambda: tf.numpy_function(record, flat, tf.int32),
        lambda: tf.constant(0),
    )


def _planned(
    synchronizer: TensorflowSynchronizer,
    positions: Sequence[int],
    gradients: Sequence[Any],
    target: Any,
    planned: Any,
) -> list[Any]:
    def report(function: Callable[..., object], *tensors: Any) -> Any:
        def call(planned: object, *arrays: Any) -> Any:
            function(*arrays)
            return np.int32(0)

        return tf.numpy_function(call, [planned, *tensors], tf.int32, stateful=False)

    tokens = [report(lambda *_: synchronizer.backward_starts(), *tf.nest.flatten(target)[:1])]
    for position, gradient in zip(positions, gradients, strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            tensors = [gradient.values, gradient.indices]
        elif gradient is not None:
            tensors = [gradient]
        else:
            continue
        tokens.append(report(partial(synchronizer.ready, position), *tensors))
    kinds: list[Any] = []
    for position, gradient in zip(positions, gradients, strict=True):
        kinds.append(_dtype(synchronizer, position))
        if isinstance(gradient, tf.IndexedSlices):
            kinds.append(tf.int64)

    missing = _missing(positions, gradients)

    def finish(*tokens: object) -> list[Any]:
        synchronizer.check_missing(missing)
        averages = synchronizer.finish()
        arrays: list[Any] = []
        for position, gradient in zip(positions, gradients, strict=True):
            average = averages[position]
            arrays.extend(average if isinstance(gradient, tf.IndexedSlices) else [average])
        return arrays

    arrays = iter(tf.numpy_function(finish, tokens, kinds, stateful=False))
    results: list[Any] = []
    for position, gradient in zip(positions, gradients, strict=True):
        values = next(arrays)
        shape = synchronizer.parameters[position].shape
        if isinstance(gradient, tf.IndexedSlices):
            values.set_shape([None, *shape[1:]])
            indices = next(arrays)
            indices.set_shape([None])
            indices = tf.cast(indices, gradient.indices.dtype)
            results.append(tf.IndexedSlices(values, indices, gradient.dense_shape))
        else:
            values.set_shape(shape)
            results.append(values)
    return results


def _dtype(synchronizer: TensorflowSynchronizer, position: int) -> Any:
    return tf.as_dtype(str(synchronizer.parameters[position].dtype).removeprefix("torch."))


def outermost_graph() -> Any:
    """The outermost graph under construction; raises `InvalidInput` if it cannot switch plans."""
    graph: Any = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "outer_graph"):
        raise InvalidInput(
            "Horovod scripts of TensorFlow 1 build one graph for all steps, but plans are switched "
            "between steps; put the step into a tf.function, or compute it eagerly"
        )
    while True:
        if isinstance(graph, WhileBodyFuncGraph):
            raise InvalidInput(LOOP_REFUSAL)
        outer = graph.outer_graph
        if not hasattr(outer, "outer_graph"):
            return graph
        graph = outer
