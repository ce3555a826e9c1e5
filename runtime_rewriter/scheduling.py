"""Real-time round-robin scheduling (Linux SCHED_RR) of a rank: when it helps, and how a process takes it.

Between ranks that mostly wait, a message's latency is decided by how soon the receiver gets a core; a round-robin rank gets
it at once.  Ranks that compute without a pause would keep everything else on the machine from its cores instead.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from autotune.records import Accelerators, Conditions, Network

ROUND_ROBIN, BYTE_SCALE = "AUTOTUNE_ROUND_ROBIN", "AUTOTUNE_BYTE_SCALE"
"""Variables in a rank's environment by which a placement asks for its conditions; see `launch`."""
PRIORITY = 1
"""The lowest real-time priority: above all ordinary processes, below the kernel's own threads."""
_THREADS = Path("/proc/self/task")


def wants_round_robin(conditions: Conditions, ranks: int, cores: int) -> bool:
    """Whether `ranks` ranks that share a machine of `cores` cores are to ask for round-robin scheduling; pure.

    Ranks of a real cluster keep the policy that they will train under. Emulated accelerators wait, so their ranks share
    few cores well. Ranks that really compute must leave at least one core to the rest of the machine, Ray's own
    processes among it.
    """
    if conditions.network is Network.HOSTS:
        return False
    return conditions.accelerators is Accelerators.EMULATED or ranks < cores


def asked_of_ranks(conditions: Conditions) -> dict[str, str]:
    """What a placement adds to the environment of every rank."""
    return {
        ROUND_ROBIN: "1" if conditions.round_robin else "0",
        BYTE_SCALE: repr(conditions.byte_scale),
    }


def usable_cores() -> int:
    """CPU cores that this process may use; 0 where nobody knows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def take_round_robin() -> bool:
    """Put every thread of this process, and those it will start, under round-robin scheduling; False where not permitted."""
    return _schedule(round_robin=True)


def step_down() -> bool:
    """From round-robin scheduling back to the default policy, so that a rank that keeps it comes first; False where not under it."""
    return (
        hasattr(os, "sched_getscheduler")
        and os.sched_getscheduler(0) == os.SCHED_RR
        and _schedule(round_robin=False)
    )


def _schedule(round_robin: bool) -> bool:
    if not hasattr(os, "sched_setscheduler"):
        return False
    policy, priority = (os.SCHED_RR, PRIORITY) if round_robin else (os.SCHED_OTHER, 0)
    try:
        os.sched_setscheduler(0, policy, os.sched_param(priority))
    except OSError:
        return False
    # A thread inherits the policy of the one that starts it; these run already.
    for thread in [int(entry.name) for entry in _THREADS.iterdir()] if _THREADS.is_dir() else []:
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setscheduler(thread, policy, os.sched_param(priority))
    return True
