"""cluster.yaml: written by hand with units, or by `autotune probe` in SI numbers that read back
exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from autotune.canonical import to_data
from autotune.cluster import Cluster, CollectiveFit, Host, LinkFit, PairLink, PeerFit
from autotune.errors import InvalidInput
from autotune.parsing import parse, read_yaml, refuse_newer
from autotune.units import (
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
)

SOURCES = ("assumed", "measured")


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
    cores: int = 0


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
    source: str = "assumed"
    measured_at: str = ""
    measured_on: str = ""
    machine_cores: int = 0
    software: dict[str, str] | None = None
    link_fits: tuple[LinkFit, ...] = ()
    peer_fits: tuple[PeerFit, ...] = ()
    fits: tuple[CollectiveFit, ...] = ()


def _refuse_booleans(data: Any, path: Path) -> None:
    """Raise `InvalidInput` for true or yes as a value of a host or a link: it would count as 1."""
    for kind in ("hosts", "links"):
        items = data.get(kind) if isinstance(data, dict) else None
        for item in items if isinstance(items, list) else ():
            for name, value in item.items() if isinstance(item, dict) else ():
                if isinstance(value, bool):
                    raise InvalidInput(
                        f"{path}: {name} in {kind} must be a number or text, but is a boolean "
                        "(YAML reads yes and on as true)"
                    )


def read_cluster(path: Path) -> Cluster:
    """Read a cluster from its YAML file; docs/cluster.md lists the fields and their units."""
    data = read_yaml(path)
    refuse_newer(data, 1, "cluster", str(path))
    _refuse_booleans(data, path)
    spec = parse(_ClusterSpec, data, str(path))
    if spec.source not in SOURCES:
        raise InvalidInput(
            f"{path}: source must be one of {', '.join(SOURCES)}, but is {spec.source!r}"
        )
    hosts = tuple(
        Host(
            name=host.name,
            devices=host.devices,
            link_bytes_per_s=parse_bytes_per_s(host.bandwidth, f"{path}: bandwidth of {host.name}"),
            latency_s=parse_seconds(host.latency, f"{path}: latency of {host.name}"),
            inner_bytes_per_s=parse_bytes_per_s(
                host.inner_bandwidth, f"{path}: inner_bandwidth of {host.name}"
            ),
            inner_latency_s=parse_seconds(
                host.inner_latency, f"{path}: inner_latency of {host.name}"
            ),
            memory_bytes=parse_bytes(host.memory, f"{path}: memory of {host.name}"),
            address=host.address,
            cores=host.cores,
        )
        for host in spec.hosts
    )
    links = tuple(
        PairLink(
            link.between,
            parse_bytes_per_s(
                link.bandwidth, f"{path}: bandwidth of link {' - '.join(link.between)}"
            ),
            parse_seconds(link.latency, f"{path}: latency of link {' - '.join(link.between)}"),
        )
        for link in spec.links
    )
    software = tuple((spec.software or {}).items())
    provenance = (spec.measured_at, software, spec.measured_on, spec.machine_cores)
    return Cluster(
        spec.name,
        hosts,
        links,
        spec.fits,
        spec.source,
        1,
        spec.link_fits,
        *provenance,
        peer_fits=spec.peer_fits,
    )


def cluster_yaml(cluster: Cluster) -> str:
    """The text of a file that `read_cluster` reads back exactly; comments name the measurements."""
    fits = {(link.host, link.inside): link for link in cluster.link_fits}
    head = {"schema": cluster.schema, "name": cluster.name, "source": cluster.source}
    if cluster.measured_at:
        head["measured_at"] = cluster.measured_at
    lines = [
        "# Plain numbers are SI: seconds, bytes, bytes per second.",
        *(_block({key: value}) for key, value in head.items()),
    ]
    if cluster.measured_on:
        lines += [
            "# What was probed stood for a real cluster:",
            _block({"measured_on": cluster.measured_on}),
        ]
    if cluster.machine_cores:
        lines += [
            "# All hosts share the cores of one machine:",
            _block({"machine_cores": cluster.machine_cores}),
        ]
    if cluster.software:
        lines += [_block({"software": dict(cluster.software)})]
    lines += ["hosts: # ranks are numbered host by host"]
    for host in cluster.hosts:
        outer, inner = fits.get((host.name, False)), fits.get((host.name, True))
        comment = _link_comment(outer, host.link_bytes_per_s, host.latency_s)
        lines += [f"  # link {comment}"]
        if host.devices > 1:
            comment = _link_comment(inner, host.inner_bytes_per_s, host.inner_latency_s)
            lines += [f"  # inside {comment}"]
        lines += [f"  - {_flow(_host_data(host))}"]
    if cluster.pair_links:
        lines += ["links: # pairs of hosts that are unlike what their interfaces give"]
        for link in cluster.pair_links:
            figures = {"bandwidth": link.link_bytes_per_s, "latency": link.latency_s}
            lines += [f"  - {_flow({'between': list(link.between), **figures})}"]
    if cluster.link_fits:
        lines += ["link_fits: # one-way cost between two hosts, or inside one; measured"]
        lines += [f"  - {_flow(to_data(link))}" for link in cluster.link_fits]
    if cluster.peer_fits:
        lines += ["peer_fits: # seconds = peers * message_s + bytes / bytes_per_s; measured"]
        lines += [f"  - {_flow(to_data(fit))}" for fit in cluster.peer_fits]
    if cluster.fits:
        lines += [
            "fits: # seconds = alpha_s + beta_s_per_byte * bytes beyond the last bend; measured"
        ]
        lines += [f"  - {_flow(_fit_data(fit))}" for fit in cluster.fits]
    return "\n".join(lines) + "\n"


def _host_data(host: Host) -> dict[str, Any]:
    data = {
        "name": host.name,
        "devices": host.devices,
        "bandwidth": host.link_bytes_per_s,
        "latency": host.latency_s,
        "inner_bandwidth": host.inner_bytes_per_s,
        "inner_latency": host.inner_latency_s,
    }
    given = {"memory": host.memory_bytes, "address": host.address, "cores": host.cores}
    return data | {key: value for key, value in given.items() if value}


def _fit_data(fit: CollectiveFit) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(CollectiveFit)}
    return {key: value for key, value in to_data(fit).items() if getattr(fit, key) != defaults[key]}


def _link_comment(fit: LinkFit | None, bytes_per_s: float, latency_s: float) -> str:
    """The figures in everyday units, and their source."""
    rate = f"{format_rate(bytes_per_s)} ({format_bytes(bytes_per_s)}/s)"
    figures = f"{rate}, {format_seconds(latency_s)}"
    if fit is None:
        return f"{figures}: not measured"
    return (
        f"{figures}: measured, fit error {fit.relative_error:.1%}, "
        f"spread of the repeats {fit.spread:.1%}"
    )


def _flow(data: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(
        data, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True
    )
    return text.strip()


def _block(data: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(
        data, default_flow_style=False, sort_keys=False, width=float("inf"), allow_unicode=True
    )
    return text.rstrip("\n")
