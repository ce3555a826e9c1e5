"""Estimates roughly how fast the machines' clocks drift apart; the program refines it.

A clock that is off by g runs g seconds ahead in a second. Within a recording g is constant for our
purpose: quartz wanders by some 1e-8 in minutes, and NTP's corrections are at most 5e-4
(adjtimex(2), and RFC 5905, sec. 11.3). On the first rank's clock an event at t of rank p happened
at

    t + offset_p + drift_p (t - middle_p),

where drift_p is equal for all ranks of a machine and 0 for the first rank's machine. The rough
estimate is the change of the median difference of ends from the first third of the recording to the
last; some late ends do not move it. The program searches only for a drift that is certain and
matters: at least `SURE` standard errors, and more than half the noise of the ends over the whole
recording.

| symbol | meaning | shape |
|---|---|---|
| R, M | ranks, machines | - |
| machine | number of each rank's machine, 0 for the first rank's | (R,) |
| drift, error | s per s, and its standard error | (R,) |
"""

from __future__ import annotations

import math

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.profiling.alignment.observations import Observations

MOST_DRIFT = 5e-4
SURE = 5.0
FEWEST = 12
"""Least number of collectives, shared with ranks of known drift, to estimate a rank's drift."""


def machines(hosts: IntArray) -> IntArray:
    """(R,) number of every rank's machine, in order of their first ranks.

    A rank with an unknown host is a machine of its own.
    """
    keys = [(int(host), -1) if host >= 0 else (-1, rank) for rank, host in enumerate(hosts)]
    numbers: dict[tuple[int, int], int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def middles_s(observed: Observations, machine: IntArray) -> FloatArray:
    """(R,) mean of the ends on each rank's machine, at which the drift adds nothing."""
    of_member = machine[observed.rank]
    count = np.bincount(of_member, minlength=int(machine.max()) + 1)
    total_s = np.bincount(of_member, weights=observed.end_s, minlength=len(count))
    mean_s: FloatArray = (total_s / np.maximum(count, 1))[machine]
    return mean_s


def rough_drift(
    observed: Observations, machine: IntArray, middle_s: FloatArray, offset_s: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """(drift (R,), error (R,)), from machine to machine over the collectives that they share.

    Drift 0 and an infinite error where they share too few. Pairs have no common end.
    """
    together = ~observed.is_pair[observed.of]
    drift, error = np.zeros(observed.ranks), np.full(observed.ranks, np.inf)
    known = machine == 0
    error[known] = 0.0
    while True:
        has = known[observed.rank] & together
        ends = observed.drifted(drift, middle_s).end_s + offset_s[observed.rank]
        total = np.bincount(observed.of[has], weights=ends[has], minlength=observed.collectives)
        count = np.bincount(observed.of[has], minlength=observed.collectives)
        usable = np.flatnonzero(together & ~has & (count[observed.of] > 0))
        if not len(usable):
            return drift, error
        late = total[observed.of[usable]] / count[observed.of[usable]] - ends[usable]
        for number in np.unique(machine[observed.rank[usable]]):
            members = machine[observed.rank[usable]] == number
            ranks = machine == number
            drift[ranks], error[ranks] = _slope(observed.end_s[usable[members]], late[members])
            known |= ranks


def _slope(at_s: FloatArray, late_s: FloatArray) -> tuple[float, float]:
    """Slope and standard error from the medians of the outer thirds (Brown and Mood, 1951)."""
    third = len(at_s) // 3
    if len(at_s) < FEWEST:
        return 0.0, np.inf
    order = np.argsort(at_s, kind="stable")
    ends = [order[:third], order[-third:]]
    middles = [float(np.median(late_s[part])) for part in ends]
    apart_s = float(at_s[ends[1]].mean() - at_s[ends[0]].mean())
    if apart_s <= 0:
        return 0.0, np.inf
    slope = (middles[1] - middles[0]) / apart_s
    left_s = late_s - slope * at_s
    return slope, math.hypot(*(_median_error(left_s[part]) for part in ends)) / apart_s


def _median_error(values: FloatArray) -> float:
    """Standard error of the median of a series whose neighbours may be correlated.

    Load on a machine lasts longer than a collective. The median of n independent normal values
    scatters by 1.2533 / sqrt(n) of their deviation, which is 1.4826 medians of deviations. For a
    correlation r, signs of neighbours agree with probability 1/2 + asin(r) / pi, and n counts as
    n (1 - r) / (1 + r).
    """
    off = values - np.median(values)
    agreement = np.mean(np.sign(off[1:]) * np.sign(off[:-1]))
    correlation = float(np.clip(np.sin(np.pi / 2 * agreement), 0.0, 0.98))
    independent = 1.2533 * 1.4826 * float(np.median(np.abs(off))) / np.sqrt(len(off))
    return float(independent * np.sqrt((1 + correlation) / (1 - correlation)))


def matters(
    observed: Observations, drift: FloatArray, error: FloatArray, noise_s: float, least_s: float
) -> BoolArray:
    """(R,) whether the drift is certain and matters over the whole recording.

    It must exceed `least_s` and half of `noise_s`, the noise of ends.
    """
    span_s = float(np.ptp(observed.end_s)) if observed.members else 0.0
    size = np.abs(drift)
    result: BoolArray = (size > SURE * error) & (size * span_s > max(least_s, noise_s / 2))
    return result
