"""Network costs: Eq. 2 (parameter server) and Eq. 3 (collectives) for each message of a plan.

Source: AutoSync, supplement sec. 2 (Eq. 2) and sec. 3 (Eq. 3).

| symbol | meaning | unit | here |
|---|---|---|---|
| M | number of messages of the plan | - | leading axis of every array |
| c(m) | bytes of the compressed message | B | `Message.wire_bytes` |
| w | ranks of the collective | - | world size, or `len(Message.ranks)` |
| r_k | replicas on machine k | - | its devices that take part |
| b_jk | bandwidth between server j and machine k | B/s | `Cluster.bandwidth_bytes_per_s` |
| b_m | slowest link of the ring | B/s | `Cluster.ring_bytes_per_s` |
| phi | network overhead per peer | s | `network_overhead_s` |
| delta | kernel and copy latency per collective | s | `KERNEL_LATENCY_S` |

Eq. 2:  sum_k I_d(j,k) c(m)/b_jk r_k^(1-I_p)  +  phi sum_k I_d(j,k) r_k^(1-I_p)  +  delta

Eq. 3:  factor(w) c(m)/b_m  +  w phi  +  delta,  factor = 2(w-1)/w for all-reduce, (w-1)/w for
reduce-scatter and for all-gather, 1 for broadcast and for reduce. A message of two collectives
costs their sum.

Readings of the printed equations: the exponent of r_k is 1 for flat reduction and 0 for
hierarchical (I_p), as the paper's text states. I_d(j,k) is 0 for the server's own host. On a
cluster of one host each device counts as a machine of its own over the inner link; otherwise I_d
would be 0 and a server free. A hierarchical collective is a reduce inside each host, the collective
among the hosts, and a broadcast inside (Eq. 3 three times). Rows of a sparse gradient are one
all-gather of the rows that all ranks touch (`row_traffic`). Global features are maximum and sum, as
in AutoSync's code; the supplement prints maximum and mean for collectives.

A direct exchange is two collectives of Eq. 3, whose transfer is that of its shares and pieces
(`direct_cost`), and each further piece costs another delta.

All ranks of one host cost the same, so no sum runs over pairs of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.cluster import Cluster, CollectiveFit, Where
from autotune.costs.direct_cost import direct_s_per_byte
from autotune.costs.row_traffic import RowTraffic
from autotune.errors import InvalidInput
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.shares import Shares
from autotune.strategy_space.strategy import SparseHandling, Synchronizer
from autotune.workload import Workload

KERNEL_LATENCY_S = 1e-4
"""delta. The paper gives no value.

Measured: issuing an in-place all-reduce on a packed 32 MB buffer (torch 2.13, gloo, CPU).
"""

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
"""The five collectives of Eq. 3."""

_PARTS = {
    Synchronizer.ALL_REDUCE: ("all_reduce",),
    Synchronizer.REDUCE_SCATTER_ALL_GATHER: ("reduce_scatter", "all_gather"),
    Synchronizer.REDUCE_BROADCAST: ("reduce", "broadcast"),
}

MESSAGE_FEATURES = ("transfer_s", "overhead_count", "kernel_count", "is_parameter_server")
"""z of one message: transfer (s), coefficients of phi and delta, and 1 for a parameter server."""

GLOBAL_FEATURES = tuple(
    f"{of}_{over}_{what}"
    for over in ("server", "collective")
    for of in ("max", "sum")
    for what in ("transfer_s", "overhead_count", "kernel_count")
)
"""The 12 numbers of a plan, in this order."""


def collective_factor(primitive: str, ranks: int) -> float:
    """How many times Eq. 3 moves the message over the slowest link."""
    if primitive not in COLLECTIVES:
        raise InvalidInput(
            f"a collective primitive must be one of {', '.join(COLLECTIVES)}, but is {primitive!r}"
        )
    if ranks < 2:
        return 0.0
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share}.get(
        primitive, 1.0
    )


@dataclass(frozen=True)
class MessageCosts:
    """Costs of the M messages of a plan, in issue order.

    | name | meaning | unit |
    |---|---|---|
    | `transfer_s` | network transfer of Eq. 2 or 3 | s |
    | `overhead_count` | coefficient of phi | - |
    | `overhead_s` | coefficient times phi; steps inside a host count with its inner latency | s |
    | `kernel_count` | coefficient of delta | - |
    | `server` | machine that serves the message; -1 for collectives | - |
    | `fitted_sync_s` | cost of c(m) by the fits of its collectives; NaN if one is missing | s |
    | `link_bytes_per_s` | interface of the server, or slowest link of the ring | B/s |
    | `wire_bytes` | c(m) | B |
    """

    transfer_s: FloatArray
    overhead_count: FloatArray
    overhead_s: FloatArray
    kernel_count: FloatArray
    server: IntArray
    fitted_sync_s: FloatArray
    link_bytes_per_s: FloatArray
    wire_bytes: FloatArray

    @property
    def is_parameter_server(self) -> BoolArray:
        return self.server >= 0

    @cached_property
    def sync_s(self) -> FloatArray:
        """Eq. 2 and Eq. 3 exactly, shape (M,)."""
        return self.transfer_s + self.overhead_s + self.kernel_count * KERNEL_LATENCY_S

    @cached_property
    def channel_s(self) -> FloatArray:
        """How long each message holds the one communication channel, shape (M,).

        Fitted if probed. Otherwise Eq. 3, and for servers Eq. 2 with transfer and overhead twice:
        Eq. 2 counts one direction, and on one channel the pull follows the push.
        """
        both_ways = self.is_parameter_server * (self.transfer_s + self.overhead_s)
        return np.where(np.isnan(self.fitted_sync_s), self.sync_s + both_ways, self.fitted_sync_s)

    @cached_property
    def features(self) -> FloatArray:
        """z of each message, shape (M, 4), columns `MESSAGE_FEATURES`."""
        counts = (self.overhead_count, self.kernel_count)
        served = self.is_parameter_server.astype(np.float64)
        return np.column_stack([self.transfer_s, *counts, served])

    @cached_property
    def global_features(self) -> FloatArray:
        """The 12 numbers, shape (12,), columns `GLOBAL_FEATURES`; 0 if a kind is absent."""
        parts = self.features[:, :3]
        return np.concatenate(
            [_max_and_sum(self._per_server(parts)), _max_and_sum(parts[~self.is_parameter_server])]
        )

    @cached_property
    def paper_sync_s(self) -> float:
        """T_sync: the most loaded server (servers work in parallel) plus all collectives."""
        served = self._per_server(self.sync_s[:, None])
        return float(served.max(initial=0.0) + self.sync_s[~self.is_parameter_server].sum())

    def _per_server(self, values: FloatArray) -> FloatArray:
        """Sums of the rows of `values` over each server's messages, shape (servers, columns)."""
        chosen = self.is_parameter_server
        if not chosen.any():
            return np.zeros((0, values.shape[1]))
        sums = np.zeros((int(self.server.max()) + 1, values.shape[1]))
        np.add.at(sums, self.server[chosen], values[chosen])
        return sums


def _max_and_sum(rows: FloatArray) -> FloatArray:
    return np.concatenate([rows.max(axis=0, initial=0.0), rows.sum(axis=0)])


def message_costs(
    plan: Plan, cluster: Cluster, workload: Workload, rates: Rates | None = None
) -> MessageCosts:
    """Eq. 2, Eq. 3 and the fitted cost of each message.

    `workload`: the plan's, which knows the rows of sparse gradients. `rates`: those of this cluster
    and the plan's ring order, to share among many plans. Raises `InvalidInput` if the sizes of plan
    and cluster differ.
    """
    if plan.world_size != cluster.world_size:
        raise InvalidInput(
            f"costs need a plan for the cluster, but the plan is for {plan.world_size} ranks "
            f"and cluster {cluster.name!r} has {cluster.world_size}; "
            "plan the strategy for this cluster"
        )
    wire_bytes = RowTraffic(workload).collective_bytes(plan.messages, plan.world_size)
    rates = rates or Rates(cluster, plan.ring_order)
    return rates.costs([kind_of(message) for message in plan.messages], wire_bytes)


def network_overhead_s(cluster: Cluster) -> float:
    """phi: the fitted all-reduce's remainder per rank, (alpha - delta) / w.

    Without a fit it is the worst latency of the ring.
    """
    fit = cluster.fit("all_reduce", cluster.world_size)
    if fit is not None:
        return max(fit.alpha_s - KERNEL_LATENCY_S, 0.0) / cluster.world_size
    inner = [host.inner_latency_s for host in cluster.hosts if host.devices > 1]
    firsts = np.cumsum([0, *(host.devices for host in cluster.hosts[:-1])]).tolist()
    hops = zip(firsts, firsts[1:] + firsts[:1], strict=True) if len(firsts) > 1 else ()
    return max([*inner, *(cluster.latency_s(here, there) for here, there in hops)], default=0.0)


_Fits = tuple[CollectiveFit, ...] | None
"""Fits of the collectives that a message runs one after the other; None if one is missing."""


class MessageKind(NamedTuple):
    """Everything that determines a message's cost, except its size."""

    synchronizer: Synchronizer
    owner: int | None = None
    hierarchical: bool = False
    sparse: SparseHandling = SparseHandling.DENSE
    ranks: tuple[int, ...] = ()
    shares: Shares | None = None
    pieces: int = 1


def kind_of(message: Message) -> MessageKind:
    return MessageKind(
        message.synchronizer,
        message.owner,
        message.hierarchical,
        message.sparse,
        message.ranks,
        message.shares,
        message.pieces,
    )


@dataclass(frozen=True)
class _Rate:
    """The cost of one kind of message, per byte and constant."""

    s_per_byte: float
    overhead_count: float
    overhead_s: float
    kernel_count: float
    link: float
    server: int = -1
    fits: _Fits = None
    fit_factor: float = 1.0
    pieces_s: float = 0.0


class Rates:
    """Message costs on one cluster and ring order; each of the few kinds is computed once."""

    def __init__(self, cluster: Cluster, ring_order: tuple[int, ...] | None = None) -> None:
        self.cluster = cluster
        self.ring_order = ring_order
        self.phi_s = network_overhead_s(cluster)
        self._numbers: dict[MessageKind, int] = {}
        self._rates: list[_Rate] = []
        self._bandwidths: dict[tuple[int, ...], float] = {}
        self._leaders_of: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._known_fits: dict[tuple[tuple[str, ...], int, bool], _Fits] = {}

    def costs(self, kinds: Sequence[MessageKind], wire_bytes: FloatArray) -> MessageCosts:
        """Costs of messages of these kinds and sizes, both of shape (M,)."""
        numbers = np.array([self._number(kind) for kind in kinds], dtype=np.int64)
        rates = self._rates
        columns = np.array(
            [(r.s_per_byte, r.overhead_count, r.overhead_s, r.kernel_count, r.link) for r in rates]
        )[numbers]
        fitted_s = np.full(len(numbers), np.nan)
        for number in np.unique(numbers).tolist():
            fits, at = rates[number].fits, np.flatnonzero(numbers == number)
            if fits is not None:
                each_s = (fit.seconds_each(wire_bytes[at]) for fit in fits)
                factor, more_s = rates[number].fit_factor, rates[number].pieces_s
                fitted_s[at] = factor * sum(each_s, np.zeros(len(at))) + more_s
        return MessageCosts(
            transfer_s=columns[:, 0] * wire_bytes,
            overhead_count=columns[:, 1],
            overhead_s=columns[:, 2],
            kernel_count=columns[:, 3],
            server=np.array([r.server for r in rates], dtype=np.int64)[numbers],
            fitted_sync_s=fitted_s,
            link_bytes_per_s=columns[:, 4],
            wire_bytes=wire_bytes,
        )

    def _number(self, kind: MessageKind) -> int:
        if kind.owner is not None and kind.synchronizer is not Synchronizer.PARAMETER_SERVER:
            kind = kind._replace(owner=None)  # a collective costs the same from any root
        number = self._numbers.get(kind)
        if number is None:
            self._numbers[kind] = number = len(self._rates)
            self._rates.append(self._rate(kind))
        return number

    def _rate(self, kind: MessageKind) -> _Rate:
        ranks = kind.ranks or self.ring_order or ()
        size = len(ranks) or self.cluster.world_size
        if size < 2:
            return _Rate(0.0, 0.0, 0.0, 0.0, self.cluster.own_bandwidth_bytes_per_s(0), fits=())
        if kind.synchronizer is Synchronizer.PARAMETER_SERVER:
            return self._served(kind, ranks, size)
        if kind.synchronizer is Synchronizer.DIRECT_EXCHANGE:
            return self._direct(kind, size)
        return self._collective(kind, ranks, size)

    def _served(self, kind: MessageKind, ranks: tuple[int, ...], size: int) -> _Rate:
        """Eq. 2 for the server on rank `kind.owner`."""
        assert kind.owner is not None
        cluster = self.cluster
        link = cluster.own_bandwidth_bytes_per_s(kind.owner)
        fits = (
            None
            if self._hierarchical(kind)
            else self._fit((kind.synchronizer.operation,), size, ranks)
        )
        if len(cluster.hosts) == 1:
            others = size - 1
            return _Rate(others / link, others, others * self.phi_s, 1.0, link, kind.owner, fits)
        server = cluster.host_of_rank[kind.owner]
        replicas = self._replicas(ranks)
        copies = np.minimum(replicas, 1) if self._hierarchical(kind) else replicas
        elsewhere = np.arange(len(cluster.hosts)) != server
        s_per_byte = float((copies / host_bandwidths(cluster, server))[elsewhere].sum())
        count = float(copies[elsewhere].sum())
        return _Rate(s_per_byte, count, count * self.phi_s, 1.0, link, server, fits)

    def _direct(self, kind: MessageKind, size: int) -> _Rate:
        """Both rounds of a direct exchange of all ranks, or of the hosts' leaders.

        The probe exchanged whole messages with equal shares between all ranks. Two levels have no
        fit here.
        """
        two_level = self._hierarchical(kind)
        members = len(self.cluster.hosts) if two_level else size
        s_per_byte, link = direct_s_per_byte(self.cluster, kind.shares, kind.pieces, two_level)
        exchange = _Rate(
            s_per_byte=s_per_byte,
            overhead_count=2.0 * members,
            overhead_s=2.0 * members * self.phi_s,
            kernel_count=1.0 + kind.pieces,
            link=link,
        )
        if two_level:
            inside = self._two_level((), ())
            return replace(
                exchange,
                s_per_byte=s_per_byte + inside.s_per_byte,
                overhead_count=exchange.overhead_count + inside.overhead_count,
                overhead_s=exchange.overhead_s + inside.overhead_s,
                kernel_count=exchange.kernel_count + inside.kernel_count,
            )
        fits = self._fit((kind.synchronizer.operation,), size, ())
        if not fits:
            return exchange
        probed, _ = direct_s_per_byte(self.cluster, None, 1, two_level)
        pieces_s = (kind.pieces - 1) / 2 * fits[0].alpha_s
        return replace(exchange, fits=fits, fit_factor=s_per_byte / probed, pieces_s=pieces_s)

    def _collective(self, kind: MessageKind, ranks: tuple[int, ...], size: int) -> _Rate:
        """Eq. 3, summed over the message's collectives."""
        parts = (
            ("all_gather",)
            if kind.sparse is SparseHandling.ALL_GATHER
            else _PARTS[kind.synchronizer]
        )
        if self._hierarchical(kind):
            return self._two_level(parts, ranks)
        link = self._ring(ranks)
        factor = sum(collective_factor(part, size) for part in parts)
        fits = self._fit(
            (kind.synchronizer.operation,) if parts == _PARTS[kind.synchronizer] else parts,
            size,
            ranks,
        )
        if fits is None:
            fits = self._fit(parts, size, ranks)
        count = float(size * len(parts))
        slower = (
            1.0 if kind.ranks else self.cluster.ring_bytes_per_s / link
        )  # than the ring in rank order, which was probed
        return _Rate(
            factor / link, count, count * self.phi_s, float(len(parts)), link, -1, fits, slower
        )

    def _two_level(self, parts: Sequence[str], ranks: tuple[int, ...]) -> _Rate:
        """Reduce inside the hosts, the collectives among them, broadcast inside."""
        replicas = self._replicas(ranks)
        crowded = [
            (host, int(count))
            for host, count in zip(self.cluster.hosts, replicas, strict=True)
            if count > 1
        ]
        inner_link = min(host.inner_bytes_per_s for host, _ in crowded)
        inner_latency_s = max(host.inner_latency_s for host, _ in crowded)
        inner_size = max(count for _, count in crowded)
        hosts = int((replicas > 0).sum())
        link = self._ring(self._leaders(ranks))
        s_per_byte = 2 / inner_link + sum(collective_factor(part, hosts) for part in parts) / link
        inner_count, outer_count = float(2 * inner_size), float(hosts * len(parts))
        overhead_s = inner_count * inner_latency_s + outer_count * self.phi_s
        fits = self._two_level_fits(parts, inner_size, hosts)
        return _Rate(
            s_per_byte, inner_count + outer_count, overhead_s, 2.0 + len(parts), link, -1, fits
        )

    def _leaders(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The lowest rank of each host that takes part, in the order of the ring."""
        if ranks not in self._leaders_of:
            order = np.array(ranks or range(self.cluster.world_size), dtype=np.int64)
            ascending = np.sort(order)
            hosts = np.asarray(self.cluster.host_of_rank)[ascending]
            lowest = ascending[np.unique(hosts, return_index=True)[1]]
            self._leaders_of[ranks] = tuple(order[np.isin(order, lowest)].tolist())
        return self._leaders_of[ranks]

    def _two_level_fits(self, parts: Sequence[str], inner_size: int, hosts: int) -> _Fits:
        """Fits of the three steps: inside hosts of this size, and among one rank per host."""
        inside = [
            self.cluster.fit(primitive, inner_size, Where.HOST)
            for primitive in ("reduce", "broadcast")
        ]
        among = [self.cluster.fit(primitive, hosts, Where.ACROSS) for primitive in parts]
        return _all_or_none([*inside, *among])

    def _hierarchical(self, kind: MessageKind) -> bool:
        """Whether hierarchy matters: between hosts, one of which has several of the ranks.

        Rows of sparse gradients go between all ranks.
        """
        if not kind.hierarchical or kind.sparse is not SparseHandling.DENSE:
            return False
        replicas = self._replicas(kind.ranks)
        return int((replicas > 0).sum()) > 1 and int(replicas.max()) > 1

    def _replicas(self, ranks: tuple[int, ...]) -> IntArray:
        """r_k: ranks that take part on each host, shape (hosts,)."""
        if not ranks:
            return np.array([host.devices for host in self.cluster.hosts], dtype=np.int64)
        counts: IntArray = np.bincount(
            np.asarray(self.cluster.host_of_rank)[list(ranks)], minlength=len(self.cluster.hosts)
        )
        return counts

    def _ring(self, ranks: tuple[int, ...]) -> float:
        """b_m: slowest link between neighbours of the ring; O(ranks)."""
        if not ranks:
            return self.cluster.ring_bytes_per_s
        if ranks not in self._bandwidths:
            hops = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
            self._bandwidths[ranks] = min(
                self.cluster.bandwidth_bytes_per_s(here, there) for here, there in hops
            )
        return self._bandwidths[ranks]

    def _fit(self, primitives: tuple[str, ...], size: int, ranks: tuple[int, ...]) -> _Fits:
        """Fits of these collectives on this many ranks; inside one host, those probed there.

        Equal arguments return the same object.
        """
        inside = (
            len(self.cluster.hosts) > 1
            and bool(ranks)
            and len({self.cluster.host_of_rank[rank] for rank in ranks}) == 1
        )
        key = (primitives, size, inside)
        if key not in self._known_fits:
            where = Where.HOST if inside else None
            self._known_fits[key] = _all_or_none(
                [self.cluster.fit(primitive, size, where) for primitive in primitives]
            )
        return self._known_fits[key]


def _all_or_none(fits: Sequence[CollectiveFit | None]) -> _Fits:
    known = tuple(fit for fit in fits if fit is not None)
    return known if len(known) == len(fits) else None


def host_bandwidths(cluster: Cluster, server: int) -> FloatArray:
    """b_jk of host `server` to each host, shape (hosts,)."""
    links = np.array([host.link_bytes_per_s for host in cluster.hosts])
    bandwidths: FloatArray = np.minimum(links, links[server])
    names = {host.name: index for index, host in enumerate(cluster.hosts)}
    for pair in reversed(cluster.pair_links):  # the first link named for a pair counts
        a, b = (names[end] for end in pair.between)
        if server in (a, b):
            bandwidths[b if a == server else a] = pair.link_bytes_per_s
    bandwidths[server] = cluster.hosts[server].inner_bytes_per_s
    return bandwidths
