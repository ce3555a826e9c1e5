"""The private folder of a local Ray cluster, and the end of everything that uses it.

Ray's default folder is readable by everybody, and keeps every session forever. Each folder has a
lock, which the kernel releases when the job's process ends for any reason. A guard process waits
for the lock, then kills the rest of the cluster and removes the folder. If the guard was killed
too, the next job does the same.

This file is also the guard's program, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "AUTOTUNE_RAY_FOLDER"
"""Variable of the cluster's processes, by which they are found: Ray changes their arguments."""
_PREFIX = "atray-"
_LOCK = "lock"
_LONGEST_PARENT = 25
"""Characters: the kernel limits paths of sockets to 107, and Ray and we append 82."""
_KILLS = 50
_KILL_WAIT_S = 0.02
"""A process may start another one just before it is killed."""


@dataclass(frozen=True)
class PrivateFolder:
    """A folder that only this user can read. `lock` is held by this process until `end`."""

    path: Path
    lock: int
    guard: subprocess.Popen[bytes]

    @property
    def for_ray(self) -> Path:
        """A folder inside, as Ray opens its own to everybody."""
        return self.path / "r"

    @staticmethod
    def create() -> PrivateFolder:
        """A new folder, named in this process's environment; removes abandoned ones."""
        remove_abandoned()
        while True:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_parent()))
            lock = _locked(path)
            if lock is not None:
                break  # else another job took it for abandoned before it was locked
        guard = subprocess.Popen(
            [sys.executable, "-P", __file__, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=without_folder(os.environ),
            start_new_session=True,  # it must outlive signals to this process's group
        )
        os.environ[FOLDER_VARIABLE] = str(path)
        return PrivateFolder(path, lock, guard)

    def end(self) -> None:
        """Kill the processes of the cluster and the guard, and remove the folder."""
        os.environ.pop(FOLDER_VARIABLE, None)
        self.guard.kill()
        self.guard.wait()
        end(self.path)
        os.close(self.lock)

    def kill(self) -> None:
        """Kill the processes of the cluster. The guard ends those that a thread still starts."""
        kill(self.path)


def without_folder(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that outlives the cluster, to clean up."""
    return {name: value for name, value in environment.items() if name != FOLDER_VARIABLE}


def remove_abandoned() -> None:
    """Remove this user's folders that no process has locked, and end what still uses them."""
    for folder in _parent().glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                lock = _locked(folder)
                if lock is not None:
                    end(folder)
                    os.close(lock)


def end(folder: Path) -> None:
    """Kill every process of the folder's cluster, and remove the folder."""
    for _ in range(_KILLS):
        kill(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():  # a process that just ended may have written into it
            break


def kill(folder: Path) -> None:
    """Kill every process of the folder's cluster."""
    for _ in range(_KILLS):
        processes = list(processes_of(folder))
        if not processes:
            break
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_KILL_WAIT_S)


def _parent() -> Path:
    parent = tempfile.gettempdir()
    return Path(parent if len(parent) <= _LONGEST_PARENT else "/tmp")


def _locked(folder: Path, wait: bool = False) -> int | None:
    """A descriptor that holds the lock of the folder; None if another process has it."""
    descriptor: int | None = None
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.path.samestat(os.fstat(descriptor), (folder / _LOCK).stat()):
            return descriptor
    except OSError:  # locked by another process, or removed by it
        pass
    if descriptor is not None:
        os.close(descriptor)
    return None


def processes_of(folder: Path) -> Iterator[int]:
    """This user's processes that were started with the folder's variable, without this one."""
    entry = f"{FOLDER_VARIABLE}={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (process / "environ").read_bytes()
            if int(process.name) != os.getpid() and entry in environment.split(b"\0"):
                yield int(process.name)


def _guard(folder: Path) -> None:
    """Wait until the job's process has ended, then end what it left."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if _locked(folder, wait=True) is not None:
        end(folder)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]))
