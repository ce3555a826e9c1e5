"""Where the search starts: the field's hand-made strategies and the exact best cuts of the closed form, best first by replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autotune.arrays import FloatArray
from autotune.costs.issue_order import MessageTimes, channel_ends_s
from autotune.costs.sync_cost import MessageKind, Rates
from autotune.optimizer.contiguous import contiguous_strategy
from autotune.optimizer.state import Problem, State
from autotune.profiling.op_graph import OpFusion
from autotune.strategy_space.builders.collectives import large_alone
from autotune.strategy_space.builders.cross_step import in_planned_order
from autotune.strategy_space.builders.registry import seed_strategies
from autotune.strategy_space.builders.servers import served_in_buckets
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer
from autotune.workload import Workload

COLLECTIVES = (Synchronizer.ALL_REDUCE, Synchronizer.REDUCE_SCATTER_ALL_GATHER)
ORDER_NODES = 40
EVEN_BYTES = (2**18, 2**19, 2**20, 2**21, 2**22)


def started(problem: Problem, fusion: OpFusion) -> list[tuple[str, State]]:
    """(name, state), each strategy once, the shortest estimate first; all lie in the problem's space. `fusion` is what they begin with.

    None is left out by its estimate: that of one channel was seen to be four times the replay of two threads and lanes.
    """
    found: dict[Strategy, str] = {}
    estimated: dict[Strategy, float] = {}
    seeds = seed_strategies(problem.workload, problem.cluster, problem.space)
    for name, strategy in [*seeds, *_best_cuts(problem, fusion), *_even_buckets(problem, fusion)]:
        if problem.space.contains(strategy, problem.workload, problem.cluster):
            found.setdefault(strategy, name)
            estimated.setdefault(strategy, _estimated_s(strategy, problem))
    return [
        (found[strategy], State(strategy, fusion))
        for strategy in sorted(found, key=lambda own: estimated[own])
    ]


def _estimated_s(strategy: Strategy, problem: Problem) -> float:
    """The step by the closed form of one channel, which takes a fraction of a replay."""
    workload = problem.workload
    times = MessageTimes.of(
        plan(strategy, workload, problem.cluster.world_size), workload, problem.cluster
    )
    if strategy.cross_step:
        return times.period_s
    sent_s = float(channel_ends_s(times.ready_s, times.cost_s)[-1])
    return workload.forward_s + max(workload.backward_s, sent_s) + workload.update_s


def _even_buckets(problem: Problem, fusion: OpFusion) -> Iterator[tuple[str, Strategy]]:
    """Messages of about one size across the step, in the planned order and with as many in flight as the space allows, where sizes matter
    less than that something is always under way: by all-reduce and on servers.
    """
    space = problem.space
    if not space.cross_step:
        return
    timed, cluster = _timed(problem, fusion), problem.cluster
    for size in EVEN_BYTES:
        ways = {
            Synchronizer.ALL_REDUCE: partial(large_alone, timed, size, size),
            Synchronizer.PARAMETER_SERVER: partial(served_in_buckets, timed, cluster, size),
        }
        for synchronizer, made in ways.items():
            if synchronizer in space.synchronizers and space.contains(
                buckets := made(), problem.workload, cluster
            ):
                across = in_planned_order(buckets, timed, cluster, ORDER_NODES)
                name = f"{synchronizer}, buckets of {size // 1024} KiB, across steps"
                yield name, replace(across, in_flight=space.most_in_flight)


def _timed(problem: Problem, fusion: OpFusion) -> Workload:
    return (
        problem.workload
        if problem.graph is None
        else problem.graph.workload(fusion, problem.fused_s)
    )


def _best_cuts(problem: Problem, fusion: OpFusion) -> Iterator[tuple[str, Strategy]]:
    """For every collective of the space the best messages of consecutive groups, within the step and, in the planned order, across it."""
    rates, space = Rates(problem.cluster), problem.space
    timed = _timed(problem, fusion)
    levels = (False, True) if space.hierarchy_for(problem.cluster) else (False,)
    for synchronizer in COLLECTIVES:
        if synchronizer not in space.synchronizers:
            continue
        for hierarchical in levels:
            shard = Shard(synchronizer, hierarchical=hierarchical)
            cost_s = partial(_cost_s, rates, MessageKind(synchronizer, hierarchical=hierarchical))
            strategy = contiguous_strategy(timed, problem.groups(), shard, cost_s)
            name = f"best cuts, {synchronizer}{', hierarchical' if hierarchical else ''}"
            yield name, strategy
            if space.cross_step:
                across = in_planned_order(strategy, timed, problem.cluster, ORDER_NODES)
                yield f"{name}, across steps", across
                if space.most_in_flight > 1:
                    yield (
                        f"{name}, across steps, {space.most_in_flight} in flight",
                        replace(across, in_flight=space.most_in_flight),
                    )


def _cost_s(rates: Rates, kind: MessageKind, sizes_bytes: FloatArray) -> FloatArray:
    return rates.costs([kind] * len(sizes_bytes), sizes_bytes).channel_s
