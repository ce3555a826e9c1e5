"""Owners, pieces and pieces in flight of direct exchanges: the closed form first, then replays.

The closed form ignores latencies, pair links, the shape of a plan and all that is not a direct
exchange. So parts of one host's share are given to another, which the replay judges. One such
change at a time may miss the best owners between several slow pairs of hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from autotune.optimizer.edits import exchanged
from autotune.optimizer.state import CriticalPath, State
from autotune.strategy_space.moves.changed_owners import moved
from autotune.strategy_space.owners import by_bandwidth, host_parts, shares_of
from autotune.strategy_space.plan import Message
from autotune.strategy_space.shares import MOST_PIECES, Shares
from autotune.strategy_space.strategy import MOST_DIRECT_IN_FLIGHT, Shard, Synchronizer

GIVERS = 2
"""Hosts with the largest shares, which give a part to others."""
TAKERS = 4
"""Hosts with the most bandwidth per share, which take it."""
LEAVERS = 4
"""Hosts with the largest shares, each of which leaves its share to all other owners."""
PARTS = (0.5, 0.15)
"""Parts of the giver's share: a large step, and a small one near an optimum."""


class DirectExchange:
    """Propose other owners, pieces and pieces in flight for all direct exchanges of the plan."""

    name = "direct exchange"

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        direct = [m for m in path.plan.messages if m.synchronizer is Synchronizer.DIRECT_EXCHANGE]
        if not direct:
            return
        for shares in self._owners(path, direct[0]):
            yield state.with_strategy(exchanged(state, path.problem, partial(_owned, shares)))
        for factor in (0.5, 2.0):
            yield state.with_strategy(exchanged(state, path.problem, partial(_cut, factor)))
        now = state.strategy.in_flight
        for count in {max(now // 2, 1), min(2 * now, MOST_DIRECT_IN_FLIGHT)} - {now}:
            yield state.with_strategy(exchanged(state, path.problem, _as_before, count))

    @staticmethod
    def _owners(path: CriticalPath, message: Message) -> Iterator[Shares | None]:
        """Other owners than those of a message, each once."""
        cluster = path.problem.cluster
        owned = host_parts(cluster, message.shares)
        links = np.array([host.link_bytes_per_s for host in cluster.hosts])
        givers = np.argsort(-owned, kind="stable").tolist()
        takers = np.argsort((owned + 1 / len(owned)) / links, kind="stable")[:TAKERS].tolist()
        others = [by_bandwidth(cluster, message.hierarchical), None]
        for giver in givers[:LEAVERS]:
            if 0 < owned[giver] < 1:
                rest = owned.copy()
                rest[giver] = 0.0
                others.append(shares_of(cluster, rest))
        for giver in givers[:GIVERS]:
            for taker in takers:
                for part in PARTS:
                    others.append(moved(cluster, message.shares, giver, taker, part))
        yield from (shares for shares in dict.fromkeys(others) if shares != message.shares)


def _owned(shares: Shares | None, shard: Shard) -> Shard:
    return replace(shard, shares=shares)


def _cut(factor: float, shard: Shard) -> Shard:
    if shard.compressor.error_feedback:
        return shard  # needs the whole message
    return replace(shard, pieces=min(max(int(factor * shard.pieces), 1), MOST_PIECES))


def _as_before(shard: Shard) -> Shard:
    return shard
