"""The bytes that a collective moves through every port of the cluster, and its rounds.

A port is a host's interface, outwards or inwards, the link inside a host, or one direction of a
pair of hosts with a link of its own. Bytes are per byte of the tensor that the collective's fit
takes (`CollectiveFit`).

| symbol | meaning |
|---|---|
| n | members of the collective, in the order of their ring |
| H | hosts |
| P | ports: H outwards, H inwards, H inside, then two per pair with a link of its own |

We measured what gloo does for each collective (torch 2.13). An all-reduce is a ring of 2 (n - 1)
rounds, each of which sends 1/n of the tensor to the next rank. A reduce-scatter moves as much. An
all-gather is a ring of n - 1 rounds. A reduce is the first half of the ring; then every rank sends
its part to the root. A broadcast is a binomial tree: rank v, counted from the root, receives from
v without its highest bit. Gather and scatter are stars. A direct exchange is two rounds of sends
between all pairs of ranks. In a push, every rank sends to each owner the part that it owns; in a
pull, every owner sends its sum to all others. Their n (n - 1) sends each are the only quantity here
that grows with the square of the ranks. They are counted by host, never one by one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.cluster import Cluster
from autotune.lowering.tree import senders, tree_s_per_byte

OUT, IN, INSIDE = 0, 1, 2
MOST_STAGES = 4
"""Groups of owners of a direct exchange, whose parts arrive one after the other."""
APART = 0.1
"""Owners are in two groups if their shares differ by more than this part of the largest one."""


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
    PUSH = "push"
    PULL = "pull"


DIRECT = (Collective.PUSH, Collective.PULL)
"""The rounds of a direct exchange."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """`s_per_byte` (P,): time that a byte of the tensor occupies each port.

    `rounds`: sends that wait for each other. `alone_s_per_byte`: time of the whole collective
    without competitors. It is the slowest port's time, and more in a tree, whose links wait for
    each other.
    """

    s_per_byte: FloatArray
    rounds: int
    alone_s_per_byte: float

    @staticmethod
    def even(s_per_byte: FloatArray, rounds: int) -> Traffic:
        """Traffic whose slowest port is never idle."""
        return Traffic(s_per_byte, rounds, float(s_per_byte.max(initial=0.0)))


def owners_by_end(owned: FloatArray) -> list[tuple[FloatArray, FloatArray]]:
    """The stages of a direct exchange: what is pushed, and what is pulled behind it, both (n,).

    A rank's sends share its link evenly, so the owners of the smallest shares have their parts
    first. They send their sums while the others still receive. Similar shares count
    as one, and below `MOST_STAGES` of them all.
    """
    ends: list[float] = []
    for share in np.unique(owned[owned > 0])[::-1].tolist():
        if len(ends) < MOST_STAGES and (not ends or ends[-1] - share > APART * ends[0]):
            ends.append(share)
    stages, reached = [], 0.0
    for end in ends[::-1]:
        pushed = np.clip(owned, 0.0, end) - np.clip(owned, 0.0, reached)
        stages.append((pushed, np.where((owned > reached) & (owned <= end), owned, 0.0)))
        reached = end
    return stages


def _port_names(hosts: Sequence[str], pairs: Iterable[tuple[int, int]]) -> list[str]:
    """The names of all ports in the order of their numbers."""
    names = [f"{host} {side}" for side in ("out", "in", "inside") for host in hosts]
    for a, b in pairs:
        names += [f"{hosts[a]} to {hosts[b]}", f"{hosts[b]} to {hosts[a]}"]
    return names


class Ports:
    """The ports of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        hosts = cluster.hosts
        self.hosts = len(hosts)
        numbers = {host.name: index for index, host in enumerate(hosts)}
        pairs: dict[tuple[int, int], float] = {}
        for link in cluster.pair_links:  # the first link of a pair counts
            a, b = sorted(numbers[end] for end in link.between)
            if a != b:
                pairs.setdefault((a, b), link.link_bytes_per_s)
        self.pairs = {pair: 3 * self.hosts + 2 * number for number, pair in enumerate(pairs)}
        outside = [1 / host.link_bytes_per_s for host in hosts]
        inside = [1 / host.inner_bytes_per_s for host in hosts]
        paired = [1 / speed for speed in pairs.values() for _ in (0, 1)]
        self.s_per_byte = np.array([*outside, *outside, *inside, *paired])
        """(P,): time of one byte on each port."""
        self.names = _port_names([host.name for host in hosts], pairs)
        self.host_of_rank = np.array(cluster.host_of_rank, dtype=np.int64)
        self._trees: dict[Hashable, float] = {}

    @property
    def count(self) -> int:
        return len(self.s_per_byte)

    def name(self, port: int) -> str:
        return self.names[port]

    def traffic(
        self,
        collective: Collective,
        members: Sequence[int],
        root: int = 0,
        owned: FloatArray | None = None,
    ) -> Traffic:
        """`root`: the rank that gathers, scatters, broadcasts or receives the sum.

        `owned` (n,): the share of a direct exchange that each member owns; None: equal shares. They
        sum to less than 1 in a part of an exchange.
        """
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
        if collective in DIRECT:
            if owned is None:
                owned = np.full(count, 1 / count)
            return Traffic.even(self._direct(ranks, owned, collective is Collective.PULL), 1)
        others = ranks[ranks != root]
        at_root = np.full(len(others), root)
        if collective is Collective.GATHER:
            return Traffic.even(self._moved(others, at_root, 1.0), 1)
        if collective is Collective.SCATTER:
            return Traffic.even(self._moved(at_root, others, 1.0), 1)
        if collective is Collective.REDUCE:
            parts = self._moved(others, at_root, 1 / count)
            return Traffic.even(self._ring(ranks, share) + parts, count)
        return self._tree(ranks, root)

    def _ring(self, ranks: IntArray, factor: float) -> FloatArray:
        return self._moved(ranks, np.roll(ranks, -1), factor)

    def _tree(self, ranks: IntArray, root: int) -> Traffic:
        """Roots with equal hosts around them share one simulated tree."""
        count = len(ranks)
        from_root = np.roll(ranks, -int(np.flatnonzero(ranks == root)[0]))
        sources = from_root[senders(count)]
        loads = self._moved(sources, from_root[1:], 1.0)
        key = self._tree_key(self.host_of_rank[from_root])
        if key not in self._trees:
            paths, s_per_byte = self._paths(sources, from_root[1:])
            self._trees[key] = tree_s_per_byte(paths, s_per_byte)
        alone_s_per_byte = max(self._trees[key], float(loads.max()))
        return Traffic(loads, int(count - 1).bit_length(), alone_s_per_byte)

    def _tree_key(self, hosts: IntArray) -> Hashable:
        """Equal for sequences of hosts that differ only by hosts of the same speeds."""
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
        """(ports of every transfer, seconds per byte of each port).

        Inside a host every device has two ports of its own.
        """
        ranks = sorted({*sources.tolist(), *receivers.tolist()})
        at = {rank: place for place, rank in enumerate(ranks)}
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

    def path(self, source: int, target: int) -> tuple[int, ...]:
        """The ports that a transfer between two ranks passes, in order."""
        a, b = int(self.host_of_rank[source]), int(self.host_of_rank[target])
        if a == b:
            return (INSIDE * self.hosts + a,)
        pair = self.pairs.get((min(a, b), max(a, b)))
        if pair is not None:
            return (pair + (a > b),)
        return (OUT * self.hosts + a, IN * self.hosts + b)

    def _all_to_all(self, ranks: IntArray) -> FloatArray:
        """Every rank sends 1/n of its tensor to each other rank."""
        replicas = np.bincount(self.host_of_rank[ranks], minlength=self.hosts) / len(ranks)
        loads = np.zeros(self.count)
        flows = replicas * (len(ranks) - replicas * len(ranks))
        loads[: self.hosts] = loads[self.hosts : 2 * self.hosts] = flows
        loads[2 * self.hosts : 3 * self.hosts] = np.maximum(replicas - 1 / len(ranks), 0.0) * (
            replicas > 0
        )
        for (a, b), port in self.pairs.items():
            moved_bytes = replicas[a] * replicas[b] * len(ranks)
            for source, target, pair_port in ((a, b, port), (b, a, port + 1)):
                loads[source] -= moved_bytes
                loads[self.hosts + target] -= moved_bytes
                loads[pair_port] += moved_bytes
        moved: FloatArray = np.maximum(loads, 0.0) * self.s_per_byte
        return moved

    def _direct(self, ranks: IntArray, owned: FloatArray, pull: bool) -> FloatArray:
        """Every rank sends to each other one what that owns; a pull is the reverse.

        Host h has d of the n ranks, which own s together. If all own w, it sends d (w - s) of the
        tensor to other hosts, and receives (n - d) s. O(ranks + pairs with a link of their own).
        """
        hosts = self.host_of_rank[ranks]
        devices = np.bincount(hosts, minlength=self.hosts).astype(np.float64)
        shares = np.bincount(hosts, weights=owned, minlength=self.hosts)
        sent, received = devices * (owned.sum() - shares), (len(ranks) - devices) * shares
        inside = np.zeros(self.hosts)
        # The busiest device sends to, and receives from, the others of its host.
        np.maximum.at(
            inside, hosts, np.maximum(shares[hosts] - owned, (devices[hosts] - 1) * owned)
        )
        loads = np.zeros(self.count)
        for (a, b), port in self.pairs.items():
            for source, target, pair_port in ((a, b, port), (b, a, port + 1)):
                moved = devices[source] * shares[target]
                sent[source] -= moved
                received[target] -= moved
                loads[pair_port + (1 - 2 * (pair_port - port) if pull else 0)] += moved
        loads[: self.hosts], loads[self.hosts : 2 * self.hosts] = sent, received
        if pull:
            loads[: self.hosts], loads[self.hosts : 2 * self.hosts] = received, sent
        loads[2 * self.hosts : 3 * self.hosts] = inside
        busy: FloatArray = np.maximum(loads, 0.0) * self.s_per_byte
        return busy

    def _moved(self, senders: IntArray, receivers: IntArray, share: float) -> FloatArray:
        """Seconds per port if each sender sends `share` bytes to its receiver.

        Inside a host the busiest device counts.
        """
        a, b = self.host_of_rank[senders], self.host_of_rank[receivers]
        across = a != b
        loads = np.zeros(self.count)
        direct = across.copy()
        for (x, y), port in self.pairs.items():
            for source, target, pair_port in ((x, y, port), (y, x, port + 1)):
                on_pair = (a == source) & (b == target)
                loads[pair_port] += float(on_pair.sum())
                direct &= ~on_pair
        loads[: self.hosts] = np.bincount(a[direct], minlength=self.hosts)
        loads[self.hosts : 2 * self.hosts] = np.bincount(b[direct], minlength=self.hosts)
        if not across.all():
            for ends in (senders, receivers):
                counts = np.bincount(ends[~across], minlength=len(self.host_of_rank))
                busy = counts.astype(np.float64)
                np.maximum.at(loads[2 * self.hosts : 3 * self.hosts], self.host_of_rank, busy)
        moved: FloatArray = share * loads * self.s_per_byte
        return moved
