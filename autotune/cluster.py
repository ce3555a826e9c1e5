"""Where the replicas run: hosts, their devices and the links between them, with fitted costs.

Workers (ranks) are numbered host by host: the first host's devices are ranks 0..d-1, and so on.
Nothing is stored per pair of workers: a link is a host's own interface, unless a pair is named.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from autotune.arrays import FloatArray
from autotune.canonical import LATER, content_id, to_data
from autotune.errors import InvalidInput
from autotune.limits import (
    MAX_BYTES,
    MAX_RANKS,
    MIN_BYTES_PER_S,
    check_range,
    check_rate,
    check_seconds,
)
from autotune.parsing import parse, refuse_newer

MAX_NAMED = 20
"""Hosts that an error message names."""
MAX_FITS = 512
"""A probe has fewer than 100 combinations of collective, group and load."""
MAX_BENDS = 8
MAX_ERROR = 1e6
"""Largest relative error or spread of a fit: times a million apart fit no line."""
FITTED = (
    *("all_reduce", "reduce_scatter_all_gather", "push_pull", "direct_exchange"),
    *("reduce", "broadcast"),
    *("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"),
)
"""Operations that a probe times (`runtime_rewriter/probe/operations.py`)."""


@dataclass(frozen=True)
class Host:
    """A machine: `devices` workers that share one network interface and one memory-speed link
    inside.

    `cores`: CPU cores that they share; 0 if unknown. `address`: of its Ray node; "" if any node
    with enough room will do.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    devices: int
    link_bytes_per_s: float
    latency_s: float
    inner_bytes_per_s: float
    inner_latency_s: float
    memory_bytes: int = 0
    address: str = ""
    cores: int = 0

    def __post_init__(self) -> None:
        of = f"of host {self.name!r}"
        check_range(self.devices, 1, MAX_RANKS, f"devices {of}")
        check_range(self.cores, 0, MAX_RANKS, f"cores {of}")
        check_range(self.memory_bytes, 0, MAX_BYTES, f"memory {of} (bytes)")
        check_rate(self.link_bytes_per_s, f"bandwidth {of}")
        check_rate(self.inner_bytes_per_s, f"inner bandwidth {of}")
        check_seconds(self.latency_s, f"latency {of}")
        check_seconds(self.inner_latency_s, f"inner latency {of}")


@dataclass(frozen=True)
class PairLink:
    """A link between two hosts that differs from their own interfaces."""

    __pydantic_config__ = {"extra": "forbid"}

    between: tuple[str, str]
    link_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        of = f"of link {self.between[0]!r} - {self.between[1]!r}"
        check_rate(self.link_bytes_per_s, f"bandwidth {of}")
        check_seconds(self.latency_s, f"latency {of}")


class Where(StrEnum):
    """The ranks that a collective was probed on."""

    WORLD = "world"
    HOST = "host"  # ranks of one host
    ACROSS = "across"  # ranks on different hosts


@dataclass(frozen=True)
class Bend:
    """A byte costs `s_per_byte` up to `until_bytes`."""

    __pydantic_config__ = {"extra": "forbid"}

    until_bytes: float
    s_per_byte: float


@dataclass(frozen=True)
class CollectiveFit:
    """Measured cost of one collective on `group_size` ranks, by the bytes of the whole tensor; for
    gather and scatter, of one rank's tensor.

    seconds = alpha_s + beta_s_per_byte * bytes if one line fits. Otherwise the cost is piecewise
    linear, continuous and never falls: each of the `bends` gives the cost per byte up to its size,
    and beta_s_per_byte applies beyond the last one, also beyond the largest probe.

    `relative_error`: median of |fitted - measured| / measured over the probed sizes. `large_error`:
    their maximum from 1 MiB up (None: no such size). `spread`: median over the sizes of the
    repeats' interquartile range over their median. `sizes`: number of sizes. `cpu_alpha_s` and
    `cpu_beta_s_per_byte` fit the CPU time that one rank spends on it (all its threads, mean over
    the ranks), which it may take from computation. With `loaded`, every rank computed meanwhile,
    and they fit the seconds of computation that a rank lost to it.
    """

    __pydantic_config__ = {"extra": "forbid"}

    primitive: str
    group_size: int
    alpha_s: float
    beta_s_per_byte: float
    relative_error: float
    smallest_bytes: int
    largest_bytes: int
    cpu_alpha_s: float = 0.0
    cpu_beta_s_per_byte: float = 0.0
    where: Where = Where.WORLD
    loaded: bool = False
    bends: tuple[Bend, ...] = ()
    large_error: float | None = None
    spread: float = 0.0
    sizes: int = 0

    def __post_init__(self) -> None:
        if self.primitive not in FITTED:
            raise InvalidInput(
                f"a fit must be of one of {', '.join(FITTED)}, but is of {self.primitive!r}"
            )
        check_range(self.group_size, 1, MAX_RANKS, f"group_size of the fit of {self.primitive!r}")
        what = f"largest_bytes of the fit of {self.primitive!r}"
        check_range(self.smallest_bytes, 0, self.largest_bytes, f"smallest_bytes, up to {what},")
        check_range(self.largest_bytes, 0, MAX_BYTES, what)
        of = f"of the fit of {self.primitive!r}"
        for what in ("alpha_s", "cpu_alpha_s"):
            check_seconds(getattr(self, what), f"{what} {of}")
        bends_s = (bend.s_per_byte for bend in self.bends)
        for cost_s in (self.beta_s_per_byte, self.cpu_beta_s_per_byte, *bends_s):
            check_range(cost_s, 0, 1 / MIN_BYTES_PER_S, f"costs {of} (seconds per byte)")
        for error in (self.relative_error, self.spread, self.large_error or 0.0):
            check_range(error, 0, MAX_ERROR, f"errors {of}")
        sizes = (0.0, *(bend.until_bytes for bend in self.bends), math.inf)
        if len(self.bends) > MAX_BENDS or not all(a < b for a, b in pairwise(sizes)):
            rule = f"needs at most {MAX_BENDS} bends at ascending finite sizes above 0"
            raise InvalidInput(
                f"the fit of {self.primitive!r} {rule}, but has them at {sizes[1:-1]}"
            )

    @property
    def identity(self) -> tuple[str, int, Where, bool]:
        """The key under which a newer probe replaces this fit."""
        return self.primitive, self.group_size, self.where, self.loaded

    def cpu_s(self, message_bytes: float) -> float:
        return self.cpu_alpha_s + self.cpu_beta_s_per_byte * message_bytes

    def seconds(self, message_bytes: float) -> float:
        return float(self.seconds_each(np.array([message_bytes], dtype=np.float64))[0])

    def seconds_each(self, message_bytes: FloatArray) -> FloatArray:
        """The cost of each message; the shape of the sizes."""
        seconds, reached = np.full(message_bytes.shape, self.alpha_s), 0.0
        for bend in self.bends:
            width = bend.until_bytes - reached
            seconds += bend.s_per_byte * np.clip(message_bytes - reached, 0.0, width)
            reached = bend.until_bytes
        seconds += self.beta_s_per_byte * np.maximum(message_bytes - reached, 0.0)
        return seconds


@dataclass(frozen=True)
class LinkFit:
    """Measured one-way cost of a host's own link, or (`inside`) of one between two of its devices.

    A slower other end hides a link: the fastest host's fit is the rate of the second fastest.
    `relative_error`: maximum of |fitted - measured| / measured over the large messages. `spread`:
    as in `CollectiveFit`. `probes`: number of pairs of hosts that measured it.
    """

    __pydantic_config__ = {"extra": "forbid"}

    host: str
    inside: bool
    bytes_per_s: float
    latency_s: float
    relative_error: float
    spread: float
    probes: int = 1

    def __post_init__(self) -> None:
        of = f"of the link of {self.host!r}"
        check_rate(self.bytes_per_s, f"bandwidth {of}")
        check_seconds(self.latency_s, f"latency {of}")
        for what in ("relative_error", "spread"):
            check_range(getattr(self, what), 0, MAX_ERROR, f"{what} {of}")


@dataclass(frozen=True)
class PeerFit:
    """Measured cost of point-to-point messages between a host and `peers` other hosts at once.

    seconds = peers * message_s + bytes / bytes_per_s, with the bytes of all messages together. One
    peer: the cost of a single message. `outwards`: the host sends; otherwise it receives. Slower
    peers hide the rate of a host's own interface. Errors as in `LinkFit`.
    """

    __pydantic_config__ = {"extra": "forbid"}

    host: str
    peers: int
    outwards: bool
    bytes_per_s: float
    message_s: float
    relative_error: float
    spread: float

    def __post_init__(self) -> None:
        of = f"of the messages of {self.host!r} to {self.peers} peers"
        check_range(self.peers, 1, MAX_RANKS, f"peers of {self.host!r}")
        check_rate(self.bytes_per_s, f"bandwidth {of}")
        check_seconds(self.message_s, f"message_s {of}")
        for what in ("relative_error", "spread"):
            check_range(getattr(self, what), 0, MAX_ERROR, f"{what} {of}")


@dataclass(frozen=True)
class Cluster:
    """Hosts and links. `source` is "assumed" until a probe fits the links' costs ("measured").

    The probe ran `software` at `measured_at` (ISO). `measured_on`: what emulated a real cluster in
    that probe (`records.Conditions.label`), or "". `machine_cores`: CPU cores of the one machine
    that all hosts are emulated on or are processes of; 0: each host is a machine.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    hosts: tuple[Host, ...]
    pair_links: tuple[PairLink, ...] = ()
    fits: tuple[CollectiveFit, ...] = ()
    source: str = "assumed"
    schema: int = 1
    link_fits: tuple[LinkFit, ...] = ()
    measured_at: str = ""
    software: tuple[tuple[str, str], ...] = ()
    measured_on: str = ""
    machine_cores: int = 0
    peer_fits: tuple[PeerFit, ...] = field(default=(), metadata=LATER)

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not names:
            raise InvalidInput(f"cluster {self.name!r} needs at least one host")
        known = set(names)
        hosts = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
        if len(known) != len(names):
            raise InvalidInput(f"host names must be unique, but are {hosts}")
        check_range(self.world_size, 1, MAX_RANKS, f"devices of cluster {self.name!r}")
        check_range(self.machine_cores, 0, MAX_RANKS, f"machine_cores of cluster {self.name!r}")
        linked = set[frozenset[str]]()
        for link in self.pair_links:
            pair = frozenset(link.between)
            if len(pair) < 2 or pair in linked:
                raise InvalidInput(
                    "a link must join two hosts that no other link joins, but one is between "
                    f"{' and '.join(link.between)}; remove it"
                )
            linked.add(pair)
            for end in link.between:
                if end not in known:
                    raise InvalidInput(f"a link names host {end!r}, but the hosts are {hosts}")
        fitted = [fit.host for fit in self.link_fits] + [fit.host for fit in self.peer_fits]
        for name in fitted:
            if name not in known:
                raise InvalidInput(f"a fitted link names host {name!r}, but the hosts are {hosts}")
        if len(self.fits) > MAX_FITS:
            raise InvalidInput(
                f"cluster {self.name!r} may hold at most {MAX_FITS} fits, but has {len(self.fits)}"
            )

    @staticmethod
    def local(workers: int) -> Cluster:
        """One machine with `workers` workers over loopback, its figures assumed until probed."""
        host = Host("localhost", workers, 1e9, 5e-5, 1e9, 5e-5, address="127.0.0.1")
        return Cluster("local", (host,))

    @cached_property
    def id(self) -> str:
        """Identity of the hosts and links, without fits."""
        content = {"hosts": to_data(self.hosts), "links": to_data(self.pair_links)}
        return content_id("cluster", content)

    @cached_property
    def world_size(self) -> int:
        return sum(host.devices for host in self.hosts)

    @cached_property
    def host_of_rank(self) -> tuple[int, ...]:
        """Index of the host of every rank, shape (world_size,)."""
        return tuple(index for index, host in enumerate(self.hosts) for _ in range(host.devices))

    def bandwidth_bytes_per_s(self, rank_a: int, rank_b: int) -> float:
        """b(a, b): inside a host its inner link, else the pair's or the slower interface."""
        a, b = self.host_of_rank[rank_a], self.host_of_rank[rank_b]
        if a == b:
            return self.hosts[a].inner_bytes_per_s
        pair = self._pair(a, b)
        if pair:
            return pair.link_bytes_per_s
        return min(self.hosts[a].link_bytes_per_s, self.hosts[b].link_bytes_per_s)

    def latency_s(self, rank_a: int, rank_b: int) -> float:
        """One-way latency between two ranks."""
        a, b = self.host_of_rank[rank_a], self.host_of_rank[rank_b]
        if a == b:
            return self.hosts[a].inner_latency_s
        pair = self._pair(a, b)
        return pair.latency_s if pair else max(self.hosts[a].latency_s, self.hosts[b].latency_s)

    def own_bandwidth_bytes_per_s(self, rank: int) -> float:
        """b(j, j) of Algorithm 1: the rate at which a server on this rank can receive."""
        host = self.hosts[self.host_of_rank[rank]]
        return host.inner_bytes_per_s if len(self.hosts) == 1 else host.link_bytes_per_s

    @cached_property
    def ring_bytes_per_s(self) -> float:
        """b_m of Eq. 3: the slowest link of the ring in rank order; O(hosts), not O(workers)."""
        links = [host.inner_bytes_per_s for host in self.hosts if host.devices > 1]
        first_ranks = np.cumsum([0, *(host.devices for host in self.hosts[:-1])]).tolist()
        if len(first_ranks) > 1:
            for here, there in zip(first_ranks, first_ranks[1:] + first_ranks[:1], strict=True):
                links.append(self.bandwidth_bytes_per_s(here, there))
        return min(links, default=self.hosts[0].inner_bytes_per_s)

    def fit(
        self, primitive: str, group_size: int, where: Where | None = None, loaded: bool = False
    ) -> CollectiveFit | None:
        """The fitted cost of a collective on this many ranks, if it was probed.

        Without `where`, the whole world's fit comes first, then that of ranks on different hosts,
        or of one host if there is only one: fits may be those of a larger cluster that this one is
        a part of.
        """
        places = (Where.WORLD, Where.HOST if len(self.hosts) == 1 else Where.ACROSS)
        for place in places if where is None else (where,):
            key = (primitive, group_size, place, loaded)
            if key in self._fits:
                return self._fits[key]
        return None

    @cached_property
    def _fits(self) -> dict[tuple[str, int, Where, bool], CollectiveFit]:
        """The first fit of each identity counts."""
        return {fit.identity: fit for fit in reversed(self.fits)}

    def peer_fit(self, host: str, peers: int, outwards: bool) -> PeerFit | None:
        """The fit of this host and direction with the nearest number of peers, if it was probed.

        Of two equally near numbers the larger one counts.
        """
        fits = self._peer_fits.get((host, outwards), ())
        return min(fits, key=lambda fit: (abs(fit.peers - peers), -fit.peers), default=None)

    @cached_property
    def _peer_fits(self) -> dict[tuple[str, bool], list[PeerFit]]:
        by_port: dict[tuple[str, bool], list[PeerFit]] = {}
        for fit in self.peer_fits:
            by_port.setdefault((fit.host, fit.outwards), []).append(fit)
        return by_port

    def with_fits(self, fits: tuple[CollectiveFit, ...]) -> Cluster:
        """This cluster with measured costs; new fits replace those of the same identity.

        Without any, nothing was measured, and assumed links stay assumed.
        """
        if not fits:
            return self
        new = {fit.identity for fit in fits}
        remaining = tuple(fit for fit in self.fits if fit.identity not in new)
        return replace(self, fits=(*fits, *remaining), source="measured")

    def at_addresses(self, addresses: tuple[str, ...]) -> Cluster:
        """This cluster with the address of each host, where it has none; empty: not known."""
        if not addresses:
            return self
        pairs = zip(self.hosts, addresses, strict=True)
        hosts = (replace(host, address=host.address or address) for host, address in pairs)
        return replace(self, hosts=tuple(hosts))

    def _pair(self, a: int, b: int) -> PairLink | None:
        return self._pair_of.get(frozenset((self.hosts[a].name, self.hosts[b].name)))

    @cached_property
    def _pair_of(self) -> dict[frozenset[str], PairLink]:
        """The link of each pair of hosts by their names."""
        return {frozenset(link.between): link for link in self.pair_links}

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = to_data(self)
        return data

    @staticmethod
    def from_data(data: Any, where: str = "cluster") -> Cluster:
        refuse_newer(data, 1, "cluster", where)
        return parse(Cluster, data, where)
