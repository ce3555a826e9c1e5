"""How fast the machines' clocks drift apart: found roughly here, to the end by the program.

A clock that is off by g runs g seconds ahead in a second. Within a recording g is constant to what matters: quartz wanders by some 1e-8
in minutes, NTP's corrections by up to 5e-4 (adjtimex(2), and RFC 5905, sec. 11.3). On the first rank's clock an event at t of rank p
happened at

    t + offset_p + drift_p (t - middle_p),    drift_p the same for all ranks of a machine, 0 for the first rank's.

The rough estimate is the change of the median difference of ends from the first third of the recording to the last, which some late ends
do not move. A drift is searched for only where it is sure and would matter: at least `SURE` standard errors, and more than half the
noise of the ends from one end of the recording to the other.

| symbol | meaning | shape |
|---|---|---|
| R, M | ranks, machines | - |
| machine | number of each rank's machine; 0 is the first rank's | (R,) |
| drift, error | s per s, and its standard error | (R,) |
"""

from __future__ import annotations

import math

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.profiling.alignment.observations import Observations

MOST_DRIFT = 5e-4
SURE = 5.0
FEWEST = 12
"""Collectives shared with ranks whose drift is known, at least, for a rank's own to be estimated."""


def machines(hosts: IntArray) -> IntArray:
    """(R,) number of every rank's machine, in order of their first ranks; a rank whose host is unknown is a machine of its own."""
    keys = [(int(host), -1) if host >= 0 else (-1, rank) for rank, host in enumerate(hosts)]
    numbers: dict[tuple[int, int], int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def middles_s(seen: Observations, machine: IntArray) -> FloatArray:
    """(R,) mean of the ends on each rank's machine: where the drift adds nothing."""
    own = machine[seen.rank]
    count = np.bincount(own, minlength=int(machine.max()) + 1)
    mean = np.bincount(own, weights=seen.end_s, minlength=len(count)) / np.maximum(count, 1)
    found: FloatArray = mean[machine]
    return found


def rough_drift(
    seen: Observations, machine: IntArray, middle_s: FloatArray, offset_s: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """(drift (R,), error (R,)), from machine to machine over the collectives that they share; 0 and infinite where too few are."""
    drift, error = np.zeros(seen.ranks), np.full(seen.ranks, np.inf)
    known = machine == 0
    error[known] = 0.0
    while True:
        has = known[seen.rank]
        ends = seen.drifted(drift, middle_s).end_s + offset_s[seen.rank]
        total = np.bincount(seen.of[has], weights=ends[has], minlength=seen.collectives)
        count = np.bincount(seen.of[has], minlength=seen.collectives)
        usable = np.flatnonzero(~has & (count[seen.of] > 0))
        if not len(usable):
            return drift, error
        late = total[seen.of[usable]] / count[seen.of[usable]] - ends[usable]
        for number in np.unique(machine[seen.rank[usable]]):
            own = machine[seen.rank[usable]] == number
            ranks = machine == number
            drift[ranks], error[ranks] = _slope(seen.end_s[usable[own]], late[own])
            known |= ranks


def _slope(at_s: FloatArray, late_s: FloatArray) -> tuple[float, float]:
    """Slope and standard error from the medians of the first and the last third (Brown and Mood, 1951)."""
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
    """Standard error of the median of a series whose neighbours may be alike: load on a machine lasts longer than a collective.

    The median of n independent normal values scatters by 1.2533 / sqrt(n) of their deviation, which is 1.4826 medians of deviations.
    Signs of neighbours agree as often as (1/2 + asin(r) / pi) for a correlation r, and n counts as n (1 - r) / (1 + r).
    """
    off = values - np.median(values)
    alike = np.sin(np.pi / 2 * np.mean(np.sign(off[1:]) * np.sign(off[:-1])))
    correlation = float(np.clip(alike, 0.0, 0.98))
    alone = 1.2533 * 1.4826 * float(np.median(np.abs(off))) / np.sqrt(len(off))
    return float(alone * np.sqrt((1 + correlation) / (1 - correlation)))


def matters(
    seen: Observations, drift: FloatArray, error: FloatArray, noise_s: float, least_s: float
) -> np.ndarray:
    """(R,) whether the drift is sure, and more than `least_s` and half of `noise_s`, the noise of ends, over the whole recording."""
    span_s = float(np.ptp(seen.end_s)) if seen.members else 0.0
    sure: np.ndarray = (np.abs(drift) > SURE * error) & (
        np.abs(drift) * span_s > max(least_s, noise_s / 2)
    )
    return sure
