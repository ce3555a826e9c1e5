"""Limits on what a trace may state. A number beyond its limit is refused before it is used.

A number in a trace may become the length of an array, so every such number has a limit here.
"""

from __future__ import annotations

from typing import Any

from autotune.errors import InvalidInput
from autotune.limits import MAX_RANKS

MAX_GROUP_RANKS = 4_000_000
"""Ranks of all process groups of a trace together: a few groups of the largest jobs."""
MAX_TIME_US = 2**63 / 1000
"""Distance from 1970 of a time stamp: Kineto counts nanoseconds in 64 bits (the year 2262)."""
MAX_SPAN_US = 30 * 86_400 * 1e6
"""Length of a trace, 30 days; torch.profiler keeps all events in memory."""


def limited(value: Any, limit: int, what: str) -> int:
    """The count, 0 for anything that is no count. Raises `InvalidInput` above the limit."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return 0
    if value > limit:
        shown = str(value) if value < 10**30 else "more than 10^30"
        raise InvalidInput(f"there may be at most {limit} {what}, but there are {shown}")
    return value


def limited_rank(value: int) -> int:
    """The number of a rank. Raises `InvalidInput` outside of 0 to `MAX_RANKS` - 1."""
    if not 0 <= value < MAX_RANKS:
        shown = str(value) if abs(value) < 10**30 else "beyond 10^30"
        raise InvalidInput(f"a rank must be 0 to {MAX_RANKS - 1}, but one is {shown}")
    return value
