"""Nodes of a GraphDef by name, their inputs and their consumers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef


class TensorName(NamedTuple):
    """An output of a node."""

    node: str
    output: int

    @staticmethod
    def of(text: str) -> TensorName:
        node, _, index = text.partition(":")
        return TensorName(node, int(index or 0))

    def __str__(self) -> str:
        return f"{self.node}:{self.output}"


def data_inputs(node: NodeDef) -> list[TensorName]:
    return [TensorName.of(text) for text in node.input if not text.startswith("^")]


def control_inputs(node: NodeDef) -> list[str]:
    return [text[1:] for text in node.input if text.startswith("^")]


class GraphView:
    """An index of a GraphDef that does not change afterwards."""

    def __init__(self, graph_def: GraphDef) -> None:
        self.nodes: dict[str, NodeDef] = {node.name: node for node in graph_def.node}

    @cached_property
    def consumers(self) -> dict[str, list[str]]:
        """Names of the nodes that read an output of a node; control edges are no reads."""
        readers: dict[str, list[str]] = defaultdict(list)
        for node in self.nodes.values():
            for producer in {tensor.node for tensor in data_inputs(node)}:
                readers[producer].append(node.name)
        return readers

    def upstream(self, names: Iterable[str], control: bool = True) -> set[str]:
        """Return `names` and every node they depend on, over control edges too if `control`."""
        reached: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name in reached:
                continue
            reached.add(name)
            node = self.nodes[name]
            waiting.extend(tensor.node for tensor in data_inputs(node))
            if control:
                waiting.extend(control_inputs(node))
        return reached

    def downstream(self, names: Iterable[str]) -> set[str]:
        """Return `names` and every node that depends on their data."""
        reached: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                waiting.extend(self.consumers.get(name, ()))
        return reached

    def of_types(self, types: Iterable[str]) -> Iterator[NodeDef]:
        wanted = frozenset(types)
        return (node for node in self.nodes.values() if node.op in wanted)
