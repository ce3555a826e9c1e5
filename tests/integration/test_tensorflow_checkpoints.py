"""Checkpoints and SavedModels written during distributed training, and loaded into it, to the bit.

The plan cuts variables and keeps their parts and slots on servers.
"""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.strategy_space.builders.registry import BUILDERS
from autotune.strategy_space.plan import Plan, plan
from autotune.workload import Workload
from runtime_rewriter.rank.tensorflow_step import DistributedStep
from runtime_rewriter.tensorflow.capture import capture_graph
from runtime_rewriter.tensorflow.checkpoints import read_checkpoint, write_checkpoint
from runtime_rewriter.tensorflow.graph_workload import workload_of
from runtime_rewriter.tensorflow.running import RunningGraph
from runtime_rewriter.tensorflow.servers import session_config

v1 = tf.compat.v1

RANKS = 2
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(8, 6)).astype("float32")
LABELS = RANDOM.integers(0, 4, 8).astype("int32")


def two_devices() -> Any:
    """Devices of this process in place of servers."""
    config = session_config()
    config.device_count["CPU"] = RANKS
    devices = tuple(f"/device:CPU:{rank}" for rank in range(RANKS))
    return SimpleNamespace(target="", devices=devices, config=config, hosts=())


def cutting_plan(workload: Workload) -> Plan:
    """A plan that cuts variables into parts of unequal sizes on servers."""
    strategy = BUILDERS["uneven_partitioned_ps"](workload, Cluster.local(RANKS))
    return plan(strategy, workload, RANKS)


class Program:
    """A single-device program; `train` may be distributed."""

    def __init__(self, seed: int) -> None:
        keras.utils.set_random_seed(seed)
        self.model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(4)]
        )
        self.optimizer = keras.optimizers.Adam(1e-2)
        self.model.compile(self.optimizer)  # a .keras file then holds the optimizer, too
        self.optimizer.build(self.model.trainable_variables)

    @property
    def step(self) -> Any:
        @tf.function
        def step(inputs, labels):
            with tf.GradientTape() as tape:
                logits = self.model(inputs, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
                loss = tf.reduce_mean(losses)
            variables = self.model.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        return step

    def values(self) -> list[np.ndarray]:
        """Weights and the optimizer's variables."""
        return [one.numpy() for one in (*self.model.weights, *self.optimizer.variables)]


@contextmanager
def in_training(seed: int) -> Iterator[tuple[Program, RunningGraph, Any]]:
    """A program that has made two steps on two ranks, the second one with cut variables."""
    program = Program(seed)
    run = DistributedStep(program.step, two_devices(), (), None, None)
    run(INPUTS, LABELS)
    running = run._model.running
    running.load(cutting_plan(workload_of(running.training, "model")))
    assert any(one.axis is not None for one in running.graph.variables)
    run(INPUTS, LABELS)
    try:
        yield program, running, run
    finally:
        run.close()
        running.close()


def on_servers(running: RunningGraph, program: Program) -> list[np.ndarray]:
    """What the servers hold of the model's and the optimizer's variables, by original names."""
    values = running.values()
    both = (*program.model.weights, *program.optimizer.variables)
    names = [one.value.name.partition(":")[0] for one in both]
    assert set(values) <= set(names)
    return [values[name] for name in names if name in values]


def assert_same_bits(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def write_objects(program: Program, folder: Path) -> None:
    tf.train.Checkpoint(model=program.model, optimizer=program.optimizer).write(folder / "at")


def read_objects(program: Program, folder: Path) -> None:
    checkpoint = tf.train.Checkpoint(model=program.model, optimizer=program.optimizer)
    checkpoint.read(folder / "at").assert_consumed()


def write_keras(program: Program, folder: Path) -> None:
    program.model.save(folder / "model.keras")


def read_keras(program: Program, folder: Path) -> None:
    program.model.load_weights(folder / "model.keras")


def write_saved_model(program: Program, folder: Path) -> None:
    tf.saved_model.save(program.model, folder / "saved")


def read_saved_model(program: Program, folder: Path) -> None:
    path = folder / "saved" / "variables" / "variables"
    tf.train.Checkpoint(program.model).read(path).assert_existing_objects_matched()


FORMATS = {
    "tf.train.Checkpoint": (write_objects, read_objects),
    "model.save": (write_keras, read_keras),
    "tf.saved_model.save": (write_saved_model, read_saved_model),
}
COUNTS = {"tf.train.Checkpoint": None, "model.save": None, "tf.saved_model.save": 4}
"""How many of the values a file holds; None: all. A SavedModel has the model's weights alone."""


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras
def test_files_of_distributed_training_load_on_one_device_and_back(tmp_path):
    held, computed = {}, {}
    with in_training(seed=1) as (program, running, run):
        for name, (write, _) in FORMATS.items():
            run(INPUTS, LABELS)
            write(program, tmp_path)
            held[name] = on_servers(running, program)[: COUNTS[name]]
            computed[name] = program.model(INPUTS).numpy()
        weights = {one.value.name for one in program.model.weights}
    for name, (_, read) in FORMATS.items():
        alone = Program(seed=2)
        read(alone, tmp_path)
        assert_same_bits(alone.values()[: COUNTS[name]], held[name])
    with in_training(seed=3) as (another, running, run):
        for name, (_, read) in FORMATS.items():
            read(another, tmp_path)
            run._program.send_changes()  # as the next step does
            assert_same_bits(on_servers(running, another)[: COUNTS[name]], held[name])
            run(INPUTS, LABELS)
    loaded = tf.saved_model.load(tmp_path / "saved")
    serve = loaded.signatures["serving_default"]
    assert {one.name for one in serve.variables} == weights
    served = serve(tf.constant(INPUTS))["output_0"]
    np.testing.assert_allclose(served, computed["tf.saved_model.save"], rtol=1e-5, atol=1e-6)


def test_a_v1_saver_reads_what_servers_held_and_the_servers_what_it_wrote(tmp_path):
    graph = tf.Graph()
    with graph.as_default():
        value = v1.placeholder(tf.float32, [None, 6], "value")
        weight = v1.get_variable("weight", [6, 5], use_resource=True)
        bias = v1.get_variable("bias", [5], use_resource=True)
        loss = tf.reduce_mean(tf.square(tf.matmul(value, weight) + bias))
        train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        saver, initialize = v1.train.Saver(), v1.global_variables_initializer()
    with v1.Session(graph=graph) as alone:
        alone.run(initialize)
        saver.save(alone, str(tmp_path / "start"))
    training = capture_graph(graph, train, {"loss": loss})
    names = [one.name for one in training.variables]
    assert set(names) == {"weight", "bias", "weight/Momentum", "bias/Momentum"}

    running = RunningGraph(training, two_devices(), 60.0)
    running.load(cutting_plan(workload_of(training, "v1")))
    running.send(read_checkpoint(tmp_path / "start", names))
    running.step({"value": INPUTS})
    held = running.values()
    write_checkpoint(tmp_path / "held", held)
    with v1.Session(graph=graph) as alone:
        saver.restore(alone, str(tmp_path / "held"))
        restored = alone.run({name: f"{name}/Read/ReadVariableOp:0" for name in names})
        assert_same_bits([restored[name] for name in names], [held[name] for name in names])
        alone.run(train, {value: INPUTS})
        further = alone.run({name: f"{name}/Read/ReadVariableOp:0" for name in names})
        saver.save(alone, str(tmp_path / "further"))
    running.send(read_checkpoint(tmp_path / "further", names))
    held = running.values()
    assert_same_bits([held[name] for name in names], [further[name] for name in names])
    running.close()

    with pytest.raises(InvalidInput, match=r"needs every variable of the graph, but lacks 'other'"):
        read_checkpoint(tmp_path / "held", [*names, "other"])
    with pytest.raises(InvalidInput, match="must be the prefix of a checkpoint"):
        read_checkpoint(tmp_path / "nothing", names)
