"""How a program reads the rows of a sparse gradient, which decides how they may be sent.

TensorFlow leaves rows of equal index apart. Most of its own optimizers add them up first, by the
operation `Unique`; those of Keras do not, so one that squares a gradient squares row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from runtime_rewriter.tensorflow.graph_view import GraphView, TensorName

Shapes = Mapping[TensorName, tuple[int | None, ...] | None]

_KEEP = frozenset({"Identity", "Cast", "Neg"})
_SCALE = {"Mul": (0, 1), "RealDiv": (0,), "DivNoNan": (0,)}
"""Places of an operand that is only scaled if the other one is a scalar."""
_ADD_UP = {
    "UnsortedSegmentSum": 0,
    "ResourceScatterAdd": 2,
    "ResourceScatterSub": 2,
    "TensorScatterAdd": 2,
    "TensorScatterSub": 2,
    "ScatterNd": 1,
}
"""The place of the rows in operations that add up those of equal index."""
_KEEP_INDICES = frozenset({"Identity", "Cast", "Reshape", "ExpandDims", "Unique"})
_CHANGE_ZEROS = frozenset(
    {
        *(f"ResourceScatter{kind}" for kind in ("Update", "NdUpdate", "Min", "Max", "Mul", "Div")),
        "TensorScatterUpdate",
    }
)
_LEAVE_ZEROS = frozenset({"ResourceSparseApplyAdagrad", "ResourceSparseApplyAdagradV2"})
"""Updates that leave a row with a gradient of 0 as it is."""


@dataclass(frozen=True)
class RowReaders:
    """The types of operations that restrict how rows are sent; None if there is none.

    `single`: takes each row for itself, so rows of equal index must stay apart. `touched`: changes
    each row that it gets, so no others may come.
    """

    single: str | None = None
    touched: str | None = None

    def dense_refusal(self, variable: str) -> str | None:
        """Why the gradient of a variable cannot be sent dense."""
        if self.single is not None:
            reads = (
                f"{self.single} of the gradient of {variable!r} takes each row for itself, but the "
                "plan sends it dense, which adds up rows of equal index"
            )
        elif self.touched is not None:
            reads = (
                f"{self.touched} of {variable!r} changes each row that it gets, but the plan sends "
                "the gradient dense, with all rows"
            )
        else:
            return None
        return f"{reads}; set sparse = all_gather or gather_scatter"


def row_readers(
    view: GraphView, shapes: Shapes, values: TensorName, indices: TensorName
) -> RowReaders:
    """Find the readers of a gradient with rows `values` of `indices`."""
    single = None if _are_distinct(view, indices) else _single_reader(view, shapes, values)
    return RowReaders(single, _touching(view, indices))


def _are_distinct(view: GraphView, indices: TensorName) -> bool:
    """Whether the program had added up rows of equal index before it handed out the gradient."""
    while _op(view, indices.node) == "Identity":
        indices = view.inputs[indices.node][0]
    return _op(view, indices.node) == "Unique"


def _single_reader(view: GraphView, shapes: Shapes, values: TensorName) -> str | None:
    waiting = [values]
    while waiting:
        tensor = waiting.pop()
        for name, places in _readers(view, tensor):
            op, inputs = _op(view, name), view.inputs[name]
            if places == [_ADD_UP.get(op)]:
                continue
            others = [one for place, one in enumerate(inputs) if place not in places]
            scales = len(places) == 1 and places[0] in _SCALE.get(op, ())
            if op in _KEEP or (scales and all(shapes[one] == () for one in others)):
                waiting.append(TensorName(name, 0))
            else:
                return op
    return None


def _touching(view: GraphView, indices: TensorName) -> str | None:
    waiting = [indices]
    while waiting:
        tensor = waiting.pop()
        for name, _ in _readers(view, tensor):
            op = _op(view, name)
            if op in _KEEP_INDICES:
                waiting.append(TensorName(name, 0))
            applies = op.startswith("ResourceSparseApply") and op not in _LEAVE_ZEROS
            if applies or op in _CHANGE_ZEROS:
                return op
    return None


def _op(view: GraphView, name: str) -> str:
    op: str = view.nodes[name].op
    return op


def _readers(view: GraphView, tensor: TensorName) -> Iterator[tuple[str, list[int]]]:
    """The nodes that read a tensor, and at which places."""
    for name in view.consumers.get(tensor.node, ()):
        places = [place for place, one in enumerate(view.inputs[name]) if one == tensor]
        if places:
            yield name, places
