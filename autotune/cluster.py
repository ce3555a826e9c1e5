"""Where the replicas run: hosts, their devices and the links between them, with fitted costs.

Workers (ranks) are numbered host by host: the first host's devices are ranks 0..d-1, and so on.
Nothing here is stored per pair of workers: a link is a host's own interface, unless a pair is named.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from autotune.arrays import FloatArray
from autotune.canonical import content_id, to_data
from autotune.errors import InvalidInput
from autotune.parsing import parse, refuse_newer

MAX_FITS = 512
"""Primitives times groups times (alone, under load) of a probe are below 100."""
MAX_BENDS = 8


@dataclass(frozen=True)
class Host:
    """A machine: `devices` workers that share one network interface and one memory-speed link inside.

    `cores`: CPU cores that they share, 0 where nobody counted them.
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
        if self.devices < 1:
            raise InvalidInput(
                f"host {self.name!r} needs at least 1 device, but has {self.devices}"
            )
        if self.link_bytes_per_s <= 0 or self.inner_bytes_per_s <= 0:
            raise InvalidInput(f"host {self.name!r} needs bandwidths above 0")
        if self.latency_s < 0 or self.inner_latency_s < 0:
            raise InvalidInput(f"host {self.name!r} needs latencies of at least 0")


@dataclass(frozen=True)
class PairLink:
    """A link between two hosts that is unlike what their own interfaces give."""

    __pydantic_config__ = {"extra": "forbid"}

    between: tuple[str, str]
    link_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if self.link_bytes_per_s <= 0 or self.latency_s < 0:
            raise InvalidInput(
                f"link {self.between[0]!r} - {self.between[1]!r} needs a bandwidth above 0 and a latency of at least 0"
            )


class Where(StrEnum):
    """Which ranks a primitive was probed on."""

    WORLD = "world"
    HOST = "host"  # ranks of one host
    ACROSS = "across"  # ranks on different hosts


@dataclass(frozen=True)
class Bend:
    """Up to `until_bytes` a byte costs `s_per_byte`."""

    __pydantic_config__ = {"extra": "forbid"}

    until_bytes: float
    s_per_byte: float


@dataclass(frozen=True)
class CollectiveFit:
    """Measured cost of one primitive on `group_size` ranks, as a function of the whole tensor's bytes before the operation.

    seconds = alpha_s + beta_s_per_byte * bytes where one line fits. Otherwise the cost is piecewise linear, continuous and
    never falls: a byte costs what the first of the `bends` says up to its size, the second from there up to its own, and so on,
    and beta_s_per_byte beyond the last, also beyond the largest probe.

    `relative_error` is the median of |fitted - measured| / measured over the probed sizes, `large_error` the largest of
    them from 1 MiB up (None: no such size). `spread` is the median over the sizes of the repeats' interquartile range over their
    median; `sizes` counts them. `cpu_alpha_s` and `cpu_beta_s_per_byte` fit the CPU time that one rank spends on it
    (all its threads, mean over the ranks): what it may take from computation. Of a fit under load (`loaded`: every rank
    computed meanwhile) they fit the seconds of computation that a rank really lost to it.
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
        costs = (
            self.alpha_s,
            self.beta_s_per_byte,
            self.cpu_alpha_s,
            self.cpu_beta_s_per_byte,
            *(b.s_per_byte for b in self.bends),
        )
        errors = (self.relative_error, self.spread, self.large_error or 0.0)
        if not all(0 <= figure < math.inf for figure in (*costs, *errors)):
            raise InvalidInput(
                f"the fit of {self.primitive!r} needs finite costs and errors of at least 0, but has {costs} and {errors}"
            )
        sizes = (0.0, *(bend.until_bytes for bend in self.bends), math.inf)
        if len(self.bends) > MAX_BENDS or not all(a < b for a, b in pairwise(sizes)):
            rule = f"needs at most {MAX_BENDS} bends at ascending finite sizes above 0"
            raise InvalidInput(
                f"the fit of {self.primitive!r} {rule}, but has them at {sizes[1:-1]}"
            )

    @property
    def identity(self) -> tuple[str, int, Where, bool]:
        """What a newer probe of the same replaces."""
        return self.primitive, self.group_size, self.where, self.loaded

    def cpu_s(self, message_bytes: float) -> float:
        return self.cpu_alpha_s + self.cpu_beta_s_per_byte * message_bytes

    def seconds(self, message_bytes: float) -> float:
        return float(self.seconds_each(np.array([message_bytes], dtype=np.float64))[0])

    def seconds_each(self, message_bytes: FloatArray) -> FloatArray:
        """The cost of every message, shape as the sizes."""
        seconds, reached = np.full(message_bytes.shape, self.alpha_s), 0.0
        for bend in self.bends:
            seconds += bend.s_per_byte * np.clip(
                message_bytes - reached, 0.0, bend.until_bytes - reached
            )
            reached = bend.until_bytes
        seconds += self.beta_s_per_byte * np.maximum(message_bytes - reached, 0.0)
        return seconds


@dataclass(frozen=True)
class LinkFit:
    """Measured one-way cost of a host's own link, or (`inside`) of the one between two of its devices.

    A link shows itself as far as the other end is no slower: of the fastest host it is what the second fastest lets through.
    `relative_error`: the largest of |fitted - measured| / measured over the large messages; `spread` as in `CollectiveFit`;
    `probes` counts the pairs of hosts that told.
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
        if not (
            0 < self.bytes_per_s < math.inf
            and all(0 <= f < math.inf for f in (self.latency_s, self.relative_error, self.spread))
        ):
            raise InvalidInput(
                f"the link of {self.host!r} needs a finite bandwidth above 0, and a latency and errors of at least 0"
            )


@dataclass(frozen=True)
class Cluster:
    """`source` is "assumed" until a probe replaced the link costs by fitted ones ("measured"), by `software` at `measured_at` (ISO).

    `measured_on` says what stood for a real cluster in that probe (`records.Conditions.label`); "" where nothing did.
    `machine_cores`: CPU cores of the one machine that all hosts are emulated on or are processes of; 0: each host is a machine.
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

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not names:
            raise InvalidInput(f"cluster {self.name!r} needs at least one host")
        if len(set(names)) != len(names):
            raise InvalidInput(f"host names must be unique, but are {', '.join(names)}")
        for link in self.pair_links:
            for end in link.between:
                if end not in names:
                    raise InvalidInput(
                        f"a link names host {end!r}, but the hosts are {', '.join(names)}"
                    )
        for found in self.link_fits:
            if found.host not in names:
                raise InvalidInput(
                    f"a fitted link names host {found.host!r}, but the hosts are {', '.join(names)}"
                )
        if len(self.fits) > MAX_FITS:
            raise InvalidInput(
                f"cluster {self.name!r} may hold at most {MAX_FITS} fits, but has {len(self.fits)}"
            )

    @staticmethod
    def local(workers: int) -> Cluster:
        """One machine with `workers` workers over loopback. The figures are assumed until probed."""
        host = Host("localhost", workers, 1e9, 5e-5, 1e9, 5e-5, address="127.0.0.1")
        return Cluster("local", (host,))

    @cached_property
    def id(self) -> str:
        """Identity of the hosts and links, whatever was fitted on them."""
        return content_id(
            "cluster", {"hosts": to_data(self.hosts), "links": to_data(self.pair_links)}
        )

    @cached_property
    def world_size(self) -> int:
        return sum(host.devices for host in self.hosts)

    @cached_property
    def host_of_rank(self) -> tuple[int, ...]:
        """Index of the host of every rank, shape (world_size,)."""
        return tuple(index for index, host in enumerate(self.hosts) for _ in range(host.devices))

    def bandwidth_bytes_per_s(self, rank_a: int, rank_b: int) -> float:
        """b(a, b): inside a host its inner link, else the slower interface or the named pair's link."""
        a, b = self.host_of_rank[rank_a], self.host_of_rank[rank_b]
        if a == b:
            return self.hosts[a].inner_bytes_per_s
        pair = self._pair(a, b)
        return (
            pair.link_bytes_per_s
            if pair
            else min(self.hosts[a].link_bytes_per_s, self.hosts[b].link_bytes_per_s)
        )

    def latency_s(self, rank_a: int, rank_b: int) -> float:
        """One-way latency between two ranks."""
        a, b = self.host_of_rank[rank_a], self.host_of_rank[rank_b]
        if a == b:
            return self.hosts[a].inner_latency_s
        pair = self._pair(a, b)
        return pair.latency_s if pair else max(self.hosts[a].latency_s, self.hosts[b].latency_s)

    def own_bandwidth_bytes_per_s(self, rank: int) -> float:
        """b(j, j) of Algorithm 1: what a server on this rank can take in."""
        host = self.hosts[self.host_of_rank[rank]]
        return host.inner_bytes_per_s if len(self.hosts) == 1 else host.link_bytes_per_s

    @cached_property
    def ring_bytes_per_s(self) -> float:
        """b_m of Eq. 3: the slowest link of the ring in rank order; O(hosts), not O(workers)."""
        slowest = min(
            (host.inner_bytes_per_s for host in self.hosts if host.devices > 1),
            default=float("inf"),
        )
        first_ranks = [0]
        for host in self.hosts[:-1]:
            first_ranks.append(first_ranks[-1] + host.devices)
        if len(first_ranks) > 1:
            for here, there in zip(first_ranks, first_ranks[1:] + first_ranks[:1], strict=True):
                slowest = min(slowest, self.bandwidth_bytes_per_s(here, there))
        return slowest if slowest != float("inf") else self.hosts[0].inner_bytes_per_s

    def fit(
        self, primitive: str, group_size: int, where: Where | None = None, loaded: bool = False
    ) -> CollectiveFit | None:
        """The fitted cost of a primitive on so many ranks, if it was probed.

        Without `where` the whole world's comes first, then that of ranks on different hosts; ranks of one host speak
        for others only where there is no other host.
        """
        wanted = (
            (where,)
            if where is not None
            else (Where.WORLD, Where.ACROSS, Where.HOST)[: 3 if len(self.hosts) == 1 else 2]
        )
        return next(
            (
                self._fits[key]
                for place in wanted
                if (key := (primitive, group_size, place, loaded)) in self._fits
            ),
            None,
        )

    @cached_property
    def _fits(self) -> dict[tuple[str, int, Where, bool], CollectiveFit]:
        """The first of each identity counts."""
        return {fit.identity: fit for fit in reversed(self.fits)}

    def with_fits(self, fits: tuple[CollectiveFit, ...]) -> Cluster:
        """This cluster with measured link costs; a fit that is measured anew replaces the one of the same identity."""
        new = {fit.identity for fit in fits}
        kept = tuple(fit for fit in self.fits if fit.identity not in new)
        return replace(self, fits=(*fits, *kept), source="measured")

    def _pair(self, a: int, b: int) -> PairLink | None:
        names = {self.hosts[a].name, self.hosts[b].name}
        return next((link for link in self.pair_links if set(link.between) == names), None)

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = to_data(self)
        return data

    @staticmethod
    def from_data(data: Any, where: str = "cluster") -> Cluster:
        refuse_newer(data, 1, "cluster", where)
        return parse(Cluster, data, where)
