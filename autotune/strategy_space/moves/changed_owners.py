"""Random owners of direct exchanges, and small changes of owners."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autotune.cluster import Cluster
from autotune.strategy_space.owners import by_bandwidth, host_parts, one_owner, shares_of
from autotune.strategy_space.shares import Shares

MOVED = (0.1, 0.25, 0.5, 1.0)
"""Parts of a host's share that a change gives to another host."""


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

    On one host, for example, the result may equal `shares`. `pick(n)` draws a number below n.
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
