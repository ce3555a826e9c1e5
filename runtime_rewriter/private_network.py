"""Networks on which servers without authentication may listen.

`tf.distribute.Server` binds to all interfaces and runs what anybody sends. So it runs only where
nobody else can connect: on an emulated cluster, whose hosts are network namespaces; in a network
namespace that the ranks of one machine share; or on a network that the user declares trusted.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import LaunchError
from runtime_rewriter import namespaces

NETWORK = "AUTOTUNE_NETWORK"
"""Environment variable of a rank: ISOLATED, TRUSTED, or unset."""
ISOLATED = "isolated"
"""The hosts of this job are namespaces that no other machine reaches."""
TRUSTED = "trusted"
"""The user declares that everybody who reaches these hosts may run code on them."""
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1  # linux/sockios.h, linux/if.h


@dataclass(frozen=True)
class NetworkNamespace:
    """The network namespace of a thread of a process: `path` and its inode."""

    path: str
    inode: int

    def enter(self) -> None:
        """Put this thread, and the threads that it starts from now on, inside.

        Open sockets keep their network. Raises `LaunchError`.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_ino != self.inode:
                    raise FileNotFoundError("the rank that holds it has ended")
                namespaces.enter(descriptor, namespaces.CLONE_NEWNET)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise LaunchError(f"the network namespace cannot be entered: {error}") from error


def new_network_namespace() -> NetworkNamespace:
    """Put this thread, and those that it starts, into a new namespace with a loopback interface.

    Raises `OSError` where that is not permitted.
    """
    namespaces.unshare(namespaces.CLONE_NEWNET)
    with socket.socket() as control:
        request = struct.pack("16sh", b"lo", _IFF_UP).ljust(40, b"\0")  # struct ifreq
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)
    path = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"
    return NetworkNamespace(path, Path(path).stat().st_ino)


def refusal(what: str, why: str) -> LaunchError:
    """The error for a server that may not run; `why` this network does not do."""
    return LaunchError(
        f"{what} listens on all interfaces without authentication, so it runs only in a network "
        f"namespace or on a network that you trust, but {why}; add --trusted-network if only "
        "people who may run code on these hosts can reach them, or use --testbed",
        anchor="untrusted-network",
    )
