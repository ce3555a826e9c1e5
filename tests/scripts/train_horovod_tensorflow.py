"""A small TensorFlow script of Horovod, written as a user would: STEPS steps (default: many)."""

# mypy: allow-untyped-decorators

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu")])
model.build((None, 32))
optimizer = keras.optimizers.Adam(0.001)
optimizer.build(model.trainable_variables)
variables = [variable.value for variable in model.trainable_variables]
hvd.broadcast_variables([variable.value for variable in model.variables], root_rank=0)


@tf.function
def train_step(batch: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(batch, training=True) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
    return loss


random = np.random.default_rng(hvd.rank())
for _ in range(int(os.environ.get("STEPS", "1000000"))):
    loss = train_step(tf.constant(random.standard_normal((16, 32), np.float32)))
sums = [float(tf.reduce_sum(variable)) for variable in variables]
print(f"rank {hvd.rank()} of {hvd.size()}: loss {float(loss):.6f} sums {sums}")
