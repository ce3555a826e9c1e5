"""Sets of ops of a plan become exactly those kernels, and training stays the same."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")
pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf
from isolated_servers import WAIT_S, isolated
from keras import layers
from tensorflow_programs import two_servers

from autotune.errors import InvalidInput, InvalidStrategy
from autotune.records import FailureKind
from autotune.strategy_space.builders import collectives
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.plan import Plan, plan
from autotune.workload import Workload
from benchmarks.op_fusion.sides import optimizing
from runtime_rewriter.protocol import RankFailed, StartTrial, TrialAnswer
from runtime_rewriter.rank.tensorflow_model import TensorflowModel
from runtime_rewriter.tensorflow.capture import capture_function
from runtime_rewriter.tensorflow.checkpoints import gather, scatter
from runtime_rewriter.tensorflow.distribute import distribute
from runtime_rewriter.tensorflow.fused_times import paired_graph, paired_times
from runtime_rewriter.tensorflow.fusible_sets import (
    FusibleSet,
    Phase,
    concrete_types,
    fed_from,
    fusible_sets,
    phase_of_ops,
)
from runtime_rewriter.tensorflow.fusion_choices import propose_fusions
from runtime_rewriter.tensorflow.graph_workload import workload_of
from runtime_rewriter.tensorflow.local_device import LocalDevice
from runtime_rewriter.tensorflow.op_fusion import (
    can_be_kernels,
    compilable_ops,
    compilation_error,
    fusion_error,
    ran_compiled,
    seen_options,
)
from runtime_rewriter.tensorflow.running import RunningGraph
from runtime_rewriter.tensorflow.servers import JOB, session_config
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

v1 = tf.compat.v1
RANKS, WIDTH, BATCH = 2, 1 << 10, 32
LENGTH = 16
COMPILABLE = compilable_ops("CPU")
TOLERANCE = 1e-5
"""Largest difference of a gradient, relative to the largest of its variable."""
MOST_SETS = 16
"""Sets that are compiled; the largest are of all phases."""
RATE, WEIGHT_TOLERANCE = 1e-2, 0.01
"""Largest difference of weights after three steps, relative to the rate, which is Adam's step.

Adam divides a gradient by its size, so it makes the rounding of small gradients larger. Weights of
unfused training that starts 1e-7 (relative) away differ as much: by 7e-4 of the rate.
"""
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


def test_the_measured_kernel_of_a_set_returns_its_results(training) -> None:
    """XLA drops ops whose results nobody reads as data."""
    types = concrete_types(training, {feed.name: (BATCH, WIDTH) for feed in training.feeds})
    scopes = dict.fromkeys(named(training, "product", "positive", "shifted"), "set")
    times = paired_times(training.view, types, scopes, LocalDevice().config, repeats=2)
    assert times is not None and times.exact


def test_results_of_the_fusion_benchmark_are_equal_on_all_sides(training) -> None:
    """With Grappler on, the ops one by one still compute everything."""
    types = concrete_types(training, {feed.name: (BATCH, WIDTH) for feed in training.feeds})
    names = named(training, "product", "positive", "shifted", "absolute", "root")
    graph = paired_graph(training.view, types, dict.fromkeys(names, "set"), [f"{names[-1]}:0"], {})
    config = LocalDevice().config
    values = []
    for label, of_side in (("apart", config), ("apart", optimizing(config)), ("fused", config)):
        with v1.Session(graph=graph, config=of_side) as session:
            session.run("start")
            values.append(session.run(graph.get_collection(label)))
    np.testing.assert_allclose(values[1], values[0], rtol=1e-5)
    np.testing.assert_allclose(values[2], values[0], rtol=1e-5)


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


def transformer() -> TrainingGraph:
    """Many elementwise ops: GELU, layer norm, and Adam with clipping."""
    keras.utils.set_random_seed(1)
    ids = keras.Input((LENGTH,), dtype="int32")
    value = layers.Embedding(50, 128)(ids)
    value = layers.Add()([value, layers.MultiHeadAttention(2, 16)(value, value)])
    hidden = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(value))
    value = layers.LayerNormalization()(layers.Add()([value, layers.Dense(128)(hidden)]))
    model = keras.Model(ids, layers.Dense(50)(value))
    optimizer = keras.optimizers.Adam(RATE, global_clipnorm=1.0)
    optimizer.build(model.trainable_variables)

    def step(texts, following):
        with tf.GradientTape() as tape:
            logits = model(texts, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(following, logits)
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    return capture_function(step, [tf.TensorSpec([None, LENGTH], tf.int32)] * 2)


class InProcess:
    """Servers of this process in place of those of ranks."""

    def __init__(self) -> None:
        self._servers = two_servers()
        self.target, self.config = self._servers[0].target, session_config()
        self.devices = tuple(
            f"/job:{JOB}/replica:0/task:{rank}/device:CPU:0" for rank in range(RANKS)
        )
        self.hosts = (tuple(range(RANKS)),)


def fused_and_unfused_training() -> None:
    training = transformer()
    workload = workload_of(training, "transformer")
    strategy = with_rows(collectives.all_reduce_chunks(workload, 4), workload)
    running = RunningGraph(training, InProcess(), 200)
    random = np.random.default_rng(0)
    batches = [
        {
            feed.name: random.integers(0, 50, (RANKS * 16, LENGTH), "int32")
            for feed in training.feeds
        }
        for _ in range(3)
    ]
    running.load(plan(strategy, workload, RANKS))
    before = running.values()
    found = propose_fusions(running, batches[0], workload)
    assert "of ops" in found.report
    for name, value in running.values().items():  # to measure sets changes no variable
        np.testing.assert_array_equal(value, before[name])
    types = concrete_types(training, dict.fromkeys(batches[0], (16, LENGTH)))
    chosen = disjoint(training, fusible_sets(training, types, "CPU"))[:MOST_SETS]
    assert {one.phase for one in chosen} == set(Phase)
    strategies = {
        name: plan(replace(strategy, op_fusion=sets), workload, RANKS)
        for name, sets in {
            "apart": (),
            "fused": tuple(one.ops for one in chosen),
            "split": (ops_of_different_feeds(training),),
        }.items()
    }
    firsts, lasts = [], []
    for name in ("apart", "fused"):
        running.load(strategies[name])
        running.send(before)
        metadata = v1.RunMetadata()
        running.observed_step(batches[0], metadata, options=seen_options())
        firsts.append(running.values())
        assert running.graph is not None
        if name == "fused":
            assert compilation_error(running.graph.graph_def, metadata) is None
        for batch in batches[1:]:
            running.step(batch)
        lasts.append(running.values())
    assert_equal_gradients(*firsts)
    for name in workload_variables(workload):
        np.testing.assert_allclose(
            lasts[1][name], lasts[0][name], rtol=0, atol=WEIGHT_TOLERANCE * RATE
        )
    assert_wrong_kernels_are_refused(running, strategies, batches[0])


def workload_variables(workload: Workload) -> list[str]:
    return [variable.name for variable in workload.variables]


def assert_equal_gradients(apart: Mapping[str, Any], fused: Mapping[str, Any]) -> None:
    """Adam's momenta after one step are a tenth of the gradients.

    That of the key's bias is zero in exact arithmetic, since a softmax over keys ignores it.
    """
    momenta = [name for name in apart if name.endswith("_momentum")]
    assert len(momenta) > 10
    whole = max(np.abs(apart[name]).max() for name in momenta)
    for name in momenta:
        if "key_bias" in name:
            assert max(np.abs(apart[name]).max(), np.abs(fused[name]).max()) < 1e-7 * whole
            continue
        largest = np.abs(apart[name]).max()
        np.testing.assert_allclose(fused[name], apart[name], rtol=0, atol=TOLERANCE * largest)


def assert_wrong_kernels_are_refused(
    running: RunningGraph, plans: Mapping[str, Plan], batch: Mapping[str, np.ndarray]
) -> None:
    """The script survives: the trial ends once its gradients and kernels were checked."""
    model = TensorflowModel(running, "transformer")
    for name in ("split", "split", "fused"):
        trial = model.start(StartTrial(plans[name], warmup_steps=1, timed_steps=2))
        steps = 0
        ended = False
        while not ended:
            model.step(batch)
            steps += 1
            ended = trial.step_finished(0.1, clean=True)
        answer = trial.answer()
        if name == "split":
            assert steps == 2
            assert isinstance(answer, RankFailed) and answer.kind is FailureKind.REFUSED
            assert "must run as one kernel" in answer.message
        else:
            assert steps == 4 and isinstance(answer, TrialAnswer)


def ops_of_different_feeds(training: TrainingGraph) -> tuple[str, str]:
    """Neighbours that XLA can compile, of which only one depends on a second feed."""
    view = training.view
    phases = phase_of_ops(training)
    fed = fed_from(training, phases)
    return next(
        (tensor.node, reader)
        for reader in view.topological
        if phases.get(reader) is Phase.FORWARD and view.nodes[reader].op in COMPILABLE
        for tensor in view.inputs[reader]
        if view.nodes[tensor.node].op in COMPILABLE - {"Const"}
        and 0 < fed[tensor.node] != fed[reader]
    )


def disjoint(training: TrainingGraph, sets: Sequence[FusibleSet]) -> list[FusibleSet]:
    chosen: list[FusibleSet] = []
    for one in sets:
        taken = {op for other in chosen for op in other.ops}
        if taken.isdisjoint(one.ops):
            chosen.append(one)
    assert can_be_kernels(training.view, [one.ops for one in chosen])
    return chosen


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_proposed_sets_are_kernels_on_servers_and_train_the_same() -> None:
    isolated().submit(fused_and_unfused_training).result(4 * WAIT_S)


def test_a_set_that_falls_back_to_its_ops_is_noticed() -> None:
    """TensorFlow then runs the cluster's function in place of _XlaRun, and reports no error."""
    metadata = v1.RunMetadata()
    device = metadata.step_stats.dev_stats.add()
    for number, ran in enumerate(("_XlaRun", "StatefulPartitionedCall")):
        for op in ("_XlaCompile", ran):
            label = f"cluster_{number}/{op.lower()} = {op}(x)"
            device.node_stats.add(node_name=label.split()[0], timeline_label=label)
        assert ran_compiled(metadata) is (ran == "_XlaRun")
