"""Small TensorFlow programs, run on one device as the reference and as rewritten graphs.

The reference never uses the rewriter: it computes the gradients of each replica's batch from the
same parameters, averages them and updates once. Statistics and seeds belong to a replica.
"""

from __future__ import annotations

import os

os.environ.update(KERAS_BACKEND="tensorflow", CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch.distributed as dist
from isolated_servers import WAIT_S
from keras import layers

from autotune.strategy_space.plan import Plan
from runtime_rewriter.tensorflow.between_graph import graph_of_rank
from runtime_rewriter.tensorflow.capture import capture_graph
from runtime_rewriter.tensorflow.checkpoints import gather, scatter
from runtime_rewriter.tensorflow.distribute import distribute
from runtime_rewriter.tensorflow.distributed_graph import DistributedGraph
from runtime_rewriter.tensorflow.gradient_marks import marked_gradients
from runtime_rewriter.tensorflow.keras_step import LABELS, capture_keras
from runtime_rewriter.tensorflow.servers import (
    JOB,
    LOOPBACK,
    RankPlace,
    reserved_port,
    session_config,
    start_servers,
)
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

Batch = dict[str, np.ndarray]
SEED = 3


@dataclass
class Program:
    """A model, its optimizer and loss, and the signature of a step's feeds."""

    model: Any
    optimizer: Any
    loss: Callable[[Any, Any], Any]
    signature: dict[str, tf.TensorSpec]

    def gradients(self, feeds: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            inputs = [value for name, value in feeds.items() if name != LABELS]
            given = inputs if len(inputs) > 1 else inputs[0]
            loss = self.loss(feeds[LABELS], self.model(given, training=True))
            scaled = self.optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, self.model.trainable_variables)

    def capture(self) -> TrainingGraph:
        return capture_keras(self.model, self.optimizer, self.loss, self.signature[LABELS])

    @property
    def variables(self) -> dict[str, Any]:
        both = [*self.model.variables, *self.optimizer.variables]
        return {one.value.name.partition(":")[0]: one for one in both}

    @property
    def own(self) -> dict[str, Any]:
        """The variables of each replica: statistics and seeds."""
        trainable = {id(one) for one in self.model.trainable_variables}
        return {
            name: one
            for name, one in self.variables.items()
            if id(one) not in trainable and any(one is other for other in self.model.variables)
        }


def averaged_steps(program: Program, batches: Sequence[Batch], replicas: int) -> Batch:
    """Train on one device as `replicas` would; return all variables as the first replica's."""
    compute = tf.function(program.gradients, autograph=False)
    held = [_start_of(program.own, rank) for rank in range(replicas)]
    for batch in batches:
        parts = {name: np.split(value, replicas) for name, value in batch.items()}
        sums: list[Any] | None = None
        for rank in range(replicas):
            _assign(program.own, held[rank])
            feeds = {name: tf.constant(value[rank]) for name, value in parts.items()}
            _, gradients = compute(feeds)
            held[rank] = {name: one.numpy() for name, one in program.own.items()}
            scaled = [_scaled(one, 1 / replicas) for one in gradients]
            sums = (
                scaled
                if sums is None
                else [_added(a, b) for a, b in zip(sums, scaled, strict=True)]
            )
        program.optimizer.apply(sums, program.model.trainable_variables)
    _assign(program.own, held[0])
    return {name: one.numpy() for name, one in program.variables.items()}


def _start_of(own: Mapping[str, Any], rank: int) -> Batch:
    start = {name: np.array(one.numpy()) for name, one in own.items()}
    for name, value in start.items():
        if "seed_generator" in name:
            value[0] += rank
    return start


def _assign(variables: Mapping[str, Any], values: Batch) -> None:
    for name, one in variables.items():
        one.assign(values[name])


def _scaled(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _added(left: Any, right: Any) -> Any:
    if isinstance(left, tf.IndexedSlices):
        values = tf.concat([left.values, right.values], 0)
        indices = tf.concat([left.indices, right.indices], 0)
        return tf.IndexedSlices(values, indices, left.dense_shape)
    return left + right


def rewritten_steps(
    training: TrainingGraph, plan: Plan, batches: Sequence[Batch], values: Batch
) -> tuple[DistributedGraph, Batch]:
    """Train the plan's graph on virtual devices of this process; return all variables."""
    devices = [f"/device:CPU:{rank}" for rank in range(plan.world_size)]
    distributed = distribute(training, plan, devices)
    with session(distributed) as running:
        scatter(running, distributed, values)
        for batch in batches:
            running.run(
                [dict(distributed.fetches), *distributed.targets], distributed.feed_dict(batch)
            )
        return distributed, gather(running, distributed)


def session(distributed: DistributedGraph) -> Any:
    """A session of this process with a device per rank, without Grappler."""
    config = session_config()
    config.device_count["CPU"] = len(distributed.devices)
    return tf.compat.v1.Session(graph=imported(distributed), config=config)


def imported(distributed: DistributedGraph) -> tf.Graph:
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(distributed.graph_def, name="")
    return graph


def two_servers() -> list[Any]:
    """Two servers in this process."""
    with reserved_port() as first, reserved_port() as second:
        addresses = [f"127.0.0.1:{port}" for port in (first, second)]
    cluster = tf.train.ClusterSpec({JOB: addresses})
    return [
        tf.distribute.Server(cluster, job_name=JOB, task_index=rank, config=session_config())
        for rank in range(2)
    ]


def train_as_client(
    rank: int, port: int, distributed: DistributedGraph, batches: Sequence[Batch], values: Batch
) -> Batch:
    """Run this rank's part with its half of each batch, as a job's rank: on a server of its own.

    For `run_world` on two ranks. `port`: a free one, where rank 0 waits for the other.
    """
    dist.destroy_process_group()
    servers = start_servers(RankPlace(rank, 2, True, LOOPBACK, port), WAIT_S)
    own, config = graph_of_rank(distributed, rank), servers.config
    config.device_filters.append(distributed.devices[rank].partition("/device")[0])
    options = tf.compat.v1.RunOptions(timeout_in_ms=60_000)
    with tf.compat.v1.Session(servers.target, graph=imported(own), config=config) as running:
        scatter(running, own, values)
        for batch in batches:
            half = {name: np.split(value, 2)[rank] for name, value in batch.items()}
            running.run(list(own.targets), own.feed_dict(half), options=options)
        trained = gather(running, own)
    servers.peers.agree({}, lambda facts: {}, WAIT_S)  # until then the other rank may need this one
    return trained


def small_resnet() -> Program:
    keras.utils.set_random_seed(SEED)
    image = keras.Input((8, 8, 3), name="image")
    value = layers.Conv2D(8, 3, padding="same", use_bias=False)(image)
    for _ in range(2):
        inner = layers.Conv2D(8, 3, padding="same", use_bias=False)(value)
        inner = layers.Activation("relu")(layers.BatchNormalization()(inner))
        value = layers.Add()([value, layers.BatchNormalization()(inner)])
    value = layers.GlobalAveragePooling2D()(value)
    model = keras.Model(image, layers.Dense(10)(value))
    return _program(model, keras.optimizers.SGD(0.1, momentum=0.9), {"image": (8, 8, 3)}, "float32")


def small_transformer() -> Program:
    keras.utils.set_random_seed(SEED)
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    value = layers.Embedding(50, 16)(tokens)
    attended = layers.MultiHeadAttention(2, 8, dropout=0.1, use_bias=False)(value, value)
    value = layers.LayerNormalization()(layers.Add()([value, attended]))
    inner = layers.Dense(16)(layers.Dense(32, activation="gelu")(value))
    value = layers.LayerNormalization()(layers.Add()([value, layers.Dropout(0.1)(inner)]))
    model = keras.Model(tokens, layers.Dense(10)(layers.Flatten()(value)))
    adam = keras.optimizers.Adam(1e-2, global_clipnorm=1.0)
    return _program(model, adam, {"tokens": (6,)}, "int32")


def collaborative_filtering(optimizer: Any = None) -> Program:
    """With Adagrad, of which Keras squares each row of a gradient for itself, or another one."""
    keras.utils.set_random_seed(SEED)
    user, item = (keras.Input((), dtype="int32", name=name) for name in ("user", "item"))
    both = [layers.Embedding(40, 8)(user), layers.Embedding(60, 8)(item)]
    value = layers.Dense(16, activation="relu")(layers.Concatenate()(both))
    model = keras.Model([user, item], layers.Dense(10)(value))
    optimizer = optimizer or keras.optimizers.Adagrad(0.1)
    return _program(model, optimizer, {"user": (), "item": ()}, "int32")


def filtering_by_momentum() -> Program:
    """An optimizer that adds up rows of equal index, and moves all rows."""
    return collaborative_filtering(keras.optimizers.SGD(0.1, momentum=0.9))


def two_layers(optimizer: Any) -> Program:
    """A model that trains fast, for one optimizer after another."""
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential(
        [keras.Input((6,), name="value"), layers.Dense(7, activation="tanh"), layers.Dense(10)]
    )
    return _program(model, optimizer, {"value": (6,)}, "float32")


def _program(model: Any, optimizer: Any, inputs: Mapping[str, tuple[int, ...]], dtype: str):
    optimizer.build(model.trainable_variables)
    signature = {name: tf.TensorSpec([None, *shape], dtype, name) for name, shape in inputs.items()}
    signature[LABELS] = tf.TensorSpec([None], "int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Program(model, optimizer, loss, signature)


def batches_of(program: Program, rows: int, count: int) -> list[Batch]:
    rng = np.random.default_rng(SEED)
    return [
        {
            name: rng.normal(size=(rows, *spec.shape[1:])).astype("float32")
            if spec.dtype == tf.float32
            else rng.integers(0, 10, (rows, *spec.shape[1:])).astype("int32")
            for name, spec in program.signature.items()
        }
        for _ in range(count)
    ]


V1_RATE, V1_MOMENTUM = 0.1, 0.9


def v1_program(marked: bool) -> tuple[TrainingGraph, Batch]:
    """A v1 graph of two variables with TensorFlow's own momentum update, and initial values."""
    graph = tf.Graph()
    with graph.as_default(), marked_gradients() as marks:
        v1 = tf.compat.v1
        value = v1.placeholder(tf.float32, [None, 3], "value")
        options = {"initializer": v1.ones_initializer(), "use_resource": True}
        weight = v1.get_variable("weight", [3, 4], **options)
        bias = v1.get_variable("bias", [4], **options)
        loss = tf.reduce_mean(tf.square(tf.matmul(value, weight) * 0.1 + bias))
        optimizer = v1.train.MomentumOptimizer(V1_RATE, V1_MOMENTUM)
        train = optimizer.minimize(loss, var_list=[weight, bias])
    training = capture_graph(graph, train, {"loss": loss}, marks if marked else None)
    return training, dict(training.initial)


def v1_reference(start: Batch, batches: Sequence[Batch], replicas: int) -> Batch:
    """The same by hand, in numpy."""
    held = {name: np.array(value) for name, value in start.items()}
    for batch in batches:
        rows = batch["value"]
        error = 2 * (rows @ held["weight"] * 0.1 + held["bias"]) / (len(rows) * 4)
        gradients = {"weight": rows.T @ error * 0.1, "bias": error.sum(0)}
        for name, gradient in gradients.items():
            held[f"{name}/Momentum"] = V1_MOMENTUM * held[f"{name}/Momentum"] + gradient
            held[name] = held[name] - V1_RATE * held[f"{name}/Momentum"]
    return held


TABLE_ROWS = 9


def v1_table(optimizer: Any) -> TrainingGraph:
    """A v1 graph of a table of rows, updated by one of TensorFlow's own optimizers."""
    graph, v1 = tf.Graph(), tf.compat.v1
    with graph.as_default(), marked_gradients() as marks:
        rows = v1.placeholder(tf.int32, [None], "rows")
        wanted = v1.placeholder(tf.float32, [None, 4], "wanted")
        ones = v1.ones_initializer()
        table = v1.get_variable("table", [TABLE_ROWS, 4], initializer=ones, use_resource=True)
        loss = tf.reduce_mean(tf.square(tf.gather(table, rows) - wanted))
        train = optimizer.minimize(loss, var_list=[table])
    return capture_graph(graph, train, {"loss": loss}, marks)


def table_batches(rows: int, count: int) -> list[Batch]:
    """Batches with rows of equal index; fewer and fewer rows of the table are used."""
    rng = np.random.default_rng(SEED)
    return [
        {
            "rows": rng.integers(0, TABLE_ROWS - 2 * step, rows).astype("int32"),
            "wanted": rng.normal(size=(rows, 4)).astype("float32"),
        }
        for step in range(count)
    ]


def unchanged_steps(training: TrainingGraph, batches: Sequence[Batch]) -> Batch:
    """Train the captured graph as it is, on one device."""
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(training.graph_def, name="")
        handles = {
            one.name: graph.get_tensor_by_name(f"{one.name}:0") for one in training.variables
        }
        given = [
            tf.raw_ops.AssignVariableOp(resource=handles[name], value=tf.constant(value))
            for name, value in training.initial.items()
        ]
        read = {
            one.name: tf.raw_ops.ReadVariableOp(resource=handles[one.name], dtype=one.dtype)
            for one in training.variables
        }
    with tf.compat.v1.Session(graph=graph) as running:
        running.run(given)
        for batch in batches:
            fed = {f"{one.tensor}": batch[one.name] for one in training.feeds}
            running.run(list(training.targets), fed)
        trained: Batch = running.run(read)
        return trained


def _step_of(body: Callable[[Any, Any], Any]) -> tuple[Any, list[tf.TensorSpec]]:
    variable = tf.Variable(1.0, name="weight")
    return (lambda value: body(variable, value)), [tf.TensorSpec([], tf.float32, "value")]


def _gradient(variable: Any, value: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = variable * value
    return tape.gradient(loss, variable)


def python_step():
    def body(variable, value):
        value = tf.py_function(lambda one: one, [value], tf.float32)
        variable.assign_sub(_gradient(variable, value))

    return _step_of(body)


def table_step():
    initializer = tf.lookup.KeyValueTensorInitializer(tf.constant([1], tf.int64), [2.0])
    table = tf.lookup.StaticHashTable(initializer, 0.0)
    return _step_of(
        lambda variable, value: variable.assign_sub(
            _gradient(variable, table.lookup(tf.cast(value, tf.int64)))
        )
    )


def branch_step():
    def body(variable, value):
        gradient = tf.cond(value > 0, lambda: _gradient(variable, value), lambda: 0.0)
        variable.assign_sub(gradient)

    return _step_of(body)


def twice_step():
    def body(variable, value):
        variable.assign_sub(_gradient(variable, value) + _gradient(variable, value * 2))

    return _step_of(body)


def gradientless_step():
    return _step_of(lambda variable, value: variable.assign_sub(value))


def chained_step():
    other = tf.Variable(1.0, name="other")

    def body(variable, value):
        variable.assign_sub(_gradient(variable, value))
        other.assign_sub(_gradient(other, variable))

    return _step_of(body)
