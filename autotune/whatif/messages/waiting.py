"""The waiting of messages for other ranks, which no change of the network shortens.

Only the traces of all ranks show the waiting (`Base.waits_s`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.errors import InvalidInput
from autotune.whatif.base import Base


def sending_s(base: Base, messages: IntArray) -> FloatArray:
    """(K,) the part of each message's duration in which it does not wait for other ranks."""
    return base.duration_s[messages] - _waits_s(base, messages)


def with_sending(base: Base, messages: IntArray, seconds: FloatArray) -> Base:
    """Let each of `messages` (K,) wait as long as before, and then send for `seconds` (K,)."""
    durations_s = base.duration_s.copy()
    durations_s[messages] = _waits_s(base, messages) + seconds
    return replace(base, duration_s=durations_s)


def ratio(after_s: FloatArray, before_s: FloatArray) -> FloatArray:
    """(K,) `after_s / before_s`; 1 for messages that take no time, such as those of one worker."""
    return np.divide(after_s, before_s, out=np.ones(len(before_s)), where=before_s > 0)


def refuse_changed_messages(base: Base) -> None:
    """Raise `InvalidInput` if a what-if before has replaced the messages by other ones."""
    if base.messages:
        raise InvalidInput(
            f"this what-if changes whole messages, but {base.messages} before has replaced them; "
            "leave out one of the two (a faster network also goes into the cluster's file)"
        )


def _waits_s(base: Base, messages: IntArray) -> FloatArray:
    waits_s = np.zeros(base.ops)
    waits_s[list(base.waits_s)] = list(base.waits_s.values())
    return waits_s[messages]
