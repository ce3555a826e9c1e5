"""Ranks that share a host, as known from the launcher, which numbers ranks host by host."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from autotune.errors import InvalidStrategy
from runtime_rewriter.pytorch.exchange.ranks import RankGroups, SynchronizerGroups

_RULE = (
    "hierarchical messages need to know which ranks share a host, from LOCAL_RANK and "
    "LOCAL_WORLD_SIZE as torchrun sets them for ranks that are numbered host by host"
)
_FIX = "start the script by torchrun, or set hierarchical = false"


def hosts_of(ranks: SynchronizerGroups) -> RankGroups:
    """One group per host. Collective.

    Raises `InvalidStrategy` on every rank if a rank does not know its place on its host, or if the
    places contradict each other.
    """
    place = [dist.get_rank(), _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")]
    sent = torch.tensor(place, device="cpu")
    gathered = [torch.zeros_like(sent) for _ in range(ranks.size)]
    dist.all_gather(gathered, sent, group=ranks.control)
    places = [(int(place[0]), int(place[1]), int(place[2])) for place in gathered]
    parts: dict[int, list[int]] = {}
    for rank, (world_rank, local_rank, _) in enumerate(places):
        parts.setdefault(world_rank - local_rank, []).append(rank)
    _check(places)
    return RankGroups(tuple(tuple(parts[first]) for first in sorted(parts)))


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else -1


def _check(places: Sequence[tuple[int, int, int]]) -> None:
    """`places`: (rank in the world, rank on the host, ranks on the host), by rank in the group."""
    for rank, (world_rank, local_rank, local_size) in enumerate(places):
        if not 0 <= local_rank < local_size or local_rank > world_rank:
            shown = ["not set" if value < 0 else str(value) for value in (local_rank, local_size)]
            raise InvalidStrategy(
                f"{_RULE}, but on rank {rank} they are {shown[0]} and {shown[1]}; {_FIX}"
            )
    sizes = {world_rank - local_rank: local_size for world_rank, local_rank, local_size in places}
    free_from = 0
    for first, local_size in sorted(sizes.items()):
        on_host = [size for rank, local, size in places if rank - local == first]
        if first < free_from or any(size != local_size for size in on_host):
            raise InvalidStrategy(
                f"{_RULE}, but those of rank {first} contradict another rank's; {_FIX}"
            )
        free_from = first + local_size
