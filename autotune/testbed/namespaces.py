"""Network namespaces that `ip netns` names: into one and back."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.errors import EmulationError

NAMED = Path("/run/netns")
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000  # linux/sched.h


def words_inside(namespace: str) -> list[str]:
    """What to put before a command so that it runs inside the namespace."""
    return ["ip", "netns", "exec", namespace]


def inode(namespace: str) -> int | None:
    """The namespace's identity, or None where there is none of this name."""
    try:
        return (NAMED / namespace).stat().st_ino
    except FileNotFoundError:
        return None


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """The calling thread is inside: its sockets, the processes and the threads that it starts. On leaving it is back where it was.

    Other threads stay where they are, and sockets that exist keep their namespace. Raises `EmulationError`.
    """
    home = os.open(
        f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC
    )
    try:
        try:
            there = os.open(NAMED / namespace, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise EmulationError(
                f"the namespace {namespace} cannot be entered: {error.strerror}; see `autotune testbed status`"
            ) from error
        try:
            _set_namespace(there, namespace)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _set_namespace(home, "it came from")
    finally:
        os.close(home)


def _set_namespace(descriptor: int, what: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise EmulationError(
            f"this thread cannot enter the namespace {what}: {os.strerror(ctypes.get_errno())}; run as root"
        )
