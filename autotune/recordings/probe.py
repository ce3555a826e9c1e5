"""Raw measurements of a probe of the links: the ranks take them, the fits read them.

Hosts are numbered in rank order, because ranks do not know the names of their hosts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from autotune.cluster import MAX_ERROR, Where
from autotune.errors import InvalidInput
from autotune.limits import MAX_BYTES, MAX_COUNT, MAX_RANKS, check_range, check_rate, check_seconds

HostPair = tuple[int, int]
"""Numbers of two hosts, the smaller one first."""


@dataclass(frozen=True)
class ProbePoint:
    """One message size: median and spread of `repeats` times of the slowest rank.

    `cpu_s`: mean over the ranks of the CPU time of one message. Under load it is the computation
    time lost to it.
    """

    __pydantic_config__ = {"extra": "forbid"}

    size_bytes: int
    seconds: float
    spread: float
    repeats: int
    cpu_s: float

    def __post_init__(self) -> None:
        what = f"of a probe with {self.size_bytes} bytes"
        check_range(self.size_bytes, 0, MAX_BYTES, "bytes of a probe")
        check_seconds(self.seconds, f"time {what}")
        check_range(self.spread, 0, MAX_ERROR, f"spread {what}")
        check_range(self.repeats, 1, MAX_COUNT, f"repeats {what}")
        if not math.isfinite(self.cpu_s):  # the loss of computation may be below 0
            raise InvalidInput(f"CPU time {what} must be finite, but is {self.cpu_s}")


@dataclass(frozen=True)
class ProbeSeries:
    """One collective on one kind of process group; `points` have ascending sizes.

    `loaded`: while every rank computes.
    """

    __pydantic_config__ = {"extra": "forbid"}

    primitive: str
    group_size: int
    where: Where
    loaded: bool
    points: tuple[ProbePoint, ...]

    def __post_init__(self) -> None:
        check_range(self.group_size, 1, MAX_RANKS, "ranks of a probe")
        sizes = [point.size_bytes for point in self.points]
        if not all(smaller < larger for smaller, larger in pairwise(sizes)):
            raise InvalidInput(f"the sizes of a probe must ascend, but are {sizes[:20]}")


@dataclass(frozen=True)
class LinkCost:
    """One-way cost between two devices.

    `relative_error`: largest distance of the fitted line from a measured time. `spread`: that of
    the repeats.
    """

    __pydantic_config__ = {"extra": "forbid"}

    bytes_per_s: float
    latency_s: float
    relative_error: float
    spread: float

    def __post_init__(self) -> None:
        check_rate(self.bytes_per_s, "rate of a link")
        check_seconds(self.latency_s, "latency of a link")
        for error in (self.relative_error, self.spread):
            check_range(error, 0, MAX_ERROR, "errors of a link")


class NoCost(StrEnum):
    """Why a link was probed without a result.

    TIME: it did not suffice for messages that show the bandwidth. FLAT: larger messages took no
    longer.
    """

    TIME = "time"
    FLAT = "flat"


@dataclass(frozen=True)
class PeerCost:
    """Cost of messages between a host and `peers` other hosts at once; see `cluster.PeerFit`."""

    __pydantic_config__ = {"extra": "forbid"}

    host: int
    peers: int
    outwards: bool
    bytes_per_s: float
    message_s: float
    relative_error: float
    spread: float

    def __post_init__(self) -> None:
        check_range(self.peers, 1, MAX_RANKS, "peers of a host")
        check_rate(self.bytes_per_s, "rate of a host with its peers")
        check_seconds(self.message_s, "time of a message to a peer")
        for error in (self.relative_error, self.spread):
            check_range(error, 0, MAX_ERROR, "errors of messages to peers")


@dataclass(frozen=True)
class ProbedLinks:
    """The measurements of a probe of the links.

    - `inside`: (host, cost between two of its devices).
    - `between`: cost of every pair of hosts.
    - `peers`: costs of hosts with several peers.
    - `missing`: probed links without a cost; the pair (h, h) is that of two devices of host h.
    """

    __pydantic_config__ = {"extra": "forbid"}

    inside: tuple[tuple[int, LinkCost], ...] = ()
    between: tuple[tuple[HostPair, LinkCost], ...] = ()
    peers: tuple[PeerCost, ...] = ()
    missing: tuple[tuple[HostPair, NoCost], ...] = ()
