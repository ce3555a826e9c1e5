"""A world of gloo process groups that the script's `torch.distributed` does not show.

A Horovod script has no process group. Ours carry the agreement on a plan, the probe, the numerics
gate, and the messages that Horovod cannot express. torch finds the members of a group through the
default group of the process, which is ours only inside `as_default`. So `dist.is_initialized()`
stays false for the script, and it may initialize a world of its own.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

Broadcast = Callable[[str], str]
"""Returns rank 0's text on every rank."""


class OwnWorld:
    """All ranks of the job. Building one is collective.

    `address`: where rank 0 can be reached; its store listens only there.
    """

    def __init__(
        self, rank: int, size: int, address: str, broadcast: Broadcast, timeout_s: float
    ) -> None:
        waits = timedelta(seconds=timeout_s)
        with closing(socket.socket()) as listening:
            if rank == 0:
                listening.bind((address, 0))
                listening.listen(size)
            place = f"{address}:{listening.getsockname()[1]}" if rank == 0 else ""
            host, _, port = broadcast(place).rpartition(":")
            self._store = dist.TCPStore(
                host,
                int(port),
                size,
                is_master=rank == 0,
                timeout=waits,
                master_listen_fd=listening.detach() if rank == 0 else None,
            )
        before, excepthook = dist.GroupMember.WORLD, sys.excepthook
        c10d._update_default_pg(None)
        try:
            dist.init_process_group(
                "gloo", store=self._store, rank=rank, world_size=size, timeout=waits
            )
            group = dist.GroupMember.WORLD
            assert group is not None
            self._group = group
        finally:
            c10d._update_default_pg(before)
            sys.excepthook = excepthook

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Let torch's functions use this world inside."""
        before = dist.GroupMember.WORLD
        c10d._update_default_pg(self._group)
        try:
            yield
        finally:
            c10d._update_default_pg(before)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self._group)

    def agree_on(self, key: str, text: str) -> str:
        """Rank 0's text under a key that no earlier call used. Collective."""
        key = f"autotune/{key}"
        if self._group.rank() == 0:
            self._store.set(key, text)
        agreed: str = self._store.get(key).decode()
        return agreed
