"""Orders of the hosts along a ring. The ranks of a host stay together, so worlds of any size have
few.

A ring is the same from any start and in both directions. The normal form starts with the first
host, followed by the lower one of its two neighbours. None is the order of the hosts themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autotune.cluster import Cluster
from autotune.costs.sync_cost import host_bandwidths

GREEDY = 0.5
"""Share of drawn orders that follow the widest links; the others are random."""


def random_ring(cluster: Cluster, rng: np.random.Generator) -> tuple[int, ...] | None:
    """A random order, or one that always follows the widest link to an unvisited host."""
    count = len(cluster.hosts)
    if rng.random() >= GREEDY:
        return ring_of_hosts(cluster, rng.permutation(count).tolist())
    return greedy_ring(cluster, int(rng.integers(count)), lambda widest: int(rng.integers(widest)))


def greedy_ring(cluster: Cluster, first: int, pick: Callable[[int], int]) -> tuple[int, ...] | None:
    """Follow the widest link to an unvisited host; `pick` chooses among so many of equal width."""
    order = [first]
    left = np.ones(len(cluster.hosts), dtype=np.bool_)
    left[first] = False
    while left.any():
        widths = np.where(left, host_bandwidths(cluster, order[-1]), -1.0)
        widest = np.flatnonzero(widths == widths.max())
        order.append(int(widest[pick(len(widest))]))
        left[order[-1]] = False
    return ring_of_hosts(cluster, order)


def swapped_ring(
    cluster: Cluster, ring_order: tuple[int, ...] | None, one: int, other: int
) -> tuple[int, ...] | None:
    """Swap the hosts at two places of the ring."""
    order = hosts_along(cluster, ring_order)
    order[one], order[other] = order[other], order[one]
    return ring_of_hosts(cluster, order)


def hosts_along(cluster: Cluster, ring_order: tuple[int, ...] | None) -> list[int]:
    """Indices of the hosts in the order in which the ring first reaches them."""
    if ring_order is None:
        return list(range(len(cluster.hosts)))
    return list(dict.fromkeys(cluster.host_of_rank[rank] for rank in ring_order))


def ring_of_hosts(cluster: Cluster, order: Sequence[int]) -> tuple[int, ...] | None:
    """The ranks along the ring of these hosts in normal form; None for rank order."""
    start = order.index(0)
    turned = [*order[start:], *order[:start]]
    if len(turned) > 2 and turned[1] > turned[-1]:
        turned[1:] = turned[:0:-1]
    if turned == list(range(len(turned))):
        return None
    first = np.concatenate([[0], np.cumsum([host.devices for host in cluster.hosts])]).tolist()
    return tuple(rank for host in turned for rank in range(first[host], first[host + 1]))
