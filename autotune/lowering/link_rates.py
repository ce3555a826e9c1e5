"""A cluster whose links are faster or slower than stated, with its fits in keeping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autotune.cluster import Cluster, CollectiveFit, Where
from autotune.lowering.traffic import Collective, Ports

_CALLS = {
    "push_pull": (Collective.GATHER, Collective.SCATTER),
    "reduce_scatter_all_gather": (Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
    "direct_exchange": (Collective.PUSH, Collective.PULL),
}
"""The collectives of a probed operation that is none itself."""


def with_link_rates(cluster: Cluster, factors: Sequence[float]) -> Cluster:
    """Return the cluster with each host's link at this multiple of its rate, shape (hosts,).

    The bytes of a fit cost as much more as the collective's slowest port allows.
    """
    hosts = tuple(
        replace(host, link_bytes_per_s=host.link_bytes_per_s * factor)
        for host, factor in zip(cluster.hosts, factors, strict=True)
    )
    changed = replace(cluster, hosts=hosts)
    before, after = Ports(cluster), Ports(changed)
    fits = tuple(
        with_byte_cost(fit, _port_s(fit, after) / _port_s(fit, before)) for fit in cluster.fits
    )
    of_host = {host.name: factor for host, factor in zip(hosts, factors, strict=True)}
    peer_fits = tuple(
        replace(fit, bytes_per_s=fit.bytes_per_s * of_host[fit.host]) for fit in cluster.peer_fits
    )
    return replace(changed, fits=fits, peer_fits=peer_fits)


def with_byte_cost(fit: CollectiveFit, factor: float) -> CollectiveFit:
    """Return the fit with this multiple of its cost per byte."""
    bends = tuple(replace(bend, s_per_byte=bend.s_per_byte * factor) for bend in fit.bends)
    return replace(fit, beta_s_per_byte=fit.beta_s_per_byte * factor, bends=bends)


def _port_s(fit: CollectiveFit, ports: Ports) -> float:
    """Return the seconds per byte of the fit's collectives on the links alone."""
    if fit.where is Where.HOST:
        return 1.0  # no link of a host is involved
    calls = _CALLS.get(fit.primitive)
    members = tuple(range(ports.cluster.world_size))
    if fit.where is Where.ACROSS:
        members = tuple(int(rank) for rank in np.unique(ports.host_of_rank, return_index=True)[1])
    each = calls or (Collective(fit.primitive),)
    return sum(ports.traffic(call, members, members[0]).alone_s_per_byte for call in each) or 1.0
