"""Split real trials into training and test parts that do not leak.

| symbol | meaning |
|---|---|
| n | points (`trials.Point`), given in one sequence; parts are indices into it |

- A plan that was measured twice in a domain is on one side, whatever its campaign. A tested plan is
  in no source, even if it was measured on other clusters too. (A plan's id tells its model.)
- The test part depends on the domain and the seed only: every ranker, training size and kind of
  transfer is tested on the same strategies. The parts of successive seeds do not overlap as long as
  the domain's plans last.
- Smaller training parts are subsets of larger ones.
- A simulator takes its validation part and its standardisation from its training part
  (`TrainingRecipe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from autotune.arrays import IntArray
from autotune.errors import InvalidInput
from autotune.rng import generator
from benchmarks.ranking.trials import Point, plans_by_domain

FEWEST_PLANS = 3
"""Fewest plans of a domain that is split: one to learn from and two to order."""
FEWEST_TESTED = 10
"""Fewest plans of a test part, if they are at most half of the domain's."""


class HeldOut(StrEnum):
    """The property of the tested domain that no source of a transfer shares."""

    DOMAIN = "domain"  # sources may have its model elsewhere, and other models on its cluster
    MODEL = "model"
    CLUSTER = "cluster"
    BOTH = "model and cluster"


@dataclass(frozen=True)
class Parts:
    """The test part of a domain, and its training parts by number of plans, the smallest first."""

    domain: str
    seed: int
    test: IntArray
    own: dict[int, IntArray]


def can_be_split(points: Sequence[Point], domain: str) -> bool:
    """Return whether `parts_of` can split the domain; a smaller one is a source only."""
    return len({point.plan_id for point in points if point.domain == domain}) >= FEWEST_PLANS


def parts_of(
    points: Sequence[Point], domain: str, seed: int, sizes: Sequence[int], test_share: float
) -> Parts:
    """Return a test part of this share, and training parts of these sizes and of the rest."""
    plans = plans_by_domain(point for point in points if point.domain == domain)[domain]
    if len(plans) < FEWEST_PLANS:
        raise InvalidInput(
            f"a split needs at least {FEWEST_PLANS} plans, one to learn from and two to order, "
            f"but domain {domain!r} has {len(plans)}"
        )
    tested = max(2, round(test_share * len(plans)), min(FEWEST_TESTED, len(plans) // 2))
    tested = min(tested, len(plans) - 1)
    mixed = generator(0, "test", domain).permutation(len(plans))
    chosen = {plans[mixed[(seed * tested + place) % len(plans)]] for place in range(tested)}
    left = [name for name in plans if name not in chosen]
    left = [left[index] for index in generator(seed, "training", domain).permutation(len(left))]
    used = sorted({size for size in sizes if size < len(left)} | {len(left)})
    return Parts(
        domain,
        seed,
        _members(points, domain, chosen),
        {size: _members(points, domain, set(left[:size])) for size in used},
    )


def sources_for(
    points: Sequence[Point],
    domain: str,
    held_out: HeldOut,
    most_plans: int | None,
    tested: IntArray,
) -> IntArray:
    """Return points of other domains, at most `most_plans` of each; may be none.

    They are the same ones whichever domain is held out, and exclude plans of the parts `tested`,
    which may have been measured on other clusters.
    """
    hidden = {points[index].plan_id for index in tested}
    target = point_of(points, domain)
    chosen = []
    for name, plans in plans_by_domain(points).items():
        if not seen(point_of(points, name), target, held_out):
            mixed = generator(0, "sources", name).permutation(len(plans))[:most_plans]
            chosen.append(_members(points, name, {plans[index] for index in mixed} - hidden))
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, dtype=np.int64)


def assert_no_leak(
    points: Sequence[Point],
    sources: IntArray,
    training: IntArray,
    test: IntArray,
    held_out: HeldOut | None,
) -> None:
    """Raise if a figure would be tested on its training data."""
    tested = {(points[index].domain, points[index].plan_id) for index in test}
    learned = {(points[index].domain, points[index].plan_id) for index in training}
    assert not tested & learned, "a plan is in the training and in the test part"
    [domain] = {points[index].domain for index in test}
    assert all(points[index].domain == domain for index in training), (
        "an own training part holds another domain's trials"
    )
    target = points[test[0]]
    assert not {plan for _, plan in tested} & {points[index].plan_id for index in sources}, (
        "a tested plan is among the sources"
    )
    for source in (points[index] for index in sources):
        assert held_out is not None and not seen(source, target, held_out), (
            f"the held-out {held_out} is among the sources"
        )


def seen(source: Point, target: Point, held_out: HeldOut) -> bool:
    """Return whether a source shares the held-out property of the target's domain."""
    same_model = source.model == target.model or source.model_id == target.model_id
    same_cluster = source.cluster == target.cluster
    return {
        HeldOut.DOMAIN: source.domain == target.domain or (same_model and same_cluster),
        HeldOut.MODEL: same_model,
        HeldOut.CLUSTER: same_cluster,
        HeldOut.BOTH: same_model or same_cluster,
    }[held_out]


def assert_unseen(
    points: Sequence[Point], sources: IntArray, domain: str, held_out: HeldOut
) -> None:
    """Raise if a source shares the held-out property of the domain."""
    target = point_of(points, domain)
    assert not any(seen(points[index], target, held_out) for index in sources), (
        f"the {held_out} of {domain} is among the sources"
    )


def point_of(points: Sequence[Point], domain: str) -> Point:
    """Return a point of the domain; all have its model and cluster."""
    return next(point for point in points if point.domain == domain)


def _members(points: Sequence[Point], domain: str, plans: set[str]) -> IntArray:
    return np.flatnonzero(
        [point.domain == domain and point.plan_id in plans for point in points]
    ).astype(np.int64)
