"""The network in which a tracker was created: that of the machine, also while a testbed runs.

The ranks of a testbed, and the thread that starts them, are inside the network namespace of an
emulated host, from where no tracking server can be reached. New threads inherit it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from pathlib import Path

_PRESENT = Path("/proc/thread-self/ns/net")
_CLONE_NEWNET = 0x40000000  # linux/sched.h


class HomeNetwork:
    """The network namespace of the thread that creates this. Linux has namespaces, others none."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(_PRESENT, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)

    def enter(self) -> None:
        """Let the calling thread, and those that it starts, be inside. Raises `OSError`."""
        home = self._descriptor
        if home is None or os.path.samestat(os.fstat(home), _PRESENT.stat()):
            return
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns needs Python 3.12
        if libc.setns(home, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "the machine's network namespace")
