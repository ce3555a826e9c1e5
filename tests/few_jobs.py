"""Lets few tests of this machine run jobs at the same time.

A job starts Ray or a launcher, and these start ranks: a dozen processes that import torch. When
jobs of several test processes started together, ranks took more than two minutes to start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

AT_ONCE = 2
WAIT_S = 1200.0
"""After this time the test starts all the same."""
POLL_S = 0.1


@contextlib.contextmanager
def turn(
    at_once: int = AT_ONCE, wait_s: float = WAIT_S, folder: Path | None = None
) -> Iterator[bool]:
    """Wait until fewer than `at_once` processes of this user are within such a block.

    Yields whether that is so; after `wait_s` it need not be. `folder`: where the locks are.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"autotune-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    end_s = time.monotonic() + wait_s
    with contextlib.ExitStack() as held:
        locks = [held.enter_context((folder / f"job-{n}").open("w")) for n in range(at_once)]
        while not (mine := any(map(_locked, locks))) and time.monotonic() < end_s:
            time.sleep(POLL_S)
        yield mine


def _locked(lock: IO[str]) -> bool:
    """Whether this process now holds the lock, which ends when the file is closed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
