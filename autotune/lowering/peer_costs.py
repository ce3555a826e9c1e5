"""Measured costs of hosts that exchange messages with several others at once.

The ports of a direct exchange have the rates that the probe found with all peers at once
(`Cluster.peer_fits`), for each host and direction, or else the hosts' own. Without a fit, each of
its rounds costs the messages of one rank, by the same probe or the assumed `message_s`.

| symbol | meaning |
|---|---|
| P | ports |
"""

from __future__ import annotations

import numpy as np

from autotune.arrays import FloatArray
from autotune.cluster import Cluster
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.kept import KEPT_LOADS, Kept
from autotune.lowering.traffic import DIRECT, IN, OUT, Collective, Ports, Traffic
from autotune.strategy_space.shares import Shares

SEEN_BELOW = 0.9
"""A host's interface was seen if it was slower than this share of its peers' links together."""


class PeerCosts:
    """The probed rates and messages of peers on one cluster, and traffic at these rates."""

    def __init__(self, cluster: Cluster, ports: Ports, costs: RuntimeCosts) -> None:
        self._cluster, self._ports, self._costs = cluster, ports, costs
        self._factors: Kept[FloatArray] = Kept(KEPT_LOADS, KEPT_LOADS)
        self._traffic: Kept[Traffic] = Kept(KEPT_LOADS, KEPT_LOADS)
        self._messages_s: dict[int, float] = {}

    def traffic(
        self,
        collective: Collective,
        members: tuple[int, ...],
        root: int,
        shares: Shares | None = None,
    ) -> Traffic:
        """The traffic of a collective. The `factors` slow down a direct exchange.

        `shares` of a direct exchange: those of all ranks.
        """
        key = (collective, members, root, shares)
        traffic = self._traffic.get(key)
        if traffic is None:
            owned = None if shares is None else np.array(shares)[list(members)]
            traffic = self._ports.traffic(collective, members, root, owned)
            if collective in DIRECT and traffic.s_per_byte.any():
                slowed = traffic.s_per_byte * self.factors(members)
                traffic = Traffic.even(slowed, traffic.rounds)
            self._traffic.put(key, 1, traffic)
        return traffic

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
