"""The coarsened view (dPRO, sec. 5.3): ops that make no tensor join the op whose tensor is near, tensors of one op are one group.

By Theorem 3 with an empty tensor on one side such a fusion never hurts the overlap: in the backward pass an op without variables runs
before the op that it joins, so no gradient waits for it.

Rule (the released code's; REFERENCES, dPRO): walk the backward ops in post order. An op that feeds a tensor begins that tensor's layer;
another takes the one layer of its successors that have one; where these are several, or none, it is a layer of its own. The successors
of a backward op are the backward ops of what it reads in forward, so post order is forward order. A layer cannot be left and entered
again: what lies between would have to be of the layer, too. Forward ops follow their backward ops.

Where only the variables are known, those of one module (`conv1.weight`, `conv1.bias`) that are ready one after the other are a group.
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
    """Every layer as one kernel, as far as its ops are executed one after the other."""
    layer = layers_of(graph)
    joined = frozenset(
        number for number in range(len(layer) - 1) if layer[number] == layer[number + 1]
    )
    return OpFusion(joined, joined)


def tensor_groups(workload: Workload, graph: OpGraph | None = None) -> list[list[int]]:
    """Positions of the variables that one op makes, in gradient-ready order; each position once, groups of one dtype, sparse ones alone."""
    groups: list[list[int]] = []
    known: object = None
    for position, variable in enumerate(workload.variables):
        op: object = (
            graph.op_of_variable.get(variable.name)
            if graph is not None
            else module_of(variable.name)
        )
        key = (op, variable.dtype)
        if groups and key == known and not variable.sparse:
            groups[-1].append(position)
        else:
            groups.append([position])
        known = None if variable.sparse else key
    return groups


def module_of(name: str) -> str:
    """The name without its last part, as PyTorch and TensorFlow join them; a name of one part is its own."""
    return re.sub(r"[./][^./]*$", "", name)


def block_pattern(name: str) -> str:
    """A name with its numbers left out: equal for the same place in repeated blocks."""
    return re.sub(r"[0-9]+", "#", name)
