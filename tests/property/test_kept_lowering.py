"""A lowering that has lowered other plans gives the same graphs as a new one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from known_examples import examples
from test_lowering import ALL, CLUSTERS, CROWDED, SEEDS, fitted, workloads

from autotune.cluster import Cluster
from autotune.dfg.graph import OP_COLUMNS, OTHER_COLUMNS, Dfg
from autotune.lowering.lower import Lowering
from autotune.rng import generator
from autotune.sampler.random import sample
from autotune.strategy_space.moves.neighbours import mutate
from autotune.strategy_space.plan import Plan, plan
from autotune.workload import Workload

MOVES = 6


def neighbours(workload: Workload, cluster: Cluster, seed: int) -> list[Plan]:
    """A sampled plan and the plans of a walk from it, which differ in few messages."""
    rng = generator(seed, "walk")
    strategy = sample(workload, cluster, ALL, rng)
    plans = [plan(strategy, workload, cluster.world_size)]
    for _ in range(MOVES):
        strategy = mutate(strategy, workload, cluster, ALL, rng)
        plans.append(plan(strategy, workload, cluster.world_size))
    return plans


def assert_equal_graphs(one: Dfg, other: Dfg) -> None:
    for name in (*OP_COLUMNS, *OTHER_COLUMNS):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert list(one.names.ops) == list(other.names.ops)
    assert one.names.queues == other.names.queues


def worlds(draw: st.DrawFn) -> tuple[Workload, Cluster]:
    workload, cluster = draw(workloads()), CLUSTERS[draw(st.sampled_from(sorted(CLUSTERS)))]
    workload = replace(workload, reads_norms=draw(st.booleans()))
    return workload, fitted(cluster) if draw(st.booleans()) else cluster


@settings(max_examples=examples(30), deadline=None)
@given(st.composite(worlds)(), SEEDS, st.booleans(), st.booleans())
def test_a_lowering_gives_the_graphs_of_a_new_one(world, seed, crowded, symmetric) -> None:
    workload, cluster = world
    costs = CROWDED if crowded else None
    used = Lowering(workload, cluster, costs)

    def graphs(lowering: Lowering, of: Plan) -> tuple[Dfg, Dfg]:
        few, limit = of.messages[::2], (of.limit, of.in_flight)
        return lowering.period(of, symmetric), lowering.message_graph(few, None, *limit)

    plans = neighbours(workload, cluster, seed)
    expected = [graphs(Lowering(workload, cluster, costs), each) for each in plans]
    for each, new in [*zip(plans, expected, strict=True)] * 2:
        for one, other in zip(graphs(used, each), new, strict=True):
            assert_equal_graphs(one, other)


@settings(max_examples=examples(20), deadline=None)
@given(st.composite(worlds)(), SEEDS, st.floats(0.1, 3), st.none() | st.floats(0, 300))
def test_a_retimed_lowering_gives_the_graphs_of_a_new_one(world, seed, factor, touched) -> None:
    workload, cluster = world
    variables = workload.variables
    if touched is not None:  # which changes the sizes of sparse gradients
        variables = tuple(
            replace(each, touched_rows=min(touched, each.shape[0])) if each.sparse else each
            for each in variables
        )
    other = replace(workload, variables=variables, update_s=factor * workload.update_s)
    used = Lowering(workload, cluster)
    plans = neighbours(workload, cluster, seed)
    for each in plans:
        used.period(each)
    retimed = used.retimed(other)
    for each in plans:
        assert_equal_graphs(retimed.period(each), Lowering(other, cluster).period(each))
