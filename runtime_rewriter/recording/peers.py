"""The ranks of a recorded job, and the exchange of their files between hosts."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autotune.errors import LaunchError
from autotune.recordings.graph_file import GRAPH_FILE
from autotune.recordings.job_file import JOB_FILE, trace_name
from autotune.recordings.memory_file import MEMORY_FILE

World = Callable[[], AbstractContextManager[object]]
GATHER_TIMEOUT_S = 300.0
"""How long the ranks wait for the slowest one to write its trace."""


@dataclass
class Peers:
    """The ranks of the job; a single rank where there is no process group.

    `world`: inside it, torch's functions find the world that the group belongs to.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    backend: str = ""
    world: World = nullcontext

    @staticmethod
    def join(world: World = nullcontext) -> Peers:
        """Collective over the world."""
        with world():
            if not (dist.is_available() and dist.is_initialized()):
                return Peers(None, 0, 1)
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GATHER_TIMEOUT_S))
            backend = str(dist.get_backend())
            return Peers(group, dist.get_rank(), dist.get_world_size(), backend, world)

    def gather(self, value: Any) -> list[Any]:
        """Collective: return every rank's value. Raises `LaunchError` where one is missing."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            with self.world():
                dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise LaunchError(
                f"every rank must end the recording within {GATHER_TIMEOUT_S:g} s, but one did "
                f"not: {error}"
            ) from error
        return values

    def collect_traces(self, folder: Path) -> None:
        """Collective: send rank 0 the traces on other hosts, which it does not see."""
        own_path = folder / trace_name(self.rank)
        checksums = self.gather(_checksum(own_path))
        lacking: list[int] = []
        if self.rank == 0:  # a trace of an earlier recording does not count
            lacking = [
                rank
                for rank, checksum in enumerate(checksums)
                if _checksum(folder / trace_name(rank)) != checksum
            ]
        for rank in self.gather(lacking)[0]:
            sent = self.gather(own_path.read_bytes() if self.rank == rank else b"")
            if self.rank == 0:
                (folder / trace_name(rank)).write_bytes(sent[rank])

    def hand_out_files(self, folder: Path) -> None:
        """Collective: send rank 0's other files to the hosts that do not see them."""
        for name in (
            MEMORY_FILE,
            JOB_FILE,
        ):  # the job file comes last: whoever waits for it has all
            path = folder / name
            content = self.gather(_content(path) if self.rank == 0 else None)[0]
            if content is None:
                path.unlink(missing_ok=True)
            elif _content(path) != content:
                # all ranks of a host write the same
                partial = path.with_name(f"{name}.{self.rank}.partial")
                partial.write_bytes(content)
                partial.replace(path)

    def leave(self) -> None:
        with self.world():
            groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
            if self.group is not None and self.group in groups:
                dist.destroy_process_group(self.group)
        self.group = None


def remove_other_files(folder: Path, ranks: int) -> None:
    """Delete a graph, and traces of further ranks, that an earlier recording left: they would be
    read along with this one."""
    (folder / GRAPH_FILE).unlink(missing_ok=True)
    for path in folder.glob(trace_name("[0-9]*")):
        number = path.name.removeprefix("rank").partition(".")[0]
        if number.isdecimal() and int(number) >= ranks:
            path.unlink(missing_ok=True)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _checksum(path: Path) -> int | None:
    content = _content(path)
    return None if content is None else zlib.crc32(content)
