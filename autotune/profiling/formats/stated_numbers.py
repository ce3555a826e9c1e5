"""Reads the numbers of a trace's events, which some profilers write as text."""

from __future__ import annotations

import math
from typing import Any

from autotune.profiling.formats.rank_trace import MISSING


def stated_number(value: Any) -> float | None:
    """A finite number, also one written as a string; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def stated_whole(value: Any) -> int:
    """A number of 63 bits without its fraction; MISSING for anything else."""
    number = stated_number(value)
    if number is None or abs(number) >= 2**62:
        return MISSING
    return value if isinstance(value, int) else int(number)


def stated_count(value: Any) -> Any:
    """A text or a float as the whole number that it states, and any other value as it is.

    A number beyond 63 bits stays beyond every limit, so `limits.limited` still refuses it.
    """
    number = stated_number(value) if isinstance(value, str | float) else None
    return value if number is None else int(number)
