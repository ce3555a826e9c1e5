"""Several strategies worth a trial: the best of each family, since the replay may be wrong about a family as a whole, and other ends of
climbs, since it may be wrong about one of several that it finds nearly as fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from autotune.cluster import Cluster
from autotune.lowering.replayed import LoweredSteps
from autotune.optimizer.budget import Budget
from autotune.optimizer.registry import all_starts, default_passes
from autotune.optimizer.replays import Lowered, Replays
from autotune.optimizer.search import APART, Found, Search
from autotune.optimizer.state import Problem, State
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import CASTS, Compressor, Strategy
from autotune.workload import Workload


@dataclass(frozen=True)
class Suggested:
    """`name` says what it is the best of."""

    name: str
    strategy: Strategy
    predicted_step_s: float


@dataclass(frozen=True)
class Suggestions:
    """`found`: the best of each family; `others`: of what other climbs found the fastest; both fastest first. `cut_short`: the wall
    clock ended a search, so that another run may find something else.
    """

    found: tuple[Suggested, ...]
    others: tuple[Suggested, ...]
    cut_short: bool


OTHERS = 6
"""What so many other climbs found is suggested, of each set of compressors."""
NEAR = 0.05
"""None is slower than the best by more than this share, which is about what the replay may be wrong by; `APART` is their least distance."""
LOSSLESS, CAST, LOSSY = "lossless", "16 bits", "lossy"


def suggestions(
    steps: LoweredSteps,
    space: SearchSpace,
    *,
    begin: Sequence[Strategy] = (),
    avoid: Collection[str] = (),
    budget: Budget | None = None,
    seed: int = 0,
    allowed: Callable[[Plan], bool] = lambda plan: True,
    clock: Callable[[], float] = time.monotonic,
) -> Suggestions:
    """The best of each family, for each set of compressors that the space allows, and what other climbs found. Families: within the step,
    across steps one by one, and with more messages in flight.

    `steps` replays, and is left with what was replayed. The budget is shared by the sets; each begins also with what the one before found.
    With `begin` the search starts from these strategies instead of from all that are known (`all_starts`), sets that hold none of them have
    no share, and a family's best that is not near the best of all is left out. Plans of the ids `avoid` are none of the `others`.
    """

    def lower(workload: Workload, cluster: Cluster, symmetric: bool) -> Lowered:
        return (
            steps
            if workload is steps.workload
            else LoweredSteps(workload, cluster, symmetric, steps.taken_share, steps.costs)
        )

    total = budget or Budget()
    searched = _searched(steps, space, begin)
    share = max(len(searched), 1)
    each = Budget(max(total.replays // share, 1), max(total.ops // share, 1), total.seconds / share)
    found: dict[Strategy, Suggested] = {}
    others: dict[Strategy, Suggested] = {}
    starts: list[tuple[str, State]] = []
    cut_short = False
    for name, problem, known in searched:
        search = Search(
            problem, Replays(problem, lower), default_passes(), each, seed, allowed, clock, avoid
        )
        result = search.run([*starts, *known])
        cut_short |= result.cut_short
        for _, (step_s, state) in sorted(result.families.items(), key=lambda entry: entry[0] or 0):
            if not begin or step_s <= result.step_s * (1 + NEAR):
                found.setdefault(state.strategy, _suggested(name, state, step_s))
        for step_s, state in _others(result):
            others.setdefault(state.strategy, _suggested(name, state, step_s, ", another climb"))
        starts = [
            (f"best {name}, {family(state.strategy)}", state)
            for _, state in result.families.values()
        ]
    left = [own for strategy, own in others.items() if strategy not in found]
    return Suggestions(_fastest_first(found.values()), _fastest_first(left), cut_short)


def _searched(
    steps: LoweredSteps, space: SearchSpace, begin: Sequence[Strategy]
) -> list[tuple[str, Problem, Sequence[tuple[str, State]]]]:
    """(name, problem, where the search starts) of each set of compressors that has a start."""
    found: list[tuple[str, Problem, Sequence[tuple[str, State]]]] = []
    for name, bounded in _compressor_sets(space):
        problem = Problem(steps.workload, steps.cluster, bounded)
        inside = [own for own in begin if bounded.contains(own, steps.workload, steps.cluster)]
        starts = (
            [(f"given {number}", State(own)) for number, own in enumerate(inside)]
            if begin
            else all_starts(problem)
        )
        if starts:
            found.append((name, problem, starts))
    return found


def _others(result: Found) -> list[tuple[float, State]]:
    """Each at least `APART` slower than the one before, the first than the best."""
    kept: list[tuple[float, State]] = []
    last_s = result.step_s
    for step_s, state in sorted(result.optima.values(), key=lambda entry: entry[0]):
        if last_s * (1 + APART) <= step_s <= result.step_s * (1 + NEAR) and len(kept) < OTHERS:
            kept.append((step_s, state))
            last_s = step_s
    return kept


def _suggested(compressors: str, state: State, step_s: float, which: str = "") -> Suggested:
    return Suggested(f"{compressors}, {family(state.strategy)}{which}", state.strategy, step_s)


def family(strategy: Strategy) -> str:
    if strategy.limit is None:
        return "within the step"
    return "across steps" if strategy.limit == 1 else f"across steps, {strategy.limit} in flight"


def _fastest_first(found: Iterable[Suggested]) -> tuple[Suggested, ...]:
    return tuple(sorted(found, key=lambda own: own.predicted_step_s))


def _compressor_sets(space: SearchSpace) -> list[tuple[str, SearchSpace]]:
    """The space without compressors, with casts, with all; each that differs."""
    none: tuple[Compressor, ...] = tuple(
        kind for kind in space.compressors if kind is Compressor.NONE
    )
    casts = tuple(kind for kind in space.compressors if kind is Compressor.NONE or kind in CASTS)
    sets: dict[tuple[Compressor, ...], str] = {none: LOSSLESS}
    for kinds, name in ((casts, CAST), (space.compressors, LOSSY)):
        sets.setdefault(kinds, name)
    return [(name, replace(space, compressors=kinds)) for kinds, name in sets.items()]
