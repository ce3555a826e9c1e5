"""What a collective moves through every port of the cluster, and in how many rounds.

A port is a host's interface outwards or inwards, the link inside a host, or one direction of a pair of hosts that has a link of its own.
Bytes are given per byte of the tensor that the collective's fit is asked for (`CollectiveFit`).

| symbol | meaning |
|---|---|
| n | members of the collective, in the order of their ring |
| H | hosts |
| P | ports: H outwards, H inwards, H inside, then two per named pair |

What gloo does (torch 2.13), found by measuring each primitive: an all-reduce is a ring of 2 (n - 1) rounds that each send 1/n of the
tensor to the next rank; a reduce-scatter moves as much as an all-reduce; an all-gather is a ring of n - 1 rounds; a reduce is the
first half of the ring, then everybody sends its part to the root; a broadcast is a binomial tree, in which rank v, counted from the
root, gets the tensor from v without its highest bit; gather and scatter are a star.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.cluster import Cluster
from autotune.lowering.tree import senders, tree_s_per_byte

OUT, IN, INSIDE = 0, 1, 2


class Collective(StrEnum):
    """One call of the library."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    GATHER = "gather"
    SCATTER = "scatter"


@dataclass(frozen=True, eq=False)
class Traffic:
    """`s_per_byte` (P,): seconds for which a byte of the tensor occupies each port. `rounds`: steps that wait for each other.

    `alone_s_per_byte`: until all are done where nothing else is sent. Not below the slowest port's time; above it in a tree, where
    links are idle while those behind them wait.
    """

    s_per_byte: FloatArray
    rounds: int
    alone_s_per_byte: float

    @staticmethod
    def even(s_per_byte: FloatArray, rounds: int) -> Traffic:
        """The slowest port is never idle."""
        return Traffic(s_per_byte, rounds, float(s_per_byte.max(initial=0.0)))


class Ports:
    """The ports of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        hosts = cluster.hosts
        self.hosts = len(hosts)
        names = {host.name: index for index, host in enumerate(hosts)}
        pairs: dict[tuple[int, int], float] = {}
        for link in cluster.pair_links:  # the first that is named for a pair counts
            a, b = sorted(names[end] for end in link.between)
            if a != b:
                pairs.setdefault((a, b), link.link_bytes_per_s)
        self.pairs = {pair: 3 * self.hosts + 2 * number for number, pair in enumerate(pairs)}
        own = [1 / host.link_bytes_per_s for host in hosts]
        inside = [1 / host.inner_bytes_per_s for host in hosts]
        self.s_per_byte = np.array(
            [*own, *own, *inside, *(1 / speed for speed in pairs.values() for _ in (0, 1))]
        )
        """(P,): what one byte costs on each port."""
        self.host_of_rank = np.array(cluster.host_of_rank, dtype=np.int64)
        self._trees: dict[Hashable, float] = {}

    @property
    def count(self) -> int:
        return len(self.s_per_byte)

    def name(self, port: int) -> str:
        hosts = self.cluster.hosts
        if port < 3 * self.hosts:
            return f"{hosts[port % self.hosts].name} {('out', 'in', 'inside')[port // self.hosts]}"
        (a, b), first = next(
            (pair, first) for pair, first in self.pairs.items() if first <= port < first + 2
        )
        here, there = (a, b) if port == first else (b, a)
        return f"{hosts[here].name} to {hosts[there].name}"

    def traffic(self, collective: Collective, members: Sequence[int], root: int = 0) -> Traffic:
        """`root`: the rank that gathers, scatters, broadcasts or gets the sum."""
        ranks = np.asarray(members, dtype=np.int64)
        count = len(ranks)
        if count < 2:
            return Traffic.even(np.zeros(self.count), 1)
        share = (count - 1) / count
        if collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
            return Traffic.even(self._ring(ranks, 2 * share), 2 * (count - 1))
        if collective is Collective.ALL_GATHER:
            return Traffic.even(self._ring(ranks, share), count - 1)
        if collective is Collective.ALL_TO_ALL:
            return Traffic.even(self._all_to_all(ranks), 1)
        others = ranks[ranks != root]
        here = np.full(len(others), root)
        if collective is Collective.GATHER:
            return Traffic.even(self._moved(others, here, 1.0), 1)
        if collective is Collective.SCATTER:
            return Traffic.even(self._moved(here, others, 1.0), 1)
        if collective is Collective.REDUCE:
            return Traffic.even(
                self._ring(ranks, share) + self._moved(others, here, 1 / count), count
            )
        return self._tree(ranks, root)

    def _ring(self, ranks: IntArray, factor: float) -> FloatArray:
        return self._moved(ranks, np.roll(ranks, -1), factor)

    def _tree(self, ranks: IntArray, root: int) -> Traffic:
        """Of roots that see the same hosts around them the tree is played through once."""
        count = len(ranks)
        turned = np.roll(ranks, -int(np.flatnonzero(ranks == root)[0]))
        sources = turned[senders(count)]
        loads = self._moved(sources, turned[1:], 1.0)
        seen = self._seen(self.host_of_rank[turned])
        if seen not in self._trees:
            paths, s_per_byte = self._paths(sources, turned[1:])
            self._trees[seen] = tree_s_per_byte(paths, s_per_byte)
        return Traffic(
            loads, int(count - 1).bit_length(), max(self._trees[seen], float(loads.max()))
        )

    def _seen(self, hosts: IntArray) -> Hashable:
        """The same for two sequences of hosts of which one is the other's with hosts of the same speeds in their places."""
        if self.pairs:
            return tuple(hosts.tolist())
        first, places = np.unique(hosts, return_index=True)
        order = np.argsort(places)
        number = np.empty(self.hosts, dtype=np.int64)
        number[first[order]] = np.arange(len(first))
        speeds = self.s_per_byte[: 3 * self.hosts].reshape(3, -1)[:, first[order]]
        return tuple(number[hosts].tolist()), speeds.tobytes()

    def _paths(
        self, sources: IntArray, receivers: IntArray
    ) -> tuple[list[tuple[int, ...]], FloatArray]:
        """(ports of every transfer, seconds per byte of each): inside a host every device has two ports of its own."""
        at = {
            rank: place
            for place, rank in enumerate(sorted({*sources.tolist(), *receivers.tolist()}))
        }
        inner = self.s_per_byte[2 * self.hosts + self.host_of_rank[list(at)]]
        paths: list[tuple[int, ...]] = []
        for a, b in zip(sources.tolist(), receivers.tolist(), strict=True):
            x, y = int(self.host_of_rank[a]), int(self.host_of_rank[b])
            pair = self.pairs.get((min(x, y), max(x, y)))
            if x == y:
                paths.append((self.count + 2 * at[a], self.count + 2 * at[b] + 1))
            else:
                paths.append((x, self.hosts + y) if pair is None else (pair + (x > y),))
        return paths, np.concatenate([self.s_per_byte, np.repeat(inner, 2)])

    def _all_to_all(self, ranks: IntArray) -> FloatArray:
        """Every rank sends 1/n of its tensor to each other one."""
        replicas = np.bincount(self.host_of_rank[ranks], minlength=self.hosts) / len(ranks)
        loads = np.zeros(self.count)
        flows = replicas * (len(ranks) - replicas * len(ranks))
        loads[: self.hosts] = loads[self.hosts : 2 * self.hosts] = flows
        loads[2 * self.hosts : 3 * self.hosts] = np.maximum(replicas - 1 / len(ranks), 0.0) * (
            replicas > 0
        )
        for (a, b), port in self.pairs.items():
            own = replicas[a] * replicas[b] * len(ranks)
            for host, other, there in ((a, b, port), (b, a, port + 1)):
                loads[host] -= own
                loads[self.hosts + other] -= own
                loads[there] += own
        moved: FloatArray = np.maximum(loads, 0.0) * self.s_per_byte
        return moved

    def _moved(self, senders: IntArray, receivers: IntArray, share: float) -> FloatArray:
        """Seconds per port where each sender sends `share` bytes to its receiver. Inside a host the busiest device counts."""
        a, b = self.host_of_rank[senders], self.host_of_rank[receivers]
        across = a != b
        loads = np.zeros(self.count)
        direct = across.copy()
        for (x, y), port in self.pairs.items():
            for here, there, own in ((x, y, port), (y, x, port + 1)):
                chosen = (a == here) & (b == there)
                loads[own] += float(chosen.sum())
                direct &= ~chosen
        loads[: self.hosts] = np.bincount(a[direct], minlength=self.hosts)
        loads[self.hosts : 2 * self.hosts] = np.bincount(b[direct], minlength=self.hosts)
        if not across.all():
            for ends in (senders, receivers):
                busy = np.bincount(ends[~across], minlength=len(self.host_of_rank)).astype(
                    np.float64
                )
                np.maximum.at(loads[2 * self.hosts : 3 * self.hosts], self.host_of_rank, busy)
        moved: FloatArray = share * loads * self.s_per_byte
        return moved
