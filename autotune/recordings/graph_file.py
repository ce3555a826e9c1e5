"""`graph.json.gz`, the graph of one step, next to the traces of a recorded TensorFlow job.

Traces hold the times; this file holds what every node reads, so no dependency is inferred. An
event's "Record function id" is the id of its node. Each device of the job is a rank.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from autotune.canonical import to_data
from autotune.errors import InvalidInput
from autotune.limits import MAX_BYTES, MAX_RANKS, check_range, check_seconds
from autotune.workload import Variable

SCHEMA = 1
GRAPH_FILE = "graph.json.gz"
NODES = "graphNodes"
MAX_NODES = 4_000_000
"""Nodes of all partitions. A ResNet-152 on one device has about 20,000."""


class NodePhase(StrEnum):
    """The pass that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"  # behind a gradient: synchronization and the optimizer
    OTHER = "other"


@dataclass(frozen=True)
class GraphNode:
    """One node of a partition.

    - `inputs`: ids of nodes of the same rank, over data and control edges.
    - `gradient_of`, `reads`: the variable whose gradient it computes, or that it reads; else "".
    - `output_bytes`: memory that its outputs take; `shared`: ids of inputs whose memory its outputs
      reuse instead. `scratch_bytes`: further memory while it runs.
    """

    __pydantic_config__ = {"extra": "forbid"}

    id: int
    rank: int
    name: str
    op: str
    phase: NodePhase = NodePhase.OTHER
    inputs: tuple[int, ...] = ()
    gradient_of: str = ""
    reads: str = ""
    output_bytes: int = 0
    shared: tuple[int, ...] = ()
    scratch_bytes: int = 0

    def __post_init__(self) -> None:
        where = f"of node {self.name!r}"
        check_range(self.id, 0, MAX_NODES, f"the id {where}")
        check_range(self.rank, 0, MAX_RANKS - 1, f"the rank {where}")
        check_range(self.output_bytes, 0, MAX_BYTES, f"output_bytes {where}")
        check_range(self.scratch_bytes, 0, MAX_BYTES, f"scratch_bytes {where}")


@dataclass(frozen=True)
class GraphDevice:
    """One rank.

    - `idle_bytes`: memory in use before a step, mostly variables. `peak_bytes`: the most during the
      recorded steps, as the allocator counted it. None where it does not count.
    """

    __pydantic_config__ = {"extra": "forbid"}

    rank: int
    device: str
    host: str
    idle_bytes: int | None = None
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        for value in (self.idle_bytes, self.peak_bytes):
            check_range(value or 0, 0, MAX_BYTES, f"bytes in use on {self.device!r}")


@dataclass(frozen=True)
class GraphSteps:
    """Times of the client's calls in seconds, with and without the recording."""

    __pydantic_config__ = {"extra": "forbid"}

    recorded_s: tuple[float, ...] = ()
    plain_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for step_s in (*self.recorded_s, *self.plain_s):
            check_seconds(step_s, "a step")


@dataclass(frozen=True)
class StepGraph:
    """The partitions of one step, and the variables that it trains."""

    nodes: tuple[GraphNode, ...]
    devices: tuple[GraphDevice, ...]
    variables: tuple[Variable, ...] = ()
    steps: GraphSteps = GraphSteps()

    def __post_init__(self) -> None:
        by_id = self.by_id
        if len(by_id) < len(self.nodes):
            raise InvalidInput("a step's graph must number each node once")
        for node in self.nodes:
            for source in (*node.inputs, *node.shared):
                if source not in by_id or by_id[source].rank != node.rank:
                    raise InvalidInput(
                        f"the inputs of a node must be nodes of its rank, but {node.name!r} reads "
                        f"{source}"
                    )

    @cached_property
    def by_id(self) -> dict[int, GraphNode]:
        return {node.id: node for node in self.nodes}

    def write(self, folder: Path) -> Path:
        """Write `graph.json.gz`, one node per line; return its path. Raises `OSError`."""
        path = folder / GRAPH_FILE
        partial = path.with_name(path.name + ".partial")
        with gzip.open(partial, "wt", compresslevel=2, encoding="utf-8") as file:
            file.writelines(self._lines())
        partial.replace(path)
        return path

    def _lines(self) -> Iterator[str]:
        fields = {
            "schema": SCHEMA,
            "items": NODES,  # readers know the file by its first bytes
            "devices": to_data(self.devices),
            "variables": to_data(self.variables),
            "steps": to_data(self.steps),
        }
        yield json.dumps(fields)[:-1] + f', "{NODES}": ['
        for number, node in enumerate(self.nodes):
            yield (",\n" if number else "\n") + json.dumps(to_data(node))
        yield "\n]}\n"
