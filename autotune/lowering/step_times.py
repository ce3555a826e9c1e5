"""The time of a step alone, and the part of it that occupies the links and the cores.

A step costs exactly the probe's fit, but no less than its bytes at the last slope: a shaped or
buffered link passes a short burst faster, which no stream of messages can use. While its bytes are
on the slowest port, they occupy that port, and the other ports in proportion to their bytes. The
rest of the time (handshakes, copies, waking threads) occupies no port, so a second message can use
the link meanwhile.

| symbol | meaning | unit |
|---|---|---|
| K | messages of one kind: the shape of the arrays | - |
| P, C | ports; hosts, or 1 machine, with cores | - |
| S | size that the fit takes | B |
| t(S) | fitted time of the collective | s |
| s | seconds per byte on the slowest port, by the cluster's bandwidths (`traffic.py`) | s/B |
| a | seconds per byte of the whole step; above s if links wait for each other, as in a tree | s/B |
| g | real cost of a byte relative to a: the fit's last slope by a, at most 1 / payload | - |

Streams of all-reduces fill their links at the probed rate, so g is at most 1 for them: what a
slope has above it are pauses of the ring, which other messages use.

The probe's root is rank 0 and its ring follows the ranks. Another root or ring has another a':
t'(S) = t(S) + g (a' - a) S. Without a fit, t(S) = a S / payload + 2 latencies per round +
`collective_s`.

A direct exchange was probed with equal shares; others have another a'. If only k of n ranks own
something, there are k/n of the probe's messages, and as much of their CPU time. If one rank owns
all messages with one owner, their g is that of a probed gather or scatter, whose transfers all meet
at one port. The ports of a direct exchange have the rates that the probe found with all peers at
once (`Cluster.peer_fits`), for each host and direction, or else the hosts' own. Without a fit, each
of its rounds costs the messages of one rank, by the same probe or the assumed `message_s`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.cluster import Cluster, CollectiveFit, Where
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.flows import flow_s
from autotune.lowering.kept import Kept
from autotune.lowering.steps import Scope, Step
from autotune.lowering.traffic import DIRECT, IN, OUT, Collective, Ports, Traffic, owners_by_end
from autotune.strategy_space.shares import Shares
from autotune.strategy_space.strategy import Synchronizer

_HALVES = {
    Synchronizer.PARAMETER_SERVER.operation: (Collective.GATHER, Collective.SCATTER),
    Synchronizer.REDUCE_SCATTER_ALL_GATHER.operation: (
        Collective.REDUCE_SCATTER,
        Collective.ALL_GATHER,
    ),
    Synchronizer.DIRECT_EXCHANGE.operation: DIRECT,
}
MOST_MEMBERS = 8
"""An exchange with one owner and at most this many ranks is replayed transfer by transfer."""
SEEN_BELOW = 0.9
"""A host's interface was seen if it was slower than this share of its peers' links together."""
KEPT_LOADS = 1024
"""Loads that are kept, and as many traffics and factors: a job proposes owners and rings for hours.
Loads have 10 MB on 64 hosts, with 20 numbers for each port."""
_JOINT = {half: name for name, halves in _HALVES.items() for half in halves}
_WHERE = {Scope.WORLD: None, Scope.HOSTS: Where.HOST, Scope.LEADERS: Where.ACROSS}


@dataclass(frozen=True, eq=False)
class StepTimes:
    """Times of a step of K messages.

    `alone_s` (K,): the whole step. `link_s` (K,): the slowest port is occupied. `ports` (P,): the
    share of `link_s` that each port is occupied. `cpu_s` (K,): CPU time of one rank; times `cores`
    (C,) it is the time that the cores of each host are busy. `stages`: parts of `ports` that end
    one after the other; in a direct exchange, owners have their parts at their ends. `owners`: for
    each of its stages, whether a rank owns some of what it moves, shape (ranks,); else none.
    `connections` (P,): of a gather or scatter, the tensors that pass each port. `flows`: every
    transfer of a direct exchange with one owner and few members; the last one arrives `flows_share`
    of `link_s` behind the start.
    """

    alone_s: FloatArray
    link_s: FloatArray
    ports: FloatArray
    rounds: int
    cpu_s: FloatArray
    cores: FloatArray
    stages: tuple[FloatArray, ...]
    connections: IntArray
    owners: tuple[BoolArray, ...] = ()
    flows: tuple[Flow, ...] = ()
    flows_share: float = 1.0


@dataclass(frozen=True)
class Flow:
    """The transfer from rank `source` to `target`.

    `ports`: those that it passes, in order, with the share of `StepTimes.link_s` for which it
    occupies each.
    """

    source: int
    target: int
    ports: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class _Load:
    """How a collective uses the cluster, for messages of any size; fields as in `StepTimes`.

    `members`: ranks of its largest process group. `slowest`, `whole`: s and a of the legend.
    `senders`: see `_senders`.
    """

    members: int
    rounds: int
    slowest: float
    whole: float
    ports: FloatArray
    cores: FloatArray
    stages: tuple[FloatArray, ...]
    connections: IntArray
    owners: tuple[BoolArray, ...]
    senders: float
    flows: tuple[Flow, ...] = ()
    flows_share: float = 1.0


class Timing:
    """Times of steps on one cluster."""

    def __init__(self, cluster: Cluster, ports: Ports, costs: RuntimeCosts) -> None:
        self.cluster = cluster
        self.ports = ports
        self.costs = costs
        self._traffic: Kept[Traffic] = Kept(KEPT_LOADS, KEPT_LOADS)
        self._loads: Kept[_Load] = Kept(KEPT_LOADS, KEPT_LOADS)
        self._peers = _PeerCosts(cluster, ports, costs)
        self._leaders = tuple(
            int(np.searchsorted(ports.host_of_rank, host)) for host in range(len(cluster.hosts))
        )
        self._world = tuple(range(cluster.world_size))

    def of(self, step: Step, groups: Sequence[tuple[int, ...]]) -> StepTimes:
        """The times of a step with a collective; its process `groups` run it at the same time."""
        size_bytes = step.size_bytes
        load = self._load(step, tuple(groups))
        if load.members < 2:
            none = np.zeros(len(size_bytes))
            alone_s, link_s, cpu_s = none, none, none
        else:
            alone_s, link_s, cpu_s = self._times_s(step, load)
        return StepTimes(
            alone_s=alone_s,
            link_s=link_s,
            ports=load.ports,
            rounds=load.rounds,
            cpu_s=cpu_s,
            cores=load.cores,
            stages=load.stages,
            connections=load.connections,
            owners=load.owners,
            flows=load.flows,
            flows_share=load.flows_share,
        )

    def _times_s(self, step: Step, load: _Load) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(alone, link, CPU) seconds of a step, each (K,)."""
        assert step.collective is not None
        size_bytes, size, direct = step.size_bytes, load.members, step.collective in DIRECT
        fitted = self._fitted(step, size)
        if fitted is None:
            payload = self.costs["payload"]
            link_s = load.slowest * size_bytes / payload
            cpu_s = self._cpu_s(size_bytes, size, step.scope)
            start_s = self._peers.messages_s(size) if direct else self.costs["collective_s"]
            latencies_s = 2 * load.rounds * self._latency_s(step.scope) + start_s
            alone_s = load.whole * size_bytes / payload + latencies_s
            if step.collective is Collective.PULL:
                alone_s += self.costs["sum_s_per_byte"] * size_bytes
            return alone_s, link_s, cpu_s
        fitted_s, slope, cpu_s = fitted
        probed = self._probed_s_per_byte(step.collective, step.scope, size)
        g = min(slope / probed, 1 / self.costs["payload"]) if probed > 0 else 0.0
        if step.collective is Collective.ALL_REDUCE:
            g = min(g, 1.0)
        elif step.served and direct:
            g = min(g, self._served_byte_cost(step, size))
        link_s = g * load.slowest * size_bytes
        alone_s = np.maximum(fitted_s + g * (load.whole - probed) * size_bytes, link_s)
        if direct:
            saved_s = (1 - load.senders) * self._message_cpu_s(step, size)
            cpu_s = cpu_s - saved_s
            alone_s = np.maximum(alone_s - max(1.0, float(load.cores.max())) * saved_s, link_s)
        return alone_s, link_s, cpu_s

    def _served_byte_cost(self, step: Step, size: int) -> float:
        """g of a transfer from or to one owner: that of a gather or scatter.

        Infinite if neither was probed; at least 1, since streams are no faster than their link.
        """
        star = Collective.SCATTER if step.collective is Collective.PULL else Collective.GATHER
        fit = self._fit(star.value, size, step.scope)
        probed = self._probed_s_per_byte(star, step.scope, size)
        if fit is None or probed <= 0:
            return math.inf
        return max(fit.beta_s_per_byte / probed, 1.0)

    def _load(self, step: Step, groups: tuple[tuple[int, ...], ...]) -> _Load:
        key = step.collective, groups, step.root, step.shares
        load = self._loads.get(key)
        if load is None:
            load = self._new_load(step, groups)
            self._loads.put(key, 1, load)
        return load

    def _new_load(self, step: Step, groups: tuple[tuple[int, ...], ...]) -> _Load:
        assert step.collective is not None
        exchanging = [members for members in groups if len(members) > 1]
        cores = self._cores(exchanging)
        if not exchanging:
            ports = np.zeros(self.ports.count)
            return _Load(1, 1, 0.0, 0.0, ports, cores, (ports,), ports.astype(np.int64), (), 1.0)
        traffics = [
            self.traffic(step.collective, members, _root(step.root, members), step.shares)
            for members in exchanging
        ]
        s_per_byte = np.maximum.reduce([traffic.s_per_byte for traffic in traffics])
        slowest = float(s_per_byte.max())
        stages: list[FloatArray] = [s_per_byte]
        owners: list[BoolArray] = []
        if step.collective in DIRECT:
            stages, owners = self._stages(step, exchanging[0])
        scale = slowest if slowest > 0 else 1.0
        flows: tuple[Flow, ...] = ()
        if len(stages) == 1 and len(exchanging) == 1 and step.collective in DIRECT:
            flows = self._flows(step, exchanging[0], scale)
        return _Load(
            members=max(len(members) for members in exchanging),
            rounds=max(traffic.rounds for traffic in traffics),
            slowest=slowest,
            whole=max(traffic.alone_s_per_byte for traffic in traffics),
            ports=s_per_byte / scale,
            cores=cores,
            stages=tuple(stage / scale for stage in stages),
            connections=np.rint(s_per_byte / self.ports.s_per_byte).astype(np.int64),
            owners=tuple(owners),
            senders=_senders(step, exchanging[0]),
            flows=flows,
            flows_share=_flows_share(flows, step.collective),
        )

    def _flows(self, step: Step, members: tuple[int, ...], scale: float) -> tuple[Flow, ...]:
        """The transfers of an exchange with one owner; none with several, or many members.

        A queue of a device runs the rounds of all owners one after the other, so none there.
        """
        owned = _owned(step, members)
        if self.costs["queued"] or len(members) > MOST_MEMBERS or (owned > 0).sum() != 1:
            return ()
        owner = members[int(owned.argmax())]
        s_per_byte = self.ports.s_per_byte * self._peers.factors(members) / scale
        others = [rank for rank in members if rank != owner]
        pulled = step.collective is Collective.PULL
        ends = [(owner, rank) if pulled else (rank, owner) for rank in others]
        return tuple(
            Flow(a, b, tuple((port, float(s_per_byte[port])) for port in self.ports.path(a, b)))
            for a, b in ends
        )

    def _stages(
        self, step: Step, members: tuple[int, ...]
    ) -> tuple[list[FloatArray], list[BoolArray]]:
        """(seconds per byte on each port, the owners) of every stage of a push or pull."""
        assert step.collective is not None
        at = DIRECT.index(step.collective)
        parts = [parts[at] for parts in owners_by_end(_owned(step, members))]
        factors = self._peers.factors(members)
        stages = [
            self.ports.traffic(step.collective, members, owned=part).s_per_byte * factors
            for part in parts
        ]
        of_rank = np.zeros((len(parts), len(self.ports.host_of_rank)), dtype=np.bool_)
        of_rank[:, list(members)] = np.array(parts) > 0
        return stages, list(of_rank)

    def fitted(self, collective: Collective, size: int, scope: Scope) -> bool:
        """Whether the collective itself was probed on this many ranks."""
        return self._fit(collective.value, size, scope) is not None

    def traffic(
        self,
        collective: Collective,
        members: tuple[int, ...],
        root: int,
        shares: Shares | None = None,
    ) -> Traffic:
        """`shares` of a direct exchange: those of all ranks."""
        key = (collective, members, root, shares)
        traffic = self._traffic.get(key)
        if traffic is None:
            owned = None if shares is None else np.array(shares)[list(members)]
            traffic = self.ports.traffic(collective, members, root, owned)
            if collective in DIRECT and traffic.s_per_byte.any():
                slowed = traffic.s_per_byte * self._peers.factors(members)
                traffic = Traffic.even(slowed, traffic.rounds)
            self._traffic.put(key, 1, traffic)
        return traffic

    def _cores(self, groups: Sequence[tuple[int, ...]]) -> FloatArray:
        """Participating ranks per core, (C,): for each host, or (1,) for one shared machine."""
        ranks = [rank for members in groups for rank in members]
        if self.cluster.machine_cores > 0:
            return np.array([len(ranks) / self.cluster.machine_cores])
        cores = np.array([host.cores for host in self.cluster.hosts], dtype=np.float64)
        on_host = np.bincount(
            self.ports.host_of_rank[np.array(ranks, dtype=np.int64)], minlength=len(cores)
        )
        return np.divide(on_host, cores, out=np.zeros(len(cores)), where=cores > 0)

    def _fitted(self, step: Step, size: int) -> tuple[FloatArray, float, FloatArray] | None:
        """(seconds, last slope, CPU seconds of a rank) by the fits; None if nothing was probed."""
        assert step.collective is not None
        size_bytes = step.size_bytes
        alone = self._fit(step.collective.value, size, step.scope)
        if alone is not None and not step.fit:
            return _of_fit(alone, size_bytes)
        name = step.fit or _JOINT.get(step.collective, "")
        joint = self._fit(name, size, step.scope) if name else None
        if joint is not None:
            share = self._share(name, step.collective, size, step.scope, size_bytes)
            large_bytes = np.array([1e9])
            large = float(self._share(name, step.collective, size, step.scope, large_bytes)[0])
            seconds, slope, cpu_s = _of_fit(joint, size_bytes)
            return share * seconds, large * slope, share * cpu_s
        return _of_fit(alone, size_bytes) if alone is not None else None

    def _message_cpu_s(self, step: Step, size: int) -> float:
        """CPU time of a rank in this round of the smallest exchange between equal owners."""
        nothing = replace(step, size_bytes=np.zeros(1))
        fitted = self._fitted(nothing, size)
        return 0.0 if fitted is None else float(fitted[2][0])

    def _cpu_s(self, size_bytes: FloatArray, size: int, scope: Scope) -> FloatArray:
        """CPU time of a collective without a fit.

        It is that of an all-gather, in which every rank sends to every other rank, too.
        """
        all_gather = self._fit(Collective.ALL_GATHER.value, size, scope)
        return (
            np.zeros(len(size_bytes)) if all_gather is None else _of_fit(all_gather, size_bytes)[2]
        )

    def _share(
        self, name: str, half: Collective, size: int, scope: Scope, size_bytes: FloatArray
    ) -> FloatArray:
        """The share of `half` in an operation whose two halves were fitted together.

        By the fits of the halves, otherwise by the bytes that both move.
        """
        at = _HALVES[name].index(half)
        fits = [self._fit(each.value, size, scope) for each in _HALVES[name]]
        seconds = [fit.seconds_each(size_bytes) for fit in fits if fit is not None]
        if len(seconds) == 2:
            whole = seconds[0] + seconds[1]
            even = np.full(len(size_bytes), 0.5)
            share: FloatArray = np.divide(seconds[at], whole, out=even, where=whole > 0)
            return share
        moved = [self._probed_s_per_byte(each, scope, size) for each in _HALVES[name]]
        return np.full(len(size_bytes), moved[at] / sum(moved) if sum(moved) > 0 else 0.5)

    def _fit(self, name: str, size: int, scope: Scope) -> CollectiveFit | None:
        return self.cluster.fit(name, size, _WHERE[scope])

    def _probed_s_per_byte(self, collective: Collective, scope: Scope, size: int) -> float:
        """`a` of the probe: its root is the first rank, and its ring follows the ranks."""
        if scope is Scope.HOSTS:
            hosts = [
                tuple(np.flatnonzero(self.ports.host_of_rank == host).tolist())
                for host in range(len(self.cluster.hosts))
            ]
            return max(
                self.traffic(collective, ranks, ranks[0]).alone_s_per_byte
                for ranks in hosts
                if len(ranks) == size
            )
        leaders = scope is Scope.LEADERS and len(self._leaders) == size
        members = self._leaders if leaders else self._world
        return self.traffic(collective, members, 0).alone_s_per_byte

    def _latency_s(self, scope: Scope) -> float:
        hosts = self.cluster.hosts
        if scope is Scope.HOSTS or len(hosts) == 1:
            return max((host.inner_latency_s for host in hosts if host.devices > 1), default=0.0)
        latencies_s = [host.latency_s for host in hosts]
        latencies_s += [link.latency_s for link in self.cluster.pair_links]
        return max(latencies_s, default=0.0)


class _PeerCosts:
    """Measured costs of hosts that exchange messages with several others at once."""

    def __init__(self, cluster: Cluster, ports: Ports, costs: RuntimeCosts) -> None:
        self._cluster, self._ports, self._costs = cluster, ports, costs
        self._factors: Kept[FloatArray] = Kept(KEPT_LOADS, KEPT_LOADS)
        self._messages_s: dict[int, float] = {}

    def factors(self, members: tuple[int, ...]) -> FloatArray:
        """Cost of a byte on each port relative to the hosts' own links, shape (P,).

        1 for a port that was not probed, or whose peers together were not faster than it.
        """
        factors = self._factors.get(members)
        if factors is None:
            factors = self._new_factors(members)
            self._factors.put(members, 1, factors)
        return factors

    def _new_factors(self, members: tuple[int, ...]) -> FloatArray:
        ports, payload = self._ports, self._costs["payload"]
        factors = np.ones(ports.count)
        if not self._cluster.peer_fits:
            return factors
        hosts = np.unique(ports.host_of_rank[list(members)]).tolist()
        rates = 1 / ports.s_per_byte[: ports.hosts]
        for host in hosts:
            others = np.sort(rates[[other for other in hosts if other != host]])[::-1]
            for side in (OUT, IN):
                name = self._cluster.hosts[host].name
                fit = self._cluster.peer_fit(name, len(others), outwards=side == OUT)
                if fit is None:
                    continue
                of_peers = payload * float(others[: fit.peers].sum())
                if fit.bytes_per_s < SEEN_BELOW * of_peers:
                    factors[side * ports.hosts + host] = payload * rates[host] / fit.bytes_per_s
        return factors

    def messages_s(self, members: int) -> float:
        """Time of the messages of one rank in one round; the slowest host's, if it was probed."""
        if members not in self._messages_s:
            self._messages_s[members] = self._new_messages_s(members)
        return self._messages_s[members]

    def _new_messages_s(self, members: int) -> float:
        peers = min(members, len(self._cluster.hosts)) - 1
        fits = [
            fit
            for host in self._cluster.hosts
            for outwards in (True, False)
            if (fit := self._cluster.peer_fit(host.name, peers, outwards)) is not None
        ]
        each_s = max((fit.message_s for fit in fits), default=self._costs["message_s"])
        return (members - 1) * each_s


def _flows_share(flows: Sequence[Flow], collective: Collective) -> float:
    """Time until the last transfer has arrived, by the time of the slowest port."""
    if not flows:
        return 1.0
    first, last = ([flow.ports[side][1] for flow in flows] for side in (0, -1))
    other = [0.0 if len(flow.ports) == 1 else 1.0 for flow in flows]
    met, apart = (first, last) if collective is Collective.PULL else (last, first)
    return flow_s(met, [a * b for a, b in zip(apart, other, strict=True)])


def _owned(step: Step, members: tuple[int, ...]) -> FloatArray:
    """The share of each member of a direct exchange."""
    if step.shares is None:
        return np.full(len(members), 1 / len(members))
    return np.array(step.shares)[list(members)]


def _senders(step: Step, members: tuple[int, ...]) -> float:
    """Messages of a direct exchange by those between as many equal owners.

    All others send to each owner, and it sends to all others.
    """
    return float((_owned(step, members) > 0).mean())


def _of_fit(fit: CollectiveFit, size_bytes: FloatArray) -> tuple[FloatArray, float, FloatArray]:
    cpu_s = fit.cpu_alpha_s + fit.cpu_beta_s_per_byte * size_bytes
    return fit.seconds_each(size_bytes), fit.beta_s_per_byte, cpu_s


def _root(root: int | None, members: tuple[int, ...]) -> int:
    return root if root is not None and root in members else members[0]
