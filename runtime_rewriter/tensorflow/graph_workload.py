"""The workload of a training graph, for which strategies are planned."""

from __future__ import annotations

from autotune.workload import Variable, Workload
from runtime_rewriter.tensorflow.training_graph import TrainingGraph


def workload_of(training: TrainingGraph, model: str) -> Workload:
    """Describe the variables with gradients, in the order in which the graph computes these.

    No time is known: nothing was measured.
    """
    return Workload(
        model,
        tuple(
            Variable(
                gradient.variable,
                training.by_name[gradient.variable].shape,
                training.by_name[gradient.variable].dtype,
                gradient.sparse,
                rows_only=training.rows_only(gradient.variable),
            )
            for gradient in training.gradients
        ),
    )
