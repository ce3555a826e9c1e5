"""The private folder of a local Ray cluster, and the end of everything that uses it.

Ray's default folder is readable by everybody, and keeps every session forever.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

SHUTDOWN_S = 20.0
"""Time for Ray to end by itself."""
_PREFIX = "atray-"
_LONGEST_PARENT = 30
"""Characters: Ray puts sockets below its folder, whose paths the kernel limits to 107."""


def _parent() -> Path:
    parent = tempfile.gettempdir()
    return Path(parent if len(parent) <= _LONGEST_PARENT else "/tmp")


def make() -> Path:
    """A new folder that only this user can read; removes those of processes that were killed."""
    remove_abandoned()
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_parent()))


def remove_abandoned() -> None:
    """Remove this user's folders whose process is gone, and end what still uses them."""
    for folder in _parent().glob(f"{_PREFIX}*"):
        owner = re.fullmatch(rf"{_PREFIX}(\d+)-.*", folder.name)
        with contextlib.suppress(OSError):
            if owner and folder.stat().st_uid == os.getuid() and not _lives(int(owner[1])):
                end(folder)


def end(folder: Path) -> None:
    """Kill every process that has the folder in its arguments, and remove the folder."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                int(entry.name) != os.getpid()
                and str(folder).encode() in (entry / "cmdline").read_bytes()
            ):
                os.kill(int(entry.name), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def within_deadline(shut_down: Callable[[], object], seconds: float = SHUTDOWN_S) -> bool:
    """Call `shut_down` on a thread; False if it has not returned in time."""
    thread = threading.Thread(target=shut_down, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
