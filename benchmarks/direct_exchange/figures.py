"""The ratio of two sides, each with the setting that other rounds chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from benchmarks.direct_exchange.settings import DIRECT

FEWEST_ROUNDS = 4
"""Two for the choice, and two for a ratio with quartiles."""


def compared(name: str, other: str, taken_s: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Print the settings of one cluster; return the ratio to `other` with its quartiles.

    `taken_s`: setting -> seconds of each round. The first half of the rounds chooses.
    """
    best = {kind: _fastest(kind, taken_s) for kind in (other, DIRECT)}
    judged_s = {setting: times_s[len(times_s) // 2 :] for setting, times_s in taken_s.items()}
    for setting, times_s in judged_s.items():
        low, middle, high = (1e3 * one for one in quantiles(times_s, n=4))
        print(f"{name}: {setting:32} {middle:6.1f} ms ({low:.1f} to {high:.1f})")
    pairs = zip(judged_s[best[other]], judged_s[best[DIRECT]], strict=True)
    low, middle, high = quantiles([other_s / direct_s for other_s, direct_s in pairs], n=4)
    print(f"{name}: {best[DIRECT]}: {middle:.3f} times as fast as {best[other]}")
    return {
        f"ratio_to_{other}_{name}": middle,
        f"to_{other}_{name}_quartiles": [low, high],
        f"to_{other}_{name}_best": best,
        f"to_{other}_{name}_best_s": {
            kind: median(judged_s[setting]) for kind, setting in best.items()
        },
    }


def _fastest(kind: str, taken_s: Mapping[str, Sequence[float]]) -> str:
    """Return the setting of a kind with the lowest median over the first half of the rounds."""
    chosen_by_s = {
        setting: median(times_s[: len(times_s) // 2])
        for setting, times_s in taken_s.items()
        if setting.startswith(kind)
    }
    return min(chosen_by_s, key=chosen_by_s.__getitem__)
