"""A training step whose computation is timed waits in the graph: an emulated accelerator.

Variables, gradients, updates and messages are real. Each layer waits in the forward pass and in the
backward pass for its time; data dependencies keep the layers in order, as on one queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.tensorflow_ranks.layers import TimedLayer
from runtime_rewriter.tensorflow.capture import capture_function
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

_PULLS = 2
"""A dataset of one element is asked for it and for its end, and waits each time."""


def timed_training(layers: Sequence[TimedLayer]) -> TrainingGraph:
    """The training graph of one replica."""
    variables = [
        tf.Variable(np.full(layer.elements, 1e-3, np.float32), name=layer.name) for layer in layers
    ]

    def step() -> dict[str, Any]:
        with tf.GradientTape() as tape:
            signal = tf.constant(1.0)
            for layer, variable in zip(layers, variables, strict=True):
                signal = _timed(layer)(signal, variable)
        gradients = tape.gradient(signal, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(1e-3 * gradient)
        return {"loss": signal}

    return capture_function(step, [])


def _timed(layer: TimedLayer) -> Any:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(signal: Any, weight: Any) -> Any:
        with tf.control_dependencies([weight]):
            output = _wait(tf.identity(signal), layer.forward_s)

        def backward(upstream: Any) -> Any:
            ready = _wait(upstream, layer.backward_s)
            return ready, tf.convert_to_tensor(weight) * ready

        return output, backward

    return run


def _wait(signal: Any, seconds: float) -> Any:
    """Pass on `signal` after `seconds`, without a thread of the pool."""
    kinds: dict[str, Any] = {"output_types": [signal.dtype], "output_shapes": [signal.shape]}
    components = tf.raw_ops.TensorDataset(components=[signal], output_shapes=[signal.shape])
    pause_us = tf.constant(round(seconds * 1e6 / _PULLS), tf.int64)
    waiting = tf.raw_ops.SleepDataset(
        input_dataset=components, sleep_microseconds=pause_us, **kinds
    )
    return tf.raw_ops.DatasetToSingleElement(dataset=waiting, **kinds)[0]
