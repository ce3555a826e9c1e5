"""Finds out what this machine can emulate, by trials in a nameless namespace.

The namespaces of the network and of the mounts (`ip netns` keeps names as mounts) belong to one
short-lived thread. So nothing of a trial is visible outside, and nothing can be left over.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from autotune.errors import EmulationUnavailable
from autotune.testbed.layout import Means
from autotune.testbed.machine import CLONE_NEWNET, CLONE_NEWNS, NAMESPACES, attempt
from autotune.testbed.relay import TUN, open_tap

TRIAL = "trial"
TRIAL_THREAD = "testbed-trial"
NOT_TRIED = "not tried"
TRIALS_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Capability:
    """`reason`: why it is missing, or "". `needed`: there is no testbed without it.

    `gives`: its use.
    """

    name: str
    needed: bool
    gives: str
    reason: str

    @property
    def present(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class Capabilities:
    tried: tuple[Capability, ...]

    @cached_property
    def possible(self) -> bool:
        return all(capability.present for capability in self.tried if capability.needed)

    @cached_property
    def means(self) -> Means:
        present = {capability.name for capability in self.tried if capability.present}
        return Means(
            netem="netem" in present,
            filters="u32" in present,
            tun="tun" in present,
            cubic="cubic" in present,
            steered_cpus=(os.cpu_count() or 1) if "steering" in present else 0,
        )

    @cached_property
    def message(self) -> str:
        """One sentence for people: a testbed is possible, or what is missing."""
        if self.possible:
            return "a testbed is possible on this machine"
        lacking = [
            f"{item.name} ({item.reason})"
            for item in self.tried
            if item.needed and item.reason not in ("", NOT_TRIED)
        ]
        return (
            f"a testbed is not possible on this machine; missing: {'; '.join(lacking)}. "
            "Loopback stays available: leave out --testbed"
        )

    def demand(self) -> None:
        """Raise `EmulationUnavailable` with the message if no testbed is possible."""
        if not self.possible:
            raise EmulationUnavailable(self.message)


def capabilities(timeout_s: float = TRIALS_TIMEOUT_S) -> Capabilities:
    """Try everything in about 0.1 s, without changes. Missing rights are missing capabilities.

    If the trials exceed the timeout, return the capabilities so far; "an answer in time" is
    missing.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    reason = f"{' and '.join(missing)} not found; install iproute2" if missing else ""
    results = [Capability("commands", True, "ip and tc", reason)]
    trial = threading.Thread(target=_try_all, args=(results,), name=TRIAL_THREAD, daemon=True)
    trial.start()
    trial.join(timeout_s)
    if not trial.is_alive():
        return Capabilities(tuple(results))
    reason = f"the trials took more than {timeout_s:g} s"
    return Capabilities((*results, Capability("an answer in time", True, "all of it", reason)))


@dataclass(frozen=True)
class _Trial:
    name: str
    needed: bool
    gives: str
    steps: tuple[str, ...]


_FILTER = "tc filter add dev p0 parent 1: protocol ip u32 match ip dst 10.77.0.2/32"
_NETEM = "tc qdisc add dev p1 root netem"
_ROUTE = "ip route change 10.77.0.0/16 dev p0 proto kernel scope link src 10.77.0.1"
_TRIALS = (
    _Trial(
        "named namespaces",
        True,
        "hosts",
        (f"mkdir -p {NAMESPACES}", f"mount -t tmpfs none {NAMESPACES}", f"ip netns add {TRIAL}"),
    ),
    _Trial("bridge", True, "the switch", ("ip link add br0 type bridge",)),
    _Trial(
        "veth",
        True,
        "links",
        (
            "ip link add p0 type veth peer name p1",
            "ip link set p0 up",
            "ip addr add 10.77.0.1/16 dev p0",
        ),
    ),
    _Trial(
        "htb",
        True,
        "rates",
        (
            "tc qdisc add dev p0 root handle 1: htb default 2",
            "tc class add dev p0 parent 1: classid 1:2 htb rate 1gbit burst 64kb",
            "tc qdisc add dev p0 parent 1:2 handle 2: bfifo limit 1mb",
        ),
    ),
    _Trial("u32", False, "rates of pairs, fair queues", (f"{_FILTER} flowid 1:2",)),
    _Trial(
        "steering",
        False,
        "packets that stay in order",
        (f"ip netns exec {TRIAL} test -w /sys/class/net/lo/queues/rx-0/rps_cpus",),
    ),
    _Trial("netem", False, "added latency, by the kernel", (f"{_NETEM} delay 1ms",)),
    _Trial("cubic", False, "the congestion control of most machines", (f"{_ROUTE} congctl cubic",)),
)


def _try_all(results: list[Capability]) -> None:
    """Run all trials in a thread of its own, whose namespaces end with it."""
    reason = _leave_the_machines_network()
    results.append(Capability("root", True, "namespaces", reason))
    tools = all(capability.present for capability in results)
    for trial in _TRIALS:
        why = _first_failure(trial.steps) if tools else NOT_TRIED
        results.append(Capability(trial.name, trial.needed, trial.gives, why))
    # This thread may create devices only inside a namespace of its own.
    why = NOT_TRIED if reason else _refusal(lambda: os.close(open_tap("t0")), str(TUN))
    results.append(Capability("tun", False, "added latency, by a user-space relay", why))
    turn = os.sched_param(1)
    why = _refusal(lambda: os.sched_setscheduler(0, os.SCHED_RR, turn), "SCHED_RR")
    results.append(Capability("round-robin", False, "ranks that get the CPU at once", why))


def _leave_the_machines_network() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET | CLONE_NEWNS) != 0:
        reason = os.strerror(ctypes.get_errno())
        return f"CAP_SYS_ADMIN and CAP_NET_ADMIN needed: {reason}; run as root"
    return attempt(["mount", "--make-rprivate", "/"]).reason


def _first_failure(steps: tuple[str, ...]) -> str:
    for step in steps:
        if reason := attempt(step.split()).reason:
            return f"`{step}`: {reason}"
    return ""


def _refusal(act: Callable[[], None], name: str) -> str:
    try:
        act()
    except OSError as error:
        return f"{name}: {error.strerror}"
    return ""
