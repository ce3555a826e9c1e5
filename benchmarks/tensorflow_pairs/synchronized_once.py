"""Checks on a rewritten TensorFlow graph that each gradient is synchronized exactly once."""

from __future__ import annotations

from collections import Counter, defaultdict

from autotune.errors import InvalidInput
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.tensorflow.between_graph import graph_of_rank
from runtime_rewriter.tensorflow.distributed_graph import DistributedGraph, PlacedVariable
from runtime_rewriter.tensorflow.graph_view import GraphView, control_inputs, data_inputs
from runtime_rewriter.tensorflow.synchronization import MESSAGE
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")


def assert_each_gradient_is_synchronized_once(
    graph: DistributedGraph, training: TrainingGraph
) -> None:
    """A rank's gradient enters each of its messages once, and updates read all ranks' messages.

    Nothing that writes a variable with a gradient may read a local gradient.
    """
    view = GraphView(graph.graph_def)
    started = {
        node.name: (node.attr[MESSAGE].i, int(node.name.partition("rank_")[2].partition("/")[0]))
        for node in graph.graph_def.node
        if MESSAGE in node.attr
    }
    ranks = range(graph.plan.world_size)
    messages = Counter(
        (part.variable, number)
        for number, message in enumerate(graph.plan.messages)
        for part in message.slices
    )
    of_variable: dict[str, set[int]] = defaultdict(set)
    for variable, number in messages:
        of_variable[variable].add(number)
    for gradient in training.gradients:
        for rank in ranks:
            local = f"replica_{rank}/{gradient.values.node}"
            reached = _reached(view, local, set(started))
            sums = Counter(started[node] for node in reached if node in started)
            own = of_variable[gradient.variable]
            assert sums == Counter((number, rank) for number in own), (local, sums)
            written = [node for node in reached if view.nodes[node].op.startswith(WRITES)]
            assert not written, (local, written)
    for placed in graph.variables:
        if placed.variable in of_variable and placed.authoritative:
            _assert_updated(view, graph, placed, of_variable[placed.variable], started)


def splits_into_clients(graph: DistributedGraph) -> bool:
    """Whether each rank's part is complete by itself; it then has all messages of the rank."""
    try:
        parts = [graph_of_rank(graph, rank) for rank in range(graph.plan.world_size)]
    except InvalidInput:  # by which ranks meet outside of collectives
        return False
    for part in parts:
        started = [node.attr[MESSAGE].i for node in part.graph_def.node if MESSAGE in node.attr]
        assert sorted(started) == list(range(len(graph.plan.messages))), sorted(started)
    assert sum(len(part.graph_def.node) for part in parts) == len(graph.graph_def.node)
    return True


def _assert_updated(
    view: GraphView,
    graph: DistributedGraph,
    placed: PlacedVariable,
    numbers: set[int],
    started: dict[str, tuple[int, int]],
) -> None:
    """Collectives join ranks outside of the graph; a server reads what each rank sends."""
    sent = _sent_to(view, placed.handle, started)
    received = {number for number, _ in sent}
    assert received and received <= numbers, (placed.handle, received, numbers)
    assert received == numbers or placed.axis is not None, (placed.handle, received, numbers)
    for number in received:
        served = graph.plan.messages[number].synchronizer is Synchronizer.PARAMETER_SERVER
        expected = range(graph.plan.world_size) if served else [placed.rank]
        assert set(expected) <= {rank for one, rank in sent if one == number}, placed.handle


def _reached(view: GraphView, start: str, stop: set[str]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            if name not in stop:
                waiting.extend(view.consumers.get(name, ()))
    return reached


def _sent_to(
    view: GraphView, handle: str, started: dict[str, tuple[int, int]]
) -> set[tuple[int, int]]:
    """Return the messages and ranks whose data a step writes to `handle`."""
    writers = [
        name
        for name in view.consumers.get(handle, ())
        if view.nodes[name].op.startswith(WRITES) and "/held/" not in name
    ]
    found, waiting, seen = set(), writers, set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in started:
            found.add(started[name])
            continue
        waiting.extend(tensor.node for tensor in data_inputs(view.nodes[name]))
        if view.nodes[name].op == "CollectiveBcastRecvV2":  # it reads what the root sends
            waiting.extend(_roots(view, name))
        if view.nodes[name].op == "ReadVariableOp":  # of what the writers before it wrote
            waiting.extend(control_inputs(view.nodes[name]))
    return found


def _roots(view: GraphView, receive: str) -> list[str]:
    message = receive.partition("/rank_")[0]
    return [
        name
        for name, node in view.nodes.items()
        if node.op == "CollectiveBcastSendV2" and name.startswith(f"{message}/")
    ]
