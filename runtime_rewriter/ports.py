"""Ports that one process chooses and another one binds a little later.

A port that the kernel gives for 0 lies in its ephemeral range. Until it is bound again, the kernel
may give it to any listener or outgoing connection of the machine.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

LOWEST = 20_000
"""Ray's workers use 10002 to 19999."""
HIGHEST = 29_999
"""Kubernetes forwards 30000 to 32767 to services, and Linux gives ephemeral ports above these."""
ATTEMPTS = 100
EPHEMERAL_BOUNDS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Where Linux states the first and the last ephemeral port."""


def unclaimed_port(host: str, among: range | None = None) -> int:
    """A free port of `host`, if possible one of `among`, by default outside the ephemeral range.

    Raises `OSError` if `host` is no address of this machine.
    """
    among = below_ephemeral() if among is None else among
    draw = random.SystemRandom()  # the script's own generator stays as it is
    for _ in range(ATTEMPTS if among else 0):
        if chosen := bound_port(host, draw.choice(among)):
            return chosen
    chosen = bound_port(host, 0)
    assert chosen is not None, "the kernel gives no port that is in use"
    return chosen


def bound_port(host: str, port: int) -> int | None:
    """The port, or the kernel's choice for 0, if it is free. Raises `OSError` for other reasons."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        chosen: int = probe.getsockname()[1]
        return chosen


def below_ephemeral(bounds: Path = EPHEMERAL_BOUNDS) -> range:
    """The ports that nothing else is likely to use; empty if the ephemeral range begins too low."""
    try:
        first = int(bounds.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        first = HIGHEST + 1
    return range(LOWEST, min(HIGHEST + 1, first))
