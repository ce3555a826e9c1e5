"""Captures the training step of a Keras model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from runtime_rewriter.tensorflow.capture import capture_function
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

LABELS = "labels"
LOSS = "loss"


def capture_keras(
    model: Any, optimizer: Any, loss: Callable[[Any, Any], Any], labels: tf.TensorSpec
) -> TrainingGraph:
    """Capture one step of `optimizer` on `loss(labels, model(inputs))`.

    The feeds are the model's inputs, by their names, and `labels`; the step returns `loss`.
    Batch dimensions that are None are split between replicas.
    """
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    inputs = [tf.TensorSpec(one.shape, one.dtype, one.name) for one in model.inputs]

    def step(*feeds: Any) -> dict[str, Any]:
        given = feeds[0] if len(inputs) == 1 else list(feeds[:-1])
        with tf.GradientTape() as tape:
            total = loss(feeds[-1], model(given, training=True)) + sum(model.losses)
            scaled = optimizer.scale_loss(total)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return {LOSS: total}

    return capture_function(step, [*inputs, tf.TensorSpec(labels.shape, labels.dtype, LABELS)])
