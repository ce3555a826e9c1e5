"""TensorFlow scripts of Horovod that show what a plan in place of Horovod's own operations could
change.

Each is written as for horovodrun, and imports TensorFlow and Horovod itself.
"""

# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

STEPS = 6


class TensorflowRun(Protocol):
    """Runs a script, and keeps what it sees."""

    rank: int

    def see(self, *values: Any) -> None: ...


def batch(rank: int, step: int, rows: int = 5) -> Any:
    return np.random.default_rng(100 * rank + step).standard_normal((rows, 6), np.float32)


def network(seed: int = 0, dropout: float = 0.0) -> Any:
    """A Keras model with the same weights on all ranks, as after `hvd.broadcast_variables`."""
    import keras

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [layers.Dense(8, "tanh"), layers.Dropout(dropout), layers.Dense(3), layers.Dense(1)]
    )
    model.build((None, 6))
    return model


def of_tensorflow(variables: Any) -> list[Any]:
    """The variables that Horovod takes of Keras 3."""
    return [variable.value for variable in variables]


def values(variables: Any) -> list[Any]:
    return [
        np.array(variable.numpy() if hasattr(variable, "numpy") else variable)
        for variable in variables
    ]


def step_of(hvd: Any, rank: int, **options: Any) -> Any:
    """A model's variables, and a function that trains it for a step."""
    import tensorflow as tf

    model = network()
    variables = of_tensorflow(model.trainable_variables)

    @tf.function
    def train_step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        gradients = hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)
        for gradient, variable in zip(gradients, variables, strict=True):
            variable.assign_sub(0.05 * gradient)
        return loss

    return variables, lambda step: train_step(batch(rank, step))


def plain(run: TensorflowRun) -> None:
    """A Keras model and optimizer in a step of tf.function; another shape traces it once more."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    model, optimizer = network(), keras.optimizers.Adam(0.01)
    traces = []

    @tf.function
    def train_step(x: Any) -> Any:
        traces.append(x.shape)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, of_tensorflow(model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for step in range(STEPS):
        loss = train_step(tf.constant(batch(run.rank, step, 5 if step < 4 else 3)))
        if step == 0:
            hvd.broadcast_variables(of_tensorflow(model.variables), root_rank=0)
            hvd.broadcast_variables(of_tensorflow(optimizer.variables), root_rank=0)
        run.see(hvd.allreduce(loss, name="loss").numpy())
    run.see(values(model.variables), values(optimizer.variables), len(traces))


def eager(run: TensorflowRun) -> None:
    """A step without tf.function."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    model, optimizer = network(), keras.optimizers.SGD(0.05, momentum=0.9)
    for step in range(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch(run.rank, step), training=True) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, of_tensorflow(model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        run.see(values(gradients))
    run.see(values(model.variables))


def clipping(run: TensorflowRun) -> None:
    """The averages are clipped, and dropout draws from a seeded stream that must not start anew."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    model = network(dropout=0.3)
    variables = of_tensorflow(model.trainable_variables)

    @tf.function
    def train_step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.nn.dropout(x, 0.2), training=True) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.1)
        for gradient, variable in zip(gradients, variables, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss, norm

    for step in range(STEPS):
        run.see(values(train_step(batch(run.rank, step))))
    run.see(values(variables))


def _embedding(run: TensorflowRun, **options: Any) -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    start = np.random.default_rng(0)
    table = tf.Variable(start.standard_normal((20, 4), np.float32), name="table")
    head = tf.Variable(start.standard_normal((4, 3), np.float32), name="head")
    form = []

    @tf.function
    def train_step(tokens: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.gather(table, tokens) @ head) ** 2)
        tape = hvd.DistributedGradientTape(tape, **options)
        rows, dense = tape.gradient(loss, [table, head])
        form.append(type(rows).__name__)
        if isinstance(rows, tf.IndexedSlices):
            table.scatter_sub(tf.IndexedSlices(0.5 * rows.values, rows.indices))
        else:
            table.assign_sub(0.5 * rows)
        head.assign_sub(0.5 * dense)
        return loss

    for step in range(STEPS):
        tokens = np.random.default_rng(100 * run.rank + step).integers(0, 20, 6)
        train_step(tf.constant(tokens))
        run.see(table.numpy(), head.numpy())
    run.see(form)


def sparse(run: TensorflowRun) -> None:
    """Rows of an embedding stay rows."""
    _embedding(run)


def sparse_as_dense(run: TensorflowRun) -> None:
    """Rows of an embedding are summed in a dense tensor."""
    _embedding(run, sparse_as_dense=True)


def rows_in_groups(run: TensorflowRun) -> None:
    """Horovod gathers rows in a group of their own."""
    _embedding(run, num_groups=2)


def _words(run: TensorflowRun, wrapped: Callable[..., Any]) -> None:
    """Adam squares each row by itself, also those of equal index, and the norm is that of all."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([layers.Embedding(12, 4), layers.Dense(3, "tanh"), layers.Dense(2)])
    model.build((None, 6))
    scale = keras.Variable(1.5, name="scale")  # a gradient without dimensions
    optimizer = keras.optimizers.Adam(0.02)
    held = [*model.trainable_variables, scale]
    optimizer.build(held)

    @wrapped
    def train_step(tokens: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((scale.value * model(tokens)) ** 2)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, of_tensorflow(held))
        clipped, norm = tf.clip_by_global_norm(gradients, 0.1)
        optimizer.apply_gradients(zip(clipped, held, strict=True))
        return norm, gradients[0].values, gradients[0].indices

    for step in range(STEPS):
        tokens = np.random.default_rng(100 * run.rank + step).integers(0, 12, (2, 6))
        run.see(values(train_step(tf.constant(tokens))))
    run.see(values(held), values(optimizer.variables))


def words(run: TensorflowRun) -> None:
    """An embedding under an optimizer of Keras."""
    import tensorflow as tf

    _words(run, tf.function)


def words_eagerly(run: TensorflowRun) -> None:
    """The same without tf.function."""
    _words(run, lambda step: step)


def summed_in_groups(run: TensorflowRun) -> None:
    """op=Sum, and gradients that Horovod executes together; one variable is never used."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    model = network()
    idle = tf.Variable(1.0, name="idle")
    variables = [*of_tensorflow(model.trainable_variables), idle]

    @tf.function
    def train_step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, num_groups=2)
        gradients = tape.gradient(loss, variables)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                variable.assign_sub(0.02 * gradient)
        return [gradient is None for gradient in gradients]

    for step in range(STEPS):
        run.see(values(train_step(batch(run.rank, step))))
    run.see(values(variables))


def local_layer(run: TensorflowRun) -> None:
    """The gradients of one layer stay on each rank."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    model = network()
    variables = of_tensorflow(model.trainable_variables)

    @tf.function
    def train_step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        for variable in variables[-2:]:
            tape.register_local_source(variable)
        gradients = tape.gradient(loss, variables)
        for gradient, variable in zip(gradients, variables, strict=True):
            variable.assign_sub(0.05 * gradient)

    for step in range(STEPS):
        train_step(batch(run.rank, step))
    run.see(values(variables))


def two_models(run: TensorflowRun) -> None:
    """The second model keeps Horovod's own averages; both are updated in one function."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    first, second = network(), network(seed=1)

    @tf.function
    def train_step(x: Any) -> None:
        for model in (first, second):
            variables = of_tensorflow(model.trainable_variables)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x, training=True) ** 2)
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
            for gradient, variable in zip(gradients, variables, strict=True):
                variable.assign_sub(0.05 * gradient)

    for step in range(STEPS):
        train_step(batch(run.rank, step))
    run.see(values(first.variables), values(second.variables))


def inside(run: TensorflowRun) -> None:
    """A function is a step by itself, and from the fourth step on within another one."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    variables, train = step_of(hvd, run.rank)

    @tf.function
    def outer() -> Any:
        return train(0)

    for step in range(2 * STEPS):
        run.see(values([train(0) if step < 3 else outer()]))
    run.see(values(variables))


def fitted(run: TensorflowRun) -> None:
    """Keras's own loop around a train_step of the script."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    class Fitted(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def call(self, x: Any) -> Any:
            return self.inner(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, of_tensorflow(self.trainable_variables))
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = Fitted()
    model.compile(optimizer=keras.optimizers.SGD(0.05), jit_compile=False)
    x = np.concatenate([batch(run.rank, step, 4) for step in range(STEPS)])
    history = model.fit(x, x.sum(1, keepdims=True), batch_size=4, shuffle=False, verbose=0)
    run.see(values(model.variables), history.history["loss"])


TENSORFLOW_SCRIPTS: dict[str, Callable[[TensorflowRun], None]] = {
    script.__name__: script
    for script in (
        plain,
        eager,
        clipping,
        sparse,
        sparse_as_dense,
        rows_in_groups,
        words,
        words_eagerly,
        summed_in_groups,
        local_layer,
        two_models,
        inside,
        fitted,
    )
}
