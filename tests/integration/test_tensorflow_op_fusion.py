"""Sets of ops of a plan become exactly those kernels, and training stays the same."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")
pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

import tensorflow as tf

from autotune.errors import InvalidInput, InvalidStrategy
from autotune.strategy_space.builders import collectives
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.plan import Plan, plan
from runtime_rewriter.tensorflow.capture import capture_function
from runtime_rewriter.tensorflow.checkpoints import gather, scatter
from runtime_rewriter.tensorflow.distribute import distribute
from runtime_rewriter.tensorflow.graph_workload import workload_of
from runtime_rewriter.tensorflow.op_fusion import fusion_error
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

v1 = tf.compat.v1
RANKS, WIDTH, BATCH = 2, 1 << 10, 32
DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{rank}" for rank in range(RANKS)]


@pytest.fixture(scope="module")
def training() -> TrainingGraph:
    """A chain of elementwise ops on a parameter, whose fusion changes the work of a step."""
    scale = tf.Variable(np.linspace(0.5, 1.5, WIDTH, dtype=np.float32), name="scale")

    def step(features):
        with tf.GradientTape() as tape:
            hidden = tf.multiply(features, scale, name="product")
            hidden = tf.nn.relu(hidden, name="positive")
            hidden = tf.add(hidden, 1.5, name="shifted")
            hidden = tf.abs(hidden, name="absolute")
            hidden = tf.sqrt(hidden, name="root")
            loss = tf.reduce_mean(hidden, name="loss")
        scale.assign_sub(tape.gradient(loss, scale))
        return {"loss": loss}

    return capture_function(step, [tf.TensorSpec([None, WIDTH], tf.float32)])


def named(training: TrainingGraph, *ends: str) -> tuple[str, ...]:
    """The ops of the forward pass by the ends of their names."""
    found = [
        next(name for name in training.view.nodes if name.rpartition("/")[2] == end) for end in ends
    ]
    return tuple(found)


def planned(training: TrainingGraph, *sets: tuple[str, ...]) -> Plan:
    workload = workload_of(training, "chain")
    strategy = replace(collectives.all_reduce_chunks(workload, 4), op_fusion=sets)
    return plan(strategy, workload, RANKS)


def trained(training: TrainingGraph, wanted: Plan, key: int) -> tuple[Any, Any, Any]:
    """Return the distributed graph, its partitions and the variables after two steps."""
    graph = distribute(training, wanted, DEVICES, key)
    config = v1.ConfigProto(device_count={"CPU": RANKS})
    config.graph_options.optimizer_options.opt_level = -1
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    batch = np.linspace(-1, 1, RANKS * BATCH * WIDTH, dtype=np.float32).reshape(-1, WIDTH)
    (feed,) = training.feeds
    fed = graph.feed_dict({feed.name: batch})
    with tf.Graph().as_default() as built:
        tf.graph_util.import_graph_def(graph.graph_def, name="")
        with v1.Session(graph=built, config=config) as session:
            scatter(session, graph, graph.initial)
            metadata = v1.RunMetadata()
            options = v1.RunOptions(output_partition_graphs=True)
            session.run(list(graph.targets), fed, options=options, run_metadata=metadata)
            session.run(list(graph.targets), fed)
            return graph.graph_def, metadata.partition_graphs, gather(session, graph)


def test_the_sets_of_a_plan_are_compiled_and_no_others(training) -> None:
    whole = named(training, "product", "positive", "shifted", "absolute", "root")
    plans = [(), (whole,), (whole[:2], whole[2:]), (whole[:3], whole[3:])]
    runs = [
        trained(training, planned(training, *sets), 100 * number + 1)
        for number, sets in enumerate(plans)
    ]
    for number, (graph, _, values) in enumerate(runs):
        errors = [fusion_error(graph, partitions) is not None for _, partitions, _ in runs]
        assert errors == [other != number for other in range(len(runs))]
        for name, value in runs[0][2].items():
            np.testing.assert_allclose(values[name], value, rtol=1e-6)


def test_ops_that_were_not_compiled_are_named(training) -> None:
    names = named(training, "product", "positive")
    graph = distribute(training, planned(training, names), DEVICES, 400).graph_def
    assert "2 ops of" not in (error := fusion_error(graph, [graph]))
    assert "4 ops of the sets were not compiled" in error


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (("product", "shifted"), "by way of .*positive"),
        (("positive", "missing op"), "lacks 'missing op'"),
    ],
)
def test_sets_that_cannot_be_kernels_are_refused(training, ends, message) -> None:
    names = tuple(end if " " in end else named(training, end)[0] for end in ends)
    with pytest.raises(InvalidInput, match=message):
        distribute(training, planned(training, names), DEVICES, 700)


def test_ops_that_xla_does_not_know_are_named(training) -> None:
    placeholder = training.feeds[0].tensor.node
    names = (placeholder, *named(training, "product"))
    with pytest.raises(InvalidInput, match="of type Placeholder"):
        distribute(training, planned(training, names), DEVICES, 800)


def test_two_sets_that_wait_for_each_other_are_refused(training) -> None:
    ends = named(training, "product", "shifted"), named(training, "positive", "absolute")
    with pytest.raises(InvalidInput, match="convex"):
        distribute(training, planned(training, *ends), DEVICES, 900)


def test_pytorch_refuses_a_plan_that_fuses_ops(training) -> None:
    fused = planned(training, named(training, "product", "positive"))
    assert "TensorFlow only" in refusal_reason(fused)
    assert refusal_reason(fused, rewrites_graph=True) is None
    assert Plan.from_json(fused.to_json()).id == fused.id
    assert "op_fusion" not in planned(training).to_data()


def test_a_set_needs_two_ops_of_its_own(training) -> None:
    one, two = named(training, "product", "positive")
    with pytest.raises(InvalidStrategy, match="to several"):
        planned(training, (one, two), (two, "other"))
    with pytest.raises(InvalidStrategy, match="at least 2"):
        planned(training, (one,))
