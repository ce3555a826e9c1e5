"""TensorFlow scripts of Horovod that are refused, and a part of each one's message.

A script gets its rank and the session that steers it.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch_plans import uniform

from odd_scripts.horovod_tensorflow import batch, network, step_of
from runtime_rewriter.pytorch.emulation import accelerator_of

Script = Callable[[int, Any], None]


def optimizer(rank: int, session: Any) -> None:
    import horovod.tensorflow as hvd
    import keras

    hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))


def optimizer_of_keras(rank: int, session: Any) -> None:
    import horovod.tensorflow.keras
    import keras

    horovod.tensorflow.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))


def optimizer_of_old_keras(rank: int, session: Any) -> None:
    import horovod.keras
    import keras

    horovod.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))


def callback(rank: int, session: Any) -> None:
    import horovod.tensorflow.keras

    horovod.tensorflow.keras.callbacks.BroadcastGlobalVariablesCallback(0)


def adasum(rank: int, session: Any) -> None:
    import horovod.tensorflow as hvd

    step_of(hvd, rank, op=hvd.Adasum)[1](0)


def maximum(rank: int, session: Any) -> None:
    import horovod.tensorflow as hvd

    step_of(hvd, rank, op=hvd.Max)[1](0)
    session.synchronizer.load(uniform(session.synchronizer.module, 2))


def keras_variables(rank: int, session: Any) -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    model = network()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(batch(rank, 0)) ** 2)
    hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)


def loop(rank: int, session: Any) -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    train = step_of(hvd, rank)[1]

    @tf.function
    def steps() -> None:
        for _ in tf.range(2):
            train(0)

    steps()


def loop_later(rank: int, session: Any) -> None:
    """The function of the step was traced by a call outside of the loop."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    train = step_of(hvd, rank)[1]
    train(0)

    @tf.function
    def steps() -> None:
        for _ in tf.range(2):
            train(0)

    steps()


def elastic(rank: int, session: Any) -> None:
    import horovod.tensorflow as hvd

    hvd.elastic.run(print)


def some_ranks(rank: int, session: Any) -> None:
    import horovod.tensorflow as hvd

    step_of(hvd, rank, process_set=hvd.add_process_set([0]))[1](0)


def one_core(rank: int, session: Any) -> None:
    """TensorFlow has as many threads between operations as cores."""
    import horovod.tensorflow as hvd

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        step_of(hvd, rank)[1](0)
    finally:
        os.sched_setaffinity(0, cores)


def graph_of_tensorflow_1(rank: int, session: Any) -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    with tf.Graph().as_default():
        weight = tf.Variable(tf.ones(2))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight)
        hvd.DistributedGradientTape(tape).gradient(loss, [weight])


def recorded(rank: int, session: Any) -> None:
    """An eager step, steered by `autotune profile`."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    head = tf.Variable(tf.ones(2), name="head")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(head * head)
    hvd.DistributedGradientTape(tape).gradient(loss, [head])


def recorded_shapes(rank: int, session: Any) -> None:
    """Its second recorded batch has another shape."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    head = tf.Variable(tf.ones(6), name="head")

    @tf.function
    def train_step(rows: Any, *, scale: float) -> Any:
        with tf.GradientTape() as tape:
            loss = scale * tf.reduce_sum(rows * head)
        return hvd.DistributedGradientTape(tape).gradient(loss, [head])

    for rows in (4, 4, 3):
        train_step(batch(rank, 0, rows), scale=0.5)


def recorded_branch(rank: int, session: Any) -> None:
    """Rank 0 averages its loss, too, when its step is traced for the recording."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    head = tf.Variable(tf.ones(2), name="head")
    traces = []

    @tf.function
    def train_step() -> Any:
        traces.append(rank)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(head * head)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, [head])
        if len(traces) > 1 and rank == 0:
            loss = hvd.allreduce(loss, name="mean_loss")
        return loss, gradients

    for _ in range(2):
        train_step()


def _other_gradients(session: Any, wrapped: Callable[..., Any]) -> None:
    """The last step leaves out the bias, which those before it used, also under the plan."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    head, bias = tf.Variable(tf.ones(2), name="head"), tf.Variable(tf.ones(2), name="bias")

    @wrapped
    def train_step(used: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(head * head) + (tf.reduce_sum(bias) if used else 0.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, [head, bias])

    train_step(True)
    session.synchronizer.load(uniform(session.synchronizer.module, 2))
    train_step(True)
    train_step(False)


def other_gradients_eagerly(rank: int, session: Any) -> None:
    _other_gradients(session, lambda step: step)


def other_gradients_in_a_graph(rank: int, session: Any) -> None:
    import tensorflow as tf

    _other_gradients(session, tf.function)


def _table(dense: bool = True) -> tuple[Any, list[Any]]:
    """A function of the loss of rows of a table, and its variables."""
    import tensorflow as tf

    table, head = tf.Variable(tf.ones((8, 2)), name="table"), tf.Variable(tf.ones(2), name="head")

    def loss_of(used: bool) -> Any:
        rows = tf.reduce_sum(tf.gather(table, [1, 3, 3])) if used else tf.constant(0.0)
        return rows + tf.reduce_sum(head) if dense else rows

    return loss_of, [table, head] if dense else [table]


def rows_on_one_rank(rank: int, session: Any) -> None:
    """Horovod itself waits for ever for the other rank's rows."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    loss_of, variables = _table()
    with tf.GradientTape() as tape:
        loss = loss_of(used=rank == 0)
    hvd.DistributedGradientTape(tape).gradient(loss, variables)


def rows_alone(rank: int, session: Any) -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    loss_of, variables = _table(dense=False)
    with tf.GradientTape() as tape:
        loss = loss_of(used=True)
    hvd.DistributedGradientTape(tape).gradient(loss, variables)


def rows_later(rank: int, session: Any) -> None:
    """The first step has a dense gradient of the table, and the second one rows."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    table = tf.Variable(tf.ones((8, 2)), name="table")
    for dense in (True, False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table if dense else tf.gather(table, [1, 3]))
        hvd.DistributedGradientTape(tape).gradient(loss, [table])


def rows_emulated(rank: int, session: Any) -> None:
    """Emulated accelerators would have to send rows, too."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    loss_of, variables = _table()
    with tf.GradientTape() as tape:
        loss = loss_of(used=True)
    hvd.DistributedGradientTape(tape).gradient(loss, variables)
    accelerator_of(session.synchronizer, None)


def averaged_twice(rank: int, session: Any) -> None:
    """Two losses of a step, each with a tape of its own."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    head = tf.Variable(tf.ones(2), name="head")

    @tf.function
    def train_step() -> None:
        for power in (2, 3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(head**power)
            (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [head])
            head.assign_sub(0.1 * gradient)

    train_step()


def averaged_twice_inside(rank: int, session: Any) -> None:
    """One trace of an inner function, which a step calls twice: the second call waits for the
    averages of the first one."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    head = tf.Variable(tf.ones(2), name="head")

    @tf.function
    def gradient(power: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(head**power)
        return hvd.DistributedGradientTape(tape).gradient(loss, [head])

    @tf.function
    def train_step() -> Any:
        (first,) = gradient(tf.constant(2.0))
        return gradient(first[0])

    train_step()
    session.synchronizer.load(uniform(session.synchronizer.module, 2))
    train_step()


def squared_step() -> Any:
    """A step that averages the gradient of one variable."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    head = tf.Variable(tf.ones(2), name="head")

    @tf.function
    def train_step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(head * head)
        return hvd.DistributedGradientTape(tape).gradient(loss, [head])

    return train_step


def concrete(rank: int, session: Any) -> None:
    """The step is traced without a call."""
    squared_step().get_concrete_function()()


def concrete_later(rank: int, session: Any) -> None:
    """Further steps call the graph of the first one."""
    train_step = squared_step()
    train_step()
    train_step.get_concrete_function()()


def join(rank: int, session: Any) -> None:
    import horovod.tensorflow as hvd

    step_of(hvd, rank)[1](0)
    hvd.join()


TAPE = "tape = hvd.DistributedGradientTape(tape)"
THREADS = "but has 1; call tf.config.threading.set_inter_op_parallelism_threads(2)"
REFUSED: dict[Script, str] = {
    optimizer: TAPE,
    optimizer_of_keras: TAPE,
    optimizer_of_old_keras: TAPE,
    callback: "call hvd.broadcast_variables([variable.value",
    adasum: "use op=hvd.Average",
    maximum: "op other than hvd.Average and hvd.Sum",
    keras_variables: "[variable.value for variable in model.trainable_variables]",
    loop: "a tf.function of one step in a Python loop",
    loop_later: "a tf.function of one step in a Python loop",
    elastic: "elastic Horovod cannot be controlled",
    some_ranks: "its process set has ranks 0 of 2; tune with only these ranks",
    one_core: THREADS,
    graph_of_tensorflow_1: "put the step into a tf.function, or compute it eagerly",
    recorded: "the step cannot be recorded: the step is eager",
    recorded_branch: "HorovodAllreduce mean_loss' is on rank 0 and not on rank 1 (1 such)",
    recorded_shapes: "arguments of one shape, but a call differs from the first one (train_step)",
    other_gradients_eagerly: "those of bias are not; compute each in every step",
    other_gradients_in_a_graph: "those of bias are not; compute each in every step",
    rows_on_one_rank: "rows on every rank, but those of table are rows on rank 0 only",
    rows_alone: "pass sparse_as_dense=True to hvd.DistributedGradientTape",
    rows_later: "but that of table has become rows",
    rows_emulated: "the gradients of table are rows, which are not recorded",
    averaged_twice: "add up the losses",
    averaged_twice_inside: "add up the losses",
    concrete: "call train_step(batch) instead of a concrete function",
    concrete_later: "call train_step(batch) instead of a concrete function",
    join: "drop the extra batches",
}
