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
from runtime_rewriter.tensorflow.copies import Copies, Handle, replica
from runtime_rewriter.tensorflow.distributed_graph import (
    DistributedGraph,
    PlacedVariable,
    ReplicatedFeed,
)
from runtime_rewriter.tensorflow.gradient_gate import COMPARED_BYTES, GateWriter
from runtime_rewriter.tensorflow.kept_writing import KeptWriter
from runtime_rewriter.tensorflow.node_writing import GraphWriter
from runtime_rewriter.tensorflow.op_fusion import set_scopes
from runtime_rewriter.tensorflow.randomness import seed_variables
from runtime_rewriter.tensorflow.refreshing import Refreshes, update_targets
from runtime_rewriter.tensorflow.refusals import refuse
from runtime_rewriter.tensorflow.serving import served_variables
from runtime_rewriter.tensorflow.synchronization import SCOPE, Circumstances, Synchronization
from runtime_rewriter.tensorflow.training_graph import Feed, TrainingGraph
from runtime_rewriter.tensorflow.updates import Updates

ALONE = Circumstances()
"""Hosts are not known, and no message of an earlier plan has left anything."""


def distribute(
    training: TrainingGraph,
    plan: Plan,
    devices: Sequence[str],
    first_key: int = 1,
    circumstances: Circumstances = ALONE,
    gated: bool = False,
    compared_bytes: int = COMPARED_BYTES,
) -> DistributedGraph:
    """Return the graph that enacts `plan` on `devices`, one per rank.

    `first_key`: the first collective key that the servers have not seen, which is `next_key` of
    the graph that they ran before. `gated`: with a numerics gate, if there are
    gradients, which compares `compared_bytes` of them at once. Raises `InvalidInput` for what
    cannot be enacted.
    """
    refuse(training, plan, devices, circumstances.hosts)
    return _Rewriting(training, plan, tuple(devices), first_key, circumstances).result(
        compared_bytes if gated else None
    )


class _Rewriting:
    def __init__(
        self,
        training: TrainingGraph,
        plan: Plan,
        devices: tuple[str, ...],
        first_key: int,
        circumstances: Circumstances,
    ) -> None:
        self.training, self.plan, self.devices = training, plan, devices
        self.ranks = range(len(devices))
        self.keys = Keys(first_key)
        graph_def = GraphDef(
            versions=training.graph_def.versions, library=training.graph_def.library
        )
        self.writer = GraphWriter(graph_def)
        updates = Updates(training)
        self.served, self.notes = served_variables(training, plan, updates)
        container = f"autotune-{first_key}"
        self.copies = Copies(training, updates, self.writer, devices, self.served, container)
        self.kept = KeptWriter(self.writer, container, SCOPE)
        self.circumstances = circumstances
        self.seeds = seed_variables(training)

    def result(self, compared_bytes: int | None) -> DistributedGraph:
        synchronization = Synchronization(
            self.training,
            self.plan,
            self.writer,
            self.devices,
            self.keys,
            _in_replica,
            self.served,
            self.kept,
            self.circumstances,
        )
        self.copies.averaged = synchronization.averaged()
        refreshes = Refreshes(self.plan, self.copies)
        targets = self._copy_all(refreshes)
        gate = None
        if compared_bytes is not None and self.training.gradients:
            gate_writer = GateWriter(synchronization, self.writer, self.devices, compared_bytes)
            gate = gate_writer.tensors(self.keys)
        set_scopes(self.writer.graph_def, self.plan.op_fusion, self.devices)
        return DistributedGraph(
            self.writer.graph_def,
            self.plan,
            self.devices,
            self._placed(),
            tuple(self._feed(feed) for feed in self.training.feeds),
            (*targets, *self.kept.assignments),
            {name: _in_replica(str(one), 0) for name, one in self.training.fetches.items()},
            self.training.initial,
            self.keys.next_key,
            tuple(self.notes),
            tuple(self.kept.kept),
            gate,
        )

    def _copy_all(self, refreshes: Refreshes) -> list[str]:
        """Copy what each replica and server runs; return the nodes that a step runs."""
        targets: list[str] = []
        for one in self.served.values():
            for name, site in update_targets(self.copies, one):
                self.copies.copy([name], site)
                targets.append(f"{site.name}/{name}")
        fetched = [fetch.node for fetch in self.training.fetches.values()]
        gradients = [one.values.node for one in self.training.gradients]
        gradients += [one.indices.node for one in self.training.gradients if one.indices]
        own = [name for name in self.training.targets if not self.copies.is_in_update(name)]
        for rank in self.ranks:
            self.copies.copy([*own, *gradients, *fetched], replica(rank))
            targets += [f"{replica(rank).name}/{name}" for name in own]
            targets += refreshes.targets(rank)
        refreshes.write()
        return targets

    def _feed(self, feed: Feed) -> ReplicatedFeed:
        placeholders = tuple(_in_replica(str(feed.tensor), rank) for rank in self.ranks)
        return ReplicatedFeed(feed.name, placeholders, feed.split)

    def _placed(self) -> tuple[PlacedVariable, ...]:
        first: set[str] = set()  # of a variable that each replica holds, the first replica's counts
        placed = []
        for handle in sorted(self.copies.handles, key=lambda one: (one.variable, one.site.rank)):
            counts = not handle.is_copy and (
                handle.axis is not None or handle.variable not in first
            )
            if counts:
                first.add(handle.variable)
            placed.append(self._hold(handle, counts))
        return tuple(placed)

    def _hold(self, handle: Handle, authoritative: bool) -> PlacedVariable:
        """Write the nodes that set and read what a site holds of a variable."""
        variable = self.training.by_name[handle.variable]
        dtype, shape = tf.as_dtype(variable.dtype), list(variable.shape)
        if handle.axis is not None:
            shape[handle.axis] = handle.stop - handle.start
        with self.writer.at(self.devices[handle.site.rank], f"{SCOPE}/held/{handle.node}"):
            placeholder = self.writer.node(
                "Placeholder", "given", dtype=dtype, shape=tf.TensorShape(shape)
            )
            assign = self.writer.node(
                "AssignVariableOp", "set", [handle.node, placeholder], dtype=dtype
            )
            value = self.writer.node("ReadVariableOp", "value", [handle.node], dtype=dtype)
        return PlacedVariable(
            variable.name,
            handle.site.rank,
            handle.node,
            f"{placeholder}:0",
            assign,
            f"{value}:0",
            authoritative,
            handle.axis,
            handle.start,
            handle.stop,
            replica_seed=handle.site.rank if variable.name in self.seeds else 0,
        )


def _in_replica(tensor: str, rank: int) -> str:
    return f"{replica(rank).name}/{tensor}"
