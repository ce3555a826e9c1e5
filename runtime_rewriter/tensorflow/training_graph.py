"""A single-device training program as a graph: what the rewriter reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from runtime_rewriter.tensorflow.graph_view import GraphView, TensorName, functions_of
from runtime_rewriter.tensorflow.row_readers import RowReaders, row_readers


@dataclass(frozen=True)
class GraphVariable:
    """A resource variable. `name` is also the name of its VarHandleOp in the graph."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Gradient:
    """The gradient of a variable: one dense tensor, or rows (`values`) and their `indices`."""

    variable: str
    values: TensorName
    indices: TensorName | None = None

    @property
    def sparse(self) -> bool:
        return self.indices is not None


@dataclass(frozen=True)
class Feed:
    """A placeholder that each step fills. `split`: its batch dimension is unknown."""

    name: str
    tensor: TensorName
    split: bool


@dataclass(frozen=True)
class Types:
    """Shape (None: its rank is unknown) and dtype of each tensor, as TensorFlow infers them."""

    shapes: dict[TensorName, tuple[int | None, ...] | None]
    dtypes: dict[TensorName, str]

    @staticmethod
    def of(graph_def: GraphDef) -> Types:
        graph = tf.Graph()
        with graph.as_default():
            tf.import_graph_def(graph_def, name="")
        types = Types({}, {})
        for op in graph.get_operations():
            for output in op.outputs:
                name, shape = TensorName(op.name, output.value_index), output.shape
                types.shapes[name] = None if shape.rank is None else tuple(shape.as_list())
                types.dtypes[name] = output.dtype.name
        return types


@dataclass(frozen=True)
class TrainingGraph:
    """One training step on one device.

    A step fills the `feeds`, runs the nodes `targets` and returns the tensors `fetches`.
    `gradients` are in the order in which the program computes them. `initial` holds a value for
    each variable. `program_readers`: those of the program, if this graph stands for another one.
    """

    graph_def: GraphDef = field(repr=False)
    variables: tuple[GraphVariable, ...]
    gradients: tuple[Gradient, ...]
    feeds: tuple[Feed, ...]
    targets: tuple[str, ...]
    fetches: Mapping[str, TensorName]
    initial: Mapping[str, np.ndarray]
    program_readers: Mapping[str, RowReaders] | None = None

    @cached_property
    def view(self) -> GraphView:
        return GraphView(self.graph_def)

    @cached_property
    def types(self) -> Types:
        return Types.of(self.graph_def)

    @cached_property
    def gradient_nodes(self) -> frozenset[str]:
        """The nodes that give the values and indices of gradients."""
        tensors = (tensor for one in self.gradients for tensor in (one.values, one.indices))
        return frozenset(tensor.node for tensor in tensors if tensor is not None)

    def with_bodies(self, names: Iterable[str]) -> Iterator[NodeDef]:
        """Yield these nodes, and those of all functions that they call."""
        bodies = {one.signature.name: one.node_def for one in self.graph_def.library.function}
        waiting: list[Iterable[NodeDef]] = [[self.view.nodes[name] for name in names]]
        called: set[str] = set()
        while waiting:
            for node in waiting.pop():
                yield node
                new = functions_of(node) - called
                called |= new
                waiting += [bodies.get(name, ()) for name in new]

    @cached_property
    def row_readers(self) -> Mapping[str, RowReaders]:
        """How the rows of each sparse gradient may be sent."""
        if self.program_readers is not None:
            return self.program_readers
        return {
            one.variable: row_readers(self.view, self.types.shapes, one.values, one.indices)
            for one in self.gradients
            if one.indices is not None
        }

    def row_indices(self, rank: int) -> dict[str, str]:
        """The indices of each sparse gradient as a tensor of a replica, by variable."""
        return {
            one.variable: f"replica_{rank}/{one.indices}" for one in self.gradients if one.sparse
        }

    def rows_only(self, variable: str) -> bool:
        """Whether the program must get the rows of a gradient as rows."""
        readers = self.row_readers.get(variable)
        return readers is not None and readers.dense_refusal(variable) is not None

    @cached_property
    def by_name(self) -> dict[str, GraphVariable]:
        return {variable.name: variable for variable in self.variables}

    def index_dtype(self, gradient: Gradient) -> tf.DType:
        """The type of the indices of a gradient that has rows."""
        assert gradient.indices is not None
        return tf.as_dtype(self.view.nodes[gradient.indices.node].attr["T"].type)

    @cached_property
    def gradient_of(self) -> dict[str, Gradient]:
        return {gradient.variable: gradient for gradient in self.gradients}
