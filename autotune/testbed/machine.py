"""Commands, processes and network namespaces of this machine."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import EmulationError

NAMESPACES = Path("/run/netns")
"""Directory of `ip netns` with the named namespaces."""
CLONE_NEWNS = 0x00020000  # linux/sched.h
CLONE_NEWNET = 0x40000000
COMMAND_TIMEOUT_S = 60.0
GRACE_S = 1.0
END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Attempt:
    """A command's output, and one line that tells why it failed (empty if it did not)."""

    output: str
    reason: str


def attempt(command: Sequence[str]) -> Attempt:
    """Run the command; a failure of any kind is a reason, not an exception.

    An interrupt is raised when the command has ended. Python can lose a command that it is just
    starting, which would then, for example, add a namespace after all others have been removed.
    """
    with ThreadPoolExecutor(1) as elsewhere:  # interrupts are raised in the main thread only
        return elsewhere.submit(_attempt, command).result()


def _attempt(command: Sequence[str]) -> Attempt:
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return Attempt("", f"{command[0]} is not installed")
    except OSError as error:
        return Attempt("", str(error.strerror))
    except subprocess.TimeoutExpired:
        return Attempt("", f"no answer in {COMMAND_TIMEOUT_S:g} s")
    if done.returncode == 0:
        return Attempt(done.stdout, "")
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("Error", "RTNETLINK"))] or lines
    return Attempt(done.stdout, errors[0] if errors else f"exit status {done.returncode}")


def run(command: Sequence[str]) -> str:
    """The command's standard output; raises `EmulationError` with the command's error message."""
    outcome = attempt(command)
    if outcome.reason:
        raise EmulationError(f"`{shlex.join(command)}` failed: {outcome.reason}")
    return outcome.output


@dataclass(frozen=True)
class Process:
    """A process, distinct from a later one with the same id.

    `start_ticks`: field 22 of /proc/PID/stat.
    """

    __pydantic_config__ = {"extra": "forbid"}

    pid: int
    start_ticks: int

    @staticmethod
    def of(pid: int) -> Process:
        """The running process with this id; raises `ProcessLookupError`."""
        start_ticks = _start_ticks(pid)
        if start_ticks is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return Process(pid, start_ticks)

    @staticmethod
    def current() -> Process:
        return Process.of(os.getpid())

    @property
    def alive(self) -> bool:
        return _start_ticks(self.pid) == self.start_ticks


def _start_ticks(pid: int) -> int | None:
    """None: there is no such process, or it has ended and its parent has not noticed yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def words_inside(namespace: str) -> list[str]:
    """Words before a command so that it runs inside the namespace."""
    return ["ip", "netns", "exec", namespace]


def inode(namespace: str) -> int | None:
    """The namespace's identity, or None if there is none of this name."""
    try:
        return (NAMESPACES / namespace).stat().st_ino
    except FileNotFoundError:
        return None


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Put the calling thread inside, with its new sockets, processes and threads; always restored.

    Other threads and existing sockets keep their namespace. Raises `EmulationError`.
    """
    own_path = f"/proc/self/task/{threading.get_native_id()}/ns/net"
    home = os.open(own_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            target = os.open(NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise EmulationError(
                f"the namespace {namespace} cannot be entered: {error.strerror}; "
                "see `autotune testbed status`"
            ) from error
        try:
            _set_namespace(target, namespace)
        finally:
            os.close(target)
        try:
            yield
        finally:
            _set_namespace(home, "it came from")
    finally:
        os.close(home)


def _set_namespace(descriptor: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns needs Python 3.12
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise EmulationError(
            f"this thread cannot enter the namespace {name}: {reason}; run as root"
        )


def inside(namespaces: Collection[int]) -> Mapping[int, int]:
    """{process id: inode of its network namespace} of the processes inside these namespaces."""
    inodes = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):  # it ended meanwhile, or is a kernel thread
                inode = (process / "ns" / "net").stat().st_ino
                if inode in namespaces:
                    inodes[int(process.name)] = inode
    return inodes


def end_all_inside(namespaces: Collection[int]) -> None:
    """End every process inside but the calling one: by SIGTERM, after `GRACE_S` by SIGKILL.

    Raises `EmulationError` if one cannot be ended.
    """
    start_s, asked = time.monotonic(), set[int]()
    while left := [
        pid for pid in inside(namespaces) if pid != os.getpid() and _start_ticks(pid) is not None
    ]:
        waited_s = time.monotonic() - start_s
        if waited_s > END_TIMEOUT_S:
            raise EmulationError(
                f"processes {', '.join(map(str, left))} inside the testbed could not be ended "
                f"in {END_TIMEOUT_S:g} s"
            )
        for pid in left:
            if waited_s >= GRACE_S:
                _signal(pid, namespaces, signal.SIGKILL)
            elif pid not in asked:
                _signal(pid, namespaces, signal.SIGTERM)
        asked.update(left)
        time.sleep(0.02)


def _signal(pid: int, namespaces: Collection[int], number: int) -> None:
    """Signal the process if it still is inside.

    A descriptor keeps its id from becoming another's.
    """
    with suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if Path(f"/proc/{pid}/ns/net").stat().st_ino in namespaces:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
