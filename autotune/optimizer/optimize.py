"""`optimize`: the fastest strategy that the search finds for a workload on a cluster, and what the replay predicts of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autotune.cluster import Cluster
from autotune.costs.row_traffic import RowTraffic
from autotune.dfg.replay import Timeline
from autotune.optimizer.bounds import least_transfer_s
from autotune.optimizer.budget import Budget
from autotune.optimizer.fused_time import ASSUMED, LaunchGaps
from autotune.optimizer.registry import all_starts, default_passes
from autotune.optimizer.replays import Lower, Replays, lowered
from autotune.optimizer.search import Kept, Search
from autotune.optimizer.state import Pass, Problem, Speedups, State
from autotune.profiling.op_graph import FusedTime, OpFusion, OpGraph
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload

ASSUMED_TIMES, ASSUMED_LINKS = "the workload's times", "the links"
"""Of `Optimized.assumed`, where workload and cluster say so."""


DDP = "DDP's default buckets"
"""Name of the start that is compared with where no other strategy is."""


@dataclass(frozen=True)
class Optimized:
    """`predicted_step_s` is replayed with `op_fusion` (nothing fused where no op graph was given), `enacted_step_s` the same
    strategy without it, which is what a runtime that cannot fuse ops would measure.

    `before_step_s`: of the strategy before, by default DDP's buckets. `bound_s`: no synchronization that hides behind computation as
    far as it can is faster (`full_overlap_s`). `starts_s`: the replayed starting points by name. `log`: what was kept and by what.
    `dropped`: proposals outside the space or that the runtime refuses. `cut_short`: the wall clock ended the search, so that another
    run may find something else. `timeline`: the replayed step, from the start of its backward pass to the next. `assumed`: figures in
    it that nobody measured.
    """

    strategy: Strategy
    plan: Plan
    op_fusion: OpFusion
    predicted_step_s: float
    enacted_step_s: float
    before_step_s: float
    bound_s: float
    starts_s: dict[str, float]
    log: tuple[Kept, ...]
    rounds: int
    replays: int
    partial_replays: int
    dropped: int
    cut_short: bool
    seconds: float
    timeline: Timeline
    assumed: tuple[str, ...] = ()


def optimize(
    workload: Workload,
    cluster: Cluster,
    space: SearchSpace | None = None,
    *,
    graph: OpGraph | None = None,
    fused_s: FusedTime | None = None,
    passes: Sequence[Pass] | None = None,
    before: Strategy | None = None,
    budget: Budget | None = None,
    seed: int = 0,
    speedups: Speedups | None = None,
    allowed: Callable[[Plan], bool] = lambda plan: True,
    memory: Callable[[Problem], Problem] | None = None,
    lower: Lower = lowered,
) -> Optimized:
    """Search the synchronization, and with an op graph the op fusion, that makes a step shortest by replay.

    `space` bounds the strategies (by default all that loses nothing); `fused_s` estimates fused kernels (by default `LaunchGaps`, which
    is assumed); `passes` replaces `default_passes()`; `allowed` refuses plans on top, such as those whose buffers do not fit. `memory`
    is line 1 of Alg. 1: given what is to be optimized it returns it with the times and ops that fit into memory (recomputation).
    Equal inputs give equal results unless the result says `cut_short`. Raises `InvalidInput` where graph and workload do not belong
    together.
    """
    began_s = time.monotonic()
    problem = Problem(
        workload,
        cluster,
        space or SearchSpace.default(),
        graph,
        fused_s or LaunchGaps(),
        speedups or Speedups(),
    )
    if memory is not None:
        problem = memory(problem)
    replays = Replays(problem, lower)
    first = State(before or ddp_default(problem.workload))
    before_s = replays.step_s(first)
    search = Search(
        problem,
        replays,
        default_passes() if passes is None else passes,
        budget or Budget(),
        seed,
        allowed,
    )
    found = search.run(all_starts(problem, (DDP if before is None else "before", first.strategy)))
    best = found.best or first
    assumed = list(best.assumed)
    if best.fusion != OpFusion() and fused_s is None:
        assumed.append(ASSUMED)
    assumed += [
        name
        for name, source in ((ASSUMED_TIMES, workload.source), (ASSUMED_LINKS, cluster.source))
        if source == "assumed"
    ]
    enacted = replace(best, fusion=OpFusion(), compute_factor=1.0)
    return Optimized(
        best.strategy,
        replays.plan_of(best),
        best.fusion,
        found.step_s if found.best is not None else before_s,
        replays.step_s(enacted),
        before_s,
        full_overlap_s(problem, best),
        found.starts_s,
        tuple(found.log),
        found.rounds,
        replays.whole,
        replays.partial,
        found.dropped,
        found.cut_short,
        time.monotonic() - began_s,
        replays.timeline(best),
        tuple(assumed),
    )


def full_overlap_s(problem: Problem, state: State) -> float:
    """max(T_comp, T_comm): the computation of the state's kernels, and its bytes on the slowest link by whatever synchronizer."""
    compute_s = problem.workload_of(state).compute_s
    made = plan(state.strategy, problem.workload, problem.cluster.world_size)
    return max(
        compute_s,
        least_transfer_s(problem.cluster, RowTraffic(problem.workload).least_bytes(made.messages)),
    )
