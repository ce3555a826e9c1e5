"""Training steps of three Keras models with real activations, as graphs of one device."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from runtime_rewriter.tensorflow.capture import CapturedStep, capture_step

CLASSES = 10


def dense() -> tuple[keras.Model, np.ndarray]:
    layers = keras.layers
    model = keras.Sequential(
        [*(layers.Dense(1024, activation="relu") for _ in range(2)), layers.Dense(CLASSES)]
    )
    model.build((None, 512))
    return model, np.random.default_rng(0).normal(size=(256, 512)).astype("float32")


def resnet() -> tuple[keras.Model, np.ndarray]:
    layers = keras.layers
    image = keras.Input((32, 32, 3))
    values = image
    for width in (16, 32):
        shortcut = layers.Conv2D(width, 1, strides=2)(values)
        inner = layers.Conv2D(width, 3, strides=2, padding="same")(values)
        inner = layers.ReLU()(layers.BatchNormalization()(inner))
        inner = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(inner))
        values = layers.ReLU()(layers.Add()([shortcut, inner]))
    logits = layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(values))
    batch = np.random.default_rng(0).normal(size=(64, 32, 32, 3)).astype("float32")
    return keras.Model(image, logits), batch


def transformer() -> tuple[keras.Model, np.ndarray]:
    layers = keras.layers
    words = keras.Input((32,), dtype="int32")
    values = layers.Embedding(1000, 128)(words)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 32)(values, values)
        values = layers.LayerNormalization()(values + attended)
        inner = layers.Dense(128)(layers.Dense(256, activation="gelu")(values))
        values = layers.LayerNormalization()(values + inner)
    batch = np.random.default_rng(0).integers(1000, size=(64, 32)).astype("int32")
    return keras.Model(words, layers.Dense(CLASSES)(values[:, 0])), batch


PROGRAMS: dict[str, Callable[[], tuple[keras.Model, np.ndarray]]] = {
    "dense": dense,
    "resnet": resnet,
    "transformer": transformer,
}


def program(name: str) -> tuple[CapturedStep, dict[str, np.ndarray]]:
    """The captured step of a program, with Adam, and a batch by the names of its feeds."""
    keras.utils.set_random_seed(0)
    model, batch = PROGRAMS[name]()
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    def step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(inputs, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    signature = [
        tf.TensorSpec([None, *batch.shape[1:]], batch.dtype),
        tf.TensorSpec([None], tf.int32),
    ]
    captured = capture_step(tf.function(step), signature)
    values = dict(zip(captured.arguments, (batch, np.zeros(len(batch), "int32")), strict=True))
    feeds = {feed.name for feed in captured.training.feeds}
    return captured, {key: value for key, value in values.items() if key in feeds}
