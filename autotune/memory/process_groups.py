"""The ranks that sum each message of a plan, as one rank sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.recordings.memory_profile import Replica
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.shares import Shares, shares_of_hosts


@dataclass(frozen=True)
class ProcessGroup:
    """The ranks that sum a message, in the order of the ring.

    `place`: that of this rank among them; None if its host's leader sums for it.
    """

    ranks: tuple[int, ...]
    place: int | None

    @property
    def members(self) -> int:
        """The number of ranks; 0 if this rank has no place."""
        return 0 if self.place is None else len(self.ranks)


class ProcessGroups:
    """The groups of a plan's messages, seen from one rank.

    Each is computed once: a plan of thousands of messages has few of them.
    """

    def __init__(self, plan: Plan, replica: Replica) -> None:
        self._along = plan.ring_order or tuple(range(plan.world_size))
        self._hosts, self._rank = replica.host_of_rank, replica.rank
        self._leaders = leader_of_rank(self._hosts)
        self._has_levels = len(set(self._leaders)) < len(self._leaders)
        self._groups: dict[int | None, ProcessGroup] = {}
        self._shares: dict[tuple[int | None, Shares], Shares | None] = {}

    def of(self, message: Message) -> ProcessGroup:
        """The group of all ranks, or of one rank per host if the hierarchy has two levels."""
        key = self._key(message)
        if key not in self._groups:
            ranks = self._along
            if key is not None:
                leaders = self._leaders_with(key)
                ranks = tuple(rank for rank in self._along if rank in leaders)
            place = ranks.index(self._rank) if self._rank in ranks else None
            self._groups[key] = ProcessGroup(ranks, place)
        return self._groups[key]

    def shares(self, message: Message) -> Shares | None:
        """The shares of the ranks that exchange the message."""
        key = self._key(message)
        if message.shares is None or key is None:
            return message.shares
        if (key, message.shares) not in self._shares:
            on_hosts: dict[int, list[int]] = {}
            for rank, host in enumerate(self._hosts):
                on_hosts.setdefault(host, []).append(rank)
            self._shares[key, message.shares] = shares_of_hosts(
                message.shares, list(on_hosts.values()), sorted(self._leaders_with(key))
            )
        return self._shares[key, message.shares]

    def _key(self, message: Message) -> int | None:
        """None for the group of all ranks; else the owner, -1 without one."""
        if not (message.hierarchical and self._has_levels):
            return None
        return -1 if message.owner is None else message.owner

    def _leaders_with(self, owner: int) -> set[int]:
        """The leaders of hosts; the owner, unless it is -1, leads its own host."""
        leaders = set(self._leaders)
        if owner >= 0:
            leaders = leaders - {self._leaders[owner]} | {owner}
        return leaders


def leader_of_rank(host_of_rank: Sequence[int]) -> list[int]:
    """Which rank sums hierarchical messages for each rank: the lowest one of its host.

    Each rank sums for itself if all are on one host.
    """
    if len(set(host_of_rank)) < 2:
        return list(range(len(host_of_rank)))
    lowest: dict[int, int] = {}
    return [lowest.setdefault(host, rank) for rank, host in enumerate(host_of_rank)]
