"""The process groups of one synchronizer, and groups of ranks that sum together."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime_rewriter.pytorch.exchange.group_names import named_after, next_count


@dataclass(frozen=True)
class Timeouts:
    """Seconds ranks wait for each other: in a training step, and when a plan is loaded."""

    message_s: float
    agreement_s: float


TUNING_TIMEOUTS = Timeouts(60.0, 20.0)
TRAINING_TIMEOUTS = Timeouts(1800.0, 60.0)
"""Ordinary training: a rank may write a checkpoint for as long as torch's own default allows, or
the script's own group if that allows more."""


@dataclass(frozen=True)
class RankGroups:
    """Groups of ranks, each of which sums by itself: the world is one, hosts are one each.

    Ranks count within the script's process group and are in ring order. A rank in no part takes no
    part in the sum.
    """

    parts: tuple[tuple[int, ...], ...]

    @staticmethod
    def world(size: int) -> RankGroups:
        """Every rank, in rank order."""
        return RankGroups((tuple(range(size)),))

    def members_of(self, rank: int) -> tuple[int, ...]:
        """The group of `rank`; empty if it takes no part."""
        return next((part for part in self.parts if rank in part), ())


@dataclass(frozen=True)
class SynchronizerGroups:
    """The process groups of one synchronizer; `rank` and owners count within the group.

    `base` is the script's own group, on which we send no messages. `control` uses gloo and has a
    short timeout; ranks agree on it between steps.
    """

    rank: int
    size: int
    base: dist.ProcessGroup
    first: dist.ProcessGroup
    second: dist.ProcessGroup
    control: dist.ProcessGroup
    timeout_s: float
    control_timeout_s: float

    @staticmethod
    def of(
        group: dist.ProcessGroup | None,
        timeout_s: float,
        control_timeout_s: float,
        device: torch.device | None = None,
    ) -> SynchronizerGroups:
        """Collective over `group` (None: the world), which can send tensors of `device` (None: the
        current one).

        In ordinary training a message may take at least as long as one of the script's.
        """
        base = group if group is not None else dist.group.WORLD
        assert base is not None
        if timeout_s >= TRAINING_TIMEOUTS.message_s:
            timeout_s = max(timeout_s, _timeout_s(base))
        members = dist.get_process_group_ranks(base)
        partial = len(members) != dist.get_world_size()
        backend = dist.get_backend_config(base)
        # The members may be in different numbers of groups.
        counts = itertools.count(_agreed_count(base, _device_of(base, device)) if partial else 0)

        def new_group(kind: str, seconds: float) -> dist.ProcessGroup:
            with ExitStack() as inside:
                if partial:
                    inside.enter_context(named_after(next(counts)))
                    inside.enter_context(_not_split())
                group: dist.ProcessGroup = dist.new_group(
                    members,
                    timeout=timedelta(seconds=seconds),
                    backend=kind,
                    use_local_synchronization=partial,
                )
            return group

        return SynchronizerGroups(
            rank=dist.get_rank(base),
            size=len(members),
            base=base,
            first=new_group(backend, timeout_s),
            second=new_group(backend, timeout_s),
            control=new_group("gloo", control_timeout_s),
            timeout_s=timeout_s,
            control_timeout_s=control_timeout_s,
        )

    def among(self, groups: RankGroups) -> list[dist.ProcessGroup]:
        """Create a process group per part; the last one is this rank's. Collective over all ranks.

        Every rank ends with as many groups as the others, relative to before.
        """
        members = groups.members_of(self.rank) or (self.rank,)
        if not self.is_world:
            return [self.group_of(members, self.agreed_count())]
        created = [self._new_group(part, local=False) for part in groups.parts if len(part) > 1]
        joined = [group for group in created if isinstance(group, dist.ProcessGroup)]
        return joined or [self.group_of(members, next_count())]

    @property
    def is_world(self) -> bool:
        """Whether every rank of the world is in the script's group."""
        return self.size == dist.get_world_size()

    def agreed_count(self) -> int:
        """Agree on the count that names the next local group (see `group_names`). Collective."""
        return _agreed_count(self.control, torch.device("cpu"))

    def group_of(self, members: Sequence[int], count: int) -> dist.ProcessGroup:
        """Create a group of `members`, in their order. All members call it with the same count."""
        with named_after(count):
            return self._new_group(members, local=True)

    def _new_group(self, members: Sequence[int], local: bool) -> dist.ProcessGroup:
        """Called by the members only (`local`), or by all ranks of the world."""
        with _not_split() if local else nullcontext():
            group: dist.ProcessGroup = dist.new_group(
                [dist.get_global_rank(self.base, rank) for rank in members],
                timeout=timedelta(seconds=self.timeout_s),
                backend=dist.get_backend_config(self.base),
                use_local_synchronization=local,
                sort_ranks=False,
            )
        return group

    def destroy(self) -> None:
        """Destroy our groups, unless the script has already done so. Local."""
        destroy_groups((self.first, self.second, self.control))


def _agreed_count(group: dist.ProcessGroup, device: torch.device) -> int:
    """See `SynchronizerGroups.agreed_count`. Collective over `group`, by a tensor of `device`."""
    count = torch.tensor(next_count(), device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    return int(count)


def _device_of(group: dist.ProcessGroup, device: torch.device | None) -> torch.device:
    """A device whose tensors the group can send: the CPU if it can, else `device`."""
    if torch.device("cpu") in group._device_types:
        return torch.device("cpu")
    return device or torch.device("cuda", torch.cuda.current_device())


def _timeout_s(group: dist.ProcessGroup) -> float:
    """The longest timeout of the script's group in seconds; 0 if none is known."""
    longest_s = 0.0
    for device in group._device_types:
        with suppress(RuntimeError):  # not every backend has options
            options = group._get_backend(device).options
            longest_s = max(longest_s, options._timeout.total_seconds())
    return longest_s


@contextmanager
def _not_split() -> Iterator[None]:
    """Let only the members of a new NCCL communicator create it.

    If the script binds the process group to a device, torch would split the communicator off the
    world's, and all ranks of the world would have to take part.
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
    """Destroy the groups that still exist. Local."""
    if not dist.is_initialized():
        return
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
