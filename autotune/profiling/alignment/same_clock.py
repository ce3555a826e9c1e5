"""Checks whether ranks of one host can share its clock.

Two machines may have one name, and device numbers only suggest a host.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autotune.arrays import FloatArray
from autotune.profiling.alignment.intervals import feasible_intervals
from autotune.profiling.alignment.observations import Observations

SAME_S = 5e-5
"""Largest disagreement of profilers on one machine.

Each process maps its device's clock to the machine's on its own."""
NOISES = 3.0


def with_shared_clocks(
    observed: Observations, guess_s: FloatArray, noise_s: float, assumed: bool
) -> tuple[Observations, list[str]]:
    """Return `observed` without the hosts whose ranks' clocks differ, and notes on them.

    `guess_s` (R,): rough offsets; `noise_s`: their noise. A stated host is given up where the
    order of events excludes equal clocks. An assumed one is given up also where the rough offsets
    differ by more than noise explains.
    """
    hosts, notes = observed.hosts.copy(), []
    slack_s = observed.violation_s(guess_s) + 1e-9
    for host in np.unique(hosts[hosts >= 0]).tolist():
        ranks = np.flatnonzero(hosts == host)
        apart_s = float(np.ptp(guess_s[ranks]))
        if apart_s <= SAME_S:
            continue
        low_s, high_s = feasible_intervals(observed, slack_s, int(ranks[0]))
        excluded_s = float(np.maximum(low_s[ranks], -high_s[ranks]).max())
        if excluded_s > SAME_S or (assumed and apart_s > max(SAME_S, NOISES * noise_s)):
            hosts[ranks] = -1
            clocks = f"the clocks of ranks at places {ranks[:8].tolist()}"
            source = f"{'assumed' if assumed else 'said'} to be on one host"
            difference = f"differ by about {apart_s * 1e6:.0f} us"
            notes.append(f"{clocks}, {source}, {difference}: taken to be on different ones")
    return replace(observed, hosts=hosts), notes
