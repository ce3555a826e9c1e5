"""Raw measurements of a probe of the links: the ranks take them, the fits read them.

Hosts are numbered in rank order, because ranks do not know the names of their hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.cluster import Where

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


@dataclass(frozen=True)
class ProbedLinks:
    """`inside`: (host, cost between two of its devices).

    `between`: cost of every pair of hosts that was probed.
    """

    __pydantic_config__ = {"extra": "forbid"}

    inside: tuple[tuple[int, LinkCost], ...] = ()
    between: tuple[tuple[HostPair, LinkCost], ...] = ()
