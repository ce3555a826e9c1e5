"""The network interface of a host that reaches the other hosts, for gloo."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from ipaddress import ip_address

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface (netdevice(7))."""
_NAME_BYTES = 15
_ADDRESS = slice(20, 24)
"""Bytes of the IPv4 address in a `struct ifreq`."""


def interface_for_gloo(address: str, hostname: str) -> str:
    """The interface of this host's `address`, if gloo would choose loopback; else "".

    Without GLOO_SOCKET_IFNAME, gloo listens on the address that the host's name resolves to. On
    Debian and Ubuntu this is often 127.0.1.1, which no other host can reach.
    """
    if ip_address(address).is_loopback or not _is_loopback(hostname):
        return ""
    return interface_of(address)


def _is_loopback(hostname: str) -> bool:
    """Whether a name resolves to a loopback address, or not at all; gloo then takes loopback."""
    try:
        resolved = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return True
    return ip_address(str(resolved).partition("%")[0]).is_loopback


def interface_of(address: str) -> str:
    """The interface whose IPv4 address this is; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(control.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[_ADDRESS]) == address:
                    return name
    return ""
