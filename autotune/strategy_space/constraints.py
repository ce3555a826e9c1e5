"""The two knowledge constraints of AutoSync (supplement sec. 6): load balance and adjacent merging.

| symbol | meaning | unit |
|---|---|---|
| S | number of shards | - |
| D | number of devices that can serve | - |
| N | number of merge groups | - |
| shard_bytes | shape (S,), size of each shard's gradient | bytes |
| weights | shape (D,), b(j, j) of Algorithm 1: relative load of a server on device j | any |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from autotune.arrays import FloatArray, IntArray
from autotune.cluster import Cluster
from autotune.errors import InvalidInput

MAX_RANK_SERVERS = 64
"""Largest world in which every rank may serve; above it, one rank per host (S x D numbers are
drawn).
"""
MAX_SHARED_RANKS = 256
"""Largest world in which the shares of a direct exchange may differ; above it, they are equal. A
strategy has a share of each rank for each shard, and an export about 30 bytes for it.
"""
SMALLEST_SHARE = 1e-3
"""Relative to the largest share; hosts below it serve nothing."""
DRAWN_AT_ONCE = 2**20
"""Random numbers that `balance_load` draws at once, 8 MB; those of 145,000 shards on 1,000 servers
would take 1.2 GB."""


def server_ranks(cluster: Cluster) -> tuple[int, ...]:
    """Return the ranks that may serve: all, or in large worlds the first rank of each host."""
    if cluster.world_size <= MAX_RANK_SERVERS:
        return tuple(range(cluster.world_size))
    return tuple(np.cumsum([0, *(host.devices for host in cluster.hosts[:-1])]).tolist())


@dataclass(frozen=True)
class Servers:
    """The ranks that hold shards, ascending, and the share of all bytes each should serve."""

    ranks: tuple[int, ...]
    shares: tuple[float, ...]


@lru_cache(maxsize=64)
def servers_of(cluster: Cluster) -> Servers:
    """Choose servers among `server_ranks`, and their shares.

    Algorithm 1 divides by bandwidth alone, as if servers had their links to themselves. But servers
    share links with the workers of their hosts, so the shares here are `host_shares`. With equal
    hosts this is Algorithm 1. A host with a slow link serves less than its bandwidth, or nothing.
    """
    devices = np.array([host.devices for host in cluster.hosts], dtype=np.float64)
    shares = host_shares(devices, _links(cluster))
    shares = np.where(shares > SMALLEST_SHARE * shares.max(), shares, 0.0)
    ranks = np.array(server_ranks(cluster))
    host = np.array(cluster.host_of_rank)[ranks]
    of_rank = (shares / np.bincount(host, minlength=len(shares)))[host] / shares.sum()
    serving = of_rank > 0
    return Servers(tuple(ranks[serving].tolist()), tuple(of_rank[serving].tolist()))


@lru_cache(maxsize=64)
def exchange_shares(cluster: Cluster, hierarchical: bool = False) -> tuple[float, ...]:
    """The share of a direct exchange that each rank should own, by the hosts' bandwidths.

    The closed form `host_shares`, with equal parts for the ranks of a host. If `hierarchical`, one
    leader per host exchanges. Pair links do not count; the search refines the shares by replay.
    Equal in worlds above `MAX_SHARED_RANKS`.
    """
    if cluster.world_size > MAX_SHARED_RANKS:
        return (1 / cluster.world_size,) * cluster.world_size
    devices = np.array([host.devices for host in cluster.hosts], dtype=np.float64)
    members = np.ones(len(devices)) if hierarchical and len(devices) > 1 else devices
    shares = host_shares(members, _links(cluster)) / devices
    return tuple(np.repeat(shares, devices.astype(np.int64)).tolist())


def _links(cluster: Cluster) -> FloatArray:
    """Bytes per second of each host's own link."""
    firsts = np.cumsum([0, *(host.devices for host in cluster.hosts[:-1])]).tolist()
    return np.array([cluster.own_bandwidth_bytes_per_s(first) for first in firsts])


def host_shares(devices: FloatArray, links: FloatArray) -> FloatArray:
    """The share of all sums that each host should own, so that the slowest link is fastest.

    Host h has d_h of the n ranks and the link b_h in each direction, and owns the share s_h. For
    each byte of the model it sends d_h (1 - s_h) to other hosts for its own workers, and (n - d_h)
    s_h of its sums; it receives as much. So its link is occupied for

        (d_h + (n - 2 d_h) s_h) / b_h,   with one rank per host (1 + (n - 2) s_h) / b_h.

    No shares have a smaller maximum T. A host that T does not bind has room for more than its part;
    the room is divided in proportion. A host with half of the ranks or more loses nothing by owning
    more: then T is that of a host that owns everything, and shares follow the links as far as T
    allows. Inputs and result have shape (hosts,).
    """
    ranks = devices.sum()
    slope = ranks - 2 * devices
    if (slope > 0).all():
        even_s = (1 + (devices / slope).sum()) / (links / slope).sum()
        least_s = max(even_s, (devices / links).max())
        room = np.maximum(least_s * links - devices, 0.0) / slope
        divided: FloatArray = room / room.sum()
        return divided
    shares: FloatArray = links / links.sum()
    most = int(slope.argmin())
    others = np.arange(len(links)) != most
    least_s = max((devices / links)[others].max(initial=0.0), (ranks - devices[most]) / links[most])
    free = np.divide(
        least_s * links - devices, slope, out=np.ones(len(links)), where=others & (slope > 0)
    )
    shares = np.minimum(shares, np.maximum(free, 0.0))
    needed = 0.0
    if slope[most] < 0:
        bound_share = (least_s * links[most] - devices[most]) / slope[most]
        needed = min(max(bound_share, 0.0), 1.0)
    owned = float(shares[others].sum())
    if owned > 1 - needed:
        shares *= (1 - needed) / owned
    shares[most] = 1 - shares[others].sum()
    return shares


def balance_load(shard_bytes: ArrayLike, weights: ArrayLike, rng: np.random.Generator) -> IntArray:
    """c_lb, Algorithm 1: the device index of each shard, shape (S,).

    Shards are placed from the largest to the smallest, each on a device drawn from softmax(l_all *
    b_j / b_all - l_j). l_j are the bytes placed on device j so far, l_all their sum. The logits are
    in bytes, so the draw is an argmax except for differences of a few bytes: it picks the device
    furthest below its share and breaks ties at random. A sample of softmax(x) is argmax(x + Gumbel
    noise), so all random numbers and all of l_all are computed up front.
    """
    sizes = np.asarray(shard_bytes, dtype=np.int64)
    shares = np.asarray(weights, dtype=np.float64)
    if shares.size < 1 or not np.all(shares > 0) or not np.all(np.isfinite(shares)):
        raise InvalidInput(
            "balancing needs one or more devices with finite weights above 0, "
            f"but they have {shares.tolist()}"
        )
    if sizes.size and sizes.min() < 0:
        raise InvalidInput(f"shards need sizes of at least 0 bytes, but one has {sizes.min()}")
    descending = np.argsort(-sizes, kind="stable")
    ordered = sizes[descending]
    placed_before = np.cumsum(ordered) - ordered
    parts = shares / shares.sum()
    load = np.zeros(shares.size)
    chosen = np.empty(sizes.size, dtype=np.int64)
    below = np.empty_like(load)
    rows = max(DRAWN_AT_ONCE // shares.size, 1)
    for first in range(0, sizes.size, rows):
        before = placed_before[first : first + rows]
        targets = np.outer(before, parts) + rng.gumbel(size=(before.size, shares.size))
        chunk = zip(targets, ordered[first : first + rows].tolist(), strict=True)
        for number, (target, size) in enumerate(chunk, first):
            device = np.subtract(target, load, out=below).argmax()
            load[device] += size
            chosen[number] = device
    placements = np.empty_like(chosen)
    placements[descending] = chosen
    return placements


def merge_adjacent(shard_bytes: ArrayLike, groups: int) -> IntArray:
    """c_am, Algorithm 2: the group of each shard, shape (S,), ascending from 0 and below `groups`.

    `shard_bytes` are ordered from the input to the loss, the reverse of gradient-ready order. Group
    g takes shards until it holds l_avg = total / N bytes, then g + 1 begins. Every group but the
    last used one therefore holds at least l_avg, and less than l_avg plus the largest shard. Loads
    are compared as l * N >= total in integers, so rounding never opens a group N. Shards of zero
    bytes that follow a full group N - 1 join it; the printed algorithm would leave them without a
    group.
    """
    sizes = np.asarray(shard_bytes, dtype=np.int64)
    if groups < 1:
        raise InvalidInput(f"merging needs at least 1 group, but has {groups}")
    if sizes.size and sizes.min() < 0:
        raise InvalidInput(f"shards need sizes of at least 0 bytes, but one has {sizes.min()}")
    result = np.zeros(sizes.size, dtype=np.int64)
    loads = np.cumsum(sizes)
    total = int(loads[-1]) if sizes.size else 0
    scaled = loads * groups
    start = 0
    for group in range(groups - 1):
        before = int(loads[start - 1]) if start else 0
        full = int(np.searchsorted(scaled, before * groups + total, side="left"))  # fills it
        if total == 0 or full + 1 >= sizes.size:
            break
        start = full + 1
        result[start:] = group + 1
    return result
