"""Graphs of the zoo's models, checks of rewritten graphs, and edits that make them wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow_programs import Batch

from autotune.workload import Workload
from benchmarks.tensorflow_pairs.synchronized_once import (
    assert_each_gradient_is_synchronized_once as assert_each_gradient_is_synchronized_once,
)
from runtime_rewriter.tensorflow.gradient_marks import marked_gradients
from runtime_rewriter.tensorflow.normal_form import add_ends, normal_form
from runtime_rewriter.tensorflow.training_graph import GraphVariable, TrainingGraph

v1 = tf.compat.v1


def assert_close(trained: Batch, expected: Batch, tolerance: float) -> None:
    """Compare each variable: at most `tolerance` of the largest value of the expected one."""
    assert trained.keys() <= expected.keys()  # a step may leave variables alone
    for name in trained:
        value = expected[name]
        scale = max(float(np.abs(value).max(initial=0)), 1e-3)
        error = float(np.abs(trained[name] - value).max(initial=0)) / scale
        assert error <= tolerance, f"{name} differs by {error:.2g}"


def graph_of(workload: Workload) -> TrainingGraph:
    """A v1 graph that trains variables of these shapes with Adam; it never runs."""
    graph = tf.Graph()
    with graph.as_default(), marked_gradients() as marks:
        v1.enable_resource_variables()
        scale = v1.placeholder(tf.float32, [], "scale")
        rows = v1.placeholder(tf.int32, [None], "rows")
        variables, losses = [], []
        for one in reversed(workload.variables):
            zeros = v1.zeros_initializer()
            variable = v1.get_variable(one.name, one.shape, one.dtype, zeros, use_resource=True)
            value = tf.nn.embedding_lookup(variable, rows) if one.sparse else variable
            losses.append(tf.reduce_mean(tf.square(value)) * scale)
            variables.append(variable)
        loss = tf.add_n(losses)
        optimizer = v1.train.AdamOptimizer(1e-3)
        train = optimizer.minimize(loss, var_list=variables)
        graph_def = graph.as_graph_def()
        add_ends(graph_def, [train.name], [loss])
        named = [variable.op.name for variable in marks.variables]
        every = [
            GraphVariable(one.op.name, tuple(one.shape.as_list()), one.dtype.base_dtype.name)
            for one in v1.global_variables()
        ]
    return normal_form(
        graph_def, every, named, [], ["loss"], dict.fromkeys((one.name for one in every), None)
    )


def edited_input(graph_def: Any, node: str, place: int, scope: str) -> None:
    """Let a node read what the node of the same name below `scope` reads."""
    by_name = {one.name: one for one in graph_def.node}
    other = f"{scope}/{node.rpartition('/')[2]}"
    by_name[node].input[place] = by_name[other].input[place]
