"""Where the replicas run: hosts, their devices and the links between them, with fitted costs.

Workers (ranks) are numbered host by host: the first host's devices are ranks 0..d-1, and so on.
Nothing here is stored per pair of workers: a link is a host's own interface, unless a pair is named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.canonical import content_id, to_data
from autotune.errors import InvalidInput
from autotune.parsing import parse, read_yaml, refuse_newer
from autotune.units import parse_bytes, parse_bytes_per_s, parse_seconds


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
            raise InvalidInput(f"host {self.name!r} needs at least 1 device, but has {self.devices}")
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
            raise InvalidInput(f"link {self.between[0]!r} - {self.between[1]!r} needs a bandwidth above 0 and a latency of at least 0")


@dataclass(frozen=True)
class CollectiveFit:
    """Measured cost of one primitive on `group_size` ranks: seconds = alpha_s + beta_s_per_byte * bytes.

    `bytes` is the size of the whole tensor before the operation. `relative_error` is the median of
    |fitted - measured| / measured over the probed sizes. `cpu_alpha_s` and `cpu_beta_s_per_byte` fit the CPU time
    that one rank spends on it (all its threads, mean over the ranks): what it may take from computation.
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

    def cpu_s(self, message_bytes: float) -> float:
        return self.cpu_alpha_s + self.cpu_beta_s_per_byte * message_bytes

    def seconds(self, message_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * message_bytes


@dataclass(frozen=True)
class Cluster:
    """`source` is "assumed" until a probe replaced the link costs by fitted ones ("measured")."""

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    hosts: tuple[Host, ...]
    pair_links: tuple[PairLink, ...] = ()
    fits: tuple[CollectiveFit, ...] = ()
    source: str = "assumed"
    schema: int = 1

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not names:
            raise InvalidInput(f"cluster {self.name!r} needs at least one host")
        if len(set(names)) != len(names):
            raise InvalidInput(f"host names must be unique, but are {', '.join(names)}")
        for link in self.pair_links:
            for end in link.between:
                if end not in names:
                    raise InvalidInput(f"a link names host {end!r}, but the hosts are {', '.join(names)}")

    @staticmethod
    def local(workers: int) -> Cluster:
        """One machine with `workers` workers over loopback. The figures are assumed until probed."""
        host = Host("localhost", workers, 1e9, 5e-5, 1e9, 5e-5, address="127.0.0.1")
        return Cluster("local", (host,))

    @cached_property
    def id(self) -> str:
        """Identity of the hosts and links, whatever was fitted on them."""
        return content_id("cluster", {"hosts": to_data(self.hosts), "links": to_data(self.pair_links)})

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
        return pair.link_bytes_per_s if pair else min(self.hosts[a].link_bytes_per_s, self.hosts[b].link_bytes_per_s)

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
        slowest = min((host.inner_bytes_per_s for host in self.hosts if host.devices > 1), default=float("inf"))
        first_ranks = [0]
        for host in self.hosts[:-1]:
            first_ranks.append(first_ranks[-1] + host.devices)
        if len(first_ranks) > 1:
            for here, there in zip(first_ranks, first_ranks[1:] + first_ranks[:1], strict=True):
                slowest = min(slowest, self.bandwidth_bytes_per_s(here, there))
        return slowest if slowest != float("inf") else self.hosts[0].inner_bytes_per_s

    def fit(self, primitive: str, group_size: int) -> CollectiveFit | None:
        """The fitted cost of a primitive on so many ranks, if it was probed."""
        return next((f for f in self.fits if f.primitive == primitive and f.group_size == group_size), None)

    def with_fits(self, fits: tuple[CollectiveFit, ...]) -> Cluster:
        """This cluster with measured link costs."""
        return replace(self, fits=fits, source="measured")

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


@dataclass(frozen=True)
class _HostSpec:
    __pydantic_config__ = {"extra": "forbid"}

    name: str
    devices: int = 1
    bandwidth: str | float = "1Gbit/s"
    latency: str | float = "50us"
    inner_bandwidth: str | float = "10GB/s"
    inner_latency: str | float = "5us"
    memory: str | int = 0
    address: str = ""


@dataclass(frozen=True)
class _LinkSpec:
    __pydantic_config__ = {"extra": "forbid"}

    between: tuple[str, str]
    bandwidth: str | float
    latency: str | float = "50us"


@dataclass(frozen=True)
class _ClusterSpec:
    __pydantic_config__ = {"extra": "forbid"}

    hosts: tuple[_HostSpec, ...]
    name: str = "cluster"
    links: tuple[_LinkSpec, ...] = ()
    schema: int = 1


def read_cluster(path: Path) -> Cluster:
    """A cluster from its YAML file; see docs/cluster.md for the fields and their units."""
    data = read_yaml(path)
    refuse_newer(data, 1, "cluster", str(path))
    spec = parse(_ClusterSpec, data, str(path))
    hosts = tuple(
        Host(
            name=host.name,
            devices=host.devices,
            link_bytes_per_s=parse_bytes_per_s(host.bandwidth, f"{path}: bandwidth of {host.name}"),
            latency_s=parse_seconds(host.latency, f"{path}: latency of {host.name}"),
            inner_bytes_per_s=parse_bytes_per_s(host.inner_bandwidth, f"{path}: inner_bandwidth of {host.name}"),
            inner_latency_s=parse_seconds(host.inner_latency, f"{path}: inner_latency of {host.name}"),
            memory_bytes=parse_bytes(host.memory, f"{path}: memory of {host.name}"),
            address=host.address,
        )
        for host in spec.hosts
    )
    links = tuple(
        PairLink(
            link.between,
            parse_bytes_per_s(link.bandwidth, f"{path}: bandwidth of link {' - '.join(link.between)}"),
            parse_seconds(link.latency, f"{path}: latency of link {' - '.join(link.between)}"),
        )
        for link in spec.links
    )
    return Cluster(spec.name, hosts, links)
