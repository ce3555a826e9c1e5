"""Starts of a search: hand-made strategies, best cuts and even buckets, best estimate first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from autotune.arrays import FloatArray
from autotune.costs.issue_order import MessageTimes, channel_ends_s, half_crossing_period_s
from autotune.costs.sync_cost import MessageKind, Rates
from autotune.optimizer.budget import TimeUp
from autotune.optimizer.contiguous import contiguous_strategy
from autotune.optimizer.state import Problem, State, planned
from autotune.profiling.op_graph import OpFusion
from autotune.strategy_space.builders.collectives import large_alone
from autotune.strategy_space.builders.cross_step import in_planned_order
from autotune.strategy_space.builders.direct import IN_FLIGHT
from autotune.strategy_space.builders.registry import seed_strategies
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.builders.servers import served_in_buckets
from autotune.strategy_space.owners import by_bandwidth
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer
from autotune.workload import Workload

COLLECTIVES = (
    Synchronizer.ALL_REDUCE,
    Synchronizer.REDUCE_SCATTER_ALL_GATHER,
    Synchronizer.DIRECT_EXCHANGE,
)
PIECES = 8
"""Pieces of each direct exchange with which a search starts; the pass `direct_exchange` changes
them."""
ORDER_NODES = 40
ESTIMATE_OVER_REPLAY = 4.0
"""The most that an estimate with one channel was over the replay with threads and lanes."""
Builders = Callable[[Problem, OpFusion], Iterator[tuple[str, Strategy]]]
EVEN_BYTES = (2**18, 2**19, 2**20, 2**21, 2**22)


def started(
    problem: Problem, fusion: OpFusion, built_by: Builders, fastest_s: float = float("inf")
) -> list[tuple[str, State]]:
    """(name, state) of each strategy in the space, the shortest estimate first, with this fusion.

    Strategies that by their estimates can hardly be faster than `fastest_s`, the fastest replayed
    step so far, are left out. After the problem's deadline, those that were built until then are
    returned.
    """
    known: set[Strategy] = set()
    starts: list[tuple[float, str, State]] = []
    with suppress(TimeUp):
        for name, built in built_by(problem, fusion):
            problem.deadline.check()
            strategy = with_rows(built, problem.workload, every=not problem.space.dense_rows)
            if strategy not in known and problem.space.contains(
                strategy, problem.workload, problem.cluster
            ):
                known.add(strategy)
                state = State(strategy, fusion)
                estimated_s = _estimated_s(state, problem)
                if estimated_s <= ESTIMATE_OVER_REPLAY * fastest_s:
                    starts.append((estimated_s, name, state))
    return [(name, state) for _, name, state in sorted(starts, key=lambda start: start[0])]


def hand_made(problem: Problem, fusion: OpFusion) -> Iterator[tuple[str, Strategy]]:
    """Hand-made strategies, then even buckets."""
    yield from seed_strategies(problem.workload, problem.cluster, problem.space)
    yield from _even_buckets(problem, fusion)


def _estimated_s(state: State, problem: Problem) -> float:
    """The step by the closed form of one channel, which is much faster than a replay."""
    workload, cluster = problem.workload, problem.cluster
    plan = planned(state, problem)
    times = MessageTimes.of(plan, workload, cluster)
    if plan.results is not None:
        parts_s = (workload.backward_s, workload.update_s, workload.forward_s)
        return half_crossing_period_s(
            times.ready_s, times.cost_s, times.needed_s, parts_s, plan.results
        )
    if plan.cross_step:
        return times.period_s
    sent_s = float(channel_ends_s(times.ready_s, times.cost_s)[-1])
    return workload.forward_s + max(workload.backward_s, sent_s) + workload.update_s


def _even_buckets(problem: Problem, fusion: OpFusion) -> Iterator[tuple[str, Strategy]]:
    """Messages of about one size across the step, by all-reduce and through servers.

    If the script reads norms, by direct exchange, too. They have the planned order and as many in
    flight as the space allows. They suit cases in which a busy channel matters more than sizes.
    """
    space = problem.space
    if not space.cross_step:
        return
    timed, cluster = _timed(problem, fusion), problem.cluster
    for size in EVEN_BYTES:
        builders: dict[Synchronizer, Callable[[], Strategy]] = {
            Synchronizer.ALL_REDUCE: partial(large_alone, timed, size, size),
            Synchronizer.PARAMETER_SERVER: partial(served_in_buckets, timed, cluster, size),
        }
        if timed.reads_norms:
            builders[Synchronizer.DIRECT_EXCHANGE] = partial(_equally_owned, timed, size)
        for synchronizer, build in builders.items():
            if synchronizer not in space.synchronizers:
                continue
            buckets = build()
            if space.contains(buckets, problem.workload, cluster):
                across = in_planned_order(buckets, timed, cluster, ORDER_NODES)
                name = f"{synchronizer}, buckets of {size // 1024} KiB, across steps"
                most = max(space.most_in_flight, buckets.in_flight)
                yield name, replace(across, in_flight=most)


def _equally_owned(workload: Workload, size: int) -> Strategy:
    """Direct exchanges of about `size` bytes in which all n ranks own equal shares.

    Results wait until all sums are complete. So the link of a rank with the share s is busy for
    max(1 - s, (n - 1) s) / rate per byte of sums, and again per byte of results. For the slowest
    link this is shortest at s = 1 / n. Small messages let results arrive in the order in which the
    forward pass needs them.
    """
    buckets = large_alone(workload, size, size)
    shards = {
        shard: replace(shard, synchronizer=Synchronizer.DIRECT_EXCHANGE)
        for choice in buckets.variables
        for shard in choice.shards
    }
    choices = tuple(
        replace(choice, shards=tuple(shards[shard] for shard in choice.shards))
        for choice in buckets.variables
    )
    return replace(buckets, variables=choices, in_flight=IN_FLIGHT)


def _timed(problem: Problem, fusion: OpFusion) -> Workload:
    if problem.graph is None:
        return problem.workload
    return problem.graph.workload(fusion, problem.fused_s)


def computed(problem: Problem, fusion: OpFusion) -> Iterator[tuple[str, Strategy]]:
    """The best messages of consecutive groups by every collective of the space.

    They are sent within the step and, in the planned order, across it.
    """
    rates, space = Rates(problem.cluster), problem.space
    timed = _timed(problem, fusion)
    levels = (False, True) if space.hierarchy_for(problem.cluster) else (False,)
    most = space.most_in_flight
    for synchronizer in COLLECTIVES:
        if synchronizer not in space.synchronizers:
            continue
        for hierarchical in levels:
            shard = Shard(synchronizer, hierarchical=hierarchical)
            if synchronizer is Synchronizer.DIRECT_EXCHANGE:
                shares = by_bandwidth(problem.cluster, hierarchical)
                shard = replace(shard, shares=shares, pieces=PIECES)
            kind = MessageKind(
                synchronizer, hierarchical=hierarchical, shares=shard.shares, pieces=shard.pieces
            )
            cost_s = partial(_cost_s, problem, rates, kind)
            strategy = contiguous_strategy(timed, problem.groups(), shard, cost_s)
            if synchronizer is Synchronizer.DIRECT_EXCHANGE:
                strategy = replace(strategy, in_flight=IN_FLIGHT)
            name = f"best cuts, {synchronizer}{', hierarchical' if hierarchical else ''}"
            yield name, strategy
            if space.cross_step:
                across = in_planned_order(strategy, timed, problem.cluster, ORDER_NODES)
                yield f"{name}, across steps", across
                if most > 1:
                    in_flight = replace(across, in_flight=most)
                    yield f"{name}, across steps, {most} in flight", in_flight


def _cost_s(
    problem: Problem, rates: Rates, kind: MessageKind, sizes_bytes: FloatArray
) -> FloatArray:
    problem.deadline.check()
    return rates.costs([kind] * len(sizes_bytes), sizes_bytes).channel_s
