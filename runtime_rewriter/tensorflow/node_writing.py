"""Writes nodes of a GraphDef: one method per kind of node, with its types filled in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef


def attribute(value: Any) -> AttrValue:
    """Return the attribute value of a Python one."""
    if isinstance(value, AttrValue):
        return value
    if isinstance(value, bool):
        return AttrValue(b=value)
    if isinstance(value, int):
        return AttrValue(i=value)
    if isinstance(value, float):
        return AttrValue(f=value)
    if isinstance(value, str):
        return AttrValue(s=value.encode())
    if isinstance(value, tf.DType):
        return AttrValue(type=value.as_datatype_enum)
    if isinstance(value, tf.TensorShape):
        return AttrValue(shape=value.as_proto())
    assert isinstance(value, np.ndarray), value
    return AttrValue(tensor=tf.make_tensor_proto(value))


class GraphWriter:
    """A GraphDef under construction. Each method adds nodes and returns the name of a tensor."""

    def __init__(self, graph_def: GraphDef) -> None:
        self.graph_def = graph_def
        self.names = {node.name for node in graph_def.node}
        self._device = ""
        self._scope = ""

    @contextmanager
    def at(self, device: str, scope: str) -> Iterator[None]:
        """Write nodes on `device`, named below `scope`."""
        before = self._device, self._scope
        self._device, self._scope = device, scope
        try:
            yield
        finally:
            self._device, self._scope = before

    def add(self, node: NodeDef) -> None:
        """Add a finished node."""
        self.names.add(node.name)
        self.graph_def.node.append(node)

    def node(
        self,
        op: str,
        name: str,
        inputs: Sequence[str] = (),
        control: Sequence[str] = (),
        **attributes: Any,
    ) -> str:
        """Add a node and return its name; `control` are names of nodes."""
        full = self._unique(f"{self._scope}/{name}")
        ends = (f"^{node}" for node in dict.fromkeys(control))
        added = self.graph_def.node.add(
            name=full, op=op, device=self._device, input=[*inputs, *ends]
        )
        for key, value in attributes.items():
            added.attr[key].CopyFrom(attribute(value))
        return full

    def _unique(self, name: str) -> str:
        number, chosen = 0, name
        while chosen in self.names:
            number += 1
            chosen = f"{name}_{number}"
        self.names.add(chosen)
        return chosen

    def constant(self, value: Any, dtype: Any, name: str = "constant") -> str:
        array = np.asarray(value, tf.as_dtype(dtype).as_numpy_dtype)
        return self.node("Const", name, dtype=tf.as_dtype(dtype), value=array)

    def identity(
        self, tensor: str, dtype: Any, name: str = "identity", control: Sequence[str] = ()
    ) -> str:
        return self.node("Identity", name, [tensor], control, T=tf.as_dtype(dtype))

    def cast(self, tensor: str, source: Any, target: Any) -> str:
        source, target = tf.as_dtype(source), tf.as_dtype(target)
        if source == target:
            return tensor
        return self.node("Cast", "cast", [tensor], SrcT=source, DstT=target)

    def bitcast(self, tensor: str, source: Any, target: Any) -> str:
        return self.node("Bitcast", "bitcast", [tensor], T=tf.as_dtype(source), type=target)

    def scale(self, tensor: str, factor: float, dtype: Any) -> str:
        inputs = [tensor, self.constant(factor, dtype, "factor")]
        return self.node("Mul", "scaled", inputs, T=tf.as_dtype(dtype))

    def reshape(self, tensor: str, shape: Sequence[int], dtype: Any) -> str:
        inputs = [tensor, self.constant(shape, tf.int32, "shape")]
        return self.node("Reshape", "reshape", inputs, T=tf.as_dtype(dtype), Tshape=tf.int32)

    def concat(self, tensors: Sequence[str], axis: int, dtype: Any) -> str:
        if len(tensors) == 1:
            return tensors[0]
        inputs = [*tensors, self.constant(axis, tf.int32, "axis")]
        return self.node(
            "ConcatV2", "concat", inputs, N=len(tensors), T=tf.as_dtype(dtype), Tidx=tf.int32
        )

    def padded(self, tensor: str, zeros: int, dtype: Any) -> str:
        """Append zeros to a flat tensor."""
        if not zeros:
            return tensor
        return self.concat([tensor, self.zeros([zeros], dtype)], 0, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> str:
        """A tensor of zeros, without storing them in the graph."""
        inputs = [self.constant(shape, tf.int32, "shape"), self.constant(0, dtype, "zero")]
        return self.node("Fill", "zeros", inputs, T=tf.as_dtype(dtype), index_type=tf.int32)

    def unary(self, op: str, tensor: str, dtype: Any) -> str:
        """An operation that keeps the dtype."""
        return self.node(op, op.lower(), [tensor], T=tf.as_dtype(dtype))

    def binary(self, op: str, left: str, right: str, dtype: Any) -> str:
        """An operation of two tensors of one dtype."""
        return self.node(op, op.lower(), [left, right], T=tf.as_dtype(dtype))

    def where(self, condition: str, then: str, otherwise: str, dtype: Any) -> str:
        inputs = [condition, then, otherwise]
        return self.node("SelectV2", "where", inputs, T=tf.as_dtype(dtype))

    def reduced(self, op: str, tensor: str, axes: Sequence[int], dtype: Any) -> str:
        """Reduce axes by `Max`, `Sum` and the like."""
        inputs = [tensor, self.constant(axes, tf.int32, "axes")]
        return self.node(
            op, op.lower(), inputs, T=tf.as_dtype(dtype), Tidx=tf.int32, keep_dims=False
        )

    def split(self, tensor: str, sizes: Sequence[int], axis: int, dtype: Any) -> list[str]:
        if len(sizes) == 1:
            return [tensor]
        inputs = [
            tensor,
            self.constant(sizes, tf.int64, "sizes"),
            self.constant(axis, tf.int32, "axis"),
        ]
        node = self.node(
            "SplitV", "split", inputs, num_split=len(sizes), T=tf.as_dtype(dtype), Tlen=tf.int64
        )
        return [f"{node}:{number}" for number in range(len(sizes))]

    def cut(self, tensor: str, start: Sequence[int], extent: Sequence[int], dtype: Any) -> str:
        inputs = [
            tensor,
            self.constant(start, tf.int32, "start"),
            self.constant(extent, tf.int32, "extent"),
        ]
        return self.node("Slice", "slice", inputs, T=tf.as_dtype(dtype), Index=tf.int32)

    def add_n(self, tensors: Sequence[str], dtype: Any, name: str = "sum") -> str:
        return self.node("AddN", name, tensors, N=len(tensors), T=tf.as_dtype(dtype))
