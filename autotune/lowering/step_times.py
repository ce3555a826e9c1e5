"""How long a step takes alone, and how much of that occupies the links: what messages side by side can and cannot share.

A step costs exactly what the probe fitted for its primitive. Of that time the part in which its bytes are on the slowest port occupies
that port, and the other ports in proportion to their own bytes; the rest (handshakes, copies, waking threads) occupies none, so a
second message can use the link meanwhile.

| symbol | meaning | unit |
|---|---|---|
| K | messages of one kind, shape of the arrays | - |
| S | bytes that the fit is asked for | B |
| t(S) | fitted time of the primitive | s |
| s | seconds per byte on the slowest port, by the cluster's bandwidths (`traffic`) | s/B |
| a | seconds per byte of the whole step by the same bandwidths; above s where links wait for each other, as in a tree | s/B |
| g | what a byte really costs a link, by that: the fit's last slope by a, at most one over the payload of Ethernet | - |

The probe's root is rank 0 and its ring the ranks' order. Another root or ring has another a': t'(S) = t(S) + g (a' - a) S.
Without a fit t(S) = a S / payload + 2 latencies per round + `KERNEL_LATENCY_S`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray
from autotune.cluster import Cluster, CollectiveFit, Where
from autotune.costs.sync_cost import KERNEL_LATENCY_S
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.steps import Circle, Step
from autotune.lowering.traffic import Collective, Ports, Traffic
from autotune.strategy_space.strategy import Synchronizer

_HALVES = {
    Synchronizer.PARAMETER_SERVER.operation: (Collective.GATHER, Collective.SCATTER),
    Synchronizer.REDUCE_SCATTER_ALL_GATHER.operation: (
        Collective.REDUCE_SCATTER,
        Collective.ALL_GATHER,
    ),
}
_JOINT = {half: name for name, halves in _HALVES.items() for half in halves}


@dataclass(frozen=True, eq=False)
class StepTimes:
    """`alone_s` (K,): the whole step. `link_s` (K,): the part in which the slowest port is occupied. `ports` (P,): each by that one.

    `cpu_s` (K,): CPU time of one rank, and `cores` (C,) by what to multiply it for the time that a host's cores are busy.
    """

    alone_s: FloatArray
    link_s: FloatArray
    ports: FloatArray
    rounds: int
    cpu_s: FloatArray
    cores: FloatArray


class Timing:
    """Times of steps on one cluster."""

    def __init__(self, cluster: Cluster, ports: Ports, costs: RuntimeCosts) -> None:
        self.cluster, self.ports, self.costs = cluster, ports, costs
        self._known: dict[tuple[Collective, tuple[int, ...], int], Traffic] = {}
        self._firsts = tuple(
            int(np.searchsorted(ports.host_of_rank, host)) for host in range(len(cluster.hosts))
        )
        self._world = tuple(range(cluster.world_size))

    def traffic(self, collective: Collective, members: tuple[int, ...], root: int) -> Traffic:
        key = (collective, members, root)
        if key not in self._known:
            self._known[key] = self.ports.traffic(collective, members, root)
        return self._known[key]

    def of(
        self, step: Step, size_bytes: FloatArray, circles: Sequence[tuple[int, ...]]
    ) -> StepTimes:
        """`circles`: the members of each part that runs the step at the same time; of hosts, one part each."""
        assert step.collective is not None
        parts = [members for members in circles if len(members) > 1]
        if not parts:
            none = np.zeros(len(size_bytes))
            return StepTimes(none, none, np.zeros(self.ports.count), 1, none, self._cores(parts))
        traffics = [
            self.traffic(step.collective, members, _root(step.root, members)) for members in parts
        ]
        s_per_byte = np.maximum.reduce([traffic.s_per_byte for traffic in traffics])
        slowest, whole = (
            float(s_per_byte.max()),
            max(traffic.alone_s_per_byte for traffic in traffics),
        )
        rounds = max(traffic.rounds for traffic in traffics)
        size = max(len(members) for members in parts)
        found = self._fitted(step, size_bytes, size)
        if found is None:
            link_s, cpu_s = (
                slowest * size_bytes / self.costs["payload"],
                self._cpu_s(size_bytes, size, step.circle),
            )
            alone_s = (
                whole * size_bytes / self.costs["payload"]
                + 2 * rounds * self._latency_s(step.circle)
                + KERNEL_LATENCY_S
            )
        else:
            fitted_s, slope, cpu_s = found
            probed = self._probed_s_per_byte(step.collective, step.circle, size)
            g = min(slope / probed, 1 / self.costs["payload"]) if probed > 0 else 0.0
            alone_s = np.maximum(fitted_s + g * (whole - probed) * size_bytes, 0.0)
            link_s = np.minimum(g * slowest * size_bytes, alone_s)
        cores = self._cores(parts)
        return StepTimes(
            alone_s,
            link_s,
            s_per_byte / slowest if slowest > 0 else s_per_byte,
            rounds,
            cpu_s,
            cores,
        )

    def _cores(self, parts: Sequence[tuple[int, ...]]) -> FloatArray:
        """Ranks that take part by cores, of every host; of the one machine that they all stand on, (1,), if there is such."""
        ranks = [rank for part in parts for rank in part]
        if self.cluster.machine_cores > 0:
            return np.array([len(ranks) / self.cluster.machine_cores])
        cores = np.array([host.cores for host in self.cluster.hosts], dtype=np.float64)
        taking = (
            np.bincount(self.ports.host_of_rank[ranks], minlength=len(cores))
            if ranks
            else np.zeros(len(cores))
        )
        return np.divide(taking, cores, out=np.zeros(len(cores)), where=cores > 0)

    def _fitted(
        self, step: Step, size_bytes: FloatArray, size: int
    ) -> tuple[FloatArray, float, FloatArray] | None:
        """(seconds, last slope, CPU seconds of a rank) of the step by the fits, or None where nothing of its kind was probed."""
        assert step.collective is not None
        own = None if step.fit else self._fit(step.collective.value, size, step.circle)
        if own is not None:
            return _of_fit(own, size_bytes)
        name = step.fit or _JOINT.get(step.collective, "")
        joint = self._fit(name, size, step.circle) if name else None
        if joint is not None:
            share = self._share(name, step.collective, size, step.circle, size_bytes)
            large = float(self._share(name, step.collective, size, step.circle, np.array([1e9]))[0])
            seconds, slope, cpu_s = _of_fit(joint, size_bytes)
            return share * seconds, large * slope, share * cpu_s
        own = self._fit(step.collective.value, size, step.circle)
        return _of_fit(own, size_bytes) if own is not None else None

    def _cpu_s(self, size_bytes: FloatArray, size: int, circle: Circle) -> FloatArray:
        """Of a collective that was not probed: that of an all-gather, in which also every rank sends to every other one."""
        alike = self._fit(Collective.ALL_GATHER.value, size, circle)
        return _of_fit(alike, size_bytes)[2] if alike is not None else np.zeros(len(size_bytes))

    def _share(
        self, name: str, half: Collective, size: int, circle: Circle, size_bytes: FloatArray
    ) -> FloatArray:
        """Of a primitive of two halves that were fitted together: this one's, by its own fit, else by what both move."""
        fits = [self._fit(each.value, size, circle) for each in _HALVES[name]]
        at = _HALVES[name].index(half)
        if fits[0] is not None and fits[1] is not None:
            seconds = [fit.seconds_each(size_bytes) for fit in fits if fit is not None]
            whole = seconds[0] + seconds[1]
            share: FloatArray = np.divide(
                seconds[at], whole, out=np.full(len(size_bytes), 0.5), where=whole > 0
            )
            return share
        moved = [self._probed_s_per_byte(each, circle, size) for each in _HALVES[name]]
        return np.full(len(size_bytes), moved[at] / sum(moved) if sum(moved) > 0 else 0.5)

    def _fit(self, name: str, size: int, circle: Circle) -> CollectiveFit | None:
        where = {Circle.WORLD: None, Circle.HOSTS: Where.HOST, Circle.LEADERS: Where.ACROSS}[circle]
        return self.cluster.fit(name, size, where)

    def _probed_s_per_byte(self, collective: Collective, circle: Circle, size: int) -> float:
        """Of the whole step in the probe: its first rank was the root, and the ring in rank order."""
        if circle is Circle.HOSTS:
            parts = [
                tuple(np.flatnonzero(self.ports.host_of_rank == host).tolist())
                for host in range(len(self.cluster.hosts))
            ]
            return max(
                self.traffic(collective, part, part[0]).alone_s_per_byte
                for part in parts
                if len(part) == size
            )
        members = (
            self._firsts if circle is Circle.LEADERS and len(self._firsts) == size else self._world
        )
        return self.traffic(collective, members, 0).alone_s_per_byte

    def _latency_s(self, circle: Circle) -> float:
        hosts = self.cluster.hosts
        if circle is Circle.HOSTS or len(hosts) == 1:
            return max((host.inner_latency_s for host in hosts if host.devices > 1), default=0.0)
        return max(
            *(host.latency_s for host in hosts),
            *(link.latency_s for link in self.cluster.pair_links),
            0.0,
        )


def _of_fit(fit: CollectiveFit, size_bytes: FloatArray) -> tuple[FloatArray, float, FloatArray]:
    return (
        fit.seconds_each(size_bytes),
        fit.beta_s_per_byte,
        fit.cpu_alpha_s + fit.cpu_beta_s_per_byte * size_bytes,
    )


def _root(root: int | None, members: tuple[int, ...]) -> int:
    return root if root is not None and root in members else members[0]
