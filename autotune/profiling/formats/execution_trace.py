"""Reads PyTorch's and Chakra's execution traces: which op computed what from what, without times.

A node has an id, a parent, a record-function id (`rf_id`) and inputs. Their place depends on the
writer:

| form | parent | rf_id, tid | ids |
|---|---|---|---|
| PyTorch, schema 1.0.0 and 1.0.1 | field `parent` | fields | numbers |
| PyTorch, schema 1.0.2 to 1.1.1 | `ctrl_deps`, a number | in list `attrs`, as `value` | numbers |
| Chakra, also as read by `chakra.py` | first of list `ctrl_deps` or `ctrlDeps` | in `attr`, as
`int64_val`, `stringVal`, ... | numbers or text |

A collective is a node `record_param_comms`, a node of Chakra's type COMM_COLL_NODE, or the
annotation of a backend (`gloo:all_reduce`). The inputs of the first hold what older Kineto traces
lack: sequence number, group and sizes.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.arrays import FloatArray, Int32Array, IntArray
from autotune.errors import InvalidInput
from autotune.limits import MAX_ELEMENTS, MAX_RANKS
from autotune.profiling.formats.collective_args import (
    COLLECTIVES,
    PARAM_COMMS,
    backend_collective,
    collective_name,
)
from autotune.profiling.formats.json_stream import Field, JsonItems, Read
from autotune.profiling.formats.limits import MAX_GROUP_RANKS, limited, limited_rank
from autotune.profiling.formats.rank_trace import MISSING, Comm

MAX_NODES = 20_000_000
MAX_ELEMENT_BYTES = 16
"""The size of complex128, the largest type of torch."""
MAX_BYTES = MAX_ELEMENTS * MAX_ELEMENT_BYTES


@dataclass(frozen=True, eq=False)
class ExecutionTrace:
    """N nodes in the order of the file. `parent` (N,) holds ids, as `node_id` and `rf_id` do.

    `process`: the process id, "" where the trace does not state it. It leads to the rank, which an
    execution trace does not state.

    `comms`: index of a `record_param_comms` -> its collective. `marks`: the same for Chakra's nodes
    and the annotations of backends.
    """

    source: str
    process: str
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
    """Read one execution trace. Raises `InvalidInput` for any other file."""
    return trace_of_nodes(JsonItems(read, "nodes", where), where)


def trace_of_nodes(items: Iterable[Any], where: str) -> ExecutionTrace:
    """The trace of a file's nodes and of the `Field`s next to them. Raises `InvalidInput`."""
    reader = _ExecutionTraceReader(where)
    count = 0
    for node in items:
        if isinstance(node, Field):
            if node.key in ("schema", "version") and node.value:
                reader.schema = str(node.value)[:40]
            elif node.key == "pid" and (process := _id(node.value)) != MISSING:
                reader.process = str(process)
            continue
        number = _id(node.get("id")) if isinstance(node, dict) else MISSING
        if number == MISSING or not isinstance(node.get("name"), str):
            raise InvalidInput(
                f"{where}: node {count} must be an object with an id and a name, but is "
                f"{str(node)[:60]}"
            )
        if count >= MAX_NODES:
            raise InvalidInput(f"{where} may hold at most {MAX_NODES} nodes, but has more")
        try:
            reader.add(node, number)
        except InvalidInput as error:
            place = f"{where}, node {count}"
            raise InvalidInput(f"{place}: {error}; is the file damaged?") from error
        count += 1
    return reader.trace()


class _ExecutionTraceReader:
    def __init__(self, where: str) -> None:
        self.where, self.schema, self.process = where, "", ""
        self.names: dict[str, int] = {}
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.sizes: list[tuple[float, float]] = []
        self.comms: dict[int, Comm] = {}
        self.marks: dict[int, Comm] = {}
        self.groups: dict[str, tuple[int, ...]] = {}

    def add(self, node: dict[str, Any], number: int) -> None:
        attributes = _attributes(node)
        inputs = _values(node.get("inputs"))
        input_bytes, output_bytes = (
            _tensor_bytes(inputs),
            _tensor_bytes(_values(node.get("outputs"))),
        )
        size_bytes = max(input_bytes, output_bytes)
        name, row = node["name"], len(self.rows)
        comm = _comm(inputs, size_bytes) if name == PARAM_COMMS else None
        if comm is not None:
            self.comms[row] = comm
        elif (mark := _mark(node, attributes, size_bytes)) is not None:
            self.marks[row] = mark
        elif "process_group:init" in name:
            self.groups |= _groups(inputs)
            total = sum(map(len, self.groups.values()))
            limited(total, MAX_GROUP_RANKS, "ranks in all groups of a trace")
        parent = node.get("parent", node.get("ctrl_deps", node.get("ctrlDeps")))
        if isinstance(parent, list):
            parent = parent[0] if parent else None
        rf_id, thread = (_id(node.get(key, attributes.get(key))) for key in ("rf_id", "tid"))
        name_number = self.names.setdefault(name[:400], len(self.names))
        self.rows.append((name_number, number, _id(parent), rf_id, thread))
        self.sizes.append((input_bytes, output_bytes))

    def trace(self) -> ExecutionTrace:
        if not self.rows:
            raise InvalidInput(f"{self.where} must hold nodes, but has none")
        name, node_id, parent, rf_id, thread = np.array(self.rows, dtype=np.int64).T
        input_bytes, output_bytes = np.array(self.sizes, dtype=np.float64).T
        return ExecutionTrace(
            source=self.where,
            process=self.process,
            schema=self.schema,
            names=tuple(self.names),
            name=name.astype(np.int32),
            node_id=node_id,
            parent=parent,
            rf_id=rf_id,
            thread=thread.astype(np.int32),
            input_bytes=input_bytes,
            output_bytes=output_bytes,
            comms=self._grouped(self.comms),
            marks=self._grouped(self.marks),
        )

    def _grouped(self, comms: dict[int, Comm]) -> Mapping[int, Comm]:
        return {
            node: replace(comm, group_ranks=self.groups.get(comm.group, ()))
            for node, comm in comms.items()
        }


def _id(value: Any) -> int:
    """A number, also one written as text, as JSON of protocol buffers writes 64-bit numbers."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and abs(value) < 2**62 else MISSING


def _attributes(node: dict[str, Any]) -> dict[str, Any]:
    """Name -> value, whatever the value's key is."""
    listed = node.get("attrs", node.get("attr"))
    attributes: dict[str, Any] = {}
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, dict) and isinstance(one.get("name"), str):
            keys = [key for key in one if key == "value" or key.lower().endswith("val")]
            attributes[one["name"]] = one[keys[0]] if keys else None
    return attributes


def _values(inputs: Any) -> list[Any]:
    """The list of values: `inputs`, or its `values` in newer forms, in Chakra's as text."""
    if isinstance(inputs, dict):
        inputs = inputs.get("values")
    if isinstance(inputs, str):
        inputs = _parsed(inputs)
    return inputs if isinstance(inputs, list) else []


def _parsed(text: str) -> Any:
    """Parse a list that Chakra wrote in Python's form."""
    text = text.replace("'", '"').replace("None", "null")
    try:
        return json.loads(text.replace("True", "true").replace("False", "false"))
    except (ValueError, RecursionError):
        return None


def _tensor_bytes(values: list[Any]) -> float:
    """Bytes of all tensors, including those in lists.

    A tensor is [tensor id, storage id, offset, elements, bytes per element, device].
    """
    total, tensors = 0, 0
    pending = deque(values)
    while pending and tensors < 10**5:
        value = pending.popleft()
        if not isinstance(value, list):
            continue
        is_tensor = len(value) >= 6 and isinstance(value[5], str)
        if is_tensor and all(isinstance(part, int) for part in value[:5]):
            tensors += 1
            elements = limited(value[3], MAX_ELEMENTS, "elements in a tensor")
            total += elements * limited(value[4], MAX_ELEMENT_BYTES, "bytes in an element")
        elif value and isinstance(value[0], list):
            pending += value
    return float(total)


def _comm(values: list[Any], size_bytes: float) -> Comm | None:
    """The collective of [tensors, sequence, group, rank, name, ...].

    Newer forms have (sequence, whether point to point) and (name, description) in their places.
    """
    places = [
        place
        for place, value in enumerate(values)
        if isinstance(value, str) and collective_name(value) in COLLECTIVES
    ]
    if not places:
        return None
    place = places[0]
    lists = [value for value in values[:place] if isinstance(value, list) and value]
    labels = [value[0] for value in lists if isinstance(value[0], str)]
    sequences = [number for value in values[:place] if (number := _sequence(value)) != MISSING]
    return Comm(
        collective_name(values[place]),
        size_bytes,
        group=str(labels[0])[:80] if labels else "",
        sequence=sequences[0] if sequences else MISSING,
    )


def _sequence(value: Any) -> int:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[1], bool):
        value = value[0]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value < 2**53 else MISSING


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


def _mark(node: dict[str, Any], attributes: dict[str, Any], size_bytes: float) -> Comm | None:
    """The collective of one of Chakra's own nodes, or of a backend's annotation."""
    if node.get("type") in _CHAKRA_COLLECTIVE:
        kind = attributes.get("comm_type")
        number = _id(kind)
        is_number = 0 <= number < len(_CHAKRA_KINDS)
        name = _CHAKRA_KINDS[number] if is_number else collective_name(str(kind))
        if name not in COLLECTIVES:
            return None
        stated = limited(_id(attributes.get("comm_size")), MAX_BYTES, "bytes in a message")
        size_bytes = max(float(stated), size_bytes)
        return Comm(name, size_bytes, group=str(attributes.get("pg_name") or "")[:80])
    name = backend_collective(node["name"])
    return Comm(name, size_bytes) if name else None


def _groups(values: list[Any]) -> dict[str, tuple[int, ...]]:
    """Process group -> its ranks, from PyTorch's text in `## process_group:init ##`."""
    listed = _parsed(values[0]) if values and isinstance(values[0], str) else None
    groups: dict[str, tuple[int, ...]] = {}
    total = 0
    for group in listed if isinstance(listed, list) else []:
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            size = limited(_id(group.get("group_size")), MAX_RANKS, "ranks in a group")
            total = limited(total + size, MAX_GROUP_RANKS, "ranks in all groups of a trace")
            whole = tuple(map(limited_rank, ranks)) or tuple(range(size))
            groups[str(group.get("pg_name"))[:80]] = whole
    return groups
