"""Where a distributed graph holds the variables, gradients and passes of its training graph."""

from __future__ import annotations

from autotune.workload import Variable
from runtime_rewriter.tensorflow.recording.graph_nodes import TrainedVariables
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

_PASSED_ON = ("VarHandleOp", "ReadVariableOp", "Identity", "Const", "NoOp")


def replicated(training: TrainingGraph, replicas: int) -> TrainedVariables:
    """The nodes of all replicas, whose names `distribute` prefixes."""
    prefixes = [f"replica_{rank}/" for rank in range(replicas)]
    return TrainedVariables(
        {
            prefix + one.values.node: one.variable
            for prefix in prefixes
            for one in training.gradients
        },
        {prefix + one.name: one.name for prefix in prefixes for one in training.variables},
        frozenset(prefix + name for prefix in prefixes for name in forward_nodes(training)),
    )


def trained_variables(training: TrainingGraph) -> list[Variable]:
    """The variables with gradients, as a recording names them."""
    return [
        Variable(
            one.variable,
            training.by_name[one.variable].shape,
            training.by_name[one.variable].dtype,
            one.sparse,
        )
        for one in training.gradients
    ]


def forward_nodes(training: TrainingGraph) -> frozenset[str]:
    """The nodes that lead to a value that a step returns and that no gradient leads to.

    Empty if they only pass on variables and constants: then the step does not return its loss.
    """
    gradients = {one.values.node for one in training.gradients}
    forward: set[str] = set()
    for fetch in training.fetches.values():
        before = training.view.upstream([fetch.node], control=False)
        if not before & gradients:
            forward |= before
    computes = any(training.view.nodes[name].op not in _PASSED_ON for name in forward)
    return frozenset(forward if computes else ())
