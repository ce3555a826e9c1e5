"""Finds contradictions in a trace that its reader leaves as they are, and names them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from autotune.arrays import IntArray
from autotune.profiling.formats.rank_trace import DEVICE_WORK, Category, RankTrace, Repair

CLOCK_S = 50e-6
"""Device and host clocks may differ by this much: profilers align them now and then."""
_LAUNCH = re.compile(r"(?:cuda|cu|hip|hipExt|hipModule)(?:Launch\w*Kernel|GraphLaunch)")


def flaws(trace: RankTrace) -> Iterator[Repair]:
    """Yield correlation ids of several calls, and device work that begins before its launch."""
    calls, again = _repeated(trace)
    if len(again):
        first = calls[again[0]]
        yield Repair(
            f"correlation id {trace.correlation[first]} and others name several calls, such as "
            f"{trace.name_of(int(first))!r}; device work belongs to the last one before its start",
            len(again),
        )
    early, by_s = _before_launch(trace)
    if len(early):
        worst = int(early[np.argmax(by_s)])
        yield Repair(
            f"device work begins before the call that launches it, such as "
            f"{trace.name_of(worst)[:60]!r} by {by_s.max() * 1e6:.0f} us; it does not wait for a "
            "call that waits for it",
            len(early),
        )


def unfollowed_launches(trace: RankTrace) -> tuple[int, str]:
    """The number of kernel launches in a trace without device work, and the first one's name."""
    if np.isin(trace.category, DEVICE_WORK).any():
        return 0, ""
    launches = np.array([bool(_LAUNCH.match(name)) for name in trace.names], dtype=np.bool_)
    events = np.flatnonzero((trace.category == Category.RUNTIME) & launches[trace.name])
    return len(events), trace.name_of(int(events[0])) if len(events) else ""


def _repeated(trace: RankTrace) -> tuple[IntArray, IntArray]:
    """Calls by correlation id and start, and the places of those behind another of their id.

    A call within another one has its id: both interfaces of the driver were traced.
    """
    calls = np.flatnonzero((trace.category == Category.RUNTIME) & (trace.correlation > 0))
    calls = calls[np.lexsort((trace.start_s[calls], trace.correlation[calls]))]
    ids, starts_s, ends_s = (
        values[calls] for values in (trace.correlation, trace.start_s, trace.end_s)
    )
    same = (ids[1:] == ids[:-1]) & (starts_s[1:] >= ends_s[:-1])
    return calls, np.flatnonzero(same) + 1


def _before_launch(trace: RankTrace) -> tuple[IntArray, np.ndarray]:
    """Device events that begin before the first call of their id, and by how many seconds."""
    calls = np.flatnonzero((trace.category == Category.RUNTIME) & (trace.correlation > 0))
    ids, first = np.unique(trace.correlation[calls], return_index=True)
    events = np.flatnonzero(np.isin(trace.category, DEVICE_WORK) & (trace.correlation > 0))
    if not len(ids) or not len(events):
        return events[:0], np.zeros(0)
    place = np.minimum(np.searchsorted(ids, trace.correlation[events]), len(ids) - 1)
    known = ids[place] == trace.correlation[events]
    events, called_s = events[known], trace.start_s[calls[first[place[known]]]]
    by_s = called_s - trace.start_s[events]
    return events[by_s > CLOCK_S], by_s[by_s > CLOCK_S]
