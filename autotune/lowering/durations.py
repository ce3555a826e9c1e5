"""The times of a message's steps from which the durations of its ops are computed.

| symbol | meaning |
|---|---|
| K | messages of one kind |
| B | bases of a step: the members of `Base` |
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from autotune.arrays import FloatArray
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.step_times import StepTimes
from autotune.lowering.steps import Step


class Base(IntEnum):
    """A time of one step, in seconds.

    A sleeping thread needs `WAKE` before it prepares a message. The cores work `WITHIN` the
    message's time and `BEYOND` its end: senders drain their sockets, threads fall asleep. `LINK`:
    the slowest port is occupied. `REST`: neither occupies anything.
    """

    PREPARE = 0  # passing the message to the lane's thread, and computation before the step
    PREPARE_PIECE = 1  # the same for a piece with others under way
    PREPARE_ROOT = 2
    REST = 3
    WITHIN = 4
    BEYOND = 5
    LINK = 6
    PASS = 7  # as PREPARE and PREPARE_PIECE, without computation
    PASS_PIECE = 8
    WAKE = 9


def base(lane: int, which: Base) -> int:
    """The number of a time of the step on this lane."""
    return lane * len(Base) + which


def bases_s(step: Step, times: StepTimes | None, costs: RuntimeCosts) -> FloatArray:
    """All times of a step, shape (B, K)."""
    rows = np.zeros((len(Base), len(step.size_bytes)))
    rows[Base.PREPARE] = costs["lane_s"] + step.prepare_s
    rows[Base.PREPARE_PIECE] = costs["piece_s"] + step.prepare_s
    rows[Base.PREPARE_ROOT] = step.prepare_root_s
    rows[Base.PASS], rows[Base.PASS_PIECE] = costs["lane_s"], costs["piece_s"]
    rows[Base.WAKE] = costs["lane_first_s"]
    if times is None:
        return rows
    crowded = float(times.cores.max(initial=0.0))
    if crowded > 0:
        rows[Base.WITHIN] = np.minimum(times.cpu_s, times.alone_s / crowded)
        rows[Base.BEYOND] = times.cpu_s - rows[Base.WITHIN]
    rows[Base.LINK] = times.link_s
    link_s = times.link_s * (times.flows_share if times.flows else 1.0)
    most_s = np.maximum(link_s, rows[Base.WITHIN] * crowded)
    rows[Base.REST] = np.maximum(times.alone_s - most_s, 0.0)  # the product may round up to more
    return rows
