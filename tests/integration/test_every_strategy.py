"""Every uncompressed strategy trains as torch's DDP does, on jobs with every hard feature.

Strategies are sampled, mutated and hand-made. On 2 ranks results are bitwise equal, since a sum of
two has one order. DDP itself promises no order of sums: on 4 ranks results are within a few times
the distance between DDP runs of different bucket sizes, measured in the same processes.
"""

from __future__ import annotations

import pytest
from strategy_rank import SPACE, check_cases, enacted_alike
from torch_world import run_world

FEWEST = {2: 200, 4: 60}
EXPECTED = {
    "without a plan",
    "cut",
    "cut along a later axis",
    "merged",
    "mixed",
    "ring order",
    "across steps",
    "two in flight",
} | {
    *(str(kind) for kind in SPACE.synchronizers),
    *(f"sparse {handling}" for handling in SPACE.sparse),
}
"""Kinds that must occur among the strategies."""


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_strategy_trains_as_ddp(size: int) -> None:
    by_rank = run_world(check_cases, size, timeout_s=240.0)
    enacted = enacted_alike(by_rank)
    assert len(enacted) >= FEWEST[size]
    kinds = frozenset().union(*(outcome.kinds for outcome in enacted))
    expected = EXPECTED | ({"hierarchical"} if size == 4 else set())  # needs two hosts of two ranks
    assert kinds >= expected, f"never sampled: {', '.join(sorted(expected - kinds))}"
    clipped = [o for case, outcomes in by_rank[0].items() if "clipped" in case for o in outcomes]
    assert any("across steps" in outcome.kinds and not outcome.refused for outcome in clipped), (
        "half of an exchange crosses the step of a script that clips"
    )
