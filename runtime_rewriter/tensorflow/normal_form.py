"""Brings a captured graph into the form that the rewriter reads.

Calls are inlined, nodes of several independent outputs are split, devices are dropped, and nodes
that a step does not need are removed. A graph that cannot be rewritten is refused by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.framework import op_def_registry

from autotune.errors import InvalidInput
from runtime_rewriter.tensorflow.gradient_marks import PART, VARIABLE
from runtime_rewriter.tensorflow.graph_view import (
    GraphView,
    TensorName,
    control_inputs,
    data_inputs,
    functions_of,
)
from runtime_rewriter.tensorflow.inlining import inlined
from runtime_rewriter.tensorflow.training_graph import Feed, Gradient, GraphVariable, TrainingGraph

STEP = "autotune_step"
FETCH = "autotune_fetch"
_LOOPS = frozenset({"Enter", "Exit", "NextIteration", "Switch", "Merge", "LoopCond"})
_LOCAL = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})


def variable_node(variable: GraphVariable) -> NodeDef:
    """Return the node that holds `variable` in a graph for one device."""
    shape = tf.TensorShape(variable.shape).as_proto()
    attributes = {
        "dtype": AttrValue(type=tf.as_dtype(variable.dtype).as_datatype_enum),
        "shape": AttrValue(shape=shape),
        "shared_name": AttrValue(s=variable.name.encode()),
        "container": AttrValue(s=b""),
    }
    return NodeDef(name=variable.name, op="VarHandleOp", attr=attributes)


def add_ends(graph_def: GraphDef, targets: Sequence[str], fetched: Sequence[tf.Tensor]) -> None:
    """Add nodes that depend on all of a step, so that inlining redirects them as any other."""
    step = graph_def.node.add(name=STEP, op="NoOp")
    step.input.extend(f"^{target}" for target in targets)
    for number, tensor in enumerate(fetched):
        fetch = graph_def.node.add(name=f"{FETCH}_{number}", op="Identity", input=[tensor.name])
        fetch.attr["T"].type = tensor.dtype.base_dtype.as_datatype_enum


def normal_form(
    graph_def: GraphDef,
    variables: Sequence[GraphVariable],
    marked: Sequence[str | None] | None,
    feeds: Sequence[Feed],
    fetch_names: Sequence[str],
    initial: Mapping[str, np.ndarray],
) -> TrainingGraph:
    """Build the training graph of a captured one with the nodes of `add_ends`.

    `marked`: the variable of each number in gradient marks; None: the graph has no marks.
    """
    graph_def = _split_identities(inlined(graph_def))
    fetches = {name: TensorName(f"{FETCH}_{number}", 0) for number, name in enumerate(fetch_names)}
    targets = [node for node in graph_def.node if node.name == STEP]
    needed = GraphView(graph_def).upstream([STEP, *(one.node for one in fetches.values())])
    pruned = GraphDef(versions=graph_def.versions, library=graph_def.library)
    pruned.node.extend(_bare(node) for node in graph_def.node if node.name in needed)
    _refuse_unsupported(pruned)
    used = [one for one in variables if one.name in needed]
    gradients = _gradients(pruned, used, marked)
    return TrainingGraph(
        pruned,
        tuple(used),
        gradients,
        tuple(feed for feed in feeds if feed.tensor.node in needed),
        tuple(control_inputs(targets[0])),
        fetches,
        {one.name: initial[one.name] for one in used},
    )


def _bare(node: NodeDef) -> NodeDef:
    """Return the node without device and colocation: the plan decides where it runs."""
    bare = NodeDef()
    bare.CopyFrom(node)
    bare.device = ""
    if "_class" in bare.attr:
        del bare.attr["_class"]
    return bare


def _split_identities(graph_def: GraphDef) -> GraphDef:
    """Replace each IdentityN by one Identity per output: its outputs are independent."""
    renamed: dict[TensorName, str] = {}
    result = GraphDef(versions=graph_def.versions, library=graph_def.library)
    parts: dict[str, list[str]] = {}
    for node in graph_def.node:
        if node.op != "IdentityN":
            result.node.add().CopyFrom(node)
            continue
        control = [f"^{name}" for name in control_inputs(node)]
        dtypes = node.attr["T"].list.type
        for index, (tensor, dtype) in enumerate(zip(data_inputs(node), dtypes, strict=True)):
            name = f"{node.name}/{index}"
            part = result.node.add(name=name, op="Identity", input=[str(tensor), *control])
            part.attr["T"].type = dtype
            renamed[TensorName(node.name, index)] = f"{name}:0"
            parts.setdefault(node.name, []).append(f"^{name}")
    for node in result.node:
        data = [renamed.get(tensor, str(tensor)) for tensor in data_inputs(node)]
        control = [text for name in control_inputs(node) for text in parts.get(name, [f"^{name}"])]
        del node.input[:]
        node.input.extend([*data, *control])
    return result


def _refuse_unsupported(graph_def: GraphDef) -> None:
    bodies = (node for function in graph_def.library.function for node in function.node_def)
    for node in graph_def.node:
        if node.op in _LOOPS:
            raise InvalidInput(
                f"a loop or branch must be functional (While, If), but {node.name!r} is of type "
                f"{node.op}; call tf.compat.v1.enable_control_flow_v2() before the graph is built"
            )
    for node in (*graph_def.node, *bodies):
        if node.op in _LOCAL:
            raise InvalidInput(
                f"a step that runs on other hosts cannot call Python, but {node.name!r} is of "
                f"type {node.op}; write it with TensorFlow's operations"
            )
        if op_def_registry.get(node.op) is None and not _is_function(node.op, graph_def):
            raise InvalidInput(
                f"every operation must be known to TensorFlow, but {node.name!r} is of the "
                f"unknown type {node.op}; load its library with tf.load_op_library first"
            )


def _is_function(op: str, graph_def: GraphDef) -> bool:
    return any(function.signature.name == op for function in graph_def.library.function)


def _gradients(
    graph_def: GraphDef, variables: Sequence[GraphVariable], marked: Sequence[str | None] | None
) -> tuple[Gradient, ...]:
    known = {variable.name for variable in variables}
    if marked is None:
        gradients = _applied(graph_def, known)
    else:
        _refuse_hidden(graph_def, marked)
        gradients = _marked(graph_def, marked)
    if not gradients:
        raise InvalidInput(
            "a training step must compute gradients of variables with tf.GradientTape or "
            "tf.gradients, but none was found"
        )
    _refuse_chained(graph_def, gradients)
    order = _positions(graph_def)
    return tuple(sorted(gradients, key=lambda one: order[one.values.node]))


def _refuse_chained(graph_def: GraphDef, gradients: Sequence[Gradient]) -> None:
    """Refuse a gradient that depends on another: a plan may send the two in any order."""
    variable_of = {one.values.node: one.variable for one in gradients}
    readers: dict[str, list[str]] = defaultdict(list)
    for node in graph_def.node:
        for name in [*(one.node for one in data_inputs(node)), *control_inputs(node)]:
            readers[name].append(node.name)
    reached: set[str] = set()
    waiting = [reader for name in variable_of for reader in readers[name]]
    while waiting:
        name = waiting.pop()
        if name in variable_of:
            raise InvalidInput(
                "gradients of a step must not depend on each other, but that of "
                f"{variable_of[name]!r} is computed after another was used; give each update a "
                "step of its own"
            )
        if name not in reached:
            reached.add(name)
            waiting.extend(readers[name])


def _marked(graph_def: GraphDef, marked: Sequence[str | None]) -> list[Gradient]:
    parts: dict[str, dict[str, TensorName]] = {}
    for node in graph_def.node:
        if VARIABLE not in node.attr:
            continue
        variable = marked[node.attr[VARIABLE].i]
        if variable is None:
            continue
        part = node.attr[PART].s.decode()
        known = parts.setdefault(variable, {})
        if known and (part in known or "dense" in (part, *known)):
            raise InvalidInput(
                f"a step must compute the gradient of a variable once, but that of {variable!r} "
                f"is computed at {next(iter(known.values())).node!r} and {node.name!r}; "
                "add up the losses and differentiate their sum"
            )
        known[part] = TensorName(node.name, 0)
    return [
        Gradient(name, known["dense"])
        if "dense" in known
        else Gradient(name, known["values"], known["indices"])
        for name, known in parts.items()
        if known.keys() & {"dense", "values"}
    ]


def _refuse_hidden(graph_def: GraphDef, marked: Sequence[str | None]) -> None:
    for function in graph_def.library.function:
        for node in function.node_def:
            if VARIABLE in node.attr and _called(function.signature.name, graph_def):
                name = marked[node.attr[VARIABLE].i]
                raise InvalidInput(
                    f"the gradient of {name!r} is computed in the loop or branch "
                    f"{function.signature.name!r}, which cannot be rewritten; compute gradients "
                    "outside of tf.while_loop and tf.cond"
                )


def _called(function: str, graph_def: GraphDef) -> bool:
    """Whether a node of the graph calls this function, as a body or through one."""
    bodies = {one.signature.name: one.node_def for one in graph_def.library.function}
    waiting: list[Iterable[NodeDef]] = [graph_def.node]
    reached: set[str] = set()
    while waiting:
        for node in waiting.pop():
            for name in functions_of(node) - reached:
                reached.add(name)
                waiting.append(bodies.get(name, ()))
    return function in reached


def _applied(graph_def: GraphDef, known: set[str]) -> list[Gradient]:
    """Find gradients as the inputs of TensorFlow's own update operations."""
    gradients = []
    for node in graph_def.node:
        if not node.op.startswith(("ResourceApply", "ResourceSparseApply")):
            continue
        inputs = dict(zip(_input_names(node.op), data_inputs(node), strict=False))
        variable = inputs["var"].node
        if variable in known:
            values = inputs["delta" if "delta" in inputs else "grad"]  # of plain gradient descent
            gradients.append(Gradient(variable, values, inputs.get("indices")))
    return gradients


def _input_names(op: str) -> list[str]:
    return [argument.name for argument in op_def_registry.get(op).input_arg]


def _positions(graph_def: GraphDef) -> dict[str, int]:
    """Place of each node in the order of construction; a mark has that of its input."""
    place = {node.name: number for number, node in enumerate(graph_def.node)}
    for node in graph_def.node:
        if VARIABLE in node.attr:
            place[node.name] = place[TensorName.of(node.input[0]).node]
    return place
