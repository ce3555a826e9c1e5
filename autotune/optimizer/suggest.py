"""Several strategies worth a trial: the best of each family, since the replay may be wrong about a family as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from autotune.cluster import Cluster
from autotune.lowering.replayed import LoweredSteps
from autotune.optimizer.budget import Budget
from autotune.optimizer.registry import all_starts, default_passes
from autotune.optimizer.replays import Lowered, Replays
from autotune.optimizer.search import Search
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
    """`found`: fastest first. `cut_short`: the wall clock ended a search, so that another run may find something else."""

    found: tuple[Suggested, ...]
    cut_short: bool


LOSSLESS, CAST, LOSSY = "lossless", "16 bits", "lossy"


def suggestions(
    steps: LoweredSteps,
    space: SearchSpace,
    *,
    budget: Budget | None = None,
    seed: int = 0,
    allowed: Callable[[Plan], bool] = lambda plan: True,
    clock: Callable[[], float] = time.monotonic,
) -> Suggestions:
    """The best within the step and the best across steps, for each set of compressors that the space allows, fastest first.

    `steps` replays, and is left with what was replayed. The budget is shared by the sets; each begins also with what the one before found.
    """

    def lower(workload: Workload, cluster: Cluster, symmetric: bool) -> Lowered:
        return steps if workload is steps.workload else LoweredSteps(workload, cluster, symmetric, steps.taken_share, steps.costs)

    total = budget or Budget()
    sets = _compressor_sets(space)
    each = Budget(max(total.replays // len(sets), 1), max(total.ops // len(sets), 1), total.seconds / len(sets))
    found: dict[Strategy, Suggested] = {}
    starts: list[tuple[str, State]] = []
    cut_short = False
    for name, bounded in sets:
        problem = Problem(steps.workload, steps.cluster, bounded)
        search = Search(problem, Replays(problem, lower), default_passes(), each, seed, allowed, clock)
        result = search.run([*starts, *all_starts(problem)])
        cut_short |= result.cut_short
        for across, (step_s, state) in sorted(result.families.items()):
            found.setdefault(
                state.strategy, Suggested(f"{name}, {'across steps' if across else 'within the step'}", state.strategy, step_s)
            )
        starts = [(f"best {name}, {across}", state) for across, (_, state) in sorted(result.families.items())]
    return Suggestions(tuple(sorted(found.values(), key=lambda own: own.predicted_step_s)), cut_short)


def _compressor_sets(space: SearchSpace) -> list[tuple[str, SearchSpace]]:
    """The space without compressors, with casts, with all; each that differs."""
    none: tuple[Compressor, ...] = tuple(kind for kind in space.compressors if kind is Compressor.NONE)
    casts = tuple(kind for kind in space.compressors if kind is Compressor.NONE or kind in CASTS)
    sets: dict[tuple[Compressor, ...], str] = {none: LOSSLESS}
    for kinds, name in ((casts, CAST), (space.compressors, LOSSY)):
        sets.setdefault(kinds, name)
    return [(name, replace(space, compressors=kinds)) for kinds, name in sets.items()]
