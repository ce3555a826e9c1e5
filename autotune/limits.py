"""Limits of numbers from files: generous, but finite, so that no figure overflows or fills memory.

docs/limits.md lists them with the limits on sizes of files.
"""

from __future__ import annotations

from autotune.errors import InvalidInput

MAX_RANKS = 2**17
"""Ranks of a job, and devices of a cluster. The largest training runs published have about 100,000
accelerators."""
MAX_VARIABLES = 2**18
"""Gradient variables. DeepSeek-V3 has about 47,000: three per expert, 256 experts in 58 layers."""
MAX_ELEMENTS = 2**46
"""Elements of a variable, and of a model: 70 times 10^12. Their bytes are exact as a float."""
MAX_DIMENSIONS = 64
"""Dimensions of a tensor, as in numpy."""
MAX_SECONDS = 30 * 24 * 3600.0
"""Thirty days, for a time within a step as for a whole job."""
MIN_BYTES_PER_S, MAX_BYTES_PER_S = 1.0, 1e15
"""Rates of links. The slowest modem had 37 bytes per second; a rack's NVLink has 1.3e14."""
MAX_BYTES = 2**53
"""Bytes of anything. Up to here a float counts every byte."""
MAX_COUNT = 1_000_000
"""Steps, trials, blocks and other counts that a user chooses."""


def check_range(value: float, least: float, most: float, what: str) -> None:
    """Raise `InvalidInput` unless `value` is a number from `least` to `most`."""
    if not least <= value <= most:
        raise InvalidInput(f"{what} must be from {_plain(least)} to {_plain(most)}, but is {value}")


def check_seconds(value: float | None, what: str) -> None:
    """Raise `InvalidInput` for a negative or endless time; None is a time that is not known."""
    if value is not None:
        check_range(value, 0, MAX_SECONDS, f"{what} (seconds)")


def check_rate(value: float, what: str) -> None:
    """Raise `InvalidInput` for a rate of a link that no link has."""
    check_range(value, MIN_BYTES_PER_S, MAX_BYTES_PER_S, f"{what} (bytes per second)")


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) and bound < 10**16 else f"{bound:g}"
