"""Owners of direct exchanges: shares to choose from, and small changes of them.

The ranks of a host own equal parts, since they share its link. In worlds above `MAX_SHARED_RANKS`,
all shares are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from autotune.arrays import FloatArray
from autotune.cluster import Cluster
from autotune.strategy_space.constraints import MAX_SHARED_RANKS, exchange_shares
from autotune.strategy_space.shares import Shares, normal_shares

MOVED = (0.1, 0.25, 0.5, 1.0)
"""Parts of a host's share that a change gives to another host."""


def by_bandwidth(cluster: Cluster, hierarchical: bool = False) -> Shares | None:
    """The closed form (`constraints.exchange_shares`); None for equal shares."""
    shares = normal_shares(exchange_shares(cluster, hierarchical))
    return None if shares is None else shares_of(cluster, host_parts(cluster, shares))


def one_owner(cluster: Cluster, rank: int) -> Shares | None:
    """The shares that make `rank` a parameter server."""
    if cluster.world_size > MAX_SHARED_RANKS:
        return None
    return normal_shares([float(other == rank) for other in range(cluster.world_size)])


def drawn_owners(cluster: Cluster, rng: np.random.Generator) -> Shares | None:
    """Equal shares, those of the closed form, one owner, or random shares of the hosts."""
    kind = rng.random()
    if kind < 0.25:
        return None
    if kind < 0.65:
        return by_bandwidth(cluster)
    if kind < 0.8:
        return one_owner(cluster, int(rng.integers(cluster.world_size)))
    return shares_of(cluster, rng.dirichlet(np.ones(len(cluster.hosts))))


def changed_owners(
    cluster: Cluster, shares: Shares | None, hierarchical: bool, pick: Callable[[int], int]
) -> Shares | None:
    """Other shares: equal, by bandwidth, one owner, or a part of one host's given to another.

    They may be the same ones, for example on one host. `pick` chooses one of so many.
    """
    kind = pick(6)
    if kind == 0:
        return None
    if kind == 1:
        return by_bandwidth(cluster, hierarchical)
    if kind == 2:
        return one_owner(cluster, pick(cluster.world_size))
    owned = host_parts(cluster, shares)
    owners = np.flatnonzero(owned > 0)
    giver = int(owners[pick(len(owners))])
    taker = pick(len(owned))
    if taker == giver:
        return shares
    return moved(cluster, shares, giver, taker, MOVED[pick(len(MOVED))])


def moved(
    cluster: Cluster, shares: Shares | None, giver: int, taker: int, part: float
) -> Shares | None:
    """The shares after host `giver` has given this part of its own to host `taker`."""
    owned = host_parts(cluster, shares)
    given = part * owned[giver]
    owned[giver] -= given
    owned[taker] += given
    return shares_of(cluster, owned)


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
