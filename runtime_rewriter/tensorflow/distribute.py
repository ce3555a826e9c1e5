"""Rewrites a training graph into the distributed graph of a plan.

Every rank gets a copy of the graph on its device. The copies read averaged gradients wherever the
program reads gradients, so everything that follows (clipping, loss scaling, moments, the updates)
works on the average. One client drives all ranks (in-graph replication): only then can collectives
and servers' variables be part of one step.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef

from autotune.strategy_space.plan import Plan
from runtime_rewriter.tensorflow.collectives import Keys
from runtime_rewriter.tensorflow.distributed_graph import (
    DistributedGraph,
    PlacedVariable,
    ReplicatedFeed,
)
from runtime_rewriter.tensorflow.graph_view import TensorName, control_inputs, data_inputs
from runtime_rewriter.tensorflow.node_writing import GraphWriter
from runtime_rewriter.tensorflow.randomness import reseed, seed_variables
from runtime_rewriter.tensorflow.refusals import refuse
from runtime_rewriter.tensorflow.synchronization import SCOPE, Averaged, Synchronization
from runtime_rewriter.tensorflow.training_graph import GraphVariable, TrainingGraph


def distribute(
    training: TrainingGraph, plan: Plan, devices: Sequence[str], first_key: int = 1
) -> DistributedGraph:
    """Return the graph that enacts `plan` on `devices`, one per rank.

    `first_key`: the first collective key that the servers have not seen, which is `next_key` of
    the graph that they ran before. Raises `InvalidInput` for what cannot be enacted.
    """
    refuse(training, plan, devices)
    return _Rewriting(training, plan, tuple(devices), first_key).result()


class _Rewriting:
    def __init__(
        self, training: TrainingGraph, plan: Plan, devices: tuple[str, ...], first_key: int
    ) -> None:
        self.training, self.plan, self.devices = training, plan, devices
        self.keys = Keys(first_key)
        graph_def = GraphDef(
            versions=training.graph_def.versions, library=training.graph_def.library
        )
        self.writer = GraphWriter(graph_def)
        self.container = f"autotune-{first_key}"
        self.seeds = seed_variables(training)
        self.averaged: dict[str, Averaged] = {}
        self.gradient_at = {
            tensor: gradient
            for gradient in training.gradients
            for tensor in (gradient.values, gradient.indices)
            if tensor is not None
        }
        self._copied: set[tuple[str, int]] = set()

    def result(self) -> DistributedGraph:
        synchronization = Synchronization(
            self.training, self.plan, self.writer, self.devices, self.keys, _in_copy
        )
        self.averaged = synchronization.averaged()
        ranks = range(len(self.devices))
        for rank in ranks:
            needed = [*self.training.targets, *(one.values.node for one in self.training.gradients)]
            needed += [fetch.node for fetch in self.training.fetches.values() if rank == 0]
            self._copy(needed, rank)
        return DistributedGraph(
            self.writer.graph_def,
            self.plan,
            self.devices,
            tuple(self._placed()),
            tuple(self._feed(name, split) for name, split in self._feeds()),
            tuple(_copy_name(target, rank) for rank in ranks for target in self.training.targets),
            {name: _in_copy(str(one), 0) for name, one in self.training.fetches.items()},
            self.training.initial,
            self.keys.next_key,
        )

    def _copy(self, names: Sequence[str], rank: int) -> None:
        """Copy nodes and all that they depend on to a rank."""
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if (name, rank) in self._copied:
                continue
            self._copied.add((name, rank))
            node = self.training.view.nodes[name]
            copy = self.writer.graph_def.node.add()
            copy.CopyFrom(node)
            copy.name, copy.device = _copy_name(name, rank), self.devices[rank]
            self.writer.names.add(copy.name)
            reseed(copy, rank)
            if node.op == "VarHandleOp":
                copy.attr["shared_name"].s = copy.name.encode()
                copy.attr["container"].s = self.container.encode()
            del copy.input[:]
            copy.input.extend(self._tensor(tensor, rank) for tensor in data_inputs(node))
            copy.input.extend(f"^{_copy_name(one, rank)}" for one in control_inputs(node))
            waiting.extend(tensor.node for tensor in data_inputs(node))
            waiting.extend(control_inputs(node))

    def _tensor(self, tensor: TensorName, rank: int) -> str:
        """Return what a rank's copy reads where the program reads `tensor`."""
        gradient = self.gradient_at.get(tensor)
        if gradient is None:
            return _in_copy(str(tensor), rank)
        averaged = self.averaged[gradient.variable]
        if tensor == gradient.values:
            return averaged.values[rank]
        assert averaged.indices is not None
        return averaged.indices[rank]

    def _feeds(self) -> list[tuple[str, bool]]:
        return [(feed.name, feed.split) for feed in self.training.feeds]

    def _feed(self, name: str, split: bool) -> ReplicatedFeed:
        ranks = range(len(self.devices))
        return ReplicatedFeed(name, tuple(f"{_copy_name(name, rank)}:0" for rank in ranks), split)

    def _placed(self) -> list[PlacedVariable]:
        return [
            self._hold(variable, rank)
            for variable in self.training.variables
            for rank in range(len(self.devices))
            if (variable.name, rank) in self._copied
        ]

    def _hold(self, variable: GraphVariable, rank: int) -> PlacedVariable:
        """Write the nodes that set and read a rank's copy of a variable."""
        handle, dtype = _copy_name(variable.name, rank), tf.as_dtype(variable.dtype)
        shape = tf.TensorShape(variable.shape)
        with self.writer.at(self.devices[rank], f"{SCOPE}/held/{handle}"):
            placeholder = self.writer.node("Placeholder", "given", dtype=dtype, shape=shape)
            assign = self.writer.node("AssignVariableOp", "set", [handle, placeholder], dtype=dtype)
            value = self.writer.node("ReadVariableOp", "value", [handle], dtype=dtype)
        return PlacedVariable(
            variable.name,
            rank,
            handle,
            f"{placeholder}:0",
            assign,
            f"{value}:0",
            authoritative=rank == 0,
            replica_seed=rank if variable.name in self.seeds else 0,
        )


def _copy_name(node: str, rank: int) -> str:
    return f"replica_{rank}/{node}"


def _in_copy(tensor: str, rank: int) -> str:
    return f"replica_{rank}/{tensor}"
