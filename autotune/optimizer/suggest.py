"""Suggest strategies for trials: the best of each family, and ends of other climbs.

The replay may be wrong about a whole family, or about one of several strategies that it predicts to
be nearly as fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autotune.cluster import Cluster
from autotune.lowering.replayed import LoweredSteps
from autotune.optimizer.budget import Budget, Deadline
from autotune.optimizer.registry import default_passes, first_starts, later_starts
from autotune.optimizer.replays import Replays
from autotune.optimizer.search import APART, Search, SearchResult
from autotune.optimizer.state import Problem, State
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import CASTS, Compressor, Strategy
from autotune.workload import Workload

OTHERS = 6
"""Suggested ends of other climbs, for each set of compressors."""
NEAR = 0.05
"""Suggestions are at most this share slower than the best, about the error of the replay."""
LOSSLESS, CAST, LOSSY = "lossless", "16 bits", "lossy"

Starts = Sequence[tuple[str, State]]


@dataclass(frozen=True)
class Suggested:
    """A strategy, named after the family of which it is the best."""

    name: str
    strategy: Strategy
    predicted_step_s: float


@dataclass(frozen=True)
class Suggestions:
    """`best`: the best of each family. `others`: ends of other climbs. Both fastest first.

    `cut_short`: the wall clock ended a search, so another run may find other strategies.
    """

    best: tuple[Suggested, ...]
    others: tuple[Suggested, ...]
    cut_short: bool


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
    """The best of each family, for each set of compressors in the space, and other climbs' ends.

    A family is within the step, across steps one by one, or with more messages in flight. `steps`
    replays, and keeps its replays. The sets of compressors share the budget; each also begins with
    the best of the previous set. With `begin` the search starts only from these strategies; sets
    without one of them have no share, and families that are not near the best are left out.
    `avoid`: `Plan.enacted_id` of plans that are not among `others`.
    """

    def lower(
        workload: Workload, cluster: Cluster, symmetric: bool, like: LoweredSteps | None
    ) -> LoweredSteps:
        if workload is steps.workload or any(workload is one for one in steps.fused.values()):
            return steps
        return steps.retimed(workload)

    total = budget or Budget()
    deadline = Deadline.after(total.seconds, clock)
    searches = _searches(steps, space, begin)
    share = max(len(searches), 1)
    each = _equal_part(total, share)
    passes = default_passes()
    best: dict[Strategy, Suggested] = {}
    others: dict[Strategy, Suggested] = {}
    previous: Starts = []
    cut_short = False
    for number, (name, untimed, given) in enumerate(searches):
        problem = replace(untimed, deadline=deadline.share(1 / (share - number)))
        starts = given or first_starts(problem)
        later = None if given else partial(later_starts, problem)
        replays = Replays(problem, lower)
        search = Search(problem, replays, passes, each, seed, allowed, avoid)
        result = search.run([*previous, *starts], later)
        cut_short |= result.cut_short
        families = sorted(result.families.items(), key=lambda entry: entry[0] or 0)
        for _, (step_s, state) in families:
            if not begin or step_s <= result.step_s * (1 + NEAR):
                best.setdefault(state.strategy, _suggested(name, state, step_s))
        for step_s, state in _other_optima(result):
            others.setdefault(state.strategy, _suggested(name, state, step_s, ", another climb"))
        previous = [
            (f"best {name}, {family(state.strategy)}", state)
            for _, state in result.families.values()
        ]
    new = [one for strategy, one in others.items() if strategy not in best]
    return Suggestions(_fastest_first(best.values()), _fastest_first(new), cut_short)


def _equal_part(budget: Budget, parts: int) -> Budget:
    """One of `parts` equal parts of a budget, with at least one replay and one op."""
    return replace(
        budget,
        replays=max(budget.replays // parts, 1),
        ops=max(budget.ops // parts, 1),
        seconds=budget.seconds / parts,
    )


def _searches(
    steps: LoweredSteps, space: SearchSpace, begin: Sequence[Strategy]
) -> list[tuple[str, Problem, Starts]]:
    """(name, problem, given starts) of each set of compressors that has a start."""
    workload, cluster = steps.workload, steps.cluster
    searches: list[tuple[str, Problem, Starts]] = []
    for name, bounded in _compressor_sets(space):
        inside = [one for one in begin if bounded.contains(one, workload, cluster)]
        starts = [(f"given {number}", State(one)) for number, one in enumerate(inside)]
        if starts or not begin:
            searches.append(
                (name, Problem(workload, cluster, bounded, op_fusions=steps.fused), starts)
            )
    return searches


def _other_optima(result: SearchResult) -> list[tuple[float, State]]:
    """Ends of climbs, each at least `APART` slower than the one before, the first than the best."""
    apart: list[tuple[float, State]] = []
    last_s = result.step_s
    for step_s, state in sorted(result.optima.values(), key=lambda optimum: optimum[0]):
        near = last_s * (1 + APART) <= step_s <= result.step_s * (1 + NEAR)
        if near and len(apart) < OTHERS:
            apart.append((step_s, state))
            last_s = step_s
    return apart


def _suggested(compressors: str, state: State, step_s: float, suffix: str = "") -> Suggested:
    return Suggested(f"{compressors}, {family(state.strategy)}{suffix}", state.strategy, step_s)


def family(strategy: Strategy) -> str:
    if strategy.limit is None:
        return "within the step"
    return "across steps" if strategy.limit == 1 else f"across steps, {strategy.limit} in flight"


def _fastest_first(suggested: Iterable[Suggested]) -> tuple[Suggested, ...]:
    return tuple(sorted(suggested, key=lambda one: one.predicted_step_s))


def _compressor_sets(space: SearchSpace) -> list[tuple[str, SearchSpace]]:
    """The space without compressors, with casts, and with all; each distinct one."""
    none = tuple(kind for kind in space.compressors if kind is Compressor.NONE)
    casts = tuple(kind for kind in space.compressors if kind is Compressor.NONE or kind in CASTS)
    names: dict[tuple[Compressor, ...], str] = {none: LOSSLESS}
    for kinds, name in ((casts, CAST), (space.compressors, LOSSY)):
        names.setdefault(kinds, name)
    return [(name, replace(space, compressors=kinds)) for kinds, name in names.items()]
