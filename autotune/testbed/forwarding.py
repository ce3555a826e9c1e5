"""Forwarding of the relay: a latency per pair of hosts, a rate per pair and per downlink. Pure.

A frame that a host sent at time t is at the switch at t + latency of the pair. Every link of its
path (the pair's, if there is one, and the target's downlink) then sends it behind the frames that
came before. The frame arrives when the slowest link has sent it. A message that leaves the sender's
interface frame by frame thus takes latency + bytes / rate. A link's queue has `build.queue_bytes`;
a frame that meets a full queue is dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.testbed.build import FRAMING, queue_bytes
from autotune.testbed.layout import Layout

VNET_HEADER_BYTES = 10
"""struct virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset."""
HEADERS_BYTES = 66
"""Ethernet, IPv4 and TCP with timestamps, which every segment but the first adds to a GSO frame."""
HOST_PREFIX = bytes.fromhex("02770000")  # see `layout.mac`


@dataclass(frozen=True)
class Paths:
    """`link_bytes_per_s[link]` on the wire; `links[source][target]`: links that a frame passes."""

    __pydantic_config__ = {"extra": "forbid"}

    link_bytes_per_s: tuple[float, ...]
    links: tuple[tuple[tuple[int, ...], ...], ...]
    latency_s: tuple[tuple[float, ...], ...]


def paths_of(layout: Layout) -> Paths:
    """Link number i is the downlink of host i; the pairs' links follow."""
    hosts = range(len(layout.hosts))
    rates = [host.link_bytes_per_s * FRAMING for host in layout.hosts]
    rows = []
    for source in hosts:
        row: list[tuple[int, ...]] = []
        for target in hosts:
            lane = layout.lane(source, target) if source != target else None
            back = layout.lane(target, source) if source != target else None
            downlink = () if back and back.dedicated else (target,)
            if lane:
                rates.append(lane.link_bytes_per_s * FRAMING)
            row.append((*downlink, len(rates) - 1) if lane else downlink)
        rows.append(tuple(row))
    latency_s = tuple(
        tuple(layout.added_latency_s(a, b) if a != b else 0.0 for b in hosts) for a in hosts
    )
    return Paths(tuple(rates), tuple(rows), latency_s)


class Forwarding:
    """Takes frames (with their virtio header) as they come, and returns them when they are due."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._s_per_byte = [1 / rate for rate in paths.link_bytes_per_s]
        self._room_s = [queue_bytes(rate) / rate for rate in paths.link_bytes_per_s]
        self._free_s = [0.0] * len(
            paths.link_bytes_per_s
        )  # when a link has sent all that was put on it
        self._arriving: list[
            tuple[float, int, int, int, bytes]
        ] = []  # heap: time, number, source, target, frame
        self._leaving: list[tuple[float, int, int, bytes]] = []  # heap: time, number, target, frame
        self._number = 0
        self.dropped = 0

    def take(self, now: float, source: int, frame: bytes) -> None:
        """Take a frame to one host by its address, or to all by a group address; drop others."""
        latency_s = self._paths.latency_s[source]
        for target in self._targets(source, frame):
            self._number += 1
            heapq.heappush(
                self._arriving, (now + latency_s[target], self._number, source, target, frame)
            )

    def due(self, now: float) -> Iterator[tuple[int, bytes]]:
        """The frames that have reached their targets by `now`, in order, as (target, frame)."""
        arriving, leaving = self._arriving, self._leaving
        while arriving and arriving[0][0] <= now:
            self._send(*heapq.heappop(arriving))
        while leaving and leaving[0][0] <= now:
            _, _, target, frame = heapq.heappop(leaving)
            yield target, frame

    def next_s(self) -> float | None:
        """Next time at which `due` has work; None: no frame is on its way."""
        times = [heap[0][0] for heap in (self._arriving, self._leaving) if heap]
        return min(times) if times else None

    def _targets(self, source: int, frame: bytes) -> list[int]:
        to = frame[VNET_HEADER_BYTES : VNET_HEADER_BYTES + 6]
        hosts = len(self._paths.latency_s)
        if to[:4] == HOST_PREFIX:
            target = int.from_bytes(to[4:], "big")
            return [target] if target < hosts and target != source else []
        everybody = bool(to) and bool(to[0] & 1)
        return [target for target in range(hosts) if target != source] if everybody else []

    def _send(self, ready: float, number: int, source: int, target: int, frame: bytes) -> None:
        free, links = self._free_s, self._paths.links[source][target]
        if any(free[link] - ready > self._room_s[link] for link in links):
            self.dropped += 1
            return
        wire, arrives = wire_bytes(frame), ready
        for link in links:
            free[link] = max(ready, free[link]) + wire * self._s_per_byte[link]
            arrives = max(arrives, free[link])
        heapq.heappush(self._leaving, (arrives, number, target, frame))


def wire_bytes(frame: bytes) -> int:
    """Bytes on the wire of all segments of a frame with virtio header (gso_size 0: one segment)."""
    data = len(frame) - VNET_HEADER_BYTES
    segment = frame[4] | frame[5] << 8
    if not segment:
        return data
    segments = max(1, -(-(data - HEADERS_BYTES) // segment))
    return data + (segments - 1) * HEADERS_BYTES
