"""The sizes of the messages between two hosts: ascending ones, as far as the time suffices.

| symbol | meaning |
|---|---|
| s | bytes of a message |
| t(s) | its one-way time: latency + s / bandwidth |

On a link with much latency t(s) hardly grows between small messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from runtime_rewriter.probe.rounds import shows_bandwidth

LINK_BYTES = tuple(2**power for power in (6, 12, 16, 19, 21, 23))  # 64 B .. 8 MiB
REPEATS = 9
FEW_REPEATS = 3
SLOW_S = 0.02
"""A message that takes longer is repeated only `FEW_REPEATS` times."""
SLOWEST_BYTES_PER_S = 125e3
"""1 Mbit/s: no slower link is expected until two sizes are known."""

PairTimes = list[list[float]]
"""One-way seconds of messages of one size, shape (pairs of hosts, repeats)."""


def expected_s(
    sizes_bytes: Sequence[float], repeats_s: Sequence[Sequence[float]], size_bytes: float
) -> float:
    """Bound a message's time by those of smaller ones of ascending sizes; 0 without any.

    It is at most proportional to the largest of them. It is also below the steepest line through
    the largest and another one, by their quartiles, since some may be disturbed. After a single
    message, the line is that of `SLOWEST_BYTES_PER_S`.
    """
    if not sizes_bytes:
        return 0.0
    s = np.asarray(sizes_bytes, dtype=np.float64)
    last_s = float(np.median(repeats_s[-1]))
    slope_s = 1 / SLOWEST_BYTES_PER_S
    if len(s) > 1:
        low_s = np.array([np.quantile(row, 0.25) for row in repeats_s[:-1]])
        rises_s = np.quantile(repeats_s[-1], 0.75) - low_s
        slope_s = max(float((rises_s / (s[-1] - s[:-1])).max()), 0.0)
    last_bytes = sizes_bytes[-1]
    return min(last_s * size_bytes / last_bytes, last_s + slope_s * (size_bytes - last_bytes))


def time_sizes(
    grant: Callable[[float], float], exchange: Callable[[int, int], PairTimes]
) -> tuple[list[int], list[PairTimes]]:
    """Time messages of `LINK_BYTES` between pairs of hosts: the sizes, and the times of each.

    `grant(needed_s)`: the seconds that all sizes may take; 0 if less than `needed_s` is left.
    `exchange(size_bytes, repeats)`: sends there and back, and once more before, untimed. Sizes that
    the bandwidth needs (`shows_bandwidth`) may take more than their share of the time.
    """
    sizes: list[int] = []
    series: list[PairTimes] = []
    spent_s = share_s = 0.0
    for size in LINK_BYTES:
        of_pairs = list(zip(*series, strict=True))
        message_s = max((expected_s(sizes, rows, size) for rows in of_pairs), default=0.0)
        few_s = _exchange_s(message_s, FEW_REPEATS)
        granted_s = grant(few_s)
        if not sizes:
            share_s = granted_s
        enough = bool(sizes) and all(shows_bandwidth(sizes, rows) for rows in of_pairs)
        if granted_s <= 0 or (enough and spent_s + few_s > share_s):
            break
        fits = spent_s + _exchange_s(message_s, REPEATS) <= share_s
        repeats = REPEATS if fits and message_s <= SLOW_S else FEW_REPEATS
        times_s = exchange(size, repeats)
        spent_s += _exchange_s(max(float(np.median(row)) for row in times_s), repeats)
        sizes.append(size)
        series.append(times_s)
    return sizes, series


def _exchange_s(message_s: float, repeats: int) -> float:
    """There and back, and an untimed repeat more."""
    return 2 * (repeats + 1) * message_s
