"""The copy-on-write view of files in which a rank runs; `world.views` makes it.

The view is a mount namespace that a process holds. A rank enters it before it runs the script.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import LaunchError
from runtime_rewriter import namespaces

VARIABLE = "AUTOTUNE_FILE_VIEW"
"""Environment variable that gives a rank its view."""


@dataclass(frozen=True)
class FileView:
    """`holder`: id of the process that holds it; `namespace`: the mount namespace's inode."""

    holder: int
    namespace: int

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a rank that runs in the view."""
        return {VARIABLE: f"{self.holder}:{self.namespace}"}

    def enter(self) -> None:
        """Put this process, which must have one thread, and its children inside.

        The working directory keeps its path. Raises `LaunchError`.
        """
        directory = Path.cwd()
        try:
            user, mounts = (
                os.open(f"/proc/{self.holder}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
                for kind in ("user", "mnt")
            )
            if os.fstat(mounts).st_ino != self.namespace:
                raise FileNotFoundError("its holder has ended")
            if os.fstat(user).st_ino != Path("/proc/self/ns/user").stat().st_ino:
                namespaces.enter(user, namespaces.CLONE_NEWUSER)
            namespaces.enter(mounts, namespaces.CLONE_NEWNS)
            os.chdir(directory)
        except OSError as error:
            raise LaunchError(
                f"the view of the script's files cannot be entered: {error}"
            ) from error
        for descriptor in (user, mounts):
            os.close(descriptor)


def requested_view() -> FileView | None:
    """The view that this process's environment requests, once: the variable is removed."""
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return None
    holder, _, namespace = text.partition(":")
    return FileView(int(holder), int(namespace))
