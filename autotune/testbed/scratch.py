"""A private directory of a testbed, for what runs inside: its path is recorded before it is made, and it is removed with the testbed."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from autotune.errors import EmulationError

PREFIX = "autotune."
LONGEST_BYTES = 32
"""A Unix socket's path has at most 107 bytes, of which Ray's and a directory below this one (`ray_nodes`) take 75."""

_SHORT = Path("/tmp")


def new_scratch() -> Path:
    """A short path in the temporary directory that nothing has; `make_scratch` makes it."""
    name = PREFIX + secrets.token_hex(4)
    usual = Path(tempfile.gettempdir()) / name
    return usual if len(os.fsencode(usual)) <= LONGEST_BYTES else _SHORT / name


def make_scratch(path: Path) -> str:
    """Make the directory for this user alone; why it could not be made, empty where it was."""
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def remove_scratch(path: Path) -> None:
    """Remove the directory with all that is in it, if it is one of ours: no link, this user's, and named like one.

    Raises `EmulationError` where something of it stays.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and path.name.startswith(PREFIX)
        and path.is_absolute()
    ):
        return
    shutil.rmtree(path, ignore_errors=True)  # a process that ends may still write its last words
    try:
        if path.exists():
            shutil.rmtree(path)
    except OSError as error:
        raise EmulationError(
            f"the directory {path} of a testbed could not be removed: {error.strerror}; remove it"
        ) from error
