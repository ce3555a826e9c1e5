"""What collectives cost on a cluster: the closed forms and fits of the lowering, for what-ifs.

NCCL's and gloo's collectives of one process group follow each other, so a message holds the queue
of its group for its whole time. Nothing here depends on the number of workers except the closed
forms' sums over the ring.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autotune.arrays import FloatArray
from autotune.cluster import Cluster, Where
from autotune.costs.sync_cost import MessageKind, Rates
from autotune.errors import InvalidInput
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.step_times import Timing
from autotune.lowering.steps import Scope, Step
from autotune.lowering.traffic import Collective, Ports
from autotune.strategy_space.strategy import Synchronizer

_NAMES = (
    (re.compile(r"all_?reduce", re.IGNORECASE), Collective.ALL_REDUCE),
    (re.compile(r"reduce_?scatter", re.IGNORECASE), Collective.REDUCE_SCATTER),
    (re.compile(r"all_?gather", re.IGNORECASE), Collective.ALL_GATHER),
    (re.compile(r"broadcast", re.IGNORECASE), Collective.BROADCAST),
    (re.compile(r"all_?to_?all|sendrecv", re.IGNORECASE), Collective.ALL_TO_ALL),
)


def collective_of(name: str) -> Collective | None:
    """The collective that a kernel or annotation names, such as `ncclDevKernel_AllReduce_...`.

    None for `gloo:sparse_all_reduce`, which gathers rows; a trace states the whole tensor's bytes.
    """
    if "sparse" in name:
        return None
    return next((one for expression, one in _NAMES if expression.search(name)), None)


class CollectiveTimes:
    """Seconds of collectives on one cluster; `costs` of the device that issues them."""

    def __init__(self, cluster: Cluster, costs: RuntimeCosts) -> None:
        self.cluster = cluster
        self._timing = Timing(cluster, Ports(cluster), costs)
        self._rates = Rates(cluster)
        starts = np.cumsum([0, *(host.devices for host in cluster.hosts)]).tolist()
        self._hosts = tuple(tuple(range(first, end)) for first, end in pairwise(starts))

    def seconds(
        self, collective: Collective, size_bytes: FloatArray, scope: Scope = Scope.WORLD
    ) -> FloatArray:
        """Time of each message alone, shape of `size_bytes`.

        The size is the whole tensor's: the sum over all ranks of what an all-gather collects. A
        reduce-scatter without a fit takes as long as an all-gather, whose ring it is backwards
        (NCCL); gloo's takes as long as an all-reduce, which only a fit shows.
        """
        groups = self._groups(scope)
        if collective is Collective.REDUCE_SCATTER and not self._fitted(collective, scope):
            collective = Collective.ALL_GATHER
        nothing = np.zeros(len(size_bytes))
        step = Step(collective, size_bytes, nothing, nothing, scope=scope)
        return self._timing.of(step, groups).alone_s

    def served_s(self, size_bytes: FloatArray) -> tuple[FloatArray, float]:
        """(time in which a server receives each message from all other workers, latency).

        Eq. 2 for a server next to the first worker; one worker sends its part in the share that
        it is of the others.
        """
        kind = MessageKind(Synchronizer.PARAMETER_SERVER, owner=0)
        costs = self._rates.costs([kind] * len(size_bytes), size_bytes)
        return costs.transfer_s, self._rates.phi_s

    def is_fitted(self, collective: Collective) -> bool:
        """Whether the whole group's time was measured rather than derived from the links."""
        return self._fitted(collective, Scope.WORLD)

    @property
    def on_one_host(self) -> bool:
        return len(self._hosts) == 1

    @property
    def most_on_a_host(self) -> int:
        return max(len(ranks) for ranks in self._hosts)

    def _fitted(self, collective: Collective, scope: Scope) -> bool:
        size = max(len(members) for members in self._groups(scope))
        return self._timing.fits.fitted(collective, size, scope)

    def _groups(self, scope: Scope) -> Sequence[tuple[int, ...]]:
        if scope is Scope.WORLD:
            return ((*range(self.cluster.world_size),),)
        if scope is Scope.HOSTS:
            return self._hosts
        return (tuple(ranks[0] for ranks in self._hosts),)


def faster_network(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with `factor` times the bandwidth: between hosts, or inside a single one.

    Costs per byte fall. Costs per message stay, and so do collectives inside one of several hosts.
    Raises `InvalidInput` for a factor that is not above 0.
    """
    if not 0 < factor < float("inf"):
        raise InvalidInput(f"a network needs a factor above 0, but it is {factor}")
    alone = len(cluster.hosts) == 1
    hosts = tuple(
        replace(host, inner_bytes_per_s=host.inner_bytes_per_s * factor)
        if alone
        else replace(host, link_bytes_per_s=host.link_bytes_per_s * factor)
        for host in cluster.hosts
    )
    pairs = tuple(
        replace(link, link_bytes_per_s=link.link_bytes_per_s * factor)
        for link in cluster.pair_links
    )
    fits = tuple(
        fit
        if fit.where is Where.HOST and not alone
        else replace(
            fit,
            beta_s_per_byte=fit.beta_s_per_byte / factor,
            bends=tuple(replace(bend, s_per_byte=bend.s_per_byte / factor) for bend in fit.bends),
        )
        for fit in cluster.fits
    )
    return replace(cluster, hosts=hosts, pair_links=pairs, fits=fits)
