"""Reads the variables of an AutoDist graph item, a protocol buffer around a TensorFlow GraphDef.

GraphItem: graph_def 1 (an Any: value 2), grad_target_pairs 2 (gradient -> variable). GraphDef: node
1. NodeDef: name 1, op 2, input 3, attr 5. AttrValue: type 6, shape 7. TensorShapeProto: dim 2 with
size 1, unknown_rank 3.
"""

from __future__ import annotations

from autotune.errors import InvalidInput
from autotune.wire import WireMessage
from autotune.workload import Variable

_DTYPES = {
    1: "float32",
    2: "float64",
    8: "complex64",
    14: "bfloat16",
    18: "complex128",
    19: "float16",
}
_VARIABLES = frozenset({"VarHandleOp", "VariableV2", "Variable"})
_GATHERS = frozenset({"ResourceGather", "Gather", "GatherV2", "ResourceGatherNd"})
_SAME = frozenset({"ReadVariableOp", "Identity"})
MAX_NODES = 2_000_000


def read_variables(data: bytes, where: str) -> list[Variable]:
    """The variables that have a gradient, in the graph's order.

    Raises `InvalidInput` where there is none or one has no fixed shape.
    """
    item = WireMessage(data, where)
    graph = b"".join(item.message(1).blobs(2)[-1:])
    targets = {pair.text(2).partition(":")[0] for pair in item.messages(2)}
    nodes = WireMessage(graph, where).messages(1)
    if len(nodes) > MAX_NODES:
        raise InvalidInput(f"{where} may hold at most {MAX_NODES} nodes, but has {len(nodes)}")
    gathered = _gathered(nodes)
    variables = [
        _variable(node, gathered, where)
        for node in nodes
        if node.text(2) in _VARIABLES and node.text(1) in targets
    ]
    missing = sorted(targets - {variable.name for variable in variables})
    if missing or not variables:
        name = missing[0] if missing else "all of them"
        raise InvalidInput(f"{where} must hold the variable of every gradient, but lacks {name!r}")
    return variables


def _variable(node: WireMessage, gathered: set[str], where: str) -> Variable:
    name = node.text(1)
    attributes = {entry.text(1): entry.message(2) for entry in node.messages(5)}
    shape = attributes["shape"].message(7) if "shape" in attributes else WireMessage(b"", where)
    dtype = _DTYPES.get(attributes["dtype"].number(6) if "dtype" in attributes else 0)
    extents = tuple(dimension.number(1) for dimension in shape.messages(2))
    if dtype is None or shape.number(3) or any(extent >= 2**40 for extent in extents):
        rule = "must have a floating-point type and a known shape"
        raise InvalidInput(f"{where}: variable {name!r} {rule}")
    return Variable(name, extents, dtype, sparse=name in gathered)


def _gathered(nodes: list[WireMessage]) -> set[str]:
    """Names of nodes whose rows a gather looks up, directly or through a read or an identity."""
    inputs = {node.text(1): _inputs(node) for node in nodes if node.text(2) in _SAME}
    gathered = set()
    for node in nodes:
        if node.text(2) in _GATHERS and (sources := _inputs(node)):
            source = sources[0]
            while source not in gathered:
                gathered.add(source)
                source = next(iter(inputs.get(source, [])), source)
    return gathered


def _inputs(node: WireMessage) -> list[str]:
    """Names of the nodes that a node reads, without output numbers."""
    return [text.partition(":")[0] for text in node.texts(3) if not text.startswith("^")]
