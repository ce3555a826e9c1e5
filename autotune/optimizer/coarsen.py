"""The coarsened view (dPRO, sec. 5.3): ops without a tensor join an op with a tensor nearby.

By Theorem 3 with one empty tensor, such a fusion never hurts the overlap: in the backward pass, the
joining op runs before the op with the tensor, so no gradient waits for it.

The rule is that of the released code. Walk the backward ops in post order. An op that feeds a
tensor begins that tensor's layer. Another op takes the layer of its successors if they have exactly
one, otherwise it is a layer of its own. The successors of a backward op are the backward ops of its
forward inputs, so post order is forward order. A layer cannot be left and entered again, since the
ops between would have to belong to it. Forward ops follow their backward ops.

Without an op graph, the variables of one module (`conv1.weight`, `conv1.bias`) that are ready one
after the other are a group.
"""

from __future__ import annotations

import re

from autotune.profiling.op_graph import OpFusion, OpGraph
from autotune.workload import Workload


def layers_of(graph: OpGraph) -> list[int]:
    """The layer of every op, shape (O,): the number of the op that began it."""
    layer: list[int] = []
    for number, op in enumerate(graph.ops):
        near = {layer[before] for before in graph.predecessors[number]}
        layer.append(number if op.variables or len(near) != 1 else near.pop())
    return layer


def coarse_fusion(graph: OpGraph) -> OpFusion:
    """Every layer as one kernel, as far as its ops run one after the other."""
    layer = layers_of(graph)
    joined = frozenset(
        number for number in range(len(layer) - 1) if layer[number] == layer[number + 1]
    )
    return OpFusion(joined, joined)


def tensor_groups(workload: Workload, graph: OpGraph | None = None) -> list[list[int]]:
    """Positions of the variables of each op, in gradient-ready order.

    Every position occurs once. A group has one dtype; a sparse variable is alone.
    """
    groups: list[list[int]] = []
    previous: object = None
    for position, variable in enumerate(workload.variables):
        op: object = module_of(variable.name)
        if graph is not None:
            op = graph.op_of_variable.get(variable.name)
        key = (op, variable.dtype)
        if groups and key == previous and not variable.sparse:
            groups[-1].append(position)
        else:
            groups.append([position])
        previous = None if variable.sparse else key
    return groups


def module_of(name: str) -> str:
    """The name without its last part, as PyTorch and TensorFlow join them; a single part stays."""
    return re.sub(r"[./][^./]*$", "", name)


def block_pattern(name: str) -> str:
    """The name without its numbers: equal for the same place in repeated blocks."""
    return re.sub(r"[0-9]+", "#", name)
