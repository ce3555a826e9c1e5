"""The two knowledge constraints of AutoSync (supplement sec. 6): load balance and adjacent merging.

| symbol | meaning | unit |
|---|---|---|
| S | number of shards | - |
| D | number of devices that can serve | - |
| N | number of merge groups | - |
| shard_bytes | shape (S,), size of every shard's gradient | bytes |
| weights | shape (D,), b(j, j) of Algorithm 1, in any unit: what a server on device j should take in | - |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from autotune.arrays import IntArray
from autotune.cluster import Cluster
from autotune.errors import InvalidInput

MAX_RANK_SERVERS = 64
"""Up to so many workers every rank may serve; above, one rank per host (S x D numbers are drawn)."""
SMALLEST_SHARE = 1e-3
"""Of the largest share; hosts with less serve nothing."""


def server_ranks(cluster: Cluster) -> tuple[int, ...]:
    """The ranks that may serve: all, or in large worlds the first rank of every host."""
    if cluster.world_size <= MAX_RANK_SERVERS:
        return tuple(range(cluster.world_size))
    return tuple(np.cumsum([0, *(host.devices for host in cluster.hosts[:-1])]).tolist())


@dataclass(frozen=True)
class Servers:
    """The ranks that shards are placed on, ascending, and how much of all bytes each should serve (shares, their sum is 1)."""

    ranks: tuple[int, ...]
    shares: tuple[float, ...]


@lru_cache(maxsize=64)
def servers_of(cluster: Cluster) -> Servers:
    """`server_ranks` on the hosts that should serve.

    Algorithm 1 shares out by bandwidth alone, as if servers had their links to themselves. But they stand on the hosts of the workers:
    of n ranks, d_h of them on host h with the link b_h, that host sends and takes in, for each byte of the model, d_h (1 - s_h) for its
    own workers and (n - d_h) s_h for the others, where s_h is what it serves. The s_h here are in proportion to those that make the
    slowest link, max_h (d_h + (n - 2 d_h) s_h) / b_h, as fast as can be. Between equal hosts that is Algorithm 1; a host with a slow
    link serves less than its bandwidth would say, or nothing.
    """
    devices = np.array([host.devices for host in cluster.hosts], dtype=np.float64)
    firsts = (np.cumsum(devices) - devices).astype(np.int64)
    links = np.array([cluster.own_bandwidth_bytes_per_s(first) for first in firsts.tolist()])
    slope = cluster.world_size - 2 * devices
    shares = links / links.sum()
    if (
        slope > 0
    ).all():  # otherwise a host has half of the ranks or more, and to serve costs it nothing
        least_s = max(
            (1 + (devices / slope).sum()) / (links / slope).sum(), (devices / links).max()
        )
        shares = (least_s * links - devices) / slope
    shares = np.where(shares > SMALLEST_SHARE * shares.max(), shares, 0.0)
    ranks = np.array(server_ranks(cluster))
    host = np.array(cluster.host_of_rank)[ranks]
    of_rank = (shares / np.bincount(host, minlength=len(shares)))[host] / shares.sum()
    serving = of_rank > 0
    return Servers(tuple(ranks[serving].tolist()), tuple(of_rank[serving].tolist()))


def balance_load(shard_bytes: ArrayLike, weights: ArrayLike, rng: np.random.Generator) -> IntArray:
    """c_lb, Algorithm 1: the device index of every shard, shape (S,).

    Shards are placed from the largest to the smallest, each on a device drawn from
    softmax(l_all * b_j / b_all - l_j), where l_j are the bytes placed on device j so far and l_all their sum.
    The logits are in bytes, so the draw is an argmax but for differences of a few bytes: it is the
    device that is furthest below its share of the bandwidth, and ties are broken at random. A sample of
    softmax(x) is argmax(x + Gumbel noise), which lets all random numbers and all of l_all be computed up front.
    """
    sizes = np.asarray(shard_bytes, dtype=np.int64)
    shares = np.asarray(weights, dtype=np.float64)
    if shares.size < 1 or not np.all(shares > 0) or not np.all(np.isfinite(shares)):
        raise InvalidInput(
            f"balancing needs one or more devices with finite weights above 0, but they have {shares.tolist()}"
        )
    if sizes.size and sizes.min() < 0:
        raise InvalidInput(f"shards need sizes of at least 0 bytes, but one has {sizes.min()}")
    descending = np.argsort(-sizes, kind="stable")
    ordered = sizes[descending]
    placed_before = np.cumsum(ordered) - ordered
    targets = np.outer(placed_before, shares / shares.sum()) + rng.gumbel(
        size=(sizes.size, shares.size)
    )
    load = np.zeros(shares.size)
    chosen = np.empty(sizes.size, dtype=np.int64)
    below = np.empty_like(load)
    for number, (target, size) in enumerate(zip(targets, ordered.tolist(), strict=True)):
        device = np.subtract(target, load, out=below).argmax()
        load[device] += size
        chosen[number] = device
    placements = np.empty_like(chosen)
    placements[descending] = chosen
    return placements


def merge_adjacent(shard_bytes: ArrayLike, groups: int) -> IntArray:
    """c_am, Algorithm 2: the group of every shard, shape (S,), ascending from 0 and below `groups`.

    `shard_bytes` stand from the input to the loss, that is in reverse gradient-ready order. Group g takes
    shards until it holds l_avg = total / N bytes, then g + 1 begins; so every group but the last used one holds
    at least l_avg, and less than l_avg plus the largest shard. Loads are compared as l * N >= total in integers:
    rounding can then never open a group N. Shards of zero bytes that follow when group N - 1 is
    full stay in it, where the printed algorithm would leave them without a group.
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
        full = int(
            np.searchsorted(scaled, before * groups + total, side="left")
        )  # the shard that fills this group
        if total == 0 or full + 1 >= sizes.size:
            break
        start = full + 1
        result[start:] = group + 1
    return result
