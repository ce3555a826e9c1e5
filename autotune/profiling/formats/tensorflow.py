"""Reads `graph.json.gz`, the graph of a recorded TensorFlow step.

The times of its nodes are in Kineto traces, which `kineto` reads. TensorFlow's own RunMetadata is a
protocol buffer; the recorder converts it, so this package needs no TensorFlow.
"""

from __future__ import annotations

from typing import Any

from autotune.errors import InvalidInput
from autotune.limits import MAX_RANKS, MAX_VARIABLES
from autotune.parsing import parse, refuse_newer
from autotune.profiling.formats.json_stream import Field, JsonItems, Read
from autotune.recordings.graph_file import (
    MAX_NODES,
    NODES,
    SCHEMA,
    GraphDevice,
    GraphNode,
    GraphSteps,
    StepGraph,
)
from autotune.workload import Variable


def read_step_graph(read: Read, where: str) -> StepGraph:
    """Read one graph. Raises `InvalidInput` for a field that breaks a rule."""
    fields: dict[str, Any] = {}
    nodes: list[GraphNode] = []
    for item in JsonItems(read, NODES, where):
        if isinstance(item, Field):
            fields[item.key] = item.value
        elif len(nodes) == MAX_NODES:
            raise InvalidInput(f"{where} may hold at most {MAX_NODES} nodes, but has more")
        else:
            nodes.append(parse(GraphNode, item, f"{where}, node {len(nodes)}"))
    refuse_newer(fields, SCHEMA, "recorded graph", where)
    devices = _listed(fields, "devices", MAX_RANKS, where)
    variables = _listed(fields, "variables", MAX_VARIABLES, where)
    return StepGraph(
        nodes=tuple(nodes),
        devices=tuple(parse(GraphDevice, one, f"{where}, devices") for one in devices),
        variables=tuple(parse(Variable, one, f"{where}, variables") for one in variables),
        steps=parse(GraphSteps, fields.get("steps", {}), f"{where}, steps"),
    )


def _listed(fields: dict[str, Any], key: str, most: int, where: str) -> list[Any]:
    value = fields.get(key, [])
    if not isinstance(value, list) or len(value) > most:
        raise InvalidInput(f"{where}: {key} must be a list of at most {most} entries")
    return value
