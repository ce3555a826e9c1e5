"""A buffer of a plan: its size, and when it is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class When(StrEnum):
    """When a buffer is allocated."""

    ALWAYS = "always"
    STEP_START = "step_start"
    READY = "ready"  # while the gradient of its variable is packed
    QUEUED = "queued"  # from the issue of its message until the message arrives
    FLIGHT = "flight"  # while its message has the channel
    RESULT = "result"  # while its message's sum is sent to all ranks
    END = "end"  # while the averages are written, after the backward pass


@dataclass(frozen=True)
class Buffer:
    """One allocation. `what` describes it. `message`: its message's number in the plan."""

    bytes: int
    what: str
    when: When = When.ALWAYS
    message: int | None = None
    variable: str | None = None
