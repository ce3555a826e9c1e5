"""Real-time round-robin scheduling (Linux SCHED_RR) of ranks.

If ranks mostly wait, the latency of a message depends on how soon the receiver gets a core. A
round-robin rank gets it at once. Ranks that compute without a pause would instead keep everything
else on the machine from its cores.
"""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path

from autotune.records import Accelerators, Conditions, Network
from runtime_rewriter.private_network import ISOLATED, NETWORK

ROUND_ROBIN = "AUTOTUNE_ROUND_ROBIN"
BYTE_SCALE = "AUTOTUNE_BYTE_SCALE"
"""Environment variables that request the conditions of a rank; see `rank.launch`."""
PRIORITY = 1
"""The lowest real-time priority: above all ordinary processes, below the kernel's own threads."""
_THREADS = Path("/proc/self/task")


def wants_round_robin(conditions: Conditions, ranks: int, cores: int) -> bool:
    """Whether `ranks` ranks on one machine with `cores` cores should run round-robin; pure.

    Ranks of a real cluster keep the policy of their training. Emulated accelerators wait, so their
    ranks share few cores well. Ranks that really compute must leave at least one core to the rest
    of the machine, including Ray's processes.
    """
    if conditions.network is Network.HOSTS:
        return False
    return conditions.accelerators is Accelerators.EMULATED or ranks < cores


def requested_conditions(conditions: Conditions) -> dict[str, str]:
    """Environment variables of every rank under these conditions."""
    isolated = {NETWORK: ISOLATED} if conditions.network is Network.EMULATED else {}
    return {
        ROUND_ROBIN: "1" if conditions.round_robin else "0",
        BYTE_SCALE: repr(conditions.byte_scale),
        **isolated,
    }


def usable_cores() -> int:
    """CPU cores that this process may use; 0 if unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def take_round_robin() -> bool:
    """Run all present and future threads of this process round-robin; False if not permitted.

    Processes that it forks, such as workers of data loaders, step down: they compute. The kernel's
    SCHED_RESET_ON_FORK would also take the policy from new threads.
    """
    if not _schedule(round_robin=True):
        return False
    _forks_step_down()
    return True


@cache  # a hook of forks cannot be removed
def _forks_step_down() -> None:
    os.register_at_fork(after_in_child=step_down)


def step_down() -> bool:
    """Return to the default policy; False if the process did not run round-robin."""
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
    # New threads inherit the policy; these run already.
    for thread in [int(entry.name) for entry in _THREADS.iterdir()] if _THREADS.is_dir() else []:
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setscheduler(thread, policy, os.sched_param(priority))
    return True
