"""Owners of direct exchanges to choose from.

The ranks of a host own equal parts, since they share its link. In worlds above `MAX_SHARED_RANKS`,
all shares are equal.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from autotune.arrays import FloatArray
from autotune.cluster import Cluster
from autotune.strategy_space.constraints import MAX_SHARED_RANKS, exchange_shares
from autotune.strategy_space.shares import Shares, normal_shares


def by_bandwidth(cluster: Cluster, hierarchical: bool = False) -> Shares | None:
    """The closed form (`constraints.exchange_shares`); None for equal shares."""
    shares = normal_shares(exchange_shares(cluster, hierarchical))
    return None if shares is None else shares_of(cluster, host_parts(cluster, shares))


def one_owner(cluster: Cluster, rank: int) -> Shares | None:
    """The shares that make `rank` a parameter server."""
    if cluster.world_size > MAX_SHARED_RANKS:
        return None
    return normal_shares([float(other == rank) for other in range(cluster.world_size)])


def host_parts(cluster: Cluster, shares: Shares | None) -> FloatArray:
    """What the ranks of each host own together, shape (hosts,)."""
    ranks = cluster.world_size
    owned = np.full(ranks, 1 / ranks) if shares is None else np.array(shares)
    of_host = np.zeros(len(cluster.hosts))
    np.add.at(of_host, np.array(cluster.host_of_rank), owned)
    return of_host


def shares_of(cluster: Cluster, owned: FloatArray) -> Shares | None:
    """The shares of ranks whose hosts own these parts, rounded, so that few of them differ."""
    if cluster.world_size > MAX_SHARED_RANKS:
        return None
    devices = np.array([host.devices for host in cluster.hosts])
    bounds = np.round(np.cumsum([0.0, *(owned / owned.sum())]), 6).tolist()
    parts = [end - start for start, end in pairwise(bounds)]
    return normal_shares(np.repeat(np.array(parts) / devices, devices).tolist())
