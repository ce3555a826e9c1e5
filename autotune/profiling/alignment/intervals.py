"""The least and the greatest offset of each rank that the order of events allows.

With m_k the time at which the last member of collective k has begun, the constraints of dPRO, sec.
4.2, are

    start_e + theta_p <= m_k <= end_e + theta_p + slack_k      for every member e of k, on rank p,

2 E of them instead of one per pair of members. The second one holds for members that wait, so not
for a send. Each compares two variables. So the linear programs min theta_p and max theta_p are
shortest paths from the reference rank (Cormen et al., Introduction to Algorithms, sec. 24.4). One
run of the Bellman-Ford algorithm gives all R maxima, another one all R minima. A pass takes a
minimum over members by collective and one by rank. Few passes are needed, since a collective of all
ranks is two steps from anywhere.
"""

from __future__ import annotations

import numpy as np

from autotune.arrays import FloatArray
from autotune.profiling.alignment.observations import Observations


def feasible_intervals(
    observed: Observations, slack_s: FloatArray, reference: int = 0
) -> tuple[FloatArray, FloatArray]:
    """(low_s (R,), high_s (R,)) with theta 0 for `reference`.

    `slack_s` (K,) must make the constraints feasible.
    """
    far_s = np.where(observed.waits, observed.end_s + slack_s[observed.of], np.inf)
    high_s = _greatest(observed, observed.start_s, far_s, reference)
    # theta -> -theta turns the least into the greatest, and swaps the roles of starts and ends
    low_s = -_greatest(observed, -far_s, -observed.start_s, reference)
    return low_s, high_s


def _greatest(
    observed: Observations, near_s: FloatArray, far_s: FloatArray, reference: int
) -> FloatArray:
    """(R,) greatest theta with near_e + theta_p <= m_k <= far_e + theta_p."""
    greatest = np.full(observed.ranks, np.inf)
    greatest[reference] = 0.0
    if not observed.members:
        return greatest
    for _ in range(observed.ranks + 1):
        latest = np.minimum.reduceat(greatest[observed.rank] + far_s, observed.first[:-1])
        relaxed = greatest.copy()
        np.minimum.at(relaxed, observed.rank, latest[observed.of] - near_s)
        relaxed[reference] = 0.0
        if np.array_equal(relaxed, greatest):
            break
        greatest = relaxed
    return greatest
