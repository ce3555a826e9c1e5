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
at one port. `peer_costs.py` has the rates of its ports, and its messages without a fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.cluster import Cluster
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.fitted_costs import FittedCosts
from autotune.lowering.flows import flow_s
from autotune.lowering.kept import KEPT_LOADS, Kept
from autotune.lowering.peer_costs import PeerCosts
from autotune.lowering.steps import Scope, Step
from autotune.lowering.traffic import DIRECT, Collective, Ports, owners_by_end

MOST_MEMBERS = 8
"""An exchange with one owner and at most this many ranks is replayed transfer by transfer."""


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
        self._loads: Kept[_Load] = Kept(KEPT_LOADS, KEPT_LOADS)
        self._peers = PeerCosts(cluster, ports, costs)
        self.fits = FittedCosts(cluster, ports, self._peers)

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
        fitted = self.fits.of(step, size)
        if fitted is None:
            payload = self.costs["payload"]
            link_s = load.slowest * size_bytes / payload
            cpu_s = self.fits.unfitted_cpu_s(size_bytes, size, step.scope)
            start_s = self._peers.messages_s(size) if direct else self.costs["collective_s"]
            latencies_s = 2 * load.rounds * self._latency_s(step.scope) + start_s
            alone_s = load.whole * size_bytes / payload + latencies_s
            if step.collective is Collective.PULL:
                alone_s += self.costs["sum_s_per_byte"] * size_bytes
            return alone_s, link_s, cpu_s
        fitted_s, slope, cpu_s = fitted
        probed = self.fits.probed_s_per_byte(step.collective, step.scope, size)
        g = min(slope / probed, 1 / self.costs["payload"]) if probed > 0 else 0.0
        if step.collective is Collective.ALL_REDUCE:
            g = min(g, 1.0)
        elif step.served and direct:
            g = min(g, self._served_byte_cost(step, size))
        link_s = g * load.slowest * size_bytes
        alone_s = np.maximum(fitted_s + g * (load.whole - probed) * size_bytes, link_s)
        if direct:
            saved_s = (1 - load.senders) * self.fits.message_cpu_s(step, size)
            cpu_s = cpu_s - saved_s
            alone_s = np.maximum(alone_s - max(1.0, float(load.cores.max())) * saved_s, link_s)
        return alone_s, link_s, cpu_s

    def _served_byte_cost(self, step: Step, size: int) -> float:
        """g of a transfer from or to one owner: that of a gather or scatter.

        Infinite if neither was probed; at least 1, since streams are no faster than their link.
        """
        star = Collective.SCATTER if step.collective is Collective.PULL else Collective.GATHER
        fit = self.fits.fit(star.value, size, step.scope)
        probed = self.fits.probed_s_per_byte(star, step.scope, size)
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
            self._peers.traffic(step.collective, members, _root(step.root, members), step.shares)
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

    def _latency_s(self, scope: Scope) -> float:
        hosts = self.cluster.hosts
        if scope is Scope.HOSTS or len(hosts) == 1:
            return max((host.inner_latency_s for host in hosts if host.devices > 1), default=0.0)
        latencies_s = [host.latency_s for host in hosts]
        latencies_s += [link.latency_s for link in self.cluster.pair_links]
        return max(latencies_s, default=0.0)


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


def _root(root: int | None, members: tuple[int, ...]) -> int:
    return root if root is not None and root in members else members[0]
