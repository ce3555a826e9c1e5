"""The cluster of a job that has probed nothing."""

from __future__ import annotations

from dataclasses import replace

from autotune.cluster import Cluster, Host


def without_probe(measured: Cluster, stated: Cluster | None) -> Cluster:
    """Return the measured hosts with the links of `stated` and without any fit.

    A file of other hosts, or one that a probe wrote, states no links. Without stated links each
    host has those that the tuner assumes of a machine that it knows nothing about.
    """
    hosts = tuple(Cluster.local(host.devices).hosts[0] for host in measured.hosts)
    if stated is not None and stated.source == "assumed" and _layout(stated) == _layout(measured):
        hosts = stated.hosts
    linked = zip(measured.hosts, hosts, strict=True)
    return replace(
        measured,
        hosts=tuple(_with_links(host, other) for host, other in linked),
        fits=(),
        link_fits=(),
        peer_fits=(),
        source="assumed",
        measured_at="",
        measured_on="",
        software=(),
    )


def _layout(cluster: Cluster) -> list[tuple[str, int]]:
    return [(host.name, host.devices) for host in cluster.hosts]


def _with_links(host: Host, other: Host) -> Host:
    """Return the host with the other's links; its cores and memory stay."""
    return replace(
        host,
        link_bytes_per_s=other.link_bytes_per_s,
        latency_s=other.latency_s,
        inner_bytes_per_s=other.inner_bytes_per_s,
        inner_latency_s=other.inner_latency_s,
    )
