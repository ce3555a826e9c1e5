"""A TensorFlow program of MultiWorkerMirroredStrategy as its tutorial has it: without our lines.

Words: steps, and a folder into which each worker writes its final variables.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.update(KERAS_BACKEND="tensorflow", CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")

import keras
import numpy as np
import tensorflow as tf

STEPS, RESULTS = int(sys.argv[1]), Path(sys.argv[2])
configuration = json.loads(os.environ["TF_CONFIG"])
workers, worker = len(configuration["cluster"]["worker"]), configuration["task"]["index"]
GLOBAL_BATCH = 4 * workers

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1 + worker)  # the strategy sends the first worker's values

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Embedding(20, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(3),
        ]
    )
    model.build((None, 5))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0)
    optimizer.build(model.trainable_variables)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

random = np.random.default_rng(0)
words = random.integers(0, 19, (8 * GLOBAL_BATCH, 5)).astype("int32")
labels = (words.sum(1) % 3).astype("int32")
batches = tf.data.Dataset.from_tensor_slices((words, labels)).batch(GLOBAL_BATCH).repeat()


def replica_step(inputs, targets):
    with tf.GradientTape() as tape:
        per_example = losses(targets, model(inputs, training=True))
        loss = tf.nn.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def train_step(batch):
    per_worker = strategy.run(replica_step, args=batch)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_worker, axis=None)


for number, batch in enumerate(strategy.experimental_distribute_dataset(batches)):
    if number == STEPS:
        break
    loss = train_step(batch)
print(f"loss {float(loss):.4f}")
np.savez(RESULTS / f"worker_{worker}.npz", *model.get_weights(), *[float(loss)])
