"""Nodes of a GraphDef by name, their inputs and their consumers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
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


def functions_of(node: NodeDef) -> set[str]:
    """The names of the functions that a node calls, or has as bodies."""
    names = {value.func.name for value in node.attr.values() if value.HasField("func")}
    for value in node.attr.values():
        names |= {one.name for one in value.list.func}
    return names


class GraphView:
    """An index of a GraphDef that does not change afterwards."""

    def __init__(self, graph_def: GraphDef) -> None:
        self.nodes: dict[str, NodeDef] = {node.name: node for node in graph_def.node}
        self.inputs = {name: tuple(data_inputs(node)) for name, node in self.nodes.items()}

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each node in the order of construction."""
        return {name: place for place, name in enumerate(self.nodes)}

    @cached_property
    def consumers(self) -> dict[str, list[str]]:
        """Names of the nodes that read an output of a node; control edges are no reads."""
        readers: dict[str, list[str]] = defaultdict(list)
        for name, inputs in self.inputs.items():
            for producer in {tensor.node for tensor in inputs}:
                readers[producer].append(name)
        return readers

    @cached_property
    def topological(self) -> tuple[str, ...]:
        """The names of all nodes, each after those whose data it reads."""
        order: list[str] = []
        placed: set[str] = set()
        for root in self.nodes:
            stack = [(root, False)]
            while stack:
                name, ready = stack.pop()
                if ready:
                    order.append(name)
                elif name not in placed:
                    placed.add(name)
                    stack.append((name, True))
                    stack.extend((one.node, False) for one in self.inputs[name])
        return tuple(order)

    @cached_property
    def turns(self) -> dict[str, int]:
        """The place of each node in the topological order."""
        return {name: place for place, name in enumerate(self.topological)}

    def upstream(
        self, names: Iterable[str], control: bool = True, stop: Collection[str] = ()
    ) -> set[str]:
        """Return `names` and every node they depend on, over control edges too if `control`.

        What the nodes of `stop` depend on does not count.
        """
        reached: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name in reached:
                continue
            reached.add(name)
            if name in stop:
                continue
            waiting.extend(tensor.node for tensor in self.inputs[name])
            if control:
                waiting.extend(control_inputs(self.nodes[name]))
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
