"""A check before the first step that updates depend on a split batch through gradients alone.

Each replica updates its own copy of a variable, with averaged gradients. If an update also reads
its own part of the batch (a count of samples, a loss that decides whether to update, a learning
rate computed from either), the copies drift apart, or follow a part where one device follows the
whole. Variables that no update reads may do so: statistics of BatchNorm, metrics.
"""

from __future__ import annotations

from autotune.errors import InvalidInput
from runtime_rewriter.tensorflow.training_graph import TrainingGraph
from runtime_rewriter.tensorflow.updates import Updates

_WRITES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")


def refuse_updates_by_batch(training: TrainingGraph, replicas: int) -> None:
    """Raise `InvalidInput` if an update reads the batch other than through gradients."""
    split = {feed.tensor.node for feed in training.feeds if feed.split}
    if replicas < 2 or not split:
        return
    view, updates = training.view, Updates(training)
    names = {variable.name for variable in training.variables}
    waiting = [(name, name) for name in training.gradient_of]
    checked = set(training.gradient_of)
    while waiting:
        trained, name = waiting.pop()
        writers = [node for node in updates.writers[name] if _writes(node, training)]
        before = view.upstream(writers, control=False, stop=training.gradient_nodes)
        if before & split:
            through = "" if name == trained else f" through {name!r}, which that update reads"
            raise InvalidInput(
                "a batch is split between the ranks, so an update may depend on it through "
                f"gradients only, but that of {trained!r} also depends on the batch{through}; "
                "compute a learning rate, a count or a condition from gradients or from an "
                "argument that is not split, or change the variable between two steps"
            )
        read = (before & names) - checked
        checked |= read
        waiting += [(trained, other) for other in sorted(read)]


def _writes(name: str, training: TrainingGraph) -> bool:
    """Whether a node, or a function that it calls, writes variables."""
    return any(node.op.startswith(_WRITES) for node in training.with_bodies([name]))
