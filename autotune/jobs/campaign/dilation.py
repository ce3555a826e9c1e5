"""Time dilation: emulated hosts whose time passes more slowly than the clock.

All ranks of an emulated cluster share the cores of this machine. With links `dilation` times as
slow, and computation in proportion, every rank has `dilation` times as much of a core in a step,
as if its host had a core of its own (Gupta et al., "To Infinity and Beyond: Time-Warped Network
Emulation", NSDI 2006). Ratios between step times are those of the cluster itself; the times are
`dilation` times as long.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.cluster import Cluster


def dilated(cluster: Cluster, dilation: int) -> Cluster:
    """Return the cluster with links between hosts of 1 / `dilation` the rate.

    Latencies stay: up to 100 us they are what two hosts of a testbed have anyhow, and more would
    need another kind of switch (`autotune.testbed.layout`). Links inside a host stay too: their
    transfers are this machine's own. Measured fits would no longer hold and are dropped.
    """
    if dilation == 1:
        return cluster
    hosts = (replace(h, link_bytes_per_s=h.link_bytes_per_s / dilation) for h in cluster.hosts)
    links = (replace(p, link_bytes_per_s=p.link_bytes_per_s / dilation) for p in cluster.pair_links)
    return replace(
        cluster, hosts=tuple(hosts), pair_links=tuple(links), fits=(), link_fits=(), peer_fits=()
    )
