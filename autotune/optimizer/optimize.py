"""Find the fastest strategy for a workload on a cluster by replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autotune.cluster import Cluster
from autotune.costs.row_traffic import RowTraffic
from autotune.dfg.replay import Timeline
from autotune.errors import InvalidInput
from autotune.garbage import collection_paused
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.device_costs import costs_of
from autotune.optimizer.bounds import least_transfer_s
from autotune.optimizer.budget import Budget, Deadline
from autotune.optimizer.fused_time import ASSUMED, LaunchGaps
from autotune.optimizer.registry import default_passes, first_starts, later_starts
from autotune.optimizer.replays import Replays, lowered
from autotune.optimizer.search import Improvement, Search, SearchResult
from autotune.optimizer.state import Pass, Problem, Speedups, State, planned
from autotune.profiling.op_graph import FusedTime, OpFusion, OpGraph
from autotune.strategy_space.builders.rows import ddp_with_rows
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload

ASSUMED_TIMES, ASSUMED_LINKS = "the workload's times", "the links"
"""Entries of `Optimized.assumed` for a workload or a cluster whose source is "assumed"."""

AS_GLOO = (
    "reduce-scatters, broadcasts and reduces, which move their bytes as gloo's do "
    "(NCCL's reduce-scatter moves half of them)"
)
"""Entry for GPUs without a probed reduce-scatter: `lowering.traffic` knows gloo's collectives."""

DDP = "DDP's default buckets"
"""Name of the start to compare with, unless the caller gives another strategy."""


@dataclass(frozen=True)
class Optimized:
    """The fastest strategy of a search and its replayed step.

    - `predicted_step_s`: with `op_fusion`, which fuses nothing without an op graph.
    - `enacted_step_s`: the same strategy without op fusion, as a runtime without it measures.
    - `before_step_s`: the strategy before, by default DDP's buckets.
    - `starts_s`: the replayed starts by name.
    - `bound_s`: no synchronization of these bytes behind this computation is faster.
    - `log`: the improvements, and the pass that found each.
    - `dropped`: proposals outside the space or refused by the runtime.
    - `cut_short`: the wall clock ended the search, so another run may find another strategy.
    - `timeline`: the replayed step, from the start of its backward pass to the next.
    - `assumed`: figures behind the result that nobody measured.
    """

    strategy: Strategy
    plan: Plan
    op_fusion: OpFusion
    predicted_step_s: float
    enacted_step_s: float
    before_step_s: float
    bound_s: float
    starts_s: dict[str, float]
    log: tuple[Improvement, ...]
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
    memory: Callable[[Workload], Workload] | None = None,
    costs: RuntimeCosts | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Optimized:
    """Search the synchronization, and with an op graph the op fusion, with the shortest step.

    - `space`: the allowed strategies; by default all lossless ones.
    - `fused_s`: estimates fused kernels; by default `LaunchGaps`, which is assumed.
    - `passes`: replaces `default_passes()`.
    - `allowed`: refuses further plans, such as those whose buffers do not fit.
    - `memory`: line 1 of Alg. 1; returns the workload that fits into memory (recomputation).
    - `costs`: of the runtime; by default those of the workload's device.
    - `clock`: seconds, for the budget's.

    Equal inputs give equal results unless the result is `cut_short`. Raises `InvalidInput` if graph
    and workload do not belong together, or for a graph with `memory`.
    """
    began_s, budget = clock(), budget or Budget()
    assumed_times = workload.source == "assumed"
    if memory is not None:
        workload = _fitted_workload(workload, graph, memory)
    problem = Problem(
        workload=workload,
        cluster=cluster,
        space=space or SearchSpace.default(),
        graph=graph,
        fused_s=fused_s or LaunchGaps(),
        speedups=speedups or Speedups(),
        deadline=Deadline(began_s + budget.seconds, clock),
    )
    replays = Replays(problem, partial(lowered, costs=costs))
    first = State(before or ddp_with_rows(workload))
    before_s = replays.step_s(first)
    search = Search(
        problem, replays, default_passes() if passes is None else passes, budget, seed, allowed
    )
    name = DDP if before is None else "before"
    with collection_paused():
        starts = first_starts(problem, (name, first.strategy))
        result = search.run(starts, partial(later_starts, problem))
    best = result.best or first
    assumed = _assumed_figures(
        problem, best, costs, assumed_times=assumed_times, assumed_kernels=fused_s is None
    )
    return _optimized(
        problem, replays, result, best, before_s=before_s, began_s=began_s, assumed=assumed
    )


def _fitted_workload(
    workload: Workload, graph: OpGraph | None, memory: Callable[[Workload], Workload]
) -> Workload:
    """The workload that fits into memory. Raises `InvalidInput` if there is an op graph."""
    if graph is not None:
        raise InvalidInput(
            "memory is recorded for variables and not for an op graph; "
            "leave out the op graph or the budget"
        )
    return memory(workload)


def _optimized(
    problem: Problem,
    replays: Replays,
    result: SearchResult,
    best: State,
    *,
    before_s: float,
    began_s: float,
    assumed: tuple[str, ...],
) -> Optimized:
    """Replay the best state of a search, which is the one before if the search has none."""
    enacted = replace(best, fusion=OpFusion(), compute_factor=1.0)
    return Optimized(
        strategy=best.strategy,
        plan=replays.plan_of(best),
        op_fusion=best.fusion,
        predicted_step_s=result.step_s if result.best is not None else before_s,
        enacted_step_s=replays.step_s(enacted),
        before_step_s=before_s,
        bound_s=full_overlap_s(problem, best),
        starts_s=result.starts_s,
        log=tuple(result.log),
        rounds=result.rounds,
        replays=replays.whole,
        partial_replays=replays.partial,
        dropped=result.dropped,
        cut_short=result.cut_short,
        seconds=problem.deadline.clock() - began_s,
        timeline=replays.timeline(best),
        assumed=assumed,
    )


def _assumed_figures(
    problem: Problem,
    best: State,
    costs: RuntimeCosts | None,
    *,
    assumed_times: bool,
    assumed_kernels: bool,
) -> tuple[str, ...]:
    """The figures behind a result that nobody measured.

    `assumed_times`: those of the workload before recomputation. `assumed_kernels`: fused ones.
    """
    assumed = list(best.assumed)
    if best.fusion != OpFusion() and assumed_kernels:
        assumed.append(ASSUMED)
    if assumed_times:
        assumed.append(ASSUMED_TIMES)
    if problem.cluster.source == "assumed":
        assumed.append(ASSUMED_LINKS)
    ranks = problem.cluster.world_size
    probed = problem.cluster.fit("reduce_scatter", ranks) is not None
    if problem.workload.device == "cuda" and ranks > 1 and not probed:
        assumed.append(AS_GLOO)
    costs = costs or costs_of(problem.workload.device, problem.workload.device_name)
    packing = costs.pack_s_per_byte
    if packing.is_assumed:
        assumed.append(f"packing and issuing messages ({packing.source})")
    return tuple(assumed)


def full_overlap_s(problem: Problem, state: State) -> float:
    """max(T_comp, T_comm): the state's kernels, and its bytes on the slowest link."""
    compute_s = problem.workload_of(state).compute_s
    messages = planned(state, problem).messages
    least_bytes = RowTraffic(problem.workload).least_bytes(messages)
    return max(compute_s, least_transfer_s(problem.cluster, least_bytes))
