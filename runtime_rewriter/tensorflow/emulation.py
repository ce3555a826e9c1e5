"""A training graph whose computation is replaced by timed waits: an emulated accelerator.

Feeds still travel to the replicas, and recorded gradients between them. The waits are native
operations without Python, so they run on every server. They end at times that are counted from the
start of the step, and therefore absorb real work that is shorter than the profile's.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef

from runtime_rewriter.emulation import Timetable
from runtime_rewriter.tensorflow.graph_view import TensorName
from runtime_rewriter.tensorflow.training_graph import Feed, Gradient, GraphVariable, TrainingGraph

v1 = tf.compat.v1

LATE = "autotune_late_s"
"""A fetch of the graph: the largest lateness of the first replica's waits, in seconds."""
_PULLS = 2
"""A dataset of one element is asked for it and for its end, and waits each time."""


def recorded_tensors(training: TrainingGraph, rank: int) -> dict[str, str]:
    """The tensors of a replica whose values an emulated step sends, to be fetched in a real one."""
    wanted = {}
    for one in training.gradients:
        wanted[_values(one.variable)] = f"replica_{rank}/{one.values}"
        if one.indices is not None:
            wanted[_indices(one.variable)] = f"replica_{rank}/{one.indices}"
    return wanted


def _values(variable: str) -> str:
    return f"emulated/{variable}/values"


def _indices(variable: str) -> str:
    return f"emulated/{variable}/indices"


def emulated(
    training: TrainingGraph,
    timetable: Timetable,
    recorded: Mapping[str, np.ndarray],
    results: Mapping[str, np.ndarray],
) -> TrainingGraph:
    """The graph that waits as `timetable` says and sends `recorded` gradients.

    `recorded`: values of `recorded_tensors`. `results`: values that a step returns.
    """
    with tf.Graph().as_default() as graph:
        step = _Step(training, timetable, recorded)
        fetched = {name: tf.constant(value) for name, value in results.items()}
        fetched[LATE] = tf.reduce_max(tf.stack(step.late))
    graph_def = GraphDef()
    graph_def.CopyFrom(graph.as_graph_def())
    held = (GraphVariable(name, value.shape, value.dtype.name) for name, value in recorded.items())
    # The updated variables are not in the graph, but a plan's messages have their shapes.
    updated = (training.by_name[gradient.variable] for gradient in training.gradients)
    feeds = (
        Feed(feed.name, TensorName(feed.tensor.node, 0), feed.split) for feed in training.feeds
    )
    return TrainingGraph(
        graph_def,
        (*held, *updated),
        tuple(step.gradients),
        tuple(feeds),
        (step.end.name,),
        {name: TensorName.of(tensor.name) for name, tensor in fetched.items()},
        dict(recorded),
        training.row_readers,
    )


class _Step:
    """Builds the nodes of one step in the default graph."""

    def __init__(
        self, training: TrainingGraph, timetable: Timetable, recorded: Mapping[str, np.ndarray]
    ) -> None:
        self.late: list[Any] = []
        self.gradients: list[Gradient] = []
        self._held = {name: _variable(name, value) for name, value in recorded.items()}
        nodes = training.view.nodes
        feeds = [
            v1.placeholder(nodes[feed.tensor.node].attr["dtype"].type, name=feed.tensor.node)
            for feed in training.feeds
        ]
        with tf.control_dependencies(feeds):
            start = tf.timestamp()
        before = self._wait(start, timetable.forward_s)
        backward_start = start + timetable.forward_s
        for ready_s, group in groupby(timetable.ready, key=lambda pair: pair[1]):
            with tf.control_dependencies([before]):
                before = self._wait(backward_start, ready_s)
            with tf.control_dependencies([before]):
                self.gradients += [self._gradient(training.gradient_of[name]) for name, _ in group]
        with tf.control_dependencies([before]):
            computed = self._wait(backward_start, timetable.backward_s)
        with tf.control_dependencies([computed, *self._arrived()]):
            arrived = tf.timestamp()
        with tf.control_dependencies([self._wait(arrived, timetable.update_s)]):
            self.end = tf.no_op(name="emulated/end")

    def _gradient(self, gradient: Gradient) -> Gradient:
        values = tf.identity(self._read(_values(gradient.variable)))
        if gradient.indices is None:
            return Gradient(gradient.variable, TensorName.of(values.name))
        indices = tf.identity(self._read(_indices(gradient.variable)))
        return Gradient(gradient.variable, TensorName.of(values.name), TensorName.of(indices.name))

    def _read(self, name: str) -> Any:
        handle, dtype = self._held[name]
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)

    def _arrived(self) -> list[Any]:
        """Readers of the gradients, where the distributed graph has averaged ones."""
        graph = v1.get_default_graph()
        names = [
            str(tensor)
            for one in self.gradients
            for tensor in (one.values, one.indices)
            if tensor is not None
        ]
        return [tf.identity(graph.get_tensor_by_name(name)) for name in names]

    def _wait(self, start: Any, seconds: float) -> Any:
        """A tensor that exists `seconds` after the time `start`, or at once if that is past."""
        end, late_s = waited(start, seconds)
        self.late.append(late_s)
        return end


def waited(start: Any, seconds: float) -> tuple[Any, Any]:
    """A tensor that exists `seconds` after the time `start`, and by how many it is late."""
    with tf.control_dependencies([start]):
        now = tf.timestamp()
    left_s = start + seconds - now
    pause = tf.cast(tf.maximum(left_s, 0.0) * (1e6 / _PULLS), tf.int64)
    kinds: dict[str, Any] = {"output_types": [now.dtype], "output_shapes": [now.shape]}
    waiting = tf.raw_ops.SleepDataset(
        input_dataset=tf.raw_ops.TensorDataset(components=[now], output_shapes=[now.shape]),
        sleep_microseconds=pause,
        **kinds,
    )
    return tf.raw_ops.DatasetToSingleElement(dataset=waiting, **kinds)[0], tf.maximum(-left_s, 0.0)


def _variable(name: str, value: np.ndarray) -> tuple[Any, Any]:
    dtype = tf.as_dtype(value.dtype)
    handle = tf.raw_ops.VarHandleOp(
        dtype=dtype, shape=value.shape, shared_name=name, name=name.replace(":", "_")
    )
    return handle, dtype
