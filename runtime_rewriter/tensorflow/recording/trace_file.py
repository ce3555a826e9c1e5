"""Writes recorded steps as Kineto traces, one per device.

The keys of transfers and collectives are those that PyTorch writes for NCCL, so the readers of such
traces understand them. An event's "Record function id" is the id of its node in `graph.json.gz`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.recordings.graph_file import GraphNode
from autotune.recordings.job_file import trace_name
from runtime_rewriter.tensorflow.recording.partitions import PartitionNode, Partitions
from runtime_rewriter.tensorflow.recording.step_events import NodeEvent, StepEvents, Transfer

Event = dict[str, Any]

_WAITS = "waits"
"""Field of an event, not written: the us for which it needs its lane before it starts. The replay
starts a transfer when its sender is ready."""
_KEY_CHARS = 160
"""Readers keep 200 characters of a transaction id."""

_COMPUTES, _SENDS, _RECEIVES, _COLLECTIVE, _HOPS = (
    *("pool", "sends", "receives", "collective", "hops"),
)


@dataclass(frozen=True)
class TraceWriter:
    """`devices`: in the order of their ranks. `replicas`: how many of them compute gradients.

    `hosts` (R,): the host of each device, "" where unknown. `begin_ns`: the time from which the
    traces count, since whole microseconds of an epoch leave a float no fractions.
    """

    partitions: Partitions
    nodes: Sequence[GraphNode]
    devices: Sequence[str]
    replicas: int
    hosts: Sequence[str]
    begin_ns: int

    def write(self, folder: Path, steps: Sequence[StepEvents]) -> None:
        """Write one trace per device, lightly packed. Raises `OSError`."""
        for rank, device in enumerate(self.devices):
            header = {
                "schemaVersion": 1,
                "displayTimeUnit": "ms",
                "baseTimeNanoseconds": self.begin_ns,
                "framework": "tensorflow",
                "host_name": self.hosts[rank],
                "distributedInfo": {
                    "backend": "tensorflow",
                    "rank": rank,
                    "world_size": len(self.devices),
                },
            }
            path = folder / trace_name(rank)
            partial = path.with_name(path.name + ".partial")
            with gzip.open(partial, "wt", compresslevel=2, encoding="utf-8") as file:
                file.write(json.dumps(header)[:-1] + ', "traceEvents": [')
                for number, event in enumerate(self._events(device, rank, steps)):
                    file.write((",\n" if number else "\n") + json.dumps(event))
                file.write("\n]}\n")
            partial.replace(path)

    def _events(self, device: str, rank: int, steps: Sequence[StepEvents]) -> Iterator[Event]:
        for number, events in enumerate(steps):
            of_step = list(self._step(device, rank, events))
            if not of_step:
                continue
            begin_us = min(event["ts"] for event in of_step)
            end_us = max(event["ts"] + event["dur"] for event in of_step)
            mark = {"pid": device, "tid": "step", "ts": begin_us, "dur": end_us - begin_us}
            yield {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", **mark}
            yield from _in_lanes(of_step)

    def _step(self, device: str, rank: int, events: StepEvents) -> Iterator[Event]:
        """The events of one device, with the group of their lanes as `tid`."""
        of_device = events.nodes.get(device, {})
        if not of_device:
            return
        begin_ns = min(event.start_ns for event in of_device.values())
        received = {one.rendezvous: one for one in events.received}
        for node in self.partitions.nodes:
            crosses = node.transfer in self.partitions.crossing
            if node.device != device or (node.transfer and not crosses):
                continue  # feeds and fetches are transfers, too, but to the client
            event = of_device.get(node.name)
            if node.sends:
                yield from self._send(node, events)
            elif node.receives:
                yield from self._receive(node, received.get(node.transfer), begin_ns, events)
            elif event is not None and node.collective is not None:
                yield self._collective(node, event)
            elif event is not None:
                computed = self._event(
                    node.name, "cpu_op", device, _COMPUTES, event.start_ns, event.end_ns
                )
                yield computed | {"args": {"Record function id": node.number, "op": node.op}}
        for hop in events.hops:
            if hop.target == device:
                name = f"hop from {hop.source}"
                args = {"key": hop.key, "bytes": hop.size_bytes}
                marked = self._event(
                    name, "user_annotation", device, _HOPS, hop.start_ns, hop.end_ns
                )
                yield marked | {"args": args}

    def _send(self, node: PartitionNode, events: StepEvents) -> Iterator[Event]:
        """A send takes no time of its own: it ends where its tensor is there."""
        at_ns = self._ready_ns(node, events)
        if at_ns is not None:
            args = self._transfer_args(node, 0, 0.0)
            yield self._communication(node, _SENDS, "send", at_ns, at_ns, args)

    def _ready_ns(self, sender: PartitionNode, events: StepEvents) -> int | None:
        """When the tensor of a `_Send` was there, None if its step did not compute it."""
        of_device = events.nodes.get(sender.device, {})
        names = [self.partitions.nodes[number].name for number in sender.inputs]
        return max((of_device[name].end_ns for name in names if name in of_device), default=None)

    def _receive(
        self, node: PartitionNode, transfer: Transfer | None, begin_ns: int, events: StepEvents
    ) -> Iterator[Event]:
        """From the sender's readiness to the arrival, which its first reader shows if none did."""
        of_device = events.nodes[node.device]
        if transfer is not None:
            start_ns = max(transfer.start_ns, begin_ns)
            end_ns = max(transfer.end_ns, start_ns)
        else:
            names = [
                self.partitions.nodes[reader].name
                for reader in self.partitions.consumers[node.number]
            ]
            readers = [of_device[name].start_ns for name in names if name in of_device]
            if not readers:
                return
            start_ns = end_ns = min(readers)
        # a nanosecond less, so that rounding never moves the issue in front of the step
        size_bytes = self.nodes[node.number].output_bytes
        args = self._transfer_args(node, size_bytes, max(start_ns - begin_ns - 1, 0) / 1e3)
        ready_ns = self._ready_ns(self.partitions.crossing[node.transfer][0], events)
        # without a sender the replay takes the whole time since the issue for the transfer
        from_ns = begin_ns if ready_ns is None else max(begin_ns, min(ready_ns, start_ns))
        waits_ns = start_ns - from_ns
        received = self._communication(node, _RECEIVES, "recv", start_ns, end_ns, args)
        yield received | {_WAITS: waits_ns / 1e3}

    def _transfer_args(self, node: PartitionNode, size_bytes: int, queue_us: float) -> Event:
        sender, receiver = self.partitions.crossing[node.transfer]
        ends = [self.devices.index(one.device) for one in (sender, receiver)]
        # the tensor's name begins with the number of its edge, so its first part is unique
        transaction = f"{node.transfer.partition(';')[0][:_KEY_CHARS]};{ends[0]}>{ends[1]}"
        return {
            "Process Group Ranks": json.dumps(ends),
            "Group size": 2,
            "Root Rank": ends[0],
            "In msg nelems": size_bytes,
            "dtype": "Byte",
            "autotune": {"transaction": transaction, "queue_us": round(queue_us, 3)},
        }

    def _communication(
        self, node: PartitionNode, lane: str, kind: str, start_ns: int, end_ns: int, args: Event
    ) -> Event:
        name = f"tf:{self._direction(node)} {node.transfer.partition(';')[0]}"
        args |= {"Collective name": kind, "Record function id": node.number}
        event = self._event(name, "user_annotation", node.device, lane, start_ns, end_ns)
        return event | {"args": args}

    def _direction(self, node: PartitionNode) -> str:
        """PULL for a variable on its way to a replica, PUSH for a gradient to a server."""
        sender, receiver = self.partitions.crossing[node.transfer]
        ranks = [self.devices.index(one.device) for one in (sender, receiver)]
        if (ranks[0] < self.replicas) != (ranks[1] < self.replicas):
            return "PUSH" if ranks[0] < self.replicas else "PULL"
        phases = [self.nodes[number].phase for number in sender.inputs]
        return "PUSH" if any(phase in ("backward", "update") for phase in phases) else "PULL"

    def _collective(self, node: PartitionNode, event: NodeEvent) -> Event:
        assert node.collective is not None
        kind, group, instance = node.collective
        members = [self.devices.index(one) for one in self.partitions.members(kind, group)]
        args: Event = {
            "Record function id": node.number,
            "Collective name": kind,
            "Process Group Name": group,
            "Process Group Ranks": json.dumps(members),
            "Group size": len(members),
            "In msg nelems": sum(size for _, size in event.memory),
            "dtype": "Byte",
            "autotune": {"transaction": f"{group}:{instance}"},
        }
        if node.op.startswith("CollectiveBcastSend"):
            args["Root Rank"] = self.devices.index(node.device)
        name = f"tf:{kind} {node.name}"
        marked = self._event(
            name, "user_annotation", node.device, _COLLECTIVE, event.start_ns, event.end_ns
        )
        return marked | {"args": args}

    def _event(
        self, name: str, category: str, device: str, lane: str, start_ns: int, end_ns: int
    ) -> Event:
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": device,
            "tid": lane,
            "ts": (start_ns - self.begin_ns) / 1e3,
            "dur": max(end_ns - start_ns, 0) / 1e3,
        }


def _in_lanes(events: Iterable[Event]) -> Iterator[Event]:
    """Number the lanes of each group: an event takes the first lane that is free as it starts.

    TensorFlow does not state the thread of an event, so lanes stand for the threads of its pool.
    """
    free_us: dict[str, list[float]] = {}
    waiting = [(event["ts"] - event.pop(_WAITS, 0.0), event) for event in events]
    for start_us, event in sorted(waiting, key=lambda pair: (pair[0], pair[1]["dur"])):
        lanes = free_us.setdefault(event["tid"], [])
        end_us = event["ts"] + event["dur"]
        lane = next((at for at, until_us in enumerate(lanes) if until_us <= start_us), len(lanes))
        if lane == len(lanes):
            lanes.append(end_us)
        lanes[lane] = end_us
        yield event | {"tid": f"{event['tid']} {lane}"}
