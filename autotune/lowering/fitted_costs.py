"""The costs of collectives by the cluster's fits.

An operation of two halves, such as a push and a pull, may have been probed as one. Then each half
has its share: by the fits of the halves, or else by the bytes that both move.

| symbol | meaning | unit |
|---|---|---|
| K | messages of one kind: the shape of the arrays | - |
| a | seconds per byte of the whole collective, by the cluster's bandwidths (`traffic.py`) | s/B |
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autotune.arrays import FloatArray
from autotune.cluster import Cluster, CollectiveFit, Where
from autotune.lowering.peer_costs import PeerCosts
from autotune.lowering.steps import Scope, Step
from autotune.lowering.traffic import DIRECT, Collective, Ports
from autotune.strategy_space.strategy import Synchronizer

_HALVES = {
    Synchronizer.PARAMETER_SERVER.operation: (Collective.GATHER, Collective.SCATTER),
    Synchronizer.REDUCE_SCATTER_ALL_GATHER.operation: (
        Collective.REDUCE_SCATTER,
        Collective.ALL_GATHER,
    ),
    Synchronizer.DIRECT_EXCHANGE.operation: DIRECT,
}
_JOINT = {half: name for name, halves in _HALVES.items() for half in halves}
_WHERE = {Scope.WORLD: None, Scope.HOSTS: Where.HOST, Scope.LEADERS: Where.ACROSS}


class FittedCosts:
    """The fits of one cluster, and the bytes that their probes moved."""

    def __init__(self, cluster: Cluster, ports: Ports, peers: PeerCosts) -> None:
        self._cluster, self._ports, self._peers = cluster, ports, peers
        self._leaders = tuple(
            int(np.searchsorted(ports.host_of_rank, host)) for host in range(len(cluster.hosts))
        )
        self._world = tuple(range(cluster.world_size))

    def fitted(self, collective: Collective, size: int, scope: Scope) -> bool:
        """Whether the collective itself was probed on this many ranks."""
        return self.fit(collective.value, size, scope) is not None

    def of(self, step: Step, size: int) -> tuple[FloatArray, float, FloatArray] | None:
        """(seconds, last slope, CPU seconds of a rank) by the fits; None if nothing was probed."""
        assert step.collective is not None
        size_bytes = step.size_bytes
        alone = self.fit(step.collective.value, size, step.scope)
        if alone is not None and not step.fit:
            return _of_fit(alone, size_bytes)
        name = step.fit or _JOINT.get(step.collective, "")
        joint = self.fit(name, size, step.scope) if name else None
        if joint is not None:
            share = self._share(name, step.collective, size, step.scope, size_bytes)
            large_bytes = np.array([1e9])
            large = float(self._share(name, step.collective, size, step.scope, large_bytes)[0])
            seconds, slope, cpu_s = _of_fit(joint, size_bytes)
            return share * seconds, large * slope, share * cpu_s
        return _of_fit(alone, size_bytes) if alone is not None else None

    def message_cpu_s(self, step: Step, size: int) -> float:
        """CPU time of a rank in this round of the smallest exchange between equal owners."""
        nothing = replace(step, size_bytes=np.zeros(1))
        fitted = self.of(nothing, size)
        return 0.0 if fitted is None else float(fitted[2][0])

    def unfitted_cpu_s(self, size_bytes: FloatArray, size: int, scope: Scope) -> FloatArray:
        """CPU time of a collective without a fit.

        It is that of an all-gather, in which every rank sends to every other rank, too.
        """
        all_gather = self.fit(Collective.ALL_GATHER.value, size, scope)
        return (
            np.zeros(len(size_bytes)) if all_gather is None else _of_fit(all_gather, size_bytes)[2]
        )

    def fit(self, name: str, size: int, scope: Scope) -> CollectiveFit | None:
        return self._cluster.fit(name, size, _WHERE[scope])

    def probed_s_per_byte(self, collective: Collective, scope: Scope, size: int) -> float:
        """`a` of the probe: its root is the first rank, and its ring follows the ranks."""
        if scope is Scope.HOSTS:
            hosts = [
                tuple(np.flatnonzero(self._ports.host_of_rank == host).tolist())
                for host in range(len(self._cluster.hosts))
            ]
            return max(
                self._peers.traffic(collective, ranks, ranks[0]).alone_s_per_byte
                for ranks in hosts
                if len(ranks) == size
            )
        leaders = scope is Scope.LEADERS and len(self._leaders) == size
        members = self._leaders if leaders else self._world
        return self._peers.traffic(collective, members, 0).alone_s_per_byte

    def _share(
        self, name: str, half: Collective, size: int, scope: Scope, size_bytes: FloatArray
    ) -> FloatArray:
        """The share of `half` in an operation whose two halves were fitted together.

        By the fits of the halves, otherwise by the bytes that both move.
        """
        at = _HALVES[name].index(half)
        fits = [self.fit(each.value, size, scope) for each in _HALVES[name]]
        seconds = [fit.seconds_each(size_bytes) for fit in fits if fit is not None]
        if len(seconds) == 2:
            whole = seconds[0] + seconds[1]
            even = np.full(len(size_bytes), 0.5)
            share: FloatArray = np.divide(seconds[at], whole, out=even, where=whole > 0)
            return share
        moved = [self.probed_s_per_byte(each, scope, size) for each in _HALVES[name]]
        return np.full(len(size_bytes), moved[at] / sum(moved) if sum(moved) > 0 else 0.5)


def _of_fit(fit: CollectiveFit, size_bytes: FloatArray) -> tuple[FloatArray, float, FloatArray]:
    cpu_s = fit.cpu_alpha_s + fit.cpu_beta_s_per_byte * size_bytes
    return fit.seconds_each(size_bytes), fit.beta_s_per_byte, cpu_s
