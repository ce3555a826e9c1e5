"""On which ranks a probe runs: a few groups whatever the number of workers."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from dataclasses import dataclass

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
        crowded = [
            first for first, count in zip(firsts(devices), devices, strict=True) if count == most
        ]
        groups[Where.HOST, most] = [list(range(first, first + most)) for first in crowded]
    pair = (Where.ACROSS if len(devices) > 1 else Where.HOST, 2)
    if ranks > 2 and pair not in groups:
        groups[pair] = [[0, ranks - 1]]
    return groups


class ProbeGroups:
    """The groups of one probe, the world's own first (none for a world of one rank). Collective; `destroy` is local."""

    def __init__(self, world: Ranks, devices: tuple[int, ...], timeout_s: float) -> None:
        self._world, self._timeout_s = world, timeout_s
        self._mine: list[Ranks] = []
        self.groups = [ProbeGroup(Where.WORLD, world.size, world)] if world.size > 1 else []
        try:
            for (where, size), all_members in (
                members_of(world.size, devices) if self.groups else {}
            ).items():
                mine = next((members for members in all_members if world.rank in members), None)
                count = world.agreed_count()
                self.groups.append(
                    ProbeGroup(where, size, None if mine is None else self._made(mine, count))
                )
        except BaseException:
            self.destroy()
            raise

    def destroy(self) -> None:
        """Ends all but the world, which whoever made it ends."""
        for ranks in self._mine:
            ranks.destroy()
            dist.destroy_process_group(ranks.base)

    def _made(self, members: list[int], count: int) -> Ranks:
        made = Ranks.of(self._world.group_of(members, count), self._timeout_s, self._timeout_s)
        self._mine.append(made)
        return made
