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

from autotune.arrays import IntArray
from autotune.cluster import Cluster
from autotune.errors import InvalidInput

MAX_RANK_SERVERS = 64
"""Largest world in which every rank may serve; above it, one rank per host (S x D numbers are
drawn).
"""
SMALLEST_SHARE = 1e-3
"""Relative to the largest share; hosts below it serve nothing."""


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
    share links with the workers of their hosts. Host h has d_h of the n ranks and the link b_h, and
    serves the share s_h. For each byte of the model it sends and receives d_h (1 - s_h) for its own
    workers and (n - d_h) s_h for the others. The shares here are in proportion to the s_h that make
    the slowest link, max_h (d_h + (n - 2 d_h) s_h) / b_h, as fast as possible. With equal hosts
    this is Algorithm 1. A host with a slow link serves less than its bandwidth, or nothing.
    """
    devices = np.array([host.devices for host in cluster.hosts], dtype=np.float64)
    firsts = (np.cumsum(devices) - devices).astype(np.int64)
    links = np.array([cluster.own_bandwidth_bytes_per_s(first) for first in firsts.tolist()])
    slope = cluster.world_size - 2 * devices
    shares = links / links.sum()
    if (slope > 0).all():  # otherwise a host has half of the ranks, and serving costs it nothing
        even_s = (1 + (devices / slope).sum()) / (links / slope).sum()
        least_s = max(even_s, (devices / links).max())
        shares = (least_s * links - devices) / slope
    shares = np.where(shares > SMALLEST_SHARE * shares.max(), shares, 0.0)
    ranks = np.array(server_ranks(cluster))
    host = np.array(cluster.host_of_rank)[ranks]
    of_rank = (shares / np.bincount(host, minlength=len(shares)))[host] / shares.sum()
    serving = of_rank > 0
    return Servers(tuple(ranks[serving].tolist()), tuple(of_rank[serving].tolist()))


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
