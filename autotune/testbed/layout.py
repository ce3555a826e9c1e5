"""The layout of a testbed: namespaces, addresses, rates and latencies. Pure data.

| symbol | meaning | unit |
|---|---|---|
| link_bytes_per_s | payload of one TCP stream over a link, divided by the byte scale | bytes/s |
| added_latency_s | one way, on top of a namespace's own latency; 0 if that is enough | s |
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from autotune.canonical import content_id
from autotune.cluster import Cluster, PairLink
from autotune.errors import EmulationUnavailable, InvalidInput
from autotune.units import format_seconds

OWN_LATENCY_S = 100e-6
"""Up to here nothing is added: two namespaces are 10 to 50 us apart, more on a busy machine."""

INNER_SHAPED_BELOW_BYTES_PER_S = 2.5e9
"""The loopback moves 4 to 6 GB/s over TCP; it is shaped only below this rate."""

FASTEST_BYTES_PER_S = 1.25e9
"""Highest rate that was measured through the kernel's switch (10 Gbit/s)."""

FASTEST_RELAYED_BYTES_PER_S = 0.125e9
"""The same through the user-space relay."""

BYTES_PER_S_OF_A_CORE = 8e9 / 8
"""Two cores moved 16 Gbit/s around a ring of four hosts in a run of 2026-11-20."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,31}")
MOST_HOSTS = 250 * 250

MOST_RELAYED_HOSTS = 1000
"""The relay waits by select: it counts microseconds, but takes only descriptors below 1024."""


class Method(StrEnum):
    """Connection between the hosts."""

    SWITCH = "switch"  # a bridge of the kernel, no latency added
    NETEM = "netem"  # the bridge, and the kernel's netem for latency
    RELAY = "relay"  # our user-space switch over TAP devices


@dataclass(frozen=True)
class Means:
    """Optional capabilities of the kernel. `steered_cpus`: 0 if it does not steer packets."""

    netem: bool
    filters: bool
    tun: bool
    cubic: bool
    steered_cpus: int


@dataclass(frozen=True)
class Lane:
    """Rate and latency from a host to one other host (an index) that differ from its interface.

    `dedicated`: a separate link, faster than the interface, whose traffic bypasses the interface.
    """

    __pydantic_config__ = {"extra": "forbid"}

    to: int
    link_bytes_per_s: float
    added_latency_s: float
    dedicated: bool


@dataclass(frozen=True)
class HostLayout:
    """One host. `inner_bytes_per_s`: 0 for an unshaped loopback.

    Lanes override `added_latency_s`.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    namespace: str
    address: str
    devices: int
    link_bytes_per_s: float
    inner_bytes_per_s: float
    added_latency_s: float
    lanes: tuple[Lane, ...] = ()


@dataclass(frozen=True)
class Layout:
    """A testbed to build. `notes`: differences from the cluster file, for people.

    `steered_cpus`: number of CPUs among which connections are divided, which keeps the order of
    their packets; 0: not divided.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    cluster: str
    byte_scale: float
    method: Method
    cubic: bool
    filters: bool
    steered_cpus: int
    hosts: tuple[HostLayout, ...]
    notes: tuple[str, ...] = ()

    @property
    def switch(self) -> str:
        """The namespace of the switch. Host namespaces have one part more, so names never clash."""
        return f"autotune.{self.name}"

    @cached_property
    def namespaces(self) -> tuple[str, ...]:
        return (self.switch, *(host.namespace for host in self.hosts))

    def lane(self, source: int, target: int) -> Lane | None:
        """The lane between two hosts, or None if the source's interface serves the pair."""
        return next((lane for lane in self.hosts[source].lanes if lane.to == target), None)

    def added_latency_s(self, source: int, target: int) -> float:
        lane = self.lane(source, target)
        return lane.added_latency_s if lane else self.hosts[source].added_latency_s


def lay_out(
    cluster: Cluster, means: Means, *, name: str | None = None, byte_scale: float = 1.0
) -> Layout:
    """The testbed of `cluster`; every rate is divided by `byte_scale`.

    Raises `InvalidInput` for a name or scale that breaks a rule, `EmulationUnavailable` if this
    kernel lacks something.
    """
    name = checked_name(name) if name is not None else safe_name(cluster.name)
    if not (math.isfinite(byte_scale) and byte_scale >= 1):
        raise InvalidInput(f"--byte-scale must be at least 1, but is {byte_scale}")
    if len(cluster.hosts) > MOST_HOSTS:
        raise InvalidInput(
            f"a testbed has addresses for {MOST_HOSTS} hosts, but {cluster.name!r} has "
            f"{len(cluster.hosts)}"
        )
    for host in cluster.hosts:
        if host.inner_latency_s > OWN_LATENCY_S:
            raise EmulationUnavailable(
                f"inside a host a testbed adds no latency: inner_latency of {host.name!r} must be "
                f"at most {format_seconds(OWN_LATENCY_S)}, but is "
                f"{format_seconds(host.inner_latency_s)}; lower it in the cluster file"
            )
    added = _added_latencies(cluster)
    method = _method(cluster, added, means)
    hosts = _hosts(cluster, name, byte_scale, added)
    _refuse_unclassifiable(hosts, means)
    return Layout(
        name,
        cluster.name,
        byte_scale,
        method,
        means.cubic,
        means.filters,
        means.steered_cpus,
        hosts,
        _notes(hosts, method),
    )


def checked_name(name: str) -> str:
    """Check a testbed's name as given by a person."""
    if not NAME.fullmatch(name):
        raise InvalidInput(
            f"a testbed's name has 1 to 32 letters, digits and '-', but is {name!r}; "
            "choose another --name"
        )
    return name


def safe_name(text: str) -> str:
    """`text` as part of a namespace's name; a shortened text gets a hash."""
    plain = re.sub(r"[^A-Za-z0-9-]+", "-", text).strip("-") or "host"
    return plain if len(plain) <= 32 else f"{plain[:23]}-{content_id('', text)[1:9]}"


def safe_names(texts: tuple[str, ...]) -> tuple[str, ...]:
    """`safe_name` of each, with a number behind names that would be equal."""
    taken = {text for text in texts if safe_name(text) == text}  # valid names stay
    names = []
    for text in texts:
        name, number = safe_name(text), 2
        while name != text and name in taken:
            name, number = f"{safe_name(text)[:28]}-{number}", number + 1
        taken.add(name)
        names.append(name)
    return tuple(names)


def address(index: int) -> str:
    """Address of the host with this index, in 10.77.0.0/16; the last part is never 0 or 255."""
    return f"10.77.{index // 250}.{index % 250 + 1}"


def mac(index: int) -> str:
    """A locally administered address that contains the host's index for the relay."""
    return f"02:77:00:00:{index >> 8:02x}:{index & 255:02x}"


def _added_latencies(cluster: Cluster) -> dict[tuple[int, int], float]:
    """Seconds to add per pair of hosts: the cluster's latency, or 0 up to `OWN_LATENCY_S`."""
    first, total = [], 0
    for host in cluster.hosts:
        first.append(total)
        total += host.devices
    pairs = ((a, b) for a in range(len(first)) for b in range(len(first)) if a != b)
    latencies = {(a, b): cluster.latency_s(first[a], first[b]) for a, b in pairs}
    return {
        pair: latency_s if latency_s > OWN_LATENCY_S else 0.0
        for pair, latency_s in latencies.items()
    }


def _method(cluster: Cluster, added: dict[tuple[int, int], float], means: Means) -> Method:
    """The simplest sufficient method: the bridge, the bridge with netem, the relay."""
    latency, pairs = any(added.values()), bool(cluster.pair_links)
    if not latency and (means.filters or not pairs):
        return Method.SWITCH
    several = pairs or len(set(added.values())) > 1
    if latency and means.netem and (means.filters or not several):
        return Method.NETEM
    need = f"latencies above {format_seconds(OWN_LATENCY_S)}" if latency else "pair links"
    if means.tun and len(cluster.hosts) > MOST_RELAYED_HOSTS:
        raise EmulationUnavailable(
            f"{need} need the user-space relay on this kernel, which serves at most "
            f"{MOST_RELAYED_HOSTS} hosts, but {cluster.name!r} has {len(cluster.hosts)}; "
            "take them out of the cluster file, or hosts"
        )
    if means.tun:
        return Method.RELAY
    raise EmulationUnavailable(
        f"{need} need netem or TAP devices (/dev/net/tun), but this kernel offers neither; "
        "take them out of the cluster file"
    )


def _hosts(
    cluster: Cluster, name: str, byte_scale: float, added: dict[tuple[int, int], float]
) -> tuple[HostLayout, ...]:
    pair_links: dict[tuple[int, int], PairLink] = {}
    index = {host.name: number for number, host in enumerate(cluster.hosts)}
    for link in cluster.pair_links:
        a, b = (index[end] for end in link.between)
        pair_links.setdefault((a, b), link)
        pair_links.setdefault((b, a), link)
    names = safe_names(tuple(index))
    hosts = []
    for number, host in enumerate(cluster.hosts):
        others = [other for other in range(len(cluster.hosts)) if other != number]
        most_common = Counter(added[number, other] for other in others).most_common(1)
        usual_s = most_common[0][0] if others else 0.0
        lanes = []
        for other in others:
            pair = pair_links.get((number, other))
            rate = pair.link_bytes_per_s if pair else host.link_bytes_per_s
            if rate != host.link_bytes_per_s or added[number, other] != usual_s:
                dedicated = rate > host.link_bytes_per_s
                lanes.append(Lane(other, rate / byte_scale, added[number, other], dedicated))
        inner = host.inner_bytes_per_s / byte_scale
        hosts.append(
            HostLayout(
                name=host.name,
                namespace=f"autotune.{name}.{names[number]}",
                address=address(number),
                devices=host.devices,
                link_bytes_per_s=host.link_bytes_per_s / byte_scale,
                inner_bytes_per_s=inner if inner < INNER_SHAPED_BELOW_BYTES_PER_S else 0.0,
                added_latency_s=usual_s,
                lanes=tuple(lanes),
            )
        )
    return tuple(hosts)


def _refuse_unclassifiable(hosts: tuple[HostLayout, ...], means: Means) -> None:
    """The relay can slow a pair down; only a filter at the sender can bypass its interface."""
    for host in hosts:
        for lane in host.lanes:
            if lane.dedicated and not means.filters:
                raise EmulationUnavailable(
                    f"the link {host.name!r} - {hosts[lane.to].name!r} is faster than the "
                    "interface "
                    f"of {host.name!r}, which needs tc's u32 filter, but this kernel has none; "
                    "give the pair at most the interface's bandwidth"
                )


def _notes(hosts: tuple[HostLayout, ...], method: Method) -> tuple[str, ...]:
    limit = FASTEST_RELAYED_BYTES_PER_S if method is Method.RELAY else FASTEST_BYTES_PER_S
    fast = [
        host.name
        for host in hosts
        if max(host.link_bytes_per_s, *(lane.link_bytes_per_s for lane in host.lanes), 0) > limit
    ]
    total = sum(host.link_bytes_per_s for host in hosts)
    notes = []
    if fast:
        through = "the relay" if method is Method.RELAY else "one machine"
        notes.append(
            f"links of {', '.join(fast)} are faster than the {limit * 8e-9:g} Gbit/s that "
            f"{through} "
            "was measured to carry; use --byte-scale to divide rates and bytes"
        )
    if total > BYTES_PER_S_OF_A_CORE:
        cores = math.ceil(total / BYTES_PER_S_OF_A_CORE)
        notes.append(
            f"all hosts sending at once move {total * 8e-9:g} Gbit/s, which takes about {cores} "
            "cores of this machine"
        )
    return tuple(notes)
