"""A training step whose computation is timed waits in the graph: an emulated accelerator.

Variables, gradients, updates and messages are real. Each layer waits in the forward pass and in the
backward pass until its time, counted from the start of the step: a layer that began late because
the cores were busy ends on time, as on an accelerator, whose kernels do not wait for the cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.tensorflow_ranks.layers import TimedLayer
from runtime_rewriter.tensorflow.capture import capture_function
from runtime_rewriter.tensorflow.emulation import waited
from runtime_rewriter.tensorflow.training_graph import TrainingGraph


def timed_training(layers: Sequence[TimedLayer]) -> TrainingGraph:
    """The training graph of one replica."""
    variables = [
        tf.Variable(np.full(layer.elements, 1e-3, np.float32), name=layer.name) for layer in layers
    ]

    def step() -> dict[str, Any]:
        with tf.GradientTape() as tape:
            ends_at = tf.timestamp()
            for layer, variable in zip(layers, variables, strict=True):
                ends_at = timed_part(layer.forward_s, layer.backward_s)(ends_at, variable)
            loss = turn(ends_at)
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(1e-3 * gradient)
        return {"loss": loss}

    return capture_function(step, [])


def timed_part(forward_s: float, backward_s: float, names: Sequence[str] = ()) -> Any:
    """A part that passes on the time at which it ends, and so does its backward pass.

    Call it with the time at which it begins, in seconds, and its variables. `names`: of the nodes
    of their gradients, which are all ready at its end.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(begins_at: Any, *weights: Any) -> Any:
        with tf.control_dependencies(weights):
            ends_at = _ended(begins_at, forward_s)

        def backward(backward_at: Any) -> Any:
            ready_at = _ended(backward_at, backward_s)
            known = tf.cast(ready_at > 0, tf.float32)
            of_weights: Sequence[str | None] = names or [None] * len(weights)
            gradients = [
                tf.multiply(tf.convert_to_tensor(weight), known, name=name)
                for weight, name in zip(weights, of_weights, strict=True)
            ]
            return ready_at, *gradients

        return ends_at, backward

    return run


@tf.custom_gradient  # type: ignore[untyped-decorator]
def turn(ends_at: Any) -> Any:
    """The end of the forward pass: the backward pass begins at its time."""
    return tf.identity(ends_at), lambda upstream: ends_at * upstream


def _ended(begins_at: Any, seconds: float) -> Any:
    """The time `seconds` after `begins_at`, from then on."""
    waited_for, _ = waited(begins_at, seconds)
    return begins_at + (seconds + 0.0 * waited_for)  # by data: the passes are found by it
