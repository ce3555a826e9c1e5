"""Gives Horovod's background thread a hostname that resolves to the right interface.

Horovod 0.28.1 connects its global process set through the address that the hostname resolves to,
whatever HOROVOD_GLOO_IFACE names (`GlooContext::InitializeForProcessSet` takes the interface of a
new context, which has none). In a network namespace that is often the loopback address, and hosts
do not find each other.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from runtime_rewriter.horovod.places import address_of


def call_on_interface(interface: str, call: Callable[[], object]) -> None:
    """Call `call`, and let it and the threads it starts find the interface's address.

    Their hostname is that address, in a UTS namespace of their own. Without the permission for one
    they keep the hostname. The process's other threads always keep it.
    """
    if not interface or _resolved() == address_of(interface):
        call()
        return
    with ThreadPoolExecutor(1, "horovod-init") as thread:
        thread.submit(_call_as, address_of(interface), call).result()


def _call_as(hostname: str, call: Callable[[], object]) -> None:
    clone_newuts = 0x04000000  # <linux/sched.h>
    if ctypes.CDLL(None, use_errno=True).unshare(clone_newuts) == 0:
        socket.sethostname(hostname)
    call()


def _resolved() -> str:
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""
