"""Wait until nothing else computes on this machine.

Probed links and measured costs stay wrong for as long as a domain exists. CPU time that the host's
other virtual machines take cannot be waited for; each trial notes its share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

LOOK_S = 2.0
LOOKS = 30
"""Wait for at most this many looks."""
BUSY_CORES = 0.3
"""More than an idle Ray and waiting ranks take."""

STAT = Path("/proc/stat")
# numbers of its first line (man 5 proc_stat)
_IDLE = (3, 4)  # idle, and waiting for disks
_STOLEN = (7,)


def busy_cores(seconds: float) -> float:
    """Return the mean number of cores that worked in the next `seconds`."""
    before = STAT.read_text()
    time.sleep(seconds)
    return (os.cpu_count() or 1) * busy_share(before, STAT.read_text())


def wait_until_quiet(
    log: Callable[[str], None], look: Callable[[float], float] = busy_cores
) -> None:
    """Return when others take hardly any CPU time, or after `LOOKS` looks.

    `look(seconds)`: how many cores work meanwhile. `log` hears of a wait, and of one in vain.
    """
    for number in range(LOOKS):
        busy = look(LOOK_S)
        if busy <= BUSY_CORES:
            return
        if number == 0:
            limit_s = LOOKS * LOOK_S
            log(f"other work takes {busy:.1f} cores; waiting for its end, at most {limit_s:.0f} s")
    log(
        f"other work still takes {busy:.1f} cores, so the probe may be wrong; "
        "end that work and start the domain anew"
    )


def busy_share(before: str, after: str) -> float:
    """Return the busy share of all cores' time between two readings of /proc/stat."""
    return 1.0 - _share(before, after, _IDLE)


def stolen_share(before: str, after: str) -> float:
    """Return the share that other virtual machines had, between two readings of /proc/stat."""
    return _share(before, after, _STOLEN)


def _share(before: str, after: str, numbers: Iterable[int]) -> float:
    first, last = (
        [int(word) for word in text.splitlines()[0].split()[1:9]] for text in (before, after)
    )
    spent = [end - start for start, end in zip(first, last, strict=True)]
    return sum(spent[number] for number in numbers) / max(sum(spent), 1)
