"""Compressed, hierarchical and ring-ordered messages in the rewritten TensorFlow graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

import tensorflow as tf
from compressor_twins import twin
from tensorflow_checks import assert_each_gradient_is_synchronized_once
from tensorflow_programs import session

from autotune.errors import InvalidInput
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import ROOTED, Compressor, Synchronizer
from runtime_rewriter.tensorflow.capture import capture_function
from runtime_rewriter.tensorflow.checkpoints import gather, gather_kept, scatter, scatter_kept
from runtime_rewriter.tensorflow.distribute import distribute
from runtime_rewriter.tensorflow.kept_state import KeptState
from runtime_rewriter.tensorflow.running import RunningGraph
from runtime_rewriter.tensorflow.servers import session_config
from runtime_rewriter.tensorflow.synchronization import Circumstances
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

RANKS, STEPS = 4, 4
DEVICES = [f"/device:CPU:{rank}" for rank in range(RANKS)]
SHAPES = {"matrix": (128, 80), "vector": (7,), "cube": (6, 5, 4)}
HOSTS = ((0, 1), (2, 3))
PARAMETERS: dict[Compressor, dict[str, Any]] = {
    Compressor.TOP_K: {"ratio": 0.05},
    Compressor.POWER_SGD: {"rank": 2},
}
TOLERANCES = {Compressor.FP16: 4 * 2**-11, Compressor.BF16: 4 * 2**-8}
EXACT = 1e-5
GIVEN = "gradient_of_"
Gradients = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def training() -> TrainingGraph:
    """A step whose gradients are its feeds, and whose variables add up the averages."""
    variables = {name: tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()}

    def step(*given):
        with tf.GradientTape() as tape:
            products = [
                tf.reduce_sum(variable * one[0])
                for variable, one in zip(variables.values(), given, strict=True)
            ]
            loss = tf.add_n(products)
        gradients = tape.gradient(loss, list(variables.values()))
        for variable, gradient in zip(variables.values(), gradients, strict=True):
            variable.assign_add(gradient)

    signature = [
        tf.TensorSpec([None, *shape], "float32", f"{GIVEN}{name}") for name, shape in SHAPES.items()
    ]
    return capture_function(step, signature)


@pytest.fixture(scope="module")
def steps() -> list[Gradients]:
    """The gradients of all ranks in each step, a rank per row."""
    random = np.random.default_rng(5)
    return [
        {
            name: random.normal(size=(RANKS, *shape)).astype("float32")
            for name, shape in SHAPES.items()
        }
        for _ in range(STEPS)
    ]


def planned(
    compressor: Compressor, synchronizer: Synchronizer = Synchronizer.ALL_REDUCE, **changes: Any
) -> Plan:
    """Two messages: a part of the matrix with the vector, and the rest."""
    owner = 1 if synchronizer in ROOTED else None
    parts = (
        TensorSlice("matrix", 100 * 80, 0, 0, 100, 100),
        TensorSlice("vector", 7),
        TensorSlice("matrix", 28 * 80, 0, 100, 128, 28),
        TensorSlice("cube", 120, rows=6),
    )
    messages = tuple(
        Message(
            slices, synchronizer, compressor, "float32", owner, **PARAMETERS.get(compressor, {})
        )
        for slices in (parts[:2], parts[2:])
    )
    return replace(Plan("w", RANKS, messages), **changes)


class Run:
    """Plans one after the other; variables and what ranks keep go on."""

    def __init__(self, training: TrainingGraph) -> None:
        self.training = training
        self.values = dict(training.initial)
        self.kept = KeptState({one.name: one.shape for one in training.variables})

    def train(self, plan: Plan, steps: list[Gradients]) -> None:
        circumstances = Circumstances(HOSTS, self.kept.waiting)
        graph = distribute(self.training, plan, DEVICES, circumstances=circumstances)
        assert_each_gradient_is_synchronized_once(graph, self.training)
        with session(graph) as running:
            scatter(running, graph, self.values)
            scatter_kept(running, graph, self.kept)
            for gradients in steps:
                feeds = {f"{GIVEN}{name}": value for name, value in gradients.items()}
                running.run(list(graph.targets), graph.feed_dict(feeds))
            self.values = gather(running, graph)
            gather_kept(running, graph, self.kept)


class Twin:
    """The same in numpy."""

    def __init__(self) -> None:
        self.values = {name: np.zeros(shape, "float32") for name, shape in SHAPES.items()}
        self.residuals = [
            {name: np.zeros(shape, "float32") for name, shape in SHAPES.items()}
            for _ in range(RANKS)
        ]
        self.starts: dict[str, np.ndarray] = {}

    def train(self, plan: Plan, steps: list[Gradients]) -> None:
        for gradients in steps:
            for message in plan.messages:
                self._send(message, gradients)

    def _send(self, message: Message, gradients: Gradients) -> None:
        sent = []
        for rank in range(RANKS):
            parts = [
                gradients[part.variable][rank][_place(part)] / np.float32(RANKS)
                + self.residuals[rank][part.variable][_place(part)]
                for part in message.slices
            ]
            sent.append(np.concatenate([part.reshape(-1) for part in parts]))
        total, kept = twin(message, sent, self.starts)
        end = 0
        for part in message.slices:
            begin, end = end, end + part.elements
            target = self.values[part.variable][_place(part)]
            target += total[begin:end].reshape(target.shape)
            for rank in range(RANKS):
                residual = self.residuals[rank][part.variable][_place(part)]
                residual[...] = kept[rank][begin:end].reshape(residual.shape)


def _place(part: TensorSlice) -> slice:
    return slice(None) if part.axis is None else slice(part.start, part.stop)


def assert_close(found: Gradients, expected: Gradients, tolerance: float = EXACT) -> None:
    for name, value in expected.items():
        error = np.abs(found[name] - value).max() / max(np.abs(value).max(), 1e-3)
        assert error <= tolerance, f"{name} differs by {error:.2g}"


def assert_same(run: Run, reference: Twin, tolerance: float = EXACT) -> None:
    assert_close(run.values, reference.values, tolerance)
    for rank, expected in enumerate(reference.residuals):
        zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        found = {name: run.kept.residuals.get((rank, name), zeros[name]) for name in SHAPES}
        assert_close(found, expected, tolerance)


@pytest.mark.parametrize("synchronizer", SearchSpace.default().without_direct().synchronizers)
@pytest.mark.parametrize("compressor", [one for one in Compressor if one is not Compressor.NONE])
def test_compressed_messages_equal_those_of_numpy(training, steps, compressor, synchronizer):
    run, reference = Run(training), Twin()
    plan = planned(compressor, synchronizer)
    run.train(plan, steps)
    reference.train(plan, steps)
    assert_same(run, reference, TOLERANCES.get(compressor, EXACT))
    if compressor.error_feedback:
        assert run.kept.waiting >= {"matrix"}


def test_residuals_outlive_a_change_of_plans_and_an_uncompressed_message_sends_them(
    training, steps
):
    run, reference = Run(training), Twin()
    for compressor in (Compressor.INT8, Compressor.POWER_SGD, Compressor.TOP_K, Compressor.NONE):
        plan = planned(compressor)
        run.train(plan, steps[:2])
        reference.train(plan, steps[:2])
        assert_same(run, reference)
    assert not run.kept.waiting
    averaged = {name: sum(8 * one[name].mean(0) for one in steps[:2]) / 2 for name in SHAPES}
    assert_close(run.values, averaged)


def test_overflows_are_sent_once_and_leave_no_residual(training, steps):
    for compressor in (Compressor.INT8, Compressor.TOP_K, Compressor.POWER_SGD):
        run = Run(training)
        overflowing = {name: value.copy() for name, value in steps[0].items()}
        overflowing["matrix"][2, 3, 4] = np.inf
        run.train(planned(compressor), [overflowing])
        assert not np.isfinite(run.values["matrix"][3]).all()
        for residual in run.kept.residuals.values():
            assert np.isfinite(residual).all()


@pytest.mark.parametrize("synchronizer", SearchSpace.default().without_direct().synchronizers)
def test_hierarchical_messages_and_ring_orders_are_exact(training, steps, synchronizer):
    expected = {name: sum(one[name].mean(0) for one in steps) for name in SHAPES}
    plan = planned(Compressor.NONE, synchronizer)
    hierarchical = replace(
        plan, messages=tuple(replace(one, hierarchical=True) for one in plan.messages)
    )
    order = (2, 0, 3, 1)
    for variant in (
        hierarchical,
        replace(plan, ring_order=order),
        replace(hierarchical, ring_order=order),
    ):
        run = Run(training)
        run.train(variant, steps)
        assert_close(run.values, expected)


def test_only_the_leaders_of_hosts_compress_a_hierarchical_message(training, steps):
    plan = planned(Compressor.INT8)
    plan = replace(plan, messages=tuple(replace(one, hierarchical=True) for one in plan.messages))
    run = Run(training)
    run.train(plan, steps)
    assert {rank for rank, _ in run.kept.residuals} == {0, 2}
    run.train(planned(Compressor.NONE), steps[:1])
    expected = {name: sum(one[name].mean(0) for one in [*steps, steps[0]]) for name in SHAPES}
    assert_close(run.values, expected)


def test_a_ring_order_decides_who_sends_to_whom(training):
    order = (2, 0, 3, 1)
    plan = planned(Compressor.NONE, ring_order=order)
    graph = distribute(training, plan, DEVICES)
    nodes = {node.name: node for node in graph.graph_def.node}
    sends = set()
    for node in nodes.values():
        for name in node.input:
            source = nodes[name.removeprefix("^").partition(":")[0]]
            if "message_" in node.name and source.device != node.device:
                sends.add((DEVICES.index(source.device), DEVICES.index(node.device)))
    assert sends == {(order[place - 1], rank) for place, rank in enumerate(order)}


class FourDevices:
    """Devices of this process in place of servers."""

    target = ""
    devices = tuple(DEVICES)
    hosts = HOSTS

    @property
    def config(self) -> Any:
        config = session_config()
        config.device_count["CPU"] = RANKS
        return config


def test_a_running_graph_sends_what_an_earlier_plan_left_once(training, steps):
    running = RunningGraph(training, FourDevices(), 60.0)
    for synchronizer in (Synchronizer.ALL_REDUCE, Synchronizer.PARAMETER_SERVER):
        running.load(planned(Compressor.INT8, synchronizer))
        _step(running, steps[0])
        assert running.graph is not None and len(running.graph.kept) == 2 * RANKS
        running.load(planned(Compressor.NONE, synchronizer))
        assert running.graph is not None and len(running.graph.kept) == 2 * RANKS
        _step(running, steps[1])
        assert running.graph is not None and running.graph.kept == ()
    expected = {name: 2 * sum(one[name].mean(0) for one in steps[:2]) for name in SHAPES}
    assert_close(dict(running.values()), expected)
    running.close()


def _step(running: RunningGraph, gradients: Gradients) -> None:
    running.step({f"{GIVEN}{name}": value for name, value in gradients.items()})


def test_hierarchical_messages_need_known_hosts(training):
    plan = planned(Compressor.NONE)
    plan = replace(plan, messages=tuple(replace(one, hierarchical=True) for one in plan.messages))
    with pytest.raises(InvalidInput, match="which ranks share a host, from LOCAL_RANK"):
        distribute(training, plan, DEVICES)
