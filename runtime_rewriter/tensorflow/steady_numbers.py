"""Replaces every random number in a graph by one value, so that all rows of a batch are alike.

Gradients then depend on rows alone, as without random numbers: dropout drops nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from runtime_rewriter.tensorflow.graph_view import control_inputs

NUMBER = 0.999
"""A uniform number at which dropout keeps an element, for any rate below it."""
_KINDS = ("Uniform", "Normal")
_OPS = frozenset(
    {
        *("RandomUniform", "RandomStandardNormal", "TruncatedNormal"),
        *(f"StatelessRandom{kind}" for kind in _KINDS),
        *(f"StatelessRandom{kind}V2" for kind in _KINDS),
        *("StatelessTruncatedNormal", "StatelessTruncatedNormalV2"),
    }
)
"""Ops that fill a shape, their first input, with random floats, their only output."""
_VALUE = "autotune_steady_number"


def are_steadied(ops: Iterable[str]) -> bool:
    """Whether `steady` replaces all of these ops that draw random numbers."""
    return _OPS.issuperset(ops)


def steady(graph_def: GraphDef) -> None:
    """Replace what draws random floats, also in functions, in place."""
    _steady(graph_def.node, "")
    for function in graph_def.library.function:
        _steady(function.node_def, ":output:0")


def _steady(nodes: Any, suffix: str) -> None:
    """`suffix`: that of the name of a constant's tensor among these nodes."""
    dtypes: dict[int, str] = {}
    for node in nodes:
        if node.op in _OPS:
            dtype = node.attr["dtype"].type
            dtypes.setdefault(dtype, f"{_VALUE}_{dtype}")
            _fill(node, f"{dtypes[dtype]}{suffix}", dtype)
    for dtype, name in dtypes.items():
        nodes.append(_constant(name, dtype))


def _fill(node: NodeDef, value: str, dtype: int) -> None:
    """Make a node one that fills its shape with the tensor `value`."""
    sizes = next(node.attr[name].type for name in ("Tshape", "T") if name in node.attr)
    inputs = [node.input[0], value, *(f"^{name}" for name in control_inputs(node))]
    node.op = "Fill"
    node.attr.clear()
    node.attr["T"].type, node.attr["index_type"].type = dtype, sizes
    del node.input[:]
    node.input.extend(inputs)


def _constant(name: str, dtype: int) -> NodeDef:
    node = NodeDef(name=name, op="Const")
    node.attr["dtype"].type = dtype
    value = tf.make_tensor_proto(NUMBER, dtype=tf.as_dtype(dtype), shape=[])
    node.attr["value"].tensor.CopyFrom(value)
    return node
