"""Processes by id and start time, and those that live in given network namespaces."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import EmulationError

GRACE_S = 1.0
PATIENCE_S = 10.0


@dataclass(frozen=True)
class Process:
    """A process that is never mistaken for a later one of the same id. `start_ticks`: field 22 of /proc/PID/stat."""

    __pydantic_config__ = {"extra": "forbid"}

    pid: int
    start_ticks: int

    @staticmethod
    def of(pid: int) -> Process:
        """The running process with this id; raises `ProcessLookupError`."""
        started = _start_ticks(pid)
        if started is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return Process(pid, started)

    @staticmethod
    def current() -> Process:
        return Process.of(os.getpid())

    @property
    def alive(self) -> bool:
        return _start_ticks(self.pid) == self.start_ticks


def _start_ticks(pid: int) -> int | None:
    """None: there is no such process, or it has ended and waits for its parent to notice."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def inside(namespaces: Collection[int]) -> Mapping[int, int]:
    """{process id: inode of its network namespace} of all processes inside the namespaces with these inodes."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):  # it ended meanwhile, or is a kernel thread
                inode = (process / "ns" / "net").stat().st_ino
                if inode in namespaces:
                    found[int(process.name)] = inode
    return found


def end_all_inside(namespaces: Collection[int]) -> None:
    """End every process inside, gently first; the calling process is left alone. Raises `EmulationError` if one cannot be ended."""
    began, asked = time.monotonic(), set[int]()
    while left := [
        pid for pid in inside(namespaces) if pid != os.getpid() and _start_ticks(pid) is not None
    ]:
        waited = time.monotonic() - began
        if waited > PATIENCE_S:
            raise EmulationError(
                f"processes {', '.join(map(str, left))} inside the testbed could not be ended in {PATIENCE_S:g} s"
            )
        for pid in left:
            if waited >= GRACE_S:
                _signal(pid, namespaces, signal.SIGKILL)
            elif pid not in asked:
                _signal(pid, namespaces, signal.SIGTERM)
        asked.update(left)
        time.sleep(0.02)


def _signal(pid: int, namespaces: Collection[int], number: int) -> None:
    """Signal the process if it still is one inside: held by a descriptor, its id cannot become another's in between."""
    with suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if Path(f"/proc/{pid}/ns/net").stat().st_ino in namespaces:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
