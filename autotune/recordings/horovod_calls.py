"""Calls of Horovod that a rank records: when it enqueued a tensor, and when it was complete.

Horovod's timeline is rank 0's alone. Its handles tell whether an operation is complete only if they
are asked, so a completion lies between the last look before it and the first look after it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HorovodCall:
    """One call of an asynchronous operation; seconds on the monotonic clock of its process.

    - `name`: that of the call, "" where Horovod made one up. `tensors`: more than one for a group.
    - `called_s`, `returned_s`: begin and end of the call, which only enqueues.
    - `incomplete_s`, `complete_s`: last look without and first look with completion; None: not
      seen. `awaited_s`: when the script began to wait for it, None if it did not.
    """

    name: str
    op: str
    tensors: int
    size_bytes: int
    dtype: str
    step: int
    called_s: float
    returned_s: float
    incomplete_s: float
    complete_s: float | None = None
    awaited_s: float | None = None
