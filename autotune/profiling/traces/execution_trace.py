"""PyTorch execution traces: what was computed from what, without times. Also the newer form of them that Chakra reads.

A node has an id, a parent, a record-function id (`rf_id`) and inputs. Until schema 1.0.1 these are fields of the node; from 1.0.2 on
they are attributes and `ctrl_deps` names the parent. A collective's node (`record_param_comms`) holds what older Kineto traces lack:
the sequence number, the group and the sizes.

Kineto events are linked by record-function id where they have one. Older traces have none; their collectives are linked in order, and
only where names and sizes of the whole sequence agree.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.errors import InvalidInput
from autotune.profiling.traces.collectives import Collective
from autotune.profiling.traces.comm_args import COLLECTIVES, collective_name
from autotune.profiling.traces.json_stream import Field, JsonItems
from autotune.profiling.traces.rank_trace import MISSING, Comm, RankTrace, Repair
from autotune.profiling.traces.sources import Read

MAX_NODES = 20_000_000


@dataclass(frozen=True, eq=False)
class ExecutionTrace:
    """N nodes in the order of the file. `parent` (N,) holds ids, as `node_id` and `rf_id` do. `comms`: a node's index -> its collective."""

    source: str
    rank: int | None
    schema: str
    names: tuple[str, ...]
    name: NDArray[np.int32]
    node_id: NDArray[np.int64]
    parent: NDArray[np.int64]
    rf_id: NDArray[np.int64]
    thread: NDArray[np.int32]
    input_bytes: NDArray[np.float64]
    output_bytes: NDArray[np.float64]
    comms: dict[int, Comm]

    @property
    def nodes(self) -> int:
        return len(self.node_id)


def read_execution_trace(read: Read, where: str) -> ExecutionTrace:
    """Raises `InvalidInput` where it is none."""
    names: dict[str, int] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    sizes: list[tuple[float, float]] = []
    comms: dict[int, Comm] = {}
    schema = ""
    items = JsonItems(read, "nodes", where)
    for node in items:
        if isinstance(node, Field):
            schema = str(node.value)[:40] if node.key == "schema" else schema
            continue
        if not isinstance(node, dict) or not isinstance(node.get("id"), int) or not isinstance(node.get("name"), str):
            raise InvalidInput(f"{where}: node {items.items - 1} must be an object with an id and a name, but is {str(node)[:60]}")
        if len(rows) >= MAX_NODES:
            raise InvalidInput(f"{where} may hold at most {MAX_NODES} nodes, but has more")
        attributes = {a["name"]: a.get("value") for a in node.get("attrs", []) if isinstance(a, dict) and "name" in a}
        inputs, outputs = _tensors(node.get("inputs")), _tensors(node.get("outputs"))
        if node["name"] == "record_param_comms" and (comm := _comm(_values(node.get("inputs")), inputs, outputs)) is not None:
            comms[len(rows)] = comm
        parent = node.get("parent", node.get("ctrl_deps"))
        rf_id, thread = (node.get(key, attributes.get(key)) for key in ("rf_id", "tid"))
        name = names.setdefault(node["name"][:400], len(names))
        rows.append((name, node["id"], _int(parent), _int(rf_id), _int(thread)))
        sizes.append((_bytes(inputs), _bytes(outputs)))
    if not rows:
        raise InvalidInput(f"{where} must hold nodes, but has none")
    table = np.array(rows, dtype=np.int64)
    size = np.array(sizes, dtype=np.float64)
    return ExecutionTrace(
        where,
        _rank(where),
        schema,
        tuple(names),
        table[:, 0].astype(np.int32),
        table[:, 1],
        table[:, 2],
        table[:, 3],
        table[:, 4].astype(np.int32),
        size[:, 0],
        size[:, 1],
        comms,
    )


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62 else MISSING


def _rank(where: str) -> int | None:
    found = re.findall(r"\d{1,6}", PurePosixPath(where.replace(":", "/")).name)
    return int(found[-1]) if found else None


def _values(inputs: Any) -> list[Any]:
    """The list of values: itself, or under `values` in the newer form."""
    if isinstance(inputs, dict):
        inputs = inputs.get("values")
    return inputs if isinstance(inputs, list) else []


Tensor = tuple[int, int]


def _tensors(inputs: Any) -> list[Tensor]:
    """(elements, bytes per element) of every tensor, also of those in lists: [tensor id, storage id, offset, elements, bytes, device]."""
    found: list[Tensor] = []
    pending = list(_values(inputs))
    while pending and len(found) < 10**5:
        value = pending.pop(0)
        if not isinstance(value, list):
            continue
        if len(value) >= 6 and isinstance(value[5], str) and all(isinstance(part, int) for part in value[:5]):
            found.append((max(value[3], 0), max(value[4], 0)))
        elif value and isinstance(value[0], list):
            pending += value
    return found


def _bytes(tensors: list[Tensor]) -> float:
    return float(sum(elements * size for elements, size in tensors))


def _comm(values: list[Any], inputs: list[Tensor], outputs: list[Tensor]) -> Comm | None:
    """From [tensors, sequence, group, rank, name, ...]; the group is a number, or (name, description)."""
    place = next((n for n, value in enumerate(values) if isinstance(value, str) and collective_name(value) in COLLECTIVES), MISSING)
    if place < 0:
        return None
    scalars = [value for value in values[:place] if isinstance(value, int) and not isinstance(value, bool)]
    labels = [value[0] for value in values[:place] if isinstance(value, list) and value and isinstance(value[0], str)]
    return Comm(
        collective_name(values[place]),
        max(_bytes(inputs), _bytes(outputs)),
        group=str(labels[0])[:80] if labels else "",
        sequence=scalars[0] if scalars else MISSING,
    )


def enriched(
    traces: Sequence[RankTrace], collectives: Sequence[Sequence[Collective]], execution: Sequence[ExecutionTrace]
) -> tuple[tuple[tuple[Collective, ...], ...], list[Repair]]:
    """The collectives with the sequence numbers of the execution traces, where those fit; and how they were linked."""
    by_rank = {trace.rank: trace for trace in execution}
    linked, repairs = [], []
    for trace, own in zip(traces, collectives, strict=True):
        other = by_rank.get(trace.rank)
        if other is None:
            linked.append(tuple(own))
            continue
        found, how = _linked(own, other)
        linked.append(found)
        repairs.append(Repair(how, rank=trace.rank))
    return tuple(linked), repairs


def _linked(own: Sequence[Collective], other: ExecutionTrace) -> tuple[tuple[Collective, ...], str]:
    said = list(other.comms.values())
    names, theirs = [one.comm.name for one in own], [comm.name for comm in said]
    if names != theirs or any(a.comm.size_bytes and b.size_bytes < a.comm.size_bytes for a, b in zip(own, said, strict=True)):
        return tuple(own), "execution trace not linked: its collectives are not those of the Kineto trace"
    found = tuple(
        replace(
            a,
            comm=replace(
                a.comm,
                sequence=b.sequence if a.comm.sequence == MISSING else a.comm.sequence,
                size_bytes=max(a.comm.size_bytes, b.size_bytes),
            ),
        )
        for a, b in zip(own, said, strict=True)
    )
    return found, f"{len(found)} collectives linked to the execution trace in order, since the Kineto trace has no ids of it"
