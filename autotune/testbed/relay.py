"""The user-space switch of a testbed: `python -m autotune.testbed.relay < orders.json`.

Each host's interface is a TAP device, and this process holds its other end. Frames come with a
virtio header and offloads on, so a GSO frame of 64 KiB is one read and one write. `forwarding`
decides about frames; this module waits and handles the devices. When the devices exist, the relay
continues in the background. The process that was started prints the background's id and ends. The
relay ends when its owner dies, when a device is gone (the testbed was removed) or by a signal.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import select
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autotune.parsing import parse, parse_json
from autotune.testbed.build import port
from autotune.testbed.forwarding import Forwarding, Paths
from autotune.testbed.machine import Process

TUN = Path("/dev/net/tun")
TUNSETIFF = 0x400454CA  # linux/if_tun.h
TUNSETOFFLOAD = 0x400454D0
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
IFF_VNET_HDR = 0x4000
OFFLOADS = 0x01 | 0x02 | 0x04 | 0x08  # checksums, TSO for IPv4 and IPv6, TSO with ECN
PR_SET_TIMERSLACK = 29

PRIORITY = 20
"""Round-robin priority: above the ranks' 1, as a real network does not compete with them."""

FRAME_BYTES = 65536 + 64
FRAMES_PER_TURN = 16

COPY_S = 40e-6
"""Time of a frame through two devices and this process, without waking up.

Measured at 0.5, 2 and 5 ms.
"""
LATEST_S = 150e-6
"""A timer later than this met a disturbance of the machine, which is not learned."""
HABIT = 1 / 32
"""Weight of the newest wake-up in the mean lateness."""


@dataclass(frozen=True)
class Orders:
    """The relay's standard input, as JSON."""

    __pydantic_config__ = {"extra": "forbid"}

    paths: Paths
    owner: Process | None


def main() -> int:
    orders = parse(Orders, parse_json(sys.stdin.read(), "the relay's orders"), "the relay's orders")
    _run_first()
    taps = [open_tap(port(index)) for index in range(len(orders.paths.latency_s))]
    owner = _watch(orders.owner)
    if background := os.fork():
        os.write(sys.stdout.fileno(), f"{background}\n".encode())
        return 0
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (sys.stdin.fileno(), sys.stdout.fileno()):
        os.dup2(nothing, descriptor)  # their readers must not wait
    gc.disable()  # there are no cycles here, and a collection would delay frames
    _relay(Forwarding(orders.paths), taps, owner)
    return 0


def open_tap(name: str) -> int:
    """Open a TAP device in the calling thread's namespace; return its file descriptor."""
    tap = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR)
        fcntl.ioctl(tap, TUNSETIFF, request)
        fcntl.ioctl(tap, TUNSETOFFLOAD, OFFLOADS)
    except OSError:
        os.close(tap)
        raise
    return tap


def _run_first() -> None:
    """Take round-robin scheduling if permitted, and drop the kernel's 50 us of timer slack."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


def _watch(owner: Process | None) -> int | None:
    """A descriptor that becomes readable when the owner ends; raises if it is gone already."""
    if owner is None:
        return None
    descriptor = os.pidfd_open(owner.pid)
    if not owner.alive:  # the descriptor keeps the id from becoming another's
        raise ProcessLookupError(f"the owner, process {owner.pid}, is gone")
    return descriptor


def _relay(forwarding: Forwarding, taps: list[int], owner: int | None) -> None:
    """Send frames `ahead` seconds before they are due.

    Waking up for a frame and for its time is late twice. The lateness depends on the machine (5 us
    to 100 us), so it is learned from the timers. One shift for all frames keeps their order.
    """
    hosts = {tap: index for index, tap in enumerate(taps)}
    watched = [*taps, owner] if owner is not None else taps
    monotonic, late_s, ahead = time.monotonic, 0.0, COPY_S
    while True:
        next_s = forwarding.next_s()
        wait_s = None if next_s is None else max(0.0, next_s - ahead - monotonic())
        readable, _, _ = select.select(watched, (), (), wait_s)
        if next_s is not None and wait_s and not readable:
            late_s += HABIT * (min(monotonic() - next_s + ahead, LATEST_S) - late_s)
            ahead = COPY_S + 2 * late_s
        if owner in readable or not _take_frames(forwarding, readable, hosts):
            return
        for target, frame in forwarding.due(monotonic() + ahead):
            # EIO: the target's interface is not up yet. EINVAL: the kernel does not accept the
            # frame.
            # Networks lose such frames.
            with suppress(OSError):
                os.write(taps[target], frame)


def _take_frames(forwarding: Forwarding, readable: list[int], hosts: dict[int, int]) -> bool:
    """Read a few frames of each host, so that none waits long; False: a device is gone."""
    monotonic, take = time.monotonic, forwarding.take
    for tap in readable:
        source = hosts[tap]
        for _ in range(FRAMES_PER_TURN):
            try:
                frame = os.read(tap, FRAME_BYTES)
            except BlockingIOError:
                break
            except OSError:
                return False
            take(monotonic(), source, frame)
    return True


if __name__ == "__main__":
    sys.exit(main())
