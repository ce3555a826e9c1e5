"""Replaces calls of functions by the nodes of their bodies."""

from __future__ import annotations

from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph_def

from runtime_rewriter.tensorflow.graph_view import TensorName, control_inputs, data_inputs

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
COMPILED = "_XlaMustCompile"


def inlined(graph_def: GraphDef) -> GraphDef:
    """Return the graph with each call of a function replaced by its body, recursively.

    A function that XLA must compile stays a call. Bodies of loops and branches stay functions.
    """
    library = {function.signature.name: function for function in graph_def.library.function}
    while any(_is_inlined(node) for node in graph_def.node):
        graph_def = _inlined_once(graph_def, library)
    return graph_def


def _is_inlined(node: NodeDef) -> bool:
    return node.op in CALLS and not node.attr[COMPILED].b


def _inlined_once(graph_def: GraphDef, library: dict[str, FunctionDef]) -> GraphDef:
    result = GraphDef(versions=graph_def.versions, library=graph_def.library)
    outputs: dict[TensorName, str] = {}
    ends: dict[str, list[str]] = {}
    for node in graph_def.node:
        if not _is_inlined(node):
            result.node.add().CopyFrom(node)
            continue
        body = _Body(node, library[node.attr["f"].func.name])
        result.node.extend(body.nodes)
        outputs.update(body.outputs)
        ends[node.name] = body.ends
    for node in result.node:
        _redirect(node, outputs, ends)
    return result


def _redirect(node: NodeDef, outputs: dict[TensorName, str], ends: dict[str, list[str]]) -> None:
    data = [outputs.get(tensor, str(tensor)) for tensor in data_inputs(node)]
    while any(TensorName.of(text) in outputs for text in data):  # a call that returns a call's
        data = [outputs.get(TensorName.of(text), text) for text in data]
    control: list[str] = []
    waiting = control_inputs(node)
    while waiting:
        name = waiting.pop(0)
        if name in ends:
            waiting.extend(ends[name])
        else:
            control.append(f"^{name}")
    del node.input[:]
    node.input.extend([*data, *dict.fromkeys(control)])


class _Body:
    """The nodes of one call, renamed below the name of the call."""

    def __init__(self, call: NodeDef, function: FunctionDef) -> None:
        graph_def, flat_names = function_def_to_graph_def(function)
        arguments = [arg.name for arg in function.signature.input_arg]
        given = dict(zip(arguments, map(str, data_inputs(call)), strict=True))
        before = [f"^{name}" for name in control_inputs(call)]
        self.prefix = call.name
        self.nodes: list[NodeDef] = []
        for node in graph_def.node:
            if node.name in given:
                continue
            copy = NodeDef()
            copy.CopyFrom(node)
            copy.name = f"{self.prefix}/{node.name}"
            data = [self._tensor(tensor, given) for tensor in data_inputs(node)]
            control = [
                f"^{TensorName.of(given[name]).node}" if name in given else f"^{self.prefix}/{name}"
                for name in control_inputs(node)
            ]
            del copy.input[:]
            copy.input.extend([*data, *control, *before])
            self.nodes.append(copy)
        self.outputs: dict[TensorName, str] = {}
        for index, result in enumerate(function.signature.output_arg):
            flat = TensorName.of(flat_names[function.ret[result.name]])
            self.outputs[TensorName(call.name, index)] = self._tensor(flat, given)
        self.ends = [f"{self.prefix}/{name}" for name in function.control_ret.values()]
        self.ends += [TensorName.of(text).node for text in self.outputs.values()]

    def _tensor(self, tensor: TensorName, given: dict[str, str]) -> str:
        return given.get(tensor.node) or f"{self.prefix}/{tensor}"
