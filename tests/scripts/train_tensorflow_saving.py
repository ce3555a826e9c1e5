"""A TensorFlow program with the one line, which notes its ends in a folder (the only word).

It writes `finally-RANK` on its way out, and saves its variable as `exit-RANK.npy` in a handler.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")

import numpy as np
import tensorflow as tf

import autotune

FOLDER, RANK = Path(sys.argv[1]), os.environ["RANK"]
variable = tf.Variable([0.0])


@tf.function
def train_step(rows):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(rows * variable - 1.0))
    variable.assign_sub(0.1 * tape.gradient(loss, variable))
    return loss


atexit.register(lambda: np.save(FOLDER / f"exit-{RANK}.npy", variable.numpy()))
try:
    train_step = autotune.distribute(train_step)
    for _ in range(3):
        train_step(np.ones((4, 1), np.float32))
finally:
    (FOLDER / f"finally-{RANK}").touch()
