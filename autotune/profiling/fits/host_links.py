"""Each host's own link, told from probes of pairs of hosts: in about as many probes as there are hosts.

| symbol | meaning |
|---|---|
| H | number of hosts |
| b_h | bandwidth of host h's own link |
| min(b_a, b_c) | what a probe of the pair (a, c) shows |

The largest figure of all pairs that a host is part of is its own link, if one of its partners was no slower. So a few rounds in
which every host meets another one find the fastest hosts, and then each of the others meets one of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.profiling.fits.link_fit import spread_of

Pair = tuple[int, int]

LARGE_BYTES = 2**19
"""Many times what a shaper or a socket buffer holds."""

FIRST_ROUNDS = 7
FLAT = 1e-6
"""A line that rises by less than this share of the longest time is flat but for rounding."""
NEARLY = 0.9
"""A host that shows so much of the fastest bandwidth counts as one of the fastest."""
MAX_AT_ONCE = 8
"""On more hosts than this the pairs of a round, which share no host, are probed at the same time."""


@dataclass(frozen=True)
class PairCost:
    """One-way cost between two hosts, how far the line is from a measured time at most, and the spread of the repeats."""

    bytes_per_s: float
    latency_s: float
    relative_error: float
    spread: float


def pair_cost(
    sizes_bytes: Sequence[float], repeats_s: Sequence[Sequence[float]]
) -> PairCost | None:
    """From the one-way times of messages of ascending sizes; None where larger messages took no longer.

    The bandwidth is that of the line through the large messages (of `LARGE_BYTES` up; two at least), with any intercept: a
    shaper lets the first bytes of a message through for free. The latency is what the smallest message takes beyond it.
    The error is relative to the times of these messages; of two, which every line fits, it is the spread of their repeats.
    """
    s, t = (
        np.asarray(sizes_bytes, dtype=np.float64),
        np.array([float(np.median(row)) for row in repeats_s]),
    )
    large = np.arange(len(s)) >= min(int(np.searchsorted(s, LARGE_BYTES)), len(s) - 2)
    design = np.column_stack([np.ones(int(large.sum())), s[large] / s[-1]]) / t[large][:, None]
    (offset_s, slope_s), *_ = np.linalg.lstsq(design, np.ones(len(design)), rcond=None)
    if slope_s <= FLAT * t.max():
        return None
    bytes_per_s = float(s[-1] / slope_s)
    spreads = np.array([spread_of(row) for row in repeats_s])
    errors = (
        np.abs(design @ np.array([offset_s, slope_s]) - 1) if large.sum() > 2 else spreads[large]
    )
    latency_s = max(float(t[0] - s[0] / bytes_per_s), 0.0)
    return PairCost(bytes_per_s, latency_s, float(errors.max()), float(np.median(spreads)))


def first_rounds(hosts: int) -> list[list[Pair]]:
    """Rounds of disjoint pairs by the circle method, at most `FIRST_ROUNDS`; every host is in each of them (if H is even)."""
    seats = [*range(hosts), -1] if hosts % 2 else list(range(hosts))
    rounds = []
    for _ in range(min(FIRST_ROUNDS, len(seats) - 1)):
        facing = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in facing if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [turn for made in rounds for turn in _turns(made, hosts)]


def last_rounds(hosts: int, found: Mapping[Pair, PairCost]) -> list[list[Pair]]:
    """Rounds in which every host that has met none of the fastest yet meets one of them."""
    shown = {
        host: max((cost.bytes_per_s for pair, cost in found.items() if host in pair), default=0.0)
        for host in range(hosts)
    }
    fastest = sorted(host for host in shown if shown[host] >= NEARLY * max(shown.values()))
    met = {host for pair in found for host in pair if set(pair) & set(fastest) - {host}}
    open_hosts = [host for host in range(hosts) if host not in met and host not in fastest]
    rounds = []
    for start in range(0, len(open_hosts), len(fastest)):
        made = zip(open_hosts[start : start + len(fastest)], fastest, strict=False)
        rounds.append([(min(pair), max(pair)) for pair in made])
    return [turn for made in rounds for turn in _turns(made, hosts)]


def _turns(pairs: list[Pair], hosts: int) -> list[list[Pair]]:
    return [pairs] if hosts > MAX_AT_ONCE else [[pair] for pair in pairs]


def own_links(hosts: int, found: Mapping[Pair, PairCost]) -> dict[int, tuple[PairCost, int]]:
    """Of every host that was probed: its link (with the errors of the pair that shows the bandwidth), and the number of its pairs."""
    links = {}
    for host in range(hosts):
        costs = [cost for pair, cost in found.items() if host in pair]
        if costs:
            best = max(costs, key=lambda cost: cost.bytes_per_s)
            quickest = min(cost.latency_s for cost in costs)
            links[host] = (
                PairCost(best.bytes_per_s, quickest, best.relative_error, best.spread),
                len(costs),
            )
    return links
