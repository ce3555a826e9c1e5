"""The events of a step in TensorFlow's RunMetadata, once per node.

`step_stats` lists a node several times: as it is scheduled, on each stream of its accelerator and
on the lanes that copy memory, and in every iteration of a loop. An op's event spans all of them.
Transfers between servers are there as `RecvTensor`, the hops of a collective as `RecvBuf`.

Only RunMetadata is read. The profiler's `xplane.pb` does not state which partition and transfer an
event belongs to; sessions on `tf.distribute.Server` fill RunMetadata on every version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_DEVICE = re.compile(r"(/job:[^/]+/replica:\d+/task:\d+)/(?:device:)?([A-Za-z_]+:\d+)(/.*)?", re.I)
_TRANSFER = re.compile(r"\[[^]]*\] \[[^]]*\] (\S+) from (\S+) to (\S+)")
_RECEIVED, _HOP = "RecvTensor", "RecvBuf"


@dataclass
class NodeEvent:
    """One run of a node. `memory`: (address, bytes) of each output.

    - `scratch_bytes`: allocated and freed while it ran. `in_use_bytes`: what its allocator held at
      its end, 0 where the allocator does not count.
    - `allocations`: (ns, bytes) of each block that it got, and negative bytes as that was freed.
    """

    name: str
    start_ns: int
    end_ns: int
    memory: tuple[tuple[int, int], ...] = ()
    scratch_bytes: int = 0
    in_use_bytes: int = 0
    allocations: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Transfer:
    """A tensor, or a part of a collective, that a server received from another."""

    key: str
    source: str
    target: str
    start_ns: int
    end_ns: int
    size_bytes: int

    @property
    def rendezvous(self) -> str:
        """The key that its `_Send` and `_Recv` share: tensor, sender, receiver."""
        return ";".join((self.key, self.source, self.target))


@dataclass(frozen=True)
class StepEvents:
    """`nodes`: device -> node -> event. `received` and `hops` are in order of start."""

    nodes: dict[str, dict[str, NodeEvent]]
    received: tuple[Transfer, ...]
    hops: tuple[Transfer, ...]

    def allocated_peak(self, device: str) -> int:
        """The most bytes that the nodes of a device had allocated at once in this step.

        Blocks of one microsecond count as allocated before any is freed.
        """
        changes = [
            one for event in self.nodes.get(device, {}).values() for one in event.allocations
        ]
        live_bytes = peak_bytes = 0
        for _, size in sorted(changes, key=lambda change: (change[0], -change[1])):
            live_bytes += size
            peak_bytes = max(peak_bytes, live_bytes)
        return peak_bytes


def device_name(text: str) -> str:
    """The device of a name that may also name a stream; as TensorFlow spells it in full."""
    match = _DEVICE.match(text)
    return text if match is None else f"{match[1]}/device:{match[2].upper()}"


def step_events(step_stats: Any) -> StepEvents:
    """The events of one step's `StepStats`."""
    nodes: dict[str, dict[str, NodeEvent]] = {}
    received: list[Transfer] = []
    hops: list[Transfer] = []
    for device in step_stats.dev_stats:
        for stats in device.node_stats:
            if stats.node_name in (_RECEIVED, _HOP):
                transfer = _transfer(stats)
                if transfer is not None:
                    (received if stats.node_name == _RECEIVED else hops).append(transfer)
                continue
            event = _event(stats)
            of_device = nodes.setdefault(device_name(device.device), {})
            known = of_device.setdefault(event.name, event)
            if known is not event:
                of_device[event.name] = _merged(known, event)
    return StepEvents(
        nodes,
        tuple(sorted(received, key=lambda one: one.start_ns)),
        tuple(sorted(hops, key=lambda one: one.start_ns)),
    )


def _event(stats: Any) -> NodeEvent:
    start_ns = stats.all_start_nanos or stats.all_start_micros * 1000
    length_ns = stats.op_end_rel_nanos or stats.op_end_rel_micros * 1000
    length_ns = length_ns or stats.all_end_rel_nanos or stats.all_end_rel_micros * 1000
    outputs = [output.tensor_description.allocation_description for output in stats.output]
    kept = stats.memory_stats.persistent_memory_size
    scratch = sum(allocator.peak_bytes for allocator in stats.memory)
    return NodeEvent(
        name=_node_name(stats.node_name),
        start_ns=start_ns,
        end_ns=start_ns + length_ns,
        memory=tuple((output.ptr, _size(output)) for output in outputs if _size(output)),
        scratch_bytes=max(scratch - kept, 0),
        in_use_bytes=max(
            (allocator.allocator_bytes_in_use for allocator in stats.memory), default=0
        ),
        allocations=tuple(
            (record.alloc_micros * 1000, record.alloc_bytes)
            for allocator in stats.memory
            for record in allocator.allocation_records
        ),
    )


def _size(allocation: Any) -> int:
    return int(allocation.allocated_bytes or allocation.requested_bytes)


def _node_name(text: str) -> str:
    """The node of `name:Op`, as streams name their events."""
    return text.partition("@@")[0].partition(":")[0]


def _merged(one: NodeEvent, other: NodeEvent) -> NodeEvent:
    return NodeEvent(
        name=one.name,
        start_ns=min(one.start_ns, other.start_ns),
        end_ns=max(one.end_ns, other.end_ns),
        memory=one.memory or other.memory,
        scratch_bytes=max(one.scratch_bytes, other.scratch_bytes),
        in_use_bytes=max(one.in_use_bytes, other.in_use_bytes),
        allocations=one.allocations + other.allocations,
    )


def _transfer(stats: Any) -> Transfer | None:
    match = _TRANSFER.match(stats.timeline_label)
    if match is None:
        return None
    start_ns = stats.all_start_nanos or stats.all_start_micros * 1000
    length_ns = stats.all_end_rel_nanos or stats.all_end_rel_micros * 1000
    sizes = [output.tensor_description.allocation_description for output in stats.output]
    return Transfer(
        key=match[1],
        source=device_name(match[2]),
        target=device_name(match[3]),
        start_ns=start_ns,
        end_ns=start_ns + length_ns,
        size_bytes=sum(one.requested_bytes for one in sizes),
    )


def all_events(events: StepEvents) -> Iterator[NodeEvent]:
    for of_device in events.nodes.values():
        yield from of_device.values()
