"""PyTorch execution traces and Chakra's: what was computed from what, without times.

A node has an id, a parent, a record-function id (`rf_id`) and inputs. What wrote it decides where they stand:

| form | parent | rf_id, tid | ids |
|---|---|---|---|
| PyTorch, schema 1.0.0 and 1.0.1 | field `parent` | fields | numbers |
| PyTorch, schema 1.0.2 to 1.1.1 (`1.1.1-chakra.0.0.4`) | `ctrl_deps`, a number | in the list `attrs`, as `value` | numbers |
| Chakra, JSON of protocol buffers | first of the list `ctrl_deps` or `ctrlDeps` | in `attr`, as `int64_val`, `stringVal`, ... | or text |

A collective is a node `record_param_comms`, whose inputs hold what older Kineto traces lack (sequence number, group, sizes), or one of
Chakra's type COMM_COLL_NODE, or the annotation of a backend (`gloo:all_reduce`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.arrays import FloatArray, Int32Array, IntArray
from autotune.errors import InvalidInput
from autotune.profiling.traces.comm_args import (
    COLLECTIVES,
    PARAM_COMMS,
    backend_collective,
    collective_name,
)
from autotune.profiling.traces.json_stream import Field, JsonItems
from autotune.profiling.traces.rank_trace import MISSING, Comm
from autotune.profiling.traces.sources import Read, rank_in_name

MAX_NODES = 20_000_000


@dataclass(frozen=True, eq=False)
class ExecutionTrace:
    """N nodes in the order of the file. `parent` (N,) holds ids, as `node_id` and `rf_id` do.

    `comms`: index of a `record_param_comms` -> its collective; `marks`: the same for Chakra's nodes and the annotations of backends.
    """

    source: str
    rank: int | None
    schema: str
    names: tuple[str, ...]
    name: Int32Array
    node_id: IntArray
    parent: IntArray
    rf_id: IntArray
    thread: Int32Array
    input_bytes: FloatArray
    output_bytes: FloatArray
    comms: Mapping[int, Comm]
    marks: Mapping[int, Comm]

    @property
    def nodes(self) -> int:
        return len(self.node_id)


def read_execution_trace(read: Read, where: str) -> ExecutionTrace:
    """Raises `InvalidInput` where it is none."""
    reader = _Reader(where)
    items = JsonItems(read, "nodes", where)
    for node in items:
        if isinstance(node, Field):
            reader.field(node)
        elif (
            not isinstance(node, dict)
            or (number := _id(node.get("id"))) == MISSING
            or not isinstance(node.get("name"), str)
        ):
            raise InvalidInput(
                f"{where}: node {items.items - 1} must be an object with an id and a name, but is {str(node)[:60]}"
            )
        elif items.items > MAX_NODES:
            raise InvalidInput(f"{where} may hold at most {MAX_NODES} nodes, but has more")
        else:
            reader.node(node, number)
    return reader.trace()


class _Reader:
    def __init__(self, where: str) -> None:
        self.where, self.schema = where, ""
        self.names: dict[str, int] = {}
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.sizes: list[tuple[float, float]] = []
        self.comms: dict[int, Comm] = {}
        self.marks: dict[int, Comm] = {}
        self.groups: dict[str, tuple[int, ...]] = {}

    def field(self, field: Field) -> None:
        if field.key in ("schema", "version"):
            self.schema = str(field.value)[:40]

    def node(self, node: dict[str, Any], number: int) -> None:
        attributes = _attributes(node)
        inputs, outputs = _tensors(node.get("inputs")), _tensors(node.get("outputs"))
        name = node["name"]
        if (
            name == PARAM_COMMS
            and (comm := _comm(_values(node.get("inputs")), inputs, outputs)) is not None
        ):
            self.comms[len(self.rows)] = comm
        elif (mark := _mark(node, attributes, inputs, outputs)) is not None:
            self.marks[len(self.rows)] = mark
        elif "process_group:init" in name:
            self.groups |= _groups(_values(node.get("inputs")))
        parent = node.get("parent", node.get("ctrl_deps", node.get("ctrlDeps")))
        if isinstance(parent, list):
            parent = parent[0] if parent else None
        rf_id, thread = (_id(node.get(key, attributes.get(key))) for key in ("rf_id", "tid"))
        self.rows.append(
            (self.names.setdefault(name[:400], len(self.names)), number, _id(parent), rf_id, thread)
        )
        self.sizes.append((_bytes(inputs), _bytes(outputs)))

    def trace(self) -> ExecutionTrace:
        if not self.rows:
            raise InvalidInput(f"{self.where} must hold nodes, but has none")
        table = np.array(self.rows, dtype=np.int64)
        size = np.array(self.sizes, dtype=np.float64)
        return ExecutionTrace(
            self.where,
            rank_in_name(self.where),
            self.schema,
            tuple(self.names),
            table[:, 0].astype(np.int32),
            table[:, 1],
            table[:, 2],
            table[:, 3],
            table[:, 4].astype(np.int32),
            size[:, 0],
            size[:, 1],
            self._grouped(self.comms),
            self._grouped(self.marks),
        )

    def _grouped(self, comms: dict[int, Comm]) -> Mapping[int, Comm]:
        return {
            node: replace(comm, group_ranks=self.groups.get(comm.group, ()))
            for node, comm in comms.items()
        }


def _id(value: Any) -> int:
    """A number, also one written as text, as JSON of protocol buffers does with those of 64 bits."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62
        else MISSING
    )


def _attributes(node: dict[str, Any]) -> dict[str, Any]:
    """Name -> value, whatever the value's key is."""
    listed = node.get("attrs", node.get("attr"))
    found: dict[str, Any] = {}
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, dict) and isinstance(one.get("name"), str):
            values = (
                value for key, value in one.items() if key == "value" or key.lower().endswith("val")
            )
            found[one["name"]] = next(values, None)
    return found


def _values(inputs: Any) -> list[Any]:
    """The list of values: itself, or under `values` in the newer form, in Chakra's as text."""
    if isinstance(inputs, dict):
        inputs = inputs.get("values")
    if isinstance(inputs, str):
        inputs = _parsed(inputs)
    return inputs if isinstance(inputs, list) else []


def _parsed(text: str) -> Any:
    """Chakra writes Python's form of the list."""
    try:
        return json.loads(
            text.replace("'", '"')
            .replace("True", "true")
            .replace("False", "false")
            .replace("None", "null")
        )
    except (ValueError, RecursionError):
        return None


Tensor = tuple[int, int]


def _tensors(inputs: Any) -> list[Tensor]:
    """(elements, bytes per element) of every tensor, also of those in lists: [tensor id, storage id, offset, elements, bytes, device]."""
    found: list[Tensor] = []
    pending = list(_values(inputs))
    while pending and len(found) < 10**5:
        value = pending.pop(0)
        if not isinstance(value, list):
            continue
        if (
            len(value) >= 6
            and isinstance(value[5], str)
            and all(isinstance(part, int) for part in value[:5])
        ):
            found.append((max(value[3], 0), max(value[4], 0)))
        elif value and isinstance(value[0], list):
            pending += value
    return found


def _bytes(tensors: list[Tensor]) -> float:
    return float(sum(elements * size for elements, size in tensors))


def _comm(values: list[Any], inputs: list[Tensor], outputs: list[Tensor]) -> Comm | None:
    """From [tensors, sequence, group, rank, name, ...]; newer forms have (sequence, whether point to point) and (name, description)."""
    place = next(
        (
            n
            for n, value in enumerate(values)
            if isinstance(value, str) and collective_name(value) in COLLECTIVES
        ),
        MISSING,
    )
    if place < 0:
        return None
    labels = [
        value[0]
        for value in values[:place]
        if isinstance(value, list) and value and isinstance(value[0], str)
    ]
    return Comm(
        collective_name(values[place]),
        max(_bytes(inputs), _bytes(outputs)),
        group=str(labels[0])[:80] if labels else "",
        sequence=next(
            (number for value in values[:place] if (number := _sequence(value)) != MISSING), MISSING
        ),
    )


def _sequence(value: Any) -> int:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[1], bool):
        value = value[0]
    return (
        value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else MISSING
    )


_CHAKRA_KINDS = (
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "broadcast",
    "all_to_all",
    "reduce_scatter",
    "reduce_scatter",
    "barrier",
)
"""By number of Chakra's CollectiveCommType (et_def.proto)."""
_CHAKRA_COLLECTIVE = ("COMM_COLL_NODE", 7)


def _mark(
    node: dict[str, Any], attributes: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]
) -> Comm | None:
    """The collective of a node of Chakra's own, or of a backend's annotation."""
    if node.get("type") in _CHAKRA_COLLECTIVE:
        kind = attributes.get("comm_type")
        number = _id(kind)
        known = (
            _CHAKRA_KINDS[number]
            if 0 <= number < len(_CHAKRA_KINDS)
            else collective_name(str(kind))
        )
        size = max(float(max(_id(attributes.get("comm_size")), 0)), _bytes(inputs), _bytes(outputs))
        return (
            Comm(known, size, group=str(attributes.get("pg_name") or "")[:80])
            if known in COLLECTIVES
            else None
        )
    kind = backend_collective(node["name"])
    return Comm(kind, max(_bytes(inputs), _bytes(outputs))) if kind else None


def _groups(values: list[Any]) -> dict[str, tuple[int, ...]]:
    """Name of a process group -> its ranks, from the text that PyTorch leaves in `## process_group:init ##`."""
    listed = _parsed(values[0]) if values and isinstance(values[0], str) else None
    found: dict[str, tuple[int, ...]] = {}
    for group in listed if isinstance(listed, list) else []:
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            whole = (
                range(size) if (size := _id(group.get("group_size"))) > 0 and size <= 10**6 else ()
            )
            found[str(group.get("pg_name"))[:80]] = tuple(ranks) or tuple(whole)
    return found
