"""The exceptions that users meet.

Every message states the rule, the value that broke it and the fix. The `InvalidInput`
family is for what a user gave us; bugs of our own are `assert`s.
"""

from __future__ import annotations


class AutotuneError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidInput(AutotuneError, ValueError):
    """A file, option or argument breaks a rule; the message names rule, value and fix."""


class InvalidStrategy(InvalidInput):
    """A strategy cannot be planned for this workload and world size."""


class ModelMismatch(InvalidInput):
    """An export is applied to another model or world size than it was made for."""


class StoreVersionError(AutotuneError):
    """The trial store was written by a newer version of this package."""


class LaunchError(AutotuneError):
    """The training world could not be started, or the script cannot be tuned."""


class PlanMismatch(AutotuneError):
    """Ranks hold different plans; raised on every rank before the first collective."""


class SynchronizationError(AutotuneError):
    """A gradient synchronization could not be carried out (timeout, missing gradient)."""


class EmulationError(AutotuneError):
    """A testbed (an emulated cluster) could not be made, used or removed."""


class EmulationUnavailable(InvalidInput):
    """This machine cannot emulate what was asked for; the message says what is missing."""
