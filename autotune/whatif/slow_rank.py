"""Finds the rank that the others wait for, and what it costs all of them.

A rank alone is its base with collectives that take no time: its own computation, launches, gaps and
data loading. The cost is the replayed step of all ranks, less the one in which the slowest rank
takes as long as the median of the others alone: its durations and gaps are scaled by this ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from autotune.dfg.graph import COMMUNICATION, Dfg
from autotune.dfg.replay import replay
from autotune.whatif.base import Base, steady
from autotune.whatif.primitives import scale, select


@dataclass(frozen=True)
class RankShare:
    """One rank. `alone_s`: its step without communication; `measured_s`: its recorded step."""

    rank: int
    alone_s: float
    measured_s: float


@dataclass(frozen=True)
class SlowRank:
    """Seconds. `slowest`: the rank that takes longest alone; `others_s`: median of the others.

    `together_s`, `without_s`: the replayed step of all ranks, and with that rank as fast as the
    median of the others. `cost_s`: the difference, which every rank pays in each step.
    """

    ranks: tuple[RankShare, ...]
    slowest: int
    others_s: float
    together_s: float
    without_s: float

    @property
    def cost_s(self) -> float:
        return max(self.together_s - self.without_s, 0.0)


def alone_s(base: Base) -> float:
    """The step time of one rank if its collectives took no time."""
    return steady(scale(base, select(base, kinds=COMMUNICATION), 0.0)).step_s


def slow_rank(bases: Sequence[Base], ranks: Sequence[int], together: Dfg) -> SlowRank:
    """`bases`: those of `ranks`, at least two; `together`: one step of all of them."""
    shares = tuple(
        RankShare(rank, alone_s(base), base.measured_s)
        for rank, base in zip(ranks, bases, strict=True)
    )
    slowest = max(shares, key=lambda share: share.alone_s)
    others_s = median(share.alone_s for share in shares if share is not slowest)
    ratio = others_s / slowest.alone_s if slowest.alone_s > 0 else 1.0
    faster = (together.worker == slowest.rank) & ~np.isin(
        together.kind, [int(kind) for kind in COMMUNICATION]
    )
    factor = np.where(faster, min(ratio, 1.0), 1.0)
    without = replace(
        together, duration_s=together.duration_s * factor, gap_s=together.gap_s * factor
    )
    return SlowRank(
        shares,
        slowest.rank,
        others_s,
        replay(together).makespan_s,
        replay(without).makespan_s,
    )
