"""Sends from rank to rank, in two rounds: parts to their owners, then the owners' sums to all.

They bypass gloo's two threads per process group, so any number can be under way. Receives are
posted with the first round, so that no send waits for its receiver. Over NCCL the sends and
receives of a round are one group of its queue.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.ranks import RankGroups

_CLOSING_TAG = 2**31 - 1
"""Of a message that no rank sends."""

Parts = Sequence[tuple[int, Tensor]]
"""(place of the other rank in the group, contiguous tensor that is sent or received)."""


class PeerWork:
    """Sends and receives under way; the part of `dist.Work` that lanes use. Any thread may wait.

    A work of gloo must be waited for once only: a second wait would wait for a second message. If
    one fails, the connections of its groups are closed. Ranks that wait for this one then fail at
    once, too, and not at their timeout.
    """

    def __init__(self, works: list[dist.Work], groups: Sequence[dist.ProcessGroup]) -> None:
        self._works = works
        self._groups = groups
        self._lock = threading.Lock()
        self._error: RuntimeError | None = None

    def is_completed(self) -> bool:
        """Whether a wait has seen the end: gloo's sends and receives cannot be asked."""
        return not self._works or self._error is not None

    def wait(self) -> None:
        """Raises `RuntimeError` if a rank is gone, or late by the timeout of the group."""
        with self._lock:
            if self._error is not None:
                raise RuntimeError(str(self._error)) from self._error
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                self._error = error
                for group in self._groups:
                    close_connections(group)
                raise
            self._works = []


class TwoRounds:
    """The sends of one exchange on two lanes. Building one is collective.

    `to_owners` and `from_members`: parts of the first round; `to_members` and `from_owners`: sums
    of the second. A sum may be received where a part is sent from: its owner sends it only after
    all of that part has arrived.
    """

    def __init__(
        self,
        lanes: Lanes,
        groups: RankGroups,
        first_lane: int,
        *,
        to_owners: Parts,
        from_members: Parts,
        to_members: Parts,
        from_owners: Parts,
    ) -> None:
        self._queued = lanes.queued
        self._groups = [lanes.group(first_lane + number, groups) for number in range(2)]
        self._tags = lanes.new_tag(), lanes.new_tag()
        self._to_owners, self._from_members = to_owners, from_members
        self._to_members, self._from_owners = to_members, from_owners
        self._sums: list[dist.Work] = []

    def push(self) -> dist.Work | None:
        """Start the first round, and over gloo the receives of the second."""
        first, second = self._groups
        if first is None or second is None:
            return None
        push_tag, pull_tag = self._tags
        if self._queued:
            return grouped(first, self._to_owners, self._from_members)
        self._sums = receives(second, self._from_owners, pull_tag)
        works = receives(first, self._from_members, push_tag)
        return joined(works + sends(first, self._to_owners, push_tag), first, second)

    def pull(self) -> dist.Work | None:
        """Start the second round, once the sum is where `to_members` are sent from."""
        first, second = self._groups
        if first is None or second is None:
            return None
        if self._queued:
            return grouped(second, self._to_members, self._from_owners)
        works, self._sums = self._sums, []
        return joined(works + sends(second, self._to_members, self._tags[1]), first, second)


def sends(group: dist.ProcessGroup, parts: Parts, tag: int) -> list[dist.Work]:
    """Start to send each part to its rank. `dist.isend` would check each of them again."""
    return [group.send([tensor], place, tag) for place, tensor in parts]


def receives(group: dist.ProcessGroup, parts: Parts, tag: int) -> list[dist.Work]:
    """Start to receive each part from its rank."""
    return [group.recv([tensor], place, tag) for place, tensor in parts]


def joined(works: list[dist.Work], *groups: dist.ProcessGroup) -> dist.Work:
    """Return one work for all; if it fails, these groups close."""
    return cast(dist.Work, PeerWork(works, groups))


def close_connections(group: dist.ProcessGroup) -> None:
    """Close this rank's connections of a group over gloo, which has no call for it.

    Gloo closes them when a wait times out.
    """
    neighbour = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], neighbour, _CLOSING_TAG).wait(timedelta(milliseconds=1))


def grouped(group: dist.ProcessGroup, sent: Parts, received: Parts) -> dist.Work | None:
    """Queue all sends and receives as one operation of NCCL; None without any."""
    ops = [dist.P2POp(dist.isend, part, group=group, group_peer=place) for place, part in sent]
    ops += [dist.P2POp(dist.irecv, part, group=group, group_peer=place) for place, part in received]
    if not ops:
        return None
    (work,) = dist.batch_isend_irecv(ops)
    return work


def others(members: Sequence[int], rank: int) -> list[int]:
    """Places of the other members, the one after `rank` first, so that no rank is everyone's
    first."""
    if rank not in members:
        return []
    own, count = members.index(rank), len(members)
    return [(own + step) % count for step in range(1, count)]
