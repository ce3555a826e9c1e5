"""Which variables and nodes hold the state or the seed of random numbers."""

from __future__ import annotations

from collections.abc import Collection

from tensorflow.core.framework.node_def_pb2 import NodeDef

from runtime_rewriter.tensorflow.training_graph import TrainingGraph

_SEEDED = ("StatelessRandom", "StatelessTruncated", "StatelessShuffle", "StatelessMultinomial")
_GENERATORS = ("Stateful", "Rng")
_STATE_SIZES = (2, 3)
"""Elements of the state of a Keras SeedGenerator and of a tf.random.Generator (Philox)."""


def seed_variables(training: TrainingGraph) -> frozenset[str]:
    """Return the variables whose value decides the random numbers of a replica."""
    states = set()
    for variable in training.variables:
        if "int" not in variable.dtype or len(variable.shape) != 1:
            continue
        if variable.shape[0] not in _STATE_SIZES:
            continue
        reached = training.view.downstream([variable.name])
        if any(_draws(training.view.nodes[name], training) for name in reached):
            states.add(variable.name)
    return frozenset(states)


def reseed(node: NodeDef, rank: int) -> None:
    """Give a node with a seed of its own another seed on each rank; rank 0 keeps it."""
    seeded = "seed" in node.attr and "seed2" in node.attr
    if seeded and (node.attr["seed"].i or node.attr["seed2"].i):  # two zeros: random each time
        node.attr["seed2"].i += rank


def drawing_ops(training: TrainingGraph, names: Collection[str]) -> set[str]:
    """The types of these nodes, and of those in functions that they call, that draw random
    numbers."""
    return {node.op for node in training.with_bodies(names) if _draws_itself(node)}


def _draws_itself(node: NodeDef) -> bool:
    if node.op.startswith(("StatefulPart", "StatelessRandomGet")):
        return False
    return node.op.startswith((*_SEEDED, *_GENERATORS)) or {"seed", "seed2"} <= set(node.attr)


def _draws(node: NodeDef, training: TrainingGraph) -> bool:
    if node.op.startswith((*_SEEDED, *_GENERATORS)) and not node.op.startswith("StatefulPart"):
        return True
    bodies = {one.signature.name: one for one in training.graph_def.library.function}
    called = [value.func.name for value in node.attr.values() if value.HasField("func")]
    return any(
        inner.op.startswith((*_SEEDED, *_GENERATORS))
        for name in called
        for inner in bodies[name].node_def
    )
