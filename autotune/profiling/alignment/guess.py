"""Rough offsets, which the program refines.

They lead from rank to rank. The members of a collective end together, so the median difference of
their ends is the difference of two clocks. Where no collective leads on, ranks of one host have one
clock. Beyond these, messages bound a clock, as in NTP (RFC 5905, sec. 8). A rank p that sends to
known ranks q and receives from them has

    max (start_q + theta_q - end_p)  <=  theta_p  <=  min (end_q + theta_q - start_p).

The guess is the middle. Every offset within is possible, so its standard deviation is that of a
uniform distribution, the width divided by sqrt(12).

| symbol | meaning | shape |
|---|---|---|
| R | ranks | - |
| known | ranks with an offset so far | (R,) |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.profiling.alignment.observations import Observations

UNIFORM = 12**-0.5
"""Standard deviation of a uniform distribution of width 1."""


@dataclass(frozen=True, eq=False)
class Guess:
    """Rough offsets of R clocks.

    - `offset_s` (R,), 0 where nothing leads to a rank.
    - `error_s` (R,): standard deviation of an offset that messages in both directions gave, beyond
      that of the ranks at their other ends; else infinite.
    - `spread_s` (R,): the same with that of those ranks, 0 where collectives and hosts lead to a
      rank.
    """

    offset_s: FloatArray
    error_s: FloatArray
    spread_s: FloatArray


def first_guess(observed: Observations) -> Guess:
    """Lead from the first rank to all others; each way is tried where the ones before it end."""
    offset_s, error_s = np.zeros(observed.ranks), np.full(observed.ranks, np.inf)
    spread_s, known = np.zeros(observed.ranks), np.arange(observed.ranks) == 0
    while not known.all():
        before_s = float(spread_s.max())
        new = _by_ends(observed, offset_s, known) or _by_hosts(observed, offset_s, known)
        if new:
            spread_s[list(new)] = before_s
        else:
            new, errors_s = _by_messages(*_bounds_s(observed, offset_s, known))
            for rank, one_s in errors_s.items():
                error_s[rank], spread_s[rank] = one_s, math.hypot(before_s, one_s)
        if not new:
            break
        offset_s[list(new)], known[list(new)] = list(new.values()), True
    return Guess(offset_s, error_s, spread_s)


def _by_ends(observed: Observations, offset_s: FloatArray, known: BoolArray) -> dict[int, float]:
    """Median difference of ends, over the collectives that a rank shares with known ones."""
    together = ~observed.is_pair[observed.of]
    has = known[observed.rank] & together
    ends_s = (observed.end_s + offset_s[observed.rank])[has]
    total_s = np.bincount(observed.of[has], weights=ends_s, minlength=observed.collectives)
    count = np.bincount(observed.of[has], minlength=observed.collectives)
    usable = together & ~has & (count[observed.of] > 0)
    if not usable.any():
        return {}
    late_s = total_s[observed.of[usable]] / count[observed.of[usable]] - observed.end_s[usable]
    ranks = observed.rank[usable]
    order = np.argsort(ranks, kind="stable")
    cuts = np.flatnonzero(np.diff(ranks[order])) + 1
    return {int(ranks[part[0]]): float(np.median(late_s[part])) for part in np.split(order, cuts)}


def _by_hosts(observed: Observations, offset_s: FloatArray, known: BoolArray) -> dict[int, float]:
    """The offset of a known rank of the same host."""
    host = observed.hosts
    offset_of = {int(host[rank]): float(offset_s[rank]) for rank in np.flatnonzero(known)}
    others = np.flatnonzero(~known & (host >= 0) & np.isin(host, list(offset_of))).tolist()
    return {rank: offset_of[int(host[rank])] for rank in others}


def _bounds_s(
    observed: Observations, offset_s: FloatArray, known: BoolArray
) -> tuple[FloatArray, FloatArray]:
    """(least (R,), greatest (R,)) offsets of unknown ranks by messages from and to known ones."""
    sends = np.flatnonzero(~observed.waits)
    receives = np.flatnonzero(observed.waits & observed.is_pair[observed.of])
    sender, receiver = observed.rank[sends], observed.rank[receives]
    start_s, end_s = observed.start_s[sends], observed.end_s[receives]
    least, greatest = np.full(observed.ranks, -np.inf), np.full(observed.ranks, np.inf)
    to = known[sender] & ~known[receiver]
    np.maximum.at(least, receiver[to], (start_s + offset_s[sender] - end_s)[to])
    back = ~known[sender] & known[receiver]
    np.minimum.at(greatest, sender[back], (end_s + offset_s[receiver] - start_s)[back])
    return least, greatest


def _by_messages(
    least_s: FloatArray, greatest_s: FloatArray
) -> tuple[dict[int, float], dict[int, float]]:
    """(offsets, their errors) of the ranks with messages in both directions.

    Where there is none, those with messages in one, with the least correction of their clocks.
    """
    both = np.flatnonzero(np.isfinite(least_s) & np.isfinite(greatest_s))
    if len(both):
        middle_s = (least_s[both] + greatest_s[both]) / 2
        error_s = np.maximum(greatest_s[both] - least_s[both], 0.0) * UNIFORM
        return _by_rank(both, middle_s), _by_rank(both, error_s)
    one = np.flatnonzero(np.isfinite(least_s) | np.isfinite(greatest_s))
    return _by_rank(one, np.clip(0.0, least_s[one], greatest_s[one])), {}


def _by_rank(ranks: IntArray, values: FloatArray) -> dict[int, float]:
    return dict(zip(ranks.tolist(), values.tolist(), strict=True))
