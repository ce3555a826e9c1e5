"""What a step is fed and what it returns, for a graph of TensorFlow 1 and for a function."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow_programs import session

from autotune.errors import InvalidInput
from autotune.strategy_space.builders.collectives import single_bucket
from autotune.strategy_space.plan import plan
from runtime_rewriter.tensorflow.capture import capture_function, capture_graph
from runtime_rewriter.tensorflow.checkpoints import scatter
from runtime_rewriter.tensorflow.distribute import distribute
from runtime_rewriter.tensorflow.graph_workload import workload_of
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

v1 = tf.compat.v1
RANKS = 2
ROWS = np.arange(12, dtype="float32").reshape(4, 3)
SCALES = np.array([1.0, 2.0, 3.0], "float32")
RATE = np.array(0.5, "float32")


def graph_of_v1() -> TrainingGraph:
    with tf.Graph().as_default() as graph:
        rows = v1.placeholder(tf.float32, [None, 3], "rows")
        scales = v1.placeholder(tf.float32, [3], "scales")
        rate = v1.placeholder(tf.float32, [], "rate")
        options = {"initializer": v1.ones_initializer(), "use_resource": True}
        weight = v1.get_variable("weight", [3], **options)
        loss = tf.reduce_mean(rows * scales * weight)
        train = v1.train.GradientDescentOptimizer(rate).minimize(loss)
    return capture_graph(graph, train, {"loss": loss})


def graph_of_function() -> TrainingGraph:
    weight = tf.Variable(tf.ones(3), name="weight")

    def step(rows, scales, rate):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(rows * scales * weight)
        weight.assign_sub(rate * tape.gradient(loss, weight))
        return loss

    shapes = {"rows": [None, 3], "scales": [3], "rate": []}
    return capture_function(step, [tf.TensorSpec(s, tf.float32, n) for n, s in shapes.items()])


@pytest.mark.parametrize("make", [graph_of_v1, graph_of_function])
def test_batches_are_split_others_copied_and_values_are_of_the_first_replica(
    make: Callable[[], TrainingGraph],
) -> None:
    training = make()
    workload = workload_of(training, "model")
    planned = plan(single_bucket(workload), workload, RANKS)
    graph = distribute(training, planned, [f"/device:CPU:{rank}" for rank in range(RANKS)])
    assert {one.name: one.split for one in graph.feeds} == {
        "rows": True,
        "scales": False,
        "rate": False,
    }
    fed = graph.feed_dict({"rows": ROWS, "scales": SCALES, "rate": RATE})
    of_replica = {
        (one.name, rank): fed[node]
        for one in graph.feeds
        for rank, node in enumerate(one.placeholders)
    }
    for rank, half in enumerate(np.split(ROWS, RANKS)):
        np.testing.assert_array_equal(of_replica["rows", rank], half)
        np.testing.assert_array_equal(of_replica["scales", rank], SCALES)
        assert of_replica["rate", rank] == RATE
    updated = {name.partition("/")[0] for name in graph.targets}
    assert updated == {f"replica_{rank}" for rank in range(RANKS)}

    with session(graph) as running:
        scatter(running, graph, training.initial)
        values, _ = running.run([list(graph.fetches.values()), list(graph.targets)], fed)
        weights = running.run([one.value for one in graph.variables])
    np.testing.assert_allclose(values[0], np.mean(ROWS[:2] * SCALES), rtol=1e-6)
    expected = 1 - RATE * ROWS.mean(0) * SCALES / 3  # by the gradient of the whole batch
    for weight in weights:
        np.testing.assert_allclose(weight, expected, rtol=1e-6)
    with pytest.raises(InvalidInput, match=r"'rows' must divide into 2 equal parts, but has 3"):
        graph.feed_dict({"rows": ROWS[:3], "scales": SCALES, "rate": RATE})
