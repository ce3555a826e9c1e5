"""The two knowledge constraints of AutoSync (supplement sec. 6): load balance and adjacent merging.

| symbol | meaning | unit |
|---|---|---|
| S | number of shards | - |
| D | number of devices that can serve | - |
| N | number of merge groups | - |
| shard_bytes | shape (S,), size of every shard's gradient | bytes |
| bandwidth_bytes_per_s | shape (D,), b(j, j): what a server on device j can take in | bytes/s |
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotune.cluster import Cluster
from autotune.errors import InvalidInput

MAX_RANK_SERVERS = 64
"""Up to so many workers every rank may serve; above, one rank per host (S x D numbers are drawn)."""


def server_ranks(cluster: Cluster) -> tuple[int, ...]:
    """The ranks that shards are placed on: all, or in large worlds the first rank of every host."""
    if cluster.world_size <= MAX_RANK_SERVERS:
        return tuple(range(cluster.world_size))
    first, ranks = 0, []
    for host in cluster.hosts:
        ranks.append(first)
        first += host.devices
    return tuple(ranks)


def server_bandwidths(cluster: Cluster, ranks: tuple[int, ...]) -> NDArray[np.float64]:
    """b(j, j) of Algorithm 1 for each of `ranks`, in bytes/s, shape (D,)."""
    return np.array([cluster.own_bandwidth_bytes_per_s(rank) for rank in ranks], dtype=np.float64)


def balance_load(shard_bytes: ArrayLike, bandwidth_bytes_per_s: ArrayLike, rng: np.random.Generator) -> NDArray[np.int64]:
    """c_lb, Algorithm 1: the device index of every shard, shape (S,).

    Shards are placed from the largest to the smallest, each on a device drawn from
    softmax(l_all * b_j / b_all - l_j), where l_j are the bytes placed on device j so far and l_all their sum.
    The logits are in bytes, so the draw is an argmax but for differences of a few bytes: it is the
    device that is furthest below its share of the bandwidth, and ties are broken at random. A sample of
    softmax(x) is argmax(x + Gumbel noise), which lets all random numbers and all of l_all be computed up front.
    """
    sizes = np.asarray(shard_bytes, dtype=np.int64)
    bandwidths = np.asarray(bandwidth_bytes_per_s, dtype=np.float64)
    if bandwidths.size < 1 or not np.all(bandwidths > 0) or not np.all(np.isfinite(bandwidths)):
        raise InvalidInput(f"balancing needs one or more devices with finite bandwidths above 0, but they have {bandwidths.tolist()}")
    if sizes.size and sizes.min() < 0:
        raise InvalidInput(f"shards need sizes of at least 0 bytes, but one has {sizes.min()}")
    descending = np.argsort(-sizes, kind="stable")
    ordered = sizes[descending]
    placed_before = np.cumsum(ordered) - ordered
    targets = np.outer(placed_before, bandwidths / bandwidths.sum()) + rng.gumbel(size=(sizes.size, bandwidths.size))
    load = np.zeros(bandwidths.size)
    chosen = np.empty(sizes.size, dtype=np.int64)
    below = np.empty_like(load)
    for number, (target, size) in enumerate(zip(targets, ordered.tolist(), strict=True)):
        device = np.subtract(target, load, out=below).argmax()
        load[device] += size
        chosen[number] = device
    placements = np.empty_like(chosen)
    placements[descending] = chosen
    return placements


def merge_adjacent(shard_bytes: ArrayLike, groups: int) -> NDArray[np.int64]:
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
        full = int(np.searchsorted(scaled, before * groups + total, side="left"))  # the shard that fills this group
        if total == 0 or full + 1 >= sizes.size:
            break
        start = full + 1
        result[start:] = group + 1
    return result
