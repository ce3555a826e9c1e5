"""Captures a training step as a `TrainingGraph`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.util import nest

from autotune.errors import InvalidInput
from runtime_rewriter.tensorflow.gradient_marks import Marks, marked_gradients
from runtime_rewriter.tensorflow.graph_view import TensorName, control_inputs, data_inputs
from runtime_rewriter.tensorflow.normal_form import add_ends, normal_form, variable_node
from runtime_rewriter.tensorflow.training_graph import Feed, GraphVariable, TrainingGraph

v1 = tf.compat.v1


@dataclass(frozen=True)
class CapturedStep:
    """A captured function. `variables`: the program's own, by their names in the graph.

    `arguments`: names of the feeds, in the order of the flat arguments. `results`: the structure
    whose tensors the fetches are, in order.
    """

    training: TrainingGraph
    variables: Mapping[str, Any]
    arguments: tuple[str, ...]
    results: Any

    def packed(self, values: Sequence[np.ndarray]) -> Any:
        """The results of the function, built from the values of its fetches."""
        leaves = nest.flatten(self.results, expand_composites=True)
        tensors = iter(values)
        filled = [None if leaf is None else tf.constant(next(tensors)) for leaf in leaves]
        return nest.pack_sequence_as(self.results, filled, expand_composites=True)


def is_compiled(step: Any) -> bool:
    """Whether the script lets XLA compile a step, which no trace of ours keeps."""
    return bool(getattr(getattr(step, "function_spec", None), "jit_compile", False))


def untraced(step: Any) -> Any:
    """The step for a trace of its own, in which gradients are marked."""
    python_function = getattr(step, "python_function", None)
    if python_function is None:
        return step
    return tf.function(python_function, input_signature=step.input_signature)


def capture_function(step: Any, signature: Sequence[tf.TensorSpec]) -> TrainingGraph:
    """Trace `step` as `capture_step` does, for its graph alone."""
    return capture_step(step, signature).training


def capture_step(
    step: Any, signature: Sequence[Any], named: Mapping[str, Any] = {}, marks: Marks | None = None
) -> CapturedStep:
    """Trace `step`, a function of tensors that computes gradients and updates variables.

    `step` may be a `tf.function`. `signature`, `named`: its arguments. Give a batch dimension as
    None: such feeds are split between replicas. Variables must exist before, as for every
    `tf.function`. `marks`: those of `marked_gradients`, if it is in force already.
    """
    with nullcontext(marks) if marks else marked_gradients() as marks_in_force:
        traced = hasattr(step, "get_concrete_function")
        function = step if traced else tf.function(step, autograph=False)
        concrete = function.get_concrete_function(*signature, **named)
    return _from_concrete(concrete, marks_in_force)


def _from_concrete(concrete: Any, marks: Marks) -> CapturedStep:
    graph = concrete.graph
    graph_def = GraphDef()
    graph_def.CopyFrom(graph.as_graph_def())
    captured = {internal.op.name: external for external, internal in graph.captures}
    names = _Names([node.name for node in graph_def.node])
    by_handle = {id(variable.handle): variable for variable in graph.variables}
    variables: dict[int, GraphVariable] = {}  # by id of the tf.Variable
    initial: dict[str, np.ndarray] = {}
    renamed: dict[str, str] = {}
    for node in graph_def.node:
        if node.name not in captured:
            continue
        external = captured[node.name]
        if external.dtype != tf.resource:
            node.CopyFrom(_constant(node.name, external))
            continue
        variable = by_handle.get(id(external))
        if variable is None:
            raise InvalidInput(
                f"a training step may capture variables and constants, but {node.name!r} is "
                "another resource (a table, an iterator or a generator); pass its values as "
                "arguments of the step"
            )
        captured_variable = _graph_variable(variable, names.unique(variable.name.partition(":")[0]))
        variables[id(variable)] = captured_variable
        initial[captured_variable.name] = variable.numpy()
        renamed[node.name] = captured_variable.name
        node.CopyFrom(variable_node(captured_variable))
    _rename_inputs(graph_def, renamed)
    feeds = [_feed(tensor) for tensor in graph.inputs if tensor.op.name not in captured]
    targets = [op.name for op in graph.control_outputs]
    outputs = _named_outputs(concrete)
    add_ends(graph_def, targets, list(outputs.values()))
    marked = _marked_names(marks, variables)
    training = normal_form(
        graph_def, list(variables.values()), marked, feeds, list(outputs), initial
    )
    held = {id(variable): variable for variable in graph.variables}
    sources = {one.name: held[key] for key, one in variables.items()}
    arguments = tuple(feed.name for feed in feeds)
    return CapturedStep(training, sources, arguments, concrete.structured_outputs)


def capture_graph(
    graph: tf.Graph,
    train_op: tf.Operation,
    fetches: Mapping[str, tf.Tensor],
    marks: Marks | None = None,
    session: Any = None,
) -> TrainingGraph:
    """Capture a v1 graph: `train_op` and the values that a step returns.

    `marks`: those of `marked_gradients`, if the graph was built within it; else the gradients are
    the inputs `grad` of TensorFlow's own update operations. Initial values are read from `session`;
    without one, the graph's initializers are run.
    """
    _refuse_reference_variables(graph)
    graph_def = graph.as_graph_def()
    known = {id(variable): variable for variable in graph.get_collection("variables")}
    variables = {key: _graph_variable(one, one.op.name) for key, one in known.items()}
    with graph.as_default():
        initial = _initial_values(list(known.values()), session)
    feeds = [_feed(op.outputs[0]) for op in graph.get_operations() if op.type == "Placeholder"]
    add_ends(graph_def, [train_op.name], list(fetches.values()))
    marked = _marked_names(marks, variables) if marks else None
    return normal_form(graph_def, list(variables.values()), marked, feeds, list(fetches), initial)


def _marked_names(marks: Marks, variables: Mapping[int, GraphVariable]) -> list[str | None]:
    marked = [variables.get(id(_on_this_worker(variable))) for variable in marks.variables]
    return [None if variable is None else variable.name for variable in marked]


def _on_this_worker(variable: Any) -> Any:
    """The variable of this worker of one that a strategy mirrors."""
    mirrored = getattr(variable, "values", None)
    return mirrored[0] if isinstance(mirrored, tuple) else variable


def _initial_values(variables: Sequence[Any], session: Any) -> dict[str, np.ndarray]:
    if session is None:
        with v1.Session() as own:
            own.run([variable.initializer for variable in variables])
            return _initial_values(variables, own)
    values = session.run([variable.read_value() for variable in variables])
    return {one.op.name: value for one, value in zip(variables, values, strict=True)}


def _refuse_reference_variables(graph: tf.Graph) -> None:
    for op in graph.get_operations():
        if op.type in ("Variable", "VariableV2"):
            raise InvalidInput(
                f"the rewriter reads resource variables, but {op.name!r} is a reference variable; "
                "call tf.compat.v1.enable_resource_variables() before the graph is built"
            )


def _graph_variable(variable: Any, name: str) -> GraphVariable:
    shape = variable.shape
    if not shape.is_fully_defined():
        raise InvalidInput(f"shape of variable {name!r} must be known, but is {shape}")
    return GraphVariable(name, tuple(shape.as_list()), variable.dtype.base_dtype.name)


def _feed(tensor: tf.Tensor) -> Feed:
    shape = tensor.shape
    split = shape.rank is not None and shape.rank > 0 and shape[0] is None
    return Feed(tensor.op.name, TensorName.of(tensor.name), split)


def _named_outputs(concrete: Any) -> dict[str, tf.Tensor]:
    """Name each returned tensor by its path in the function's structure of results."""
    pairs = nest.flatten_with_joined_string_paths(
        concrete.structured_outputs, expand_composites=True
    )
    paths = [path or "output" for path, value in pairs if value is not None]
    return dict(zip(paths, concrete.graph.outputs, strict=True))


def _rename_inputs(graph_def: GraphDef, renamed: Mapping[str, str]) -> None:
    for node in graph_def.node:
        data = [
            f"{renamed.get(tensor.node, tensor.node)}:{tensor.output}"
            for tensor in data_inputs(node)
        ]
        control = [f"^{renamed.get(name, name)}" for name in control_inputs(node)]
        del node.input[:]
        node.input.extend([*data, *control])


def _constant(name: str, tensor: Any) -> NodeDef:
    attributes = {
        "dtype": AttrValue(type=tensor.dtype.as_datatype_enum),
        "value": AttrValue(tensor=tf.make_tensor_proto(tensor.numpy())),
    }
    return NodeDef(name=name, op="Const", attr=attributes)


class _Names:
    """Hands out names that are not taken."""

    def __init__(self, taken: Sequence[str]) -> None:
        self.taken = set(taken)

    def unique(self, name: str) -> str:
        number, chosen = 0, name
        while chosen in self.taken:
            number += 1
            chosen = f"{name}_{number}"
        self.taken.add(chosen)
        return chosen
