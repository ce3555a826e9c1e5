"""Averages a tape's gradients by the loaded plan, or by Horovod itself, in one traced graph.

The graph has a branch for Horovod's own operations and one for ours, and a variable that chooses.
TensorFlow lowers the branch: each gradient passes as soon as it is computed, so both ways overlap
the backward pass, and Horovod's own operations keep their names.

In our branch a Python function without state reports each gradient, and a last one waits for all
averages. Functions with state would run one after the other in the script's order. Each takes the
chosen way as an input: the graph optimizer would call a function of constants, once and for all.
Gradients that are rows are averaged by Horovod's own operations in both branches.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph

from autotune.errors import InvalidInput
from runtime_rewriter.horovod.tensorflow_synchronizer import AVERAGED_TWICE, TensorflowSynchronizer

EAGER_REFUSAL = (
    "{what}: the step is eager, so there is no function to replace; put it into a tf.function"
)
_BRANCHES = "autotune_averages"
OWN_BRANCH = f"{_BRANCHES}_false"
"""In the name of the function of Horovod's own operations."""
Own = Callable[[], Sequence[Any]]
"""Horovod's own averages."""
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
        if gradient is not None:
            synchronizer.ready(position, gradient.numpy())
    averages = synchronizer.finish()
    return [tf.convert_to_tensor(averages[position]) for position in positions]


def _missing(positions: Sequence[int], gradients: Sequence[Any]) -> frozenset[int]:
    pairs = zip(positions, gradients, strict=True)
    return frozenset(position for position, gradient in pairs if gradient is None)


def averaged_in_graph(
    synchronizer: TensorflowSynchronizer,
    positions: Sequence[int],
    gradients: Sequence[Any],
    target: Any,
    own: Own,
    rows: Own,
) -> list[Any]:
    """The averages by the plan that is loaded when the graph runs, or `own` without one.

    Those of `rows`, which no plan has, follow; `own` returns them, too.
    """
    planned = synchronizer.planned.read_value()

    def ours() -> list[Any]:
        return [*_planned(synchronizer, positions, gradients, target, planned), *rows()]

    def horovods() -> list[Any]:
        averages = own()
        count = len(positions)
        dense = [
            tf.zeros(synchronizer.parameters[position].shape, _dtype(synchronizer, position))
            if average is None  # Horovod itself waits for ever for this rank's gradient
            else average
            for position, average in zip(positions, averages[:count], strict=True)
        ]
        return [*dense, *averages[count:]]

    _record_on_request(synchronizer, positions, gradients)
    averages: list[Any] = tf.cond(planned, ours, horovods, name=_BRANCHES)
    return averages


def _record_on_request(
    synchronizer: TensorflowSynchronizer, positions: Sequence[int], gradients: Sequence[Any]
) -> None:
    """Hand out the local gradients when `synchronizer.recording` is true."""
    present = {
        position: gradient
        for position, gradient in zip(positions, gradients, strict=True)
        if gradient is not None
    }

    def record(*arrays: Any) -> Any:
        synchronizer.record(list(present), arrays)
        return np.int32(0)

    tf.cond(
        synchronizer.recording.read_value(),
        lambda: tf.numpy_function(record, list(present.values()), tf.int32),
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
        if gradient is not None:
            tokens.append(report(partial(synchronizer.ready, position), gradient))
    kinds = [_dtype(synchronizer, position) for position in positions]
    missing = _missing(positions, gradients)

    def finish(*tokens: object) -> list[Any]:
        synchronizer.check_missing(missing)
        averages = synchronizer.finish()
        return [averages[position] for position in positions]

    results: list[Any] = tf.numpy_function(finish, tokens, kinds, stateful=False)
    for position, average in zip(positions, results, strict=True):
        average.set_shape(synchronizer.parameters[position].shape)
    return results


def _dtype(synchronizer: TensorflowSynchronizer, position: int) -> Any:
    return tf.as_dtype(str(synchronizer.parameters[position].dtype).removeprefix("torch."))


class AveragedGraphs:
    """The function graphs in which gradients are averaged."""

    def __init__(self) -> None:
        self._averaging: WeakSet[Any] = WeakSet()
        self._around: WeakSet[Any] = WeakSet()

    def note(self) -> None:
        """Note the graph under construction. Raises `InvalidInput` if a run of it averages twice.

        A run takes one branch of a conditional, and perhaps none of two traces of a function.
        """
        graph: Any = tf.compat.v1.get_default_graph()
        around = list(_graphs_around(graph))
        if graph in self._around or any(one in self._averaging for one in (graph, *around)):
            raise InvalidInput(AVERAGED_TWICE)
        self._averaging.add(graph)
        self._around.update(around)


def _graphs_around(graph: Any) -> Iterator[Any]:
    """The function graphs that contain the graph, from the inside out."""
    while hasattr(graph.outer_graph, "outer_graph"):
        graph = graph.outer_graph
        yield graph


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
