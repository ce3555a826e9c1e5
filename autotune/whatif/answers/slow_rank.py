"""Finds the rank that the others wait for, and what it costs all of them.

A rank alone is its base with collectives that take no time: its own computation, launches, gaps and
data loading. The cost is the replayed step of all ranks, less the one in which the slowest rank is
like the others: each op takes their median duration and gap for the nth op of this name. Ops that
the others do not have are scaled by the ratio of the ranks' steps alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from autotune.dfg.graph import COMMUNICATION, NONE, Dfg
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

    `together_s`, `without_s`: the replayed step of all ranks, and with that rank like the others.
    `cost_s`: the difference, which every rank pays in each step.
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
    without = _like_the_others(together, slowest.rank, min(ratio, 1.0))
    return SlowRank(
        shares, slowest.rank, others_s, replay(together).makespan_s, replay(without).makespan_s
    )


def _like_the_others(together: Dfg, rank: int, ratio: float) -> Dfg:
    """The graph in which the ops of `rank` take as long as those of the other ranks."""
    of_others: dict[tuple[str, int], list[int]] = {}
    own: dict[tuple[str, int], int] = {}
    counts: Counter[tuple[int, str]] = Counter()
    communicates = np.isin(together.kind, [int(kind) for kind in COMMUNICATION]).tolist()
    for op, worker in enumerate(together.worker.tolist()):
        if worker == NONE or communicates[op]:
            continue
        name = together.names.ops[op]
        key = name, counts[worker, name]
        counts[worker, name] += 1
        if worker == rank:
            own[key] = op
        else:
            of_others.setdefault(key, []).append(op)
    duration_s, gap_s = together.duration_s.copy(), together.gap_s.copy()
    for key, op in own.items():
        for seconds, recorded_s in ((duration_s, together.duration_s), (gap_s, together.gap_s)):
            others = of_others.get(key)
            seconds[op] = np.median(recorded_s[others]) if others else ratio * recorded_s[op]
    return replace(together, duration_s=duration_s, gap_s=gap_s)
