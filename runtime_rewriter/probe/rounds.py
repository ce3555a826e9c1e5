"""The decisions of a probe: which pairs of hosts meet when, and which measurements are repeated.

| symbol | meaning |
|---|---|
| H | number of hosts |
| b_h | bandwidth of host h's own link |
| min(b_a, b_c) | bandwidth that a probe of the pair (a, c) shows |

A host's own link is the largest bandwidth of its pairs, if one partner was no slower. A few rounds,
in which every host meets another one, find the fastest hosts. Then each other host meets one of
these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autotune.recordings.probe import HostPair, LinkCost, ProbePoint

LARGE_BYTES = 2**19
"""Many times what a shaper or a socket buffer holds."""
LEAST_BYTES = 2**16
"""Smaller messages show the latency of a link and not its bandwidth, unless the link is slow."""
FIRST_ROUNDS = 7
FLAT = 1e-6
"""A line that rises by less than this share of the longest time is flat but for rounding."""
NEARLY = 0.9
"""A host with this share of the fastest bandwidth is one of the fastest."""
MAX_AT_ONCE = 8
"""With more hosts, the disjoint pairs of a round are probed at the same time."""
STEADY = 0.03
"""A relative interquartile range that needs no more repeats; also the relative error of a good line
(`link_fit.TOLERANCE`)."""
BANDWIDTH_BOUND = 0.9
"""Share of a message's time that grows with its bytes, from which on bandwidth makes it."""
SUSPECT_SPREAD = 0.15
"""A smaller spread is no reason to repeat a probe, however steady the others are."""
SUSPECT_FACTOR = 2.5
FALLING = 0.9
"""A message that takes less than this share of a smaller one's time shows that the smaller one was
disturbed."""


def spread_of(repeats: Sequence[float]) -> float:
    """Interquartile range over the median; 0 for a single repeat."""
    low, middle, high = np.quantile(np.asarray(repeats, dtype=np.float64), [0.25, 0.5, 0.75])
    return float((high - low) / middle)


def suspects(
    sizes_bytes: Sequence[float], seconds: Sequence[float], spreads: Sequence[float]
) -> tuple[int, ...]:
    """Indices of the probes of one primitive that were probably disturbed, worst first.

    Their spread is far above that of the others, or a larger message took clearly less time.
    """
    s = np.asarray(sizes_bytes, dtype=np.float64)
    t = np.asarray(seconds, dtype=np.float64)
    spread = np.asarray(spreads, dtype=np.float64)
    too_wide = spread / max(SUSPECT_SPREAD, SUSPECT_FACTOR * float(np.median(spread)))
    least_of_larger = np.array([t[s > size].min(initial=np.inf) for size in s])
    badness = np.maximum(too_wide, FALLING * t / least_of_larger)
    return tuple(int(index) for index in np.argsort(-badness, kind="stable") if badness[index] > 1)


def suspect_sizes(points: Mapping[int, ProbePoint]) -> list[int]:
    """The sizes of the points of one primitive, by size, that `suspects` finds."""
    sizes = sorted(points)
    in_order = [points[size] for size in sizes]
    seconds, spreads = [one.seconds for one in in_order], [one.spread for one in in_order]
    return [sizes[index] for index in suspects(sizes, seconds, spreads)]


def larger_are_known(
    sizes_bytes: Sequence[float], seconds: Sequence[float], spreads: Sequence[float]
) -> bool:
    """Whether larger messages are on the line through these two probes, of ascending sizes.

    So it is if both are large, the line's slope is known and bandwidth alone makes the time of the
    second. The standard error of a few repeats is about half of their spread.
    """
    (t0, t1), by_bytes = seconds, _share_of_bytes(sizes_bytes, seconds)
    error = (spreads[1] + spreads[0] * t0 / t1) / 2
    bandwidth_alone = BANDWIDTH_BOUND <= by_bytes <= 1 / BANDWIDTH_BOUND
    return sizes_bytes[0] >= LARGE_BYTES and error <= STEADY and bandwidth_alone


def shows_bandwidth(sizes_bytes: Sequence[float], repeats_s: Sequence[Sequence[float]]) -> bool:
    """Whether the slope of the last two messages is that of the link, and not of its latency.

    So it is if both have `LEAST_BYTES`, or if the second has and bandwidth alone makes its time.
    """
    if len(sizes_bytes) < 2 or sizes_bytes[-1] < LEAST_BYTES:
        return False
    if sizes_bytes[-2] >= LEAST_BYTES:
        return True
    last_s = [float(np.median(row)) for row in repeats_s[-2:]]
    return _share_of_bytes(sizes_bytes[-2:], last_s) >= BANDWIDTH_BOUND


def _share_of_bytes(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> float:
    """The share of the larger message's time that grows with its bytes, from two messages."""
    (s0, s1), (t0, t1) = sizes_bytes, seconds
    return (t1 - t0) / (s1 - s0) * s1 / t1


def pair_cost(
    sizes_bytes: Sequence[float], repeats_s: Sequence[Sequence[float]]
) -> LinkCost | None:
    """Fit one-way times of messages of ascending sizes; None if they do not show the bandwidth.

    The bandwidth is the slope of the line through the large messages (from `LARGE_BYTES`; two at
    least). The line has an intercept, because a shaper lets the first bytes of a message through
    for free. The latency is the smallest message's remaining time. The error is relative to the
    times of the large messages. Every line fits two messages: then the error is the spread of their
    repeats. None: see `shows_bandwidth`; or larger messages took no longer.
    """
    if not shows_bandwidth(sizes_bytes, repeats_s):
        return None
    s = np.asarray(sizes_bytes, dtype=np.float64)
    t = np.array([float(np.median(row)) for row in repeats_s])
    large = np.arange(len(s)) >= min(int(np.searchsorted(s, LARGE_BYTES)), len(s) - 2)
    design = np.column_stack([np.ones(int(large.sum())), s[large] / s[-1]]) / t[large][:, None]
    (offset_s, slope_s), *_ = np.linalg.lstsq(design, np.ones(len(design)), rcond=None)
    if slope_s <= FLAT * t.max():
        return None
    bytes_per_s = float(s[-1] / slope_s)
    spreads = np.array([spread_of(row) for row in repeats_s])
    residuals = np.abs(design @ np.array([offset_s, slope_s]) - 1)
    errors = residuals if large.sum() > 2 else spreads[large]
    latency_s = max(float(t[0] - s[0] / bytes_per_s), 0.0)
    return LinkCost(bytes_per_s, latency_s, float(errors.max()), float(np.median(spreads)))


def one_way_times(round_trips_s: Sequence[Sequence[float]]) -> list[list[float]]:
    """Seconds of the way there of messages of ascending sizes, of which a few bytes come back.

    The quickest round trip is two ways of the smallest message. If all of its repeats were
    disturbed, a larger message is quicker.
    """
    way_back_s = min(min(row) for row in round_trips_s) / 2
    return [[each - way_back_s for each in row] for row in round_trips_s]


def peer_counts(hosts: int) -> list[int]:
    """Numbers of peers that are probed at once: one, all others, then powers of two between."""
    most = hosts - 1
    between = [2**power for power in range(1, most.bit_length()) if 2**power < most]
    return list(dict.fromkeys([1, most, *between])) if most > 0 else []


def peer_parts(
    host: int, count: int, hosts: int, costs: Mapping[HostPair, LinkCost]
) -> dict[int, float]:
    """The fastest `count` peers of a host and the part of all bytes that each one exchanges.

    In proportion to the bandwidths of the pairs, so that all messages end together, as far as they
    are known; otherwise equal.
    """
    others = [(host + step) % hosts for step in range(1, hosts)]
    rates = {
        peer: max((cost.bytes_per_s for pair, cost in costs.items() if peer in pair), default=0.0)
        for peer in others
    }
    if min(rates.values()) <= 0:
        rates = dict.fromkeys(others, 1.0)
    peers = sorted(others, key=lambda peer: -rates[peer])[:count]
    total = sum(rates[peer] for peer in peers)
    return {peer: rates[peer] / total for peer in peers}


def first_rounds(hosts: int) -> list[list[HostPair]]:
    """At most `FIRST_ROUNDS` rounds of disjoint pairs by the circle method.

    Every host is in each of them, if H is even.
    """
    seats = [*range(hosts), -1] if hosts % 2 else list(range(hosts))
    rounds = []
    for _ in range(min(FIRST_ROUNDS, len(seats) - 1)):
        facing = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in facing if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [turn for pairs in rounds for turn in _turns(pairs, hosts)]


def last_rounds(hosts: int, costs: Mapping[HostPair, LinkCost]) -> list[list[HostPair]]:
    """Rounds in which every host that has not met one of the fastest yet meets one of them."""
    speeds = [
        max((cost.bytes_per_s for pair, cost in costs.items() if host in pair), default=0.0)
        for host in range(hosts)
    ]
    fastest = [host for host in range(hosts) if speeds[host] >= NEARLY * max(speeds)]
    met = {host for pair in costs for host in pair if set(pair) & set(fastest) - {host}}
    open_hosts = [host for host in range(hosts) if host not in met and host not in fastest]
    rounds = []
    for start in range(0, len(open_hosts), len(fastest)):
        pairs = zip(open_hosts[start : start + len(fastest)], fastest, strict=False)
        rounds.append([(min(pair), max(pair)) for pair in pairs])
    return [turn for pairs in rounds for turn in _turns(pairs, hosts)]


def _turns(pairs: list[HostPair], hosts: int) -> list[list[HostPair]]:
    return [pairs] if hosts > MAX_AT_ONCE else [[pair] for pair in pairs]
