"""On which ranks a probe runs: a few groups whatever the number of workers."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from autotune.cluster import Where
from runtime_rewriter.pytorch.exchange.ranks import Ranks


@dataclass(frozen=True)
class ProbeGroup:
    """`ranks` is None on ranks that take no part. There may be several at work at once, one on every host."""

    where: Where
    size: int
    ranks: Ranks | None


def layout(ranks: int, devices: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks per host; one host where the hosts given are not those of this group (a script may train on some ranks only)."""
    return devices if devices and sum(devices) == ranks else (ranks,)


def firsts(devices: tuple[int, ...]) -> tuple[int, ...]:
    """The first rank of every host."""
    return tuple(sum(devices[:host]) for host in range(len(devices)))


def members_of(ranks: int, devices: tuple[int, ...]) -> dict[tuple[Where, int], list[list[int]]]:
    """Which ranks form the groups besides the world, by (where, size): one of each kind, or one on every host.

    Of hosts with several devices: one rank per host, and the ranks of a host, on all hosts with the most devices at
    the same time, as a hierarchical message does it. Then the first and the last rank, if no group of two is like them.
    """
    devices = layout(ranks, devices)
    groups: dict[tuple[Where, int], list[list[int]]] = {}
    most = max(devices)
    if len(devices) > 1 and most > 1:
        groups[Where.ACROSS, len(devices)] = [list(firsts(devices))]
        crowded = [first for first, count in zip(firsts(devices), devices, strict=True) if count == most]
        groups[Where.HOST, most] = [list(range(first, first + most)) for first in crowded]
    pair = (Where.ACROSS if len(devices) > 1 else Where.HOST, 2)
    if ranks > 2 and pair not in groups:
        groups[pair] = [[0, ranks - 1]]
    return groups


class ProbeGroups:
    """The groups of one probe, the world's own first (none for a world of one rank). Collective; `destroy` is local.

    torch names a group that only its members make after the number of groups that the process has, which must be the same
    on all members: ranks that have fewer make up the difference with groups of their own.
    """

    def __init__(self, world: Ranks, devices: tuple[int, ...], timeout_s: float) -> None:
        self._world, self._timeout_s = world, timeout_s
        self._mine: list[Ranks] = []
        self._padding: list[dist.ProcessGroup] = []
        self.groups = [ProbeGroup(Where.WORLD, world.size, world)] if world.size > 1 else []
        try:
            for (where, size), all_members in (members_of(world.size, devices) if self.groups else {}).items():
                mine = next((members for members in all_members if world.rank in members), None)
                self._pad()
                self.groups.append(ProbeGroup(where, size, None if mine is None else self._made(mine)))
        except BaseException:
            self.destroy()
            raise

    def destroy(self) -> None:
        """Ends all but the world, which whoever made it ends."""
        for ranks in self._mine:
            ranks.destroy()
            dist.destroy_process_group(ranks.base)
        for group in self._padding:
            dist.destroy_process_group(group)

    def _pad(self) -> None:
        names = dist.distributed_c10d._world.pg_names
        most = torch.tensor(len(names))
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._world.control)
        while len(names) < int(most):
            self._padding.append(self._new([self._world.rank]))

    def _made(self, members: list[int]) -> Ranks:
        made = Ranks.of(self._new(members), self._timeout_s, self._timeout_s)
        self._mine.append(made)
        return made

    def _new(self, members: list[int]) -> dist.ProcessGroup:
        ranks = [dist.get_global_rank(self._world.base, rank) for rank in members]
        backend = dist.get_backend_config(self._world.base)
        made: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timedelta(seconds=self._timeout_s), backend=backend, use_local_synchronization=True
        )
        return made
