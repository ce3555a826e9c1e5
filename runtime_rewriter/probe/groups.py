"""The process groups of a probe: a few, whatever the number of ranks."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from autotune.cluster import Where
from runtime_rewriter.pytorch.exchange.ranks import SynchronizerGroups


@dataclass(frozen=True)
class ProbeGroup:
    """`ranks` is None on ranks outside the group.

    Several such groups may work at once, one on every host.
    """

    where: Where
    size: int
    ranks: SynchronizerGroups | None


def devices_per_host(ranks: int, devices: tuple[int, ...]) -> tuple[int, ...]:
    """`devices`, or one host if the script trains on other ranks than all of these."""
    return devices if devices and sum(devices) == ranks else (ranks,)


def first_ranks(devices: tuple[int, ...]) -> tuple[int, ...]:
    """The first rank of every host."""
    return tuple(sum(devices[:host]) for host in range(len(devices)))


def members_of(ranks: int, devices: tuple[int, ...]) -> dict[tuple[Where, int], list[list[int]]]:
    """Ranks of the groups besides the world, by (where, size): one group, or one on every host.

    If hosts have several devices: one rank per host, and all ranks of a host. The latter run at the
    same time on all hosts with the most devices, as in a hierarchical message. Last the pair of the
    first and the last rank, unless there is such a pair already.
    """
    devices = devices_per_host(ranks, devices)
    groups: dict[tuple[Where, int], list[list[int]]] = {}
    most = max(devices)
    if len(devices) > 1 and most > 1:
        first = first_ranks(devices)
        groups[Where.ACROSS, len(devices)] = [list(first)]
        groups[Where.HOST, most] = [
            list(range(rank, rank + most))
            for rank, count in zip(first, devices, strict=True)
            if count == most
        ]
    pair = (Where.ACROSS if len(devices) > 1 else Where.HOST, 2)
    if ranks > 2 and pair not in groups:
        groups[pair] = [[0, ranks - 1]]
    return groups


class ProbeGroups:
    """Process groups of one probe, the world's own first (none for a world of one rank).

    Collective; `destroy` is local.
    """

    def __init__(
        self, world: SynchronizerGroups, devices: tuple[int, ...], timeout_s: float
    ) -> None:
        self._created: list[SynchronizerGroups] = []
        self.groups: list[ProbeGroup] = []
        if world.size == 1:
            return
        self.groups.append(ProbeGroup(Where.WORLD, world.size, world))
        try:
            for (where, size), groups in members_of(world.size, devices).items():
                members = next((members for members in groups if world.rank in members), None)
                count = world.agreed_count()
                ranks = None
                if members is not None:
                    ranks = SynchronizerGroups.of(
                        world.group_of(members, count), timeout_s, timeout_s
                    )
                    self._created.append(ranks)
                self.groups.append(ProbeGroup(where, size, ranks))
        except BaseException:
            self.destroy()
            raise

    def destroy(self) -> None:
        """End all groups but the world, which its creator ends."""
        for ranks in self._created:
            ranks.destroy()
            dist.destroy_process_group(ranks.base)
