"""A TensorFlow program for one device with many elementwise ops: a small transformer.

    autotune tune --workers 2 -- python benchmarks/op_fusion/transformer.py

It has GELU, layer norm and Adam. The texts are random: only the time of a step counts.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # warnings only
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import autotune

VOCABULARY = 256
HEADS = 4


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small transformer on random texts.")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32, help="texts per step, of all ranks")
    parser.add_argument("--steps", type=int, default=100_000)
    return parser.parse_args()


def transformer(width: int, blocks: int, length: int) -> keras.Model:
    ids = keras.Input((length,), dtype="int32")
    x = layers.Embedding(VOCABULARY, width)(ids)
    for _ in range(blocks):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(HEADS, width // HEADS)(normal, normal)])
        hidden = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(hidden)])
    return keras.Model(ids, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))


def main() -> None:
    args = parse_args()
    keras.utils.set_random_seed(0)
    model = transformer(args.width, args.blocks, args.length)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    def step_function(texts: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(texts, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(following, logits)
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    train_step = autotune.distribute(tf.function(step_function))
    random = np.random.default_rng(0)
    for step in range(args.steps):
        texts = random.integers(VOCABULARY, size=(args.batch_size, args.length + 1), dtype="int32")
        loss = float(train_step(texts[:, :-1], texts[:, 1:]))
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{args.steps} loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
