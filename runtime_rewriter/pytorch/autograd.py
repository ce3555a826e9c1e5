"""The parameters in the autograd graph of a module's output: reachable ones, and neighbours."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.parallel.distributed import _find_tensors

NEAREST = 8
"""Variables kept per node while edges are contracted. Residual streams would otherwise connect
every pair of layers."""

_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        "Alias",
        "AsStrided",
        "Expand",
        "Permute",
        "ReshapeAlias",
        "Select",
        "Slice",
        "Split",
        "Squeeze",
        "T",
        "ToCopy",
        "Transpose",
        "UnsafeSplit",
        "Unsqueeze",
        "View",
    )
)
"""Views and casts of a variable: the transpose before a matrix product, the cast of autocast."""


def tensors_with_graph(output: object) -> list[Tensor]:
    """Tensors in a module's output, also in nested containers, from which backward can start."""
    tensors: list[Tensor] = _find_tensors(output)
    return [tensor for tensor in tensors if tensor.requires_grad and tensor.grad_fn is not None]


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _post_order(tensors: Iterable[Tensor], most_nodes: int) -> list[Node]:
    """Nodes in an order in which each follows all nodes below it; at most `most_nodes`."""
    order: list[Node] = []
    visited: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(t.grad_fn, False) for t in tensors if t.grad_fn is not None]
    while stack:
        node, finished = stack.pop()
        if finished:
            order.append(node)
            continue
        if node in visited or len(visited) >= most_nodes:
            continue
        visited.add(node)
        stack.append((node, True))
        stack.extend((child, False) for child in _children(node) if child not in visited)
    return order


def _leaf_index(node: Node, index_of: Callable[[Tensor], int | None]) -> int | None:
    """Index of the variable that an AccumulateGrad node belongs to."""
    variable = getattr(node, "variable", None)
    return index_of(variable) if isinstance(variable, Tensor) else None


def by_identity(parameters: Iterable[Tensor]) -> Callable[[Tensor], int | None]:
    """Parameter -> position. The caller keeps the tensors alive."""
    table: Mapping[int, int] = {
        id(parameter): position for position, parameter in enumerate(parameters)
    }
    return lambda tensor: table.get(id(tensor))


def reachable_variables(
    tensors: Iterable[Tensor], index_of: Callable[[Tensor], int | None]
) -> set[int]:
    """Variables that a backward pass from `tensors` can reach, in O(nodes)."""
    reachable: set[int] = set()
    visited: set[Node] = set()
    stack = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        leaf = _leaf_index(node, index_of)
        if leaf is not None:
            reachable.add(leaf)
        stack.extend(_children(node))
    return reachable


@torch.no_grad()
def variable_edges(
    tensors: Iterable[Tensor], index_of: Callable[[Tensor], int | None], most_nodes: int = 100_000
) -> set[tuple[int, int]]:
    """Unordered pairs (i < j) of variables whose operations are neighbours in the data-flow graph.

    An operation reads its own variables directly or through a chain of views and casts (`_VIEWS`).
    Operations without variables are contracted: two variables are neighbours if a path joins their
    operations without passing a third variable's. Only the `NEAREST` variables by hops count.
    """
    edges: set[tuple[int, int]] = set()
    near: dict[Node, dict[int, int]] = {}  # node -> visible variable -> hops
    chain: dict[Node, int] = {}  # leaf, or view of one -> its variable

    def connect(a: int, b: int) -> None:
        if a != b:
            edges.add((min(a, b), max(a, b)))

    for node in _post_order(tensors, most_nodes):
        leaf = _leaf_index(node, index_of)
        children = _children(node)
        if leaf is None and len(children) == 1 and node.name() in _VIEWS:
            leaf = chain.get(children[0])
        if leaf is not None:
            chain[node] = leaf
            continue
        direct = sorted({chain[child] for child in children if child in chain})
        visible: dict[int, int] = {}
        for child in children:
            for variable, hops in near.get(child, {}).items():
                if child not in chain:
                    visible[variable] = min(hops + 1, visible.get(variable, hops + 1))
        nearest = dict(sorted(visible.items(), key=lambda item: (item[1], item[0]))[:NEAREST])
        for a, b in pairwise(direct):
            connect(a, b)
        for a in direct:
            for b in nearest:
                connect(a, b)
        near[node] = dict.fromkeys(direct, 0) if direct else nearest
    return edges
