"""The exceptions that users meet.

Each message states the rule, the value that breaks it and the fix. The `InvalidInput` family is for
users' input; our own bugs are `assert`s.
"""

from __future__ import annotations

from typing import Literal

TROUBLESHOOTING = "autotune docs troubleshooting"
"""The command that prints the page; an installed package has no folder `docs`."""
Anchor = Literal[
    "",
    "no-ddp",
    "wrong-world-size",
    "another-model",
    "no-ray",
    "refused-strategy",
    "no-view",
    "untrusted-network",
]
"""An anchor of the troubleshooting page, or empty."""


class AutotuneError(Exception):
    """Base of every error that this package raises deliberately."""

    anchor: Anchor = ""

    def __init__(self, message: str = "", *, anchor: Anchor = "") -> None:
        super().__init__(message)
        if anchor:
            self.anchor = anchor

    @property
    def help_page(self) -> str:
        """The command that prints the section that helps; empty if there is none."""
        return f"{TROUBLESHOOTING}#{self.anchor}" if self.anchor else ""

    def __str__(self) -> str:
        message = super().__str__()
        if not self.help_page or self.help_page in message:
            return message
        return f"{message}; see `{self.help_page}`"


def raised_line(text: str) -> str:
    """The line after the last Python traceback in `text`, which says what was raised.

    Empty if there is no traceback. `Exception` itself says nothing and is left out.
    """
    lines = text.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else []
    raised = next((line for line in after if line.strip() and not line.startswith(" ")), "")
    return raised.removeprefix("Exception: ").strip()


class InvalidInput(AutotuneError, ValueError):
    """A file, option or argument breaks a rule; the message names rule, value and fix."""


class MissingExtra(InvalidInput):
    """An optional package is not installed; the message names the extra that brings it."""


def install_extra(extra: str) -> str:
    """The command that adds an extra. The project `autotune` on PyPI is another one."""
    return (
        f"run `pip install '.[{extra}]'` in autotune's clone, or name its wheel in place of the dot"
    )


class InvalidStrategy(InvalidInput):
    """A strategy cannot be planned for this workload and world size."""

    anchor: Anchor = "refused-strategy"


class ModelMismatch(InvalidInput):
    """An export or a plan was built for another model or world size."""

    anchor: Anchor = "another-model"


class StoreVersionError(AutotuneError):
    """The trial store was written by a newer version of this package."""


class LaunchError(AutotuneError):
    """The world could not be started, or the script cannot be tuned."""


class PlanMismatch(AutotuneError):
    """Ranks hold different plans; raised on every rank before the first collective."""


class SynchronizationError(AutotuneError):
    """A gradient synchronization failed (timeout, missing gradient)."""


class EmulationError(AutotuneError):
    """A testbed (an emulated cluster) could not be created, used or removed."""


class EmulationUnavailable(InvalidInput):
    """This machine cannot emulate the cluster; the message names the missing capability."""
