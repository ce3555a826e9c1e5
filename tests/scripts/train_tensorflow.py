"""A single-device TensorFlow program with the one line; a fault can be planted in rank 1.

Words: steps, and a file whose appearance stops rank 1 for a while ("stop" in it) or ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

os.environ.update(KERAS_BACKEND="tensorflow", CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")

import keras
import numpy as np
import tensorflow as tf

import autotune

STEPS, PLANTED = int(sys.argv[1]), Path(sys.argv[2])
STOPPED_S = 200.0
"""Longer than a step may take, and the script is started again before."""


def fail_when_planted() -> None:
    while not PLANTED.exists():
        time.sleep(0.05)
    fault = PLANTED.read_text()
    PLANTED.unlink()
    if fault != "stop":
        os._exit(7)
    own = os.getpid()  # a stopped process cannot resume itself
    subprocess.Popen(["sh", "-c", f"kill -STOP {own}; sleep {STOPPED_S}; kill -CONT {own}"])


if os.environ.get("RANK") == "1":
    threading.Thread(target=fail_when_planted, daemon=True).start()

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)])
model.build((None, 16))
optimizer = keras.optimizers.Adam(1e-3)
optimizer.build(model.trainable_variables)


@tf.function
def train_step(inputs, labels):
    with tf.GradientTape() as tape:
        logits = model(inputs, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_mean(losses)
    variables = model.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)
    return {"loss": loss}


train_step = autotune.distribute(train_step)
random = np.random.default_rng(0)
for _ in range(STEPS):
    batch = random.normal(size=(8, 16)).astype("float32")
    loss = train_step(batch, (batch[:, 0] > 0).astype("int32"))["loss"]
print(f"loss {float(loss):.4f}")
