"""The noise of a plan's median, from the noise of one trial."""

from __future__ import annotations

import math

from autotune.tuning.statistics import MEDIAN_ERROR

MEDIAN_SD = (
    *(1.0, 0.70711, 0.66983, 0.54608, 0.53557, 0.46341, 0.45874, 0.41010, 0.40756, 0.37193),
    *(0.37035, 0.34281, 0.34176, 0.31965, 0.31890, 0.30064, 0.30008, 0.28467, 0.28424, 0.27101),
)
"""Standard deviation of the median of n = 1, 2, ..., 20 standard normal values; of even n that of
the mean of the middle two. By integration of the densities of order statistics (David and Nagaraja,
Order Statistics, 2003, eqs. 2.1.6 and 2.2.1)."""


def median_noise(noise: float, trials: int) -> float:
    """Return the relative standard deviation of the median of this many trials, at least one.

    Beyond `MEDIAN_SD` it is the limit for many trials, which is up to 3.1 % too large.
    """
    if trials <= len(MEDIAN_SD):
        return noise * MEDIAN_SD[trials - 1]
    return noise * MEDIAN_ERROR / math.sqrt(trials)
