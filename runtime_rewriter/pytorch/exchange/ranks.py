"""The process groups of one synchronizer, and plan_groups: which ranks take part in a collective."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime_rewriter.pytorch.exchange.group_names import named_after, next_count


@dataclass(frozen=True)
class Timeouts:
    """How long ranks wait for each other: `message_s` in a training step, `agreement_s` when a plan is loaded."""

    message_s: float
    agreement_s: float


TUNING_TIMEOUTS = Timeouts(60.0, 20.0)
TRAINING_TIMEOUTS = Timeouts(1800.0, 60.0)
"""Ordinary training: a rank may write a checkpoint for as long as torch's own default allows."""


@dataclass(frozen=True)
class RankGroups:
    """SynchronizerGroups that sum among themselves, each part on its own: the world is one part, the hosts are one part each.

    SynchronizerGroups count within the script's group and stand in the order of their ring. A rank in no part takes no part.
    """

    parts: tuple[tuple[int, ...], ...]

    @staticmethod
    def world(size: int) -> RankGroups:
        """Every rank, in rank order."""
        return RankGroups((tuple(range(size)),))

    def members_of(self, rank: int) -> tuple[int, ...]:
        """Those that `rank` sums with, itself among them; empty where it takes no part."""
        return next((part for part in self.parts if rank in part), ())


@dataclass(frozen=True)
class SynchronizerGroups:
    """The process groups of one synchronizer; `rank` and owners count within the group."""

    rank: int
    size: int
    base: dist.ProcessGroup  # the script's own group; nothing of ours travels on it
    first: dist.ProcessGroup
    second: dist.ProcessGroup
    control: dist.ProcessGroup  # gloo with a short timeout: agreement between steps
    timeout_s: float
    control_timeout_s: float

    @staticmethod
    def of(
        group: dist.ProcessGroup | None, timeout_s: float, control_timeout_s: float
    ) -> SynchronizerGroups:
        """Collective: every rank of `group` (None: of the world) calls it at the same place."""
        base = group if group is not None else dist.group.WORLD
        assert base is not None
        members = dist.get_process_group_ranks(base)
        partial = len(members) != dist.get_world_size()
        backend = dist.get_backend_config(base)

        def new(kind: str, seconds: float) -> dist.ProcessGroup:
            with ExitStack() as inside:
                if partial:
                    inside.enter_context(named_after(next_count()))
                    inside.enter_context(_not_split())
                made: dist.ProcessGroup = dist.new_group(
                    members,
                    timeout=timedelta(seconds=seconds),
                    backend=kind,
                    use_local_synchronization=partial,
                )
            return made

        return SynchronizerGroups(
            dist.get_rank(base),
            len(members),
            base,
            new(backend, timeout_s),
            new(backend, timeout_s),
            new("gloo", control_timeout_s),
            timeout_s,
            control_timeout_s,
        )

    def among(self, rank_groups: RankGroups) -> list[dist.ProcessGroup]:
        """Collective over all ranks: new groups, the last is that of this rank's part, in the part's order."""
        mine = rank_groups.members_of(self.rank) or (self.rank,)
        if self.is_world:
            made = [
                self._new_group(part, local=False) for part in rank_groups.parts if len(part) > 1
            ]
            own = [group for group in made if isinstance(group, dist.ProcessGroup)]
            return own or [
                self.group_of(mine, next_count())
            ]  # every rank has as many groups as before, compared with the others
        return [self.group_of(mine, self.agreed_count())]

    @property
    def is_world(self) -> bool:
        """Whether every rank of the world is in the script's group."""
        return self.size == dist.get_world_size()

    def agreed_count(self) -> int:
        """Collective: the number after which the next group that only its members make is named, see `group_names`."""
        count = torch.tensor(next_count(), device="cpu")
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.control)
        return int(count)

    def group_of(self, members: Sequence[int], count: int) -> dist.ProcessGroup:
        """A new group of some ranks, in their order; called by its members only, with the same count."""
        with named_after(count):
            return self._new_group(members, local=True)

    def _new_group(self, members: Sequence[int], local: bool) -> dist.ProcessGroup:
        """Called by its members only (`local`) or by all ranks of the world."""
        with _not_split() if local else nullcontext():
            made: dist.ProcessGroup = dist.new_group(
                [dist.get_global_rank(self.base, rank) for rank in members],
                timeout=timedelta(seconds=self.timeout_s),
                backend=dist.get_backend_config(self.base),
                use_local_synchronization=local,
                sort_ranks=False,
            )
        return made

    def destroy(self) -> None:
        """Local; does nothing for groups that the script has destroyed already."""
        destroy_groups((self.first, self.second, self.control))


@contextmanager
def _not_split() -> Iterator[None]:
    """Inside, a new communicator of NCCL is made by its members alone.

    Where the script names its device when it joins, torch would split it off the world's, which all ranks of the world must enter.
    """
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def destroy_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Local; does nothing for groups that are gone already."""
    if not dist.is_initialized():
        return
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
