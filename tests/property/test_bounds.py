"""Lower bounds hold for every plan; the bound of an interruptible channel is its worst subset."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import FREE

from autotune.cluster import Cluster, Host, PairLink
from autotune.costs.issue_order import planned_order
from autotune.lowering.costs import Constant
from autotune.lowering.lower import Lowering
from autotune.optimizer.bounds import interruptible_s, least_step_s
from autotune.rng import generator
from autotune.sampler.random import sample
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer, VariableStrategy
from autotune.workload import Variable, Workload

JOBS = st.lists(st.tuples(*[st.integers(0, 20).map(float)] * 3), min_size=1, max_size=7)
"""(ready, cost, tail) of each message."""


def of_subsets(jobs: list[tuple[float, float, float]]) -> float:
    """The largest of: first ready time, plus all costs, plus shortest tail, over all subsets."""
    chosen = (own for count in range(1, len(jobs) + 1) for own in combinations(jobs, count))
    return max(
        min(job[0] for job in own) + sum(job[1] for job in own) + min(job[2] for job in own)
        for own in chosen
    )


@given(JOBS)
def test_the_bound_of_an_interruptible_channel_is_its_worst_subset(jobs):
    columns = [list(column) for column in zip(*jobs, strict=True)]
    assert interruptible_s(*columns) == of_subsets(jobs)
    ready_s, cost_s, tail_s = map(np.array, columns)
    forward_s = float(tail_s.max())
    assert planned_order(
        ready_s, cost_s, forward_s - tail_s, 0.0, forward_s
    ).period_s >= interruptible_s(*columns)


def test_an_empty_channel_takes_no_time():
    assert interruptible_s([], [], []) == 0.0


@st.composite
def slow_worlds(draw):
    """Worlds in which sending takes as long as computing, with sparse rows and pair links."""
    count, forward_s, backward_s = (
        draw(st.integers(1, 6)),
        draw(st.floats(0, 0.2)),
        draw(st.floats(0.01, 0.3)),
    )
    variables = []
    for number, share in enumerate(
        sorted(draw(st.lists(st.floats(0, 1), min_size=count, max_size=count)))
    ):
        rows, sparse = draw(st.integers(1, 200)), draw(st.booleans())
        touched, needed_s = (
            draw(st.floats(0, rows)) if sparse else None,
            draw(st.floats(0, 1)) * forward_s,
        )
        variables.append(
            Variable(
                f"v{number}", (rows, 25), "float32", sparse, share * backward_s, needed_s, touched
            )
        )
    devices = draw(st.lists(st.integers(1, 2), min_size=2, max_size=4))
    rates = [draw(st.sampled_from([1e5, 3e5, 1e6])) for _ in devices]
    pairs = (PairLink(("h0", "h1"), 5e5, 1e-5),) if draw(st.booleans()) else ()
    hosts = tuple(
        Host(f"h{i}", n, rate, 1e-6, 1e10, 1e-6)
        for i, (n, rate) in enumerate(zip(devices, rates, strict=True))
    )
    return Workload("m", tuple(variables), (), forward_s, backward_s, 0.0), Cluster(
        "c", hosts, pairs
    )


@settings(max_examples=200, deadline=None)
@given(slow_worlds(), st.integers(0, 10**6))
def test_no_lossless_strategy_is_replayed_faster(world, seed):
    workload, cluster = world
    space = replace(SearchSpace.default(), min_partition_bytes=0)
    wanted = plan(
        sample(workload, cluster, space, generator(seed, "test")), workload, cluster.world_size
    )
    assert Lowering(workload, cluster, FREE).step_s(wanted) >= least_step_s(workload, cluster) * (
        1 - 1e-9
    )


def test_one_ring_of_one_variable_reaches_the_bound():
    """Two hosts, one message, no latency: only its handshakes lie between."""
    variable = Variable("v", (100_000,), ready_s=0.1, needed_s=0.0)
    workload = Workload("m", (variable,), (), 0.05, 0.1, 0.0)
    cluster = Cluster("c", tuple(Host(f"h{i}", 1, 1e6, 0.0, 1e10, 0.0) for i in range(2)))
    across = Strategy((VariableStrategy("v", (Shard(Synchronizer.ALL_REDUCE),)),), cross_step=True)
    found_s = Lowering(workload, cluster, replace(FREE, payload=Constant(1.0, "test"))).step_s(
        plan(across, workload, 2)
    )
    assert least_step_s(workload, cluster) == pytest.approx(0.1 + 0.4 + 0.05)
    assert least_step_s(workload, cluster) <= found_s < least_step_s(workload, cluster) + 2e-4


def test_a_variable_that_is_ready_last_and_read_first_cannot_hide():
    cluster = Cluster("c", tuple(Host(f"h{i}", 1, 1e6, 1e-5, 1e10, 1e-6) for i in range(2)))
    first = Variable("first", (25_000,), ready_s=0.2, needed_s=0.0)
    last = Variable("last", (25_000,), ready_s=0.0, needed_s=0.1)
    workload = Workload("m", (last, first), (), 0.1, 0.2, 0.0)
    assert least_step_s(workload, cluster) == pytest.approx(0.2 + 0.1 + 0.1)
    hidden = replace(
        workload, variables=(replace(last, needed_s=0.1), replace(first, ready_s=0.1, needed_s=0.1))
    )
    assert least_step_s(hidden, cluster) == pytest.approx(0.3)
