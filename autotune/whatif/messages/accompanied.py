"""The share of ops' times that others accompany."""

from __future__ import annotations

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.dfg.utilisation import covered_within_s
from autotune.whatif.base import Base, steady


def accompanied_share(base: Base, ops: IntArray, others: BoolArray, with_gaps: bool) -> FloatArray:
    """The share of the time of each of `ops` during which one of `others` runs, in the steady step.

    `with_gaps`: the pause behind an op counts as its time.
    """
    replayed = steady(base)
    timeline, copies = replayed.timeline, replayed.copies
    inside = np.concatenate([np.flatnonzero(others) + copy * base.ops for copy in range(copies)])
    shown = ops + (copies - 2) * base.ops  # the last step lacks what follows it
    begin_s, end_s = timeline.start_s[shown], timeline.end_s[shown]
    until_s = timeline.end_s[inside]
    if with_gaps:
        until_s = until_s + np.tile(base.gap_s[others], copies)
    within_s = covered_within_s(timeline.start_s[inside], until_s, begin_s, end_s)
    lengths_s = end_s - begin_s
    share: FloatArray = np.divide(within_s, lengths_s, out=np.zeros(len(ops)), where=lengths_s > 0)
    return np.clip(share, 0.0, 1.0)
