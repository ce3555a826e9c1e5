"""Features of a replayed step that tell where replays tend to be wrong.

| symbol | meaning | unit |
|---|---|---|
| M | messages of the plan | - |
| start, end | of each message in the replayed step, shape (M,) | s |
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import numpy as np

from autotune.arrays import FloatArray

if TYPE_CHECKING:
    from autotune.lowering.replayed import ReplayedPlan

SMALL_BYTES = 64 * 1024
"""Messages below this size cost hardly more than their number."""
TIMELINE_FEATURES = ("overlap", "concurrency", "small_messages", "cores_busy", "exposed")


@dataclass(frozen=True)
class TimelineFeatures:
    """Features of one replayed step.

    - `overlap`: ln(overlap estimate / replayed step).
    - `concurrency`: ln of the mean number of messages under way while there are any.
    - `small_messages`: ln(1 + messages of which a rank sends less than `SMALL_BYTES`).
    - `cores_busy`: share of the step in which the busiest cores work.
    - `exposed`: ln(replayed step / computation).
    """

    overlap: float
    concurrency: float
    small_messages: float
    cores_busy: float
    exposed: float

    @property
    def row(self) -> FloatArray:
        """The features in the order of `TIMELINE_FEATURES`, shape (F,)."""
        return np.array(astuple(self), dtype=np.float64)


def timeline_features(
    replayed: ReplayedPlan, sent_bytes: Iterable[float], analytic_step_s: float, compute_s: float
) -> TimelineFeatures:
    """Describe a replayed step; `sent_bytes`: what one rank sends of its own in each message."""
    step_s = replayed.step_s
    small = sum(size < SMALL_BYTES for size in sent_bytes)
    return TimelineFeatures(
        overlap=math.log(analytic_step_s / step_s),
        concurrency=math.log(mean_concurrency(replayed.start_s, replayed.end_s)),
        small_messages=math.log1p(small),
        cores_busy=replayed.cores_busy,
        exposed=math.log(step_s / compute_s) if compute_s > 0 else 0.0,
    )


def mean_concurrency(start_s: FloatArray, end_s: FloatArray) -> float:
    """Return the mean number of messages under way while there is at least one; 1 without any."""
    order = np.argsort(start_s, kind="stable")
    starts, ends = start_s[order], end_s[order]
    reached = np.maximum.accumulate(ends)
    before = np.concatenate([[-np.inf], reached[:-1]])
    covered_s = np.maximum(reached - np.maximum(starts, before), 0.0).sum()
    total_s = float((ends - starts).sum())
    return max(total_s / float(covered_s), 1.0) if covered_s > 0 else 1.0
