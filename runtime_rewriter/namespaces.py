"""Linux namespaces: entered and left by this process, or by this thread."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000  # linux/sched.h


def enter(descriptor: int, kind: int) -> None:
    """Enter the namespace of an open file of /proc/PID/ns. Raises `OSError`."""
    _call("setns", descriptor, kind)  # os.setns needs Python 3.12


def unshare(kind: int) -> None:
    """Enter a new namespace. Raises `OSError`."""
    _call("unshare", kind)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
