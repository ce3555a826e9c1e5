"""The rewritten TensorFlow graph trains as one device with averaged gradients does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

import tensorflow as tf
from keras.optimizers import SGD, Adam, AdamW, LossScaleOptimizer
from synthetic_cluster import cluster
from tensorflow_checks import assert_close, assert_each_gradient_is_synchronized_once, graph_of
from tensorflow_programs import (
    Program,
    averaged_steps,
    batches_of,
    branch_step,
    chained_step,
    collaborative_filtering,
    filtering_by_momentum,
    gradientless_step,
    python_step,
    rewritten_steps,
    session,
    small_resnet,
    small_transformer,
    table_batches,
    table_step,
    twice_step,
    two_layers,
    unchanged_steps,
    v1_program,
    v1_reference,
    v1_table,
)

from autotune.errors import InvalidInput
from autotune.records import CURRENT_SETUP, Measured, Role, TrialRequest
from autotune.sampler.proposer import Proposer
from autotune.strategy_space.builders.registry import BUILDERS
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import SparseHandling, Strategy
from autotune.tuning.events import Profiled, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec, Search
from autotune.workload import Workload
from autotune.zoo.architectures import workload as zoo
from runtime_rewriter.rank.tensorflow_model import current_strategy
from runtime_rewriter.tensorflow import checkpoints
from runtime_rewriter.tensorflow.between_graph import graph_of_rank
from runtime_rewriter.tensorflow.capture import capture_function
from runtime_rewriter.tensorflow.distribute import distribute
from runtime_rewriter.tensorflow.distributed_graph import DistributedGraph
from runtime_rewriter.tensorflow.graph_workload import workload_of
from runtime_rewriter.tensorflow.refusals import CROSSING_REFUSED, DIRECT_REFUSED

REPLICAS = 4
DEVICES = [f"/device:CPU:{rank}" for rank in range(REPLICAS)]
CLUSTER = cluster(*[(1, 1000.0)] * REPLICAS)
PAIR = cluster((1, 1000.0), (1, 1000.0))
STEPS = 5
TOLERANCE = 1e-5


class Trained:
    """A program, and what one device makes of five steps with averaged gradients."""

    def __init__(self, program: Program, replicas: int = REPLICAS) -> None:
        self.program, self.training = program, program.capture()
        self.replicas = replicas
        self.start = {name: one.numpy() for name, one in program.variables.items()}
        self.batches = batches_of(program, 8 * replicas, STEPS)
        self.expected = averaged_steps(program, self.batches, replicas)
        self.workload = workload_of(self.training, "model")

    def assert_trains_exactly(self, strategy: Strategy) -> DistributedGraph:
        """Compare parameters, optimizer slots, statistics and seeds after five steps."""
        planned = plan(strategy, self.workload, self.replicas)
        graph, found = rewritten_steps(self.training, planned, self.batches, self.start)
        assert_close(found, self.expected, TOLERANCE)
        return graph


PAIRS = {
    small_resnet: [
        "all_reduce_chunks_8",
        "reduce_scatter_all_gather_25mib",
        "ps_round_robin",
        "uneven_partitioned_ps",
    ],
    small_transformer: ["random_axis_partitioned_all_reduce", "partitioned_ps", "parallax"],
    collaborative_filtering: ["per_variable", "parameter_server", "uneven_partitioned_ps"],
    filtering_by_momentum: [
        "per_variable",
        "partitioned_all_reduce",
        "parameter_server",
        "uneven_partitioned_ps",
        "byteps_like",
    ],
}
ON_TWO = {filtering_by_momentum}
"""Programs on two replicas: the other one with these variables has four."""
SINGLE_ROWS = {small_transformer: "Square", collaborative_filtering: "Square"}
"""Programs that take each row for itself, and the type of the operation that does."""


@pytest.mark.parametrize("make", PAIRS)
def test_five_steps_equal_those_of_one_device(make):
    trained = Trained(make(), replicas=2 if make in ON_TWO else REPLICAS)
    for name in PAIRS[make]:
        strategy = BUILDERS[name](trained.workload, PAIR if make in ON_TWO else CLUSTER)
        for variant in dict.fromkeys((strategy, with_rows(strategy, trained.workload))):
            if make in SINGLE_ROWS and sends_rows_dense(variant, trained.workload):
                reason = f"{SINGLE_ROWS[make]} of the gradient of .*each row for itself, but the pl"
                with pytest.raises(InvalidInput, match=reason):
                    trained.assert_trains_exactly(variant)
            else:
                trained.assert_trains_exactly(variant)


def sends_rows_dense(strategy: Strategy, workload: Workload) -> bool:
    sparse = {one.name for one in workload.variables if one.sparse}
    return any(
        one.sparse is SparseHandling.DENSE for one in strategy.variables if one.variable in sparse
    )


def test_rows_of_replicas_train_as_the_whole_batch_does_on_one_device():
    """The reference of several replicas is that of one, where no statistics and seeds differ."""
    program = collaborative_filtering()
    batches = batches_of(program, 8 * REPLICAS, STEPS)
    found = averaged_steps(program, batches, REPLICAS)
    expected = averaged_steps(collaborative_filtering(), batches, 1)
    assert_close(dict(zip(expected, found.values(), strict=True)), expected, TOLERANCE)


@pytest.mark.parametrize(("optimizer", "rows_only"), [(Adam, True), (SGD, False)])
def test_plans_that_are_proposed_send_rows_as_the_program_needs_them(optimizer, rows_only):
    training = collaborative_filtering(optimizer(0.1)).capture()
    workload = replace(workload_of(training, "model"), backward_s=0.1)
    tables = [one.rows_only for one in workload.variables if one.sparse]
    assert tables == [rows_only, rows_only]
    profiled = Profiled(workload, CLUSTER, 0.0, {}, CROSSING_REFUSED, direct_refused=DIRECT_REFUSED)
    for search, count in ((Search.RANDOM, 6), (Search.FUSION, 1)):
        spec = JobSpec(("python", "t.py"), REPLICAS, CLUSTER, search=search, samples_per_round=20)
        reference = TrialRequest(0, CURRENT_SETUP, Role.REFERENCE, 0, 3)
        measured = TrialFinished(reference, Measured(((0.4,) * 3,)), None, 0.0)
        history = History((profiled, measured), 0.1)
        proposals = Proposer(spec, {}).propose(history, 0, count).proposals
        assert len(proposals) == count
        for one in proposals:
            distribute(training, plan(one.strategy, workload, REPLICAS), DEVICES)


v1 = tf.compat.v1
V1_OPTIMIZERS = {
    "ResourceSparseApplyMomentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "ResourceSparseApplyRMSProp": lambda: v1.train.RMSPropOptimizer(0.1),
    "ResourceSparseApplyFtrl": lambda: v1.train.FtrlOptimizer(0.1),
    "plain": lambda: v1.train.GradientDescentOptimizer(0.1),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "adam": lambda: v1.train.AdamOptimizer(0.1),
}


@pytest.mark.parametrize("operation", V1_OPTIMIZERS)
def test_the_rows_that_own_optimizers_of_v1_touch_are_those_of_one_device(operation):
    training = v1_table(V1_OPTIMIZERS[operation]())
    start = dict(training.initial)
    batches = table_batches(8, 4)
    expected = unchanged_steps(training, batches)
    workload = workload_of(training, "v1")
    moves_rows = operation.startswith("Resource")
    assert sends_rows_dense(current_strategy(workload), workload) is not moves_rows
    for name in ("single_bucket", "parameter_server", "uneven_partitioned_ps"):
        dense = BUILDERS[name](workload, PAIR)
        for strategy in (dense, with_rows(dense, workload)):
            planned = plan(strategy, workload, 2)
            if moves_rows and strategy is dense:
                with pytest.raises(InvalidInput, match=f"{operation} of 'table' changes each row"):
                    rewritten_steps(training, planned, batches, start)
            else:
                _, found = rewritten_steps(training, planned, batches, start)
                assert_close(found, expected, TOLERANCE)


PLANNED = [name for name, build in BUILDERS.items() if not build(zoo("vgg16"), PAIR).cross_step]
"""Builders of plans within the step, which TensorFlow can enact."""


# `python -m benchmarks.tensorflow_pairs` does this for all models, with their forward passes.
@pytest.mark.parametrize(
    "model",
    ["ncf-sparse", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vgg16", "bert-3l"))],
)
def test_every_builder_synchronizes_each_gradient_once(model):
    training = graph_of(zoo(model))
    workload = workload_of(training, model)
    for name in PLANNED:
        strategy = BUILDERS[name](workload, PAIR)
        for variant in dict.fromkeys((strategy, with_rows(strategy, workload))):
            graph = distribute(training, plan(variant, workload, 2), DEVICES[:2])
            assert_each_gradient_is_synchronized_once(graph, training)


OPTIMIZERS = {
    "momentum": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "adam with decay": lambda: AdamW(1e-2, weight_decay=0.1),
    "global norm": lambda: SGD(0.1, momentum=0.9, global_clipnorm=0.1),
    "norm per variable": lambda: Adam(0.1, clipnorm=0.1),
    "loss scaling": lambda: LossScaleOptimizer(Adam(1e-2), 1024.0, dynamic_growth_steps=2),
    "accumulation": lambda: Adam(1e-2, gradient_accumulation_steps=2),
    "moving average": lambda: SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_update_on_replicas_and_on_servers(optimizer):
    trained = Trained(two_layers(OPTIMIZERS[optimizer]()), replicas=2)
    for name in ("all_reduce_chunks_8", "ps_round_robin", "uneven_partitioned_ps"):
        trained.assert_trains_exactly(BUILDERS[name](trained.workload, PAIR))


def test_a_checkpoint_moves_between_plans_and_the_program():
    trained = Trained(two_layers(Adam(1e-2)), replicas=2)
    plans = [
        plan(BUILDERS[name](trained.workload, PAIR), trained.workload, trained.replicas)
        for name in ("ps_round_robin", "uneven_partitioned_ps", "single_bucket")
    ]
    values = trained.start
    parts = [trained.batches[:2], trained.batches[2:4], trained.batches[4:]]
    for planned, batches in zip(plans, parts, strict=True):
        _, values = rewritten_steps(trained.training, planned, batches, values)
    assert_close(values, trained.expected, TOLERANCE)
    names, program = list(trained.program.variables), two_layers(Adam(1e-2))
    for name, variable in zip(names, program.variables.values(), strict=True):
        variable.assign(values[name])
    continued = averaged_steps(program, trained.batches, trained.replicas)
    expected = averaged_steps(trained.program, trained.batches, trained.replicas)
    assert_close(dict(zip(names, continued.values(), strict=True)), expected, TOLERANCE)


def test_a_run_moves_a_limited_number_of_bytes():
    program = two_layers(Adam(1e-2))
    training, start = program.capture(), {n: v.numpy() for n, v in program.variables.items()}
    planned = _planned("uneven_partitioned_ps", workload_of(training, "model"))
    graph = distribute(training, planned, DEVICES[:2])
    moved = []
    with session(graph) as running:
        run = running.run

        def counted(fetches, fed=None):
            result = run(fetches, fed)
            moved.append(sum(value.nbytes for value in (fed.values() if fed else result)))
            return result

        running.run = counted
        checkpoints.scatter(running, graph, start, 300)
        found = checkpoints.gather(running, graph, 300)
    assert max(moved) <= max(300, *(value.nbytes for value in start.values()))
    assert sum(moved) > 600 and found.keys() == start.keys()
    assert_close(found, start, 0.0)


def test_replicas_read_dense_variables_at_their_servers():
    trained = Trained(two_layers(Adam(1e-2)))
    strategy = BUILDERS["ps_round_robin"](trained.workload, CLUSTER)
    copied = trained.assert_trains_exactly(strategy)
    remote = trained.assert_trains_exactly(replace(strategy, local_copies=False))
    trainable = set(trained.training.gradient_of)
    held = [[one.variable in trainable for one in graph.variables] for graph in (copied, remote)]
    assert [sum(of) for of in held] == [len(trainable) * REPLICAS, len(trainable)]


def test_a_v1_graph_trains_with_and_without_marked_gradients():
    for marked in (True, False):
        training, start = v1_program(marked)
        batches = [{"value": np.full((4, 3), step, "float32")} for step in range(1, STEPS + 1)]
        workload = workload_of(training, "v1")
        expected = v1_reference(start, batches, 2)
        for name in ("single_bucket", "ps_round_robin", "uneven_partitioned_ps"):
            planned = plan(BUILDERS[name](workload, PAIR), workload, 2)
            _, found = rewritten_steps(training, planned, batches, start)
            assert_close(found, expected, TOLERANCE)


REFUSED_PLANS = {
    "cross_step": lambda planned: replace(planned, cross_step=True),
    "ring_order must name each": lambda planned: replace(planned, ring_order=(1, 1)),
    "which ranks share a host": lambda planned: _with_message(planned, hierarchical=True),
    "the graph lacks": lambda planned: _renamed(planned),
}


@pytest.mark.parametrize("named", REFUSED_PLANS)
def test_a_plan_that_cannot_be_enacted_is_refused_by_name(v1_training, named):
    workload = workload_of(v1_training, "v1")
    planned = plan(BUILDERS["per_variable"](workload, PAIR), workload, 2)
    with pytest.raises(InvalidInput, match=named):
        distribute(v1_training, REFUSED_PLANS[named](planned), DEVICES[:2])


@pytest.fixture(scope="module")
def v1_training():
    return v1_program(marked=True)[0]


def _with_message(planned: Plan, **changes: Any) -> Plan:
    return replace(planned, messages=tuple(replace(one, **changes) for one in planned.messages))


def _renamed(planned: Plan) -> Plan:
    first, *others = planned.messages
    slices = (replace(first.slices[0], variable="another"),)
    return replace(planned, messages=(replace(first, slices=slices), *others))


REFUSED_STEPS = {
    "of type EagerPyFunc": python_step,
    "another resource": table_step,
    "computed in the loop or branch": branch_step,
    "computes? the gradient of a variable once": twice_step,
    "must not depend on each other": chained_step,
    "must compute gradients": gradientless_step,
}


@pytest.mark.parametrize("message", REFUSED_STEPS)
def test_a_step_that_cannot_be_rewritten_is_refused_by_name(message):
    with pytest.raises(InvalidInput, match=message):
        capture_function(*REFUSED_STEPS[message]())


def test_a_client_on_each_rank_is_refused_by_the_message_that_needs_one_client():
    program = two_layers(Adam(1e-2))
    training = program.capture()
    planned = _planned("ps_round_robin", workload_of(training, "model"))
    with pytest.raises(InvalidInput, match=r"message \d+ \(parameter_server of"):
        graph_of_rank(distribute(training, planned, DEVICES[:2]), 1)


def _planned(name: str, workload: Workload) -> Plan:
    return plan(BUILDERS[name](workload, PAIR), workload, 2)
