"""Whether anything else computes on this machine: probed links and measured costs stay wrong for as long as a domain lives.

The host's other virtual machines take CPU time, too, which nothing here can wait for: what they took is noted with every trial.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

LOOK_S = 2.0
LOOKS = 30
"""So many looks are waited for quiet."""
BUSY_CORES = 0.3
"""Beyond what an idle Ray and waiting ranks take."""

STAT = Path("/proc/stat")
_IDLE, _STOLEN = (
    (3, 4),
    (7,),
)  # of the first line's numbers: idle and waiting for disks; steal (man 5 proc_stat)


def busy_cores(seconds: float) -> float:
    """Cores that worked in the next `seconds`, in the mean."""
    before = STAT.read_text()
    time.sleep(seconds)
    return (os.cpu_count() or 1) * busy_share(before, STAT.read_text())


def wait_until_quiet(
    say: Callable[[str], None], look: Callable[[float], float] = busy_cores
) -> None:
    """Returns when others take hardly any CPU time, or after `LOOKS` looks, and says that it waits and whether it helped.

    `look`: how many cores work in the next so many seconds.
    """
    for number in range(LOOKS):
        busy = look(LOOK_S)
        if busy <= BUSY_CORES:
            return
        if number == 0:
            say(
                f"other work takes {busy:.1f} cores; waiting for at most {LOOKS * LOOK_S:.0f} s until it ends"
            )
    say(
        f"other work still takes {busy:.1f} cores, so what is probed now may be wrong; end it and begin the domain anew"
    )


def busy_share(before: str, after: str) -> float:
    """Of all cores' time between two readings of /proc/stat."""
    return 1.0 - _share(before, after, _IDLE)


def stolen_share(before: str, after: str) -> float:
    """Of all cores' time between two readings of /proc/stat, what other virtual machines had."""
    return _share(before, after, _STOLEN)


def _share(before: str, after: str, numbers: Iterable[int]) -> float:
    first, last = (
        [int(word) for word in text.splitlines()[0].split()[1:9]] for text in (before, after)
    )
    spent = [end - start for start, end in zip(first, last, strict=True)]
    return sum(spent[number] for number in numbers) / max(sum(spent), 1)
