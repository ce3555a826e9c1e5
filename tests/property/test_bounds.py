"""Lower bounds hold for every plan; the bound of an interruptible channel is its worst subset."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_examples import examples
from synthetic_cluster import FREE, cluster, costs

from autotune.cluster import PairLink
from autotune.costs.issue_order import planned_order
from autotune.lowering.lower import Lowering
from autotune.optimizer.bounds import (
    interruptible_s,
    least_step_s,
    least_synchronization_s,
    least_transfer_s,
)
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
    subsets = (subset for count in range(len(jobs)) for subset in combinations(jobs, count + 1))
    columns = (tuple(zip(*subset, strict=True)) for subset in subsets)
    return max(min(ready_s) + sum(cost_s) + min(tail_s) for ready_s, cost_s, tail_s in columns)


@given(JOBS)
def test_the_bound_of_an_interruptible_channel_is_its_worst_subset(jobs):
    columns = [list(column) for column in zip(*jobs, strict=True)]
    assert interruptible_s(*columns) == of_subsets(jobs)
    ready_s, cost_s, tail_s = map(np.array, columns)
    forward_s = float(tail_s.max())
    order = planned_order(ready_s, cost_s, forward_s - tail_s, 0.0, forward_s)
    assert order.period_s >= interruptible_s(*columns)


def test_an_empty_channel_takes_no_time():
    assert interruptible_s([], [], []) == 0.0


@st.composite
def slow_worlds(draw):
    """Worlds in which sending takes as long as computing, with sparse rows and pair links."""
    count, forward_s = draw(st.integers(1, 6)), draw(st.floats(0, 0.2))
    backward_s = draw(st.floats(0.01, 0.3))
    shares = sorted(draw(st.lists(st.floats(0, 1), min_size=count, max_size=count)))
    variables = []
    for number, share in enumerate(shares):
        rows, sparse = draw(st.integers(1, 200)), draw(st.booleans())
        touched = draw(st.floats(0, rows)) if sparse else None
        times_s = (share * backward_s, draw(st.floats(0, 1)) * forward_s)
        variables.append(Variable(f"v{number}", (rows, 25), "float32", sparse, *times_s, touched))
    host = st.tuples(st.integers(1, 2), st.sampled_from([0.8, 2.4, 8.0]))
    hosts = draw(st.lists(host, min_size=2, max_size=4))
    pairs = (PairLink(("h0", "h1"), 5e5, 1e-5),) if draw(st.booleans()) else ()
    workload = Workload("m", tuple(variables), (), forward_s, backward_s, 0.0)
    return workload, cluster(*hosts, latency_s=1e-6, inner_latency_s=1e-6, pairs=pairs)


@settings(max_examples=examples(200), deadline=None)
@given(slow_worlds(), st.integers(0, 10**6))
def test_no_lossless_strategy_is_replayed_faster(world, seed):
    workload, cluster = world
    space = replace(SearchSpace.default(), min_partition_bytes=0)
    strategy = sample(workload, cluster, space, generator(seed, "test"))
    step_s = Lowering(workload, cluster, FREE).step_s(plan(strategy, workload, cluster.world_size))
    assert step_s >= least_step_s(workload, cluster) * (1 - 1e-9)


def test_one_ring_of_one_variable_reaches_the_bound():
    """Two hosts, one message, no latency: only its handshakes lie between."""
    variable = Variable("v", (100_000,), ready_s=0.1, needed_s=0.0)
    workload = Workload("m", (variable,), (), 0.05, 0.1, 0.0)
    two = cluster((1, 8), (1, 8), latency_s=0.0, inner_latency_s=0.0)
    across = Strategy((VariableStrategy("v", (Shard(Synchronizer.ALL_REDUCE),)),), cross_step=True)
    lowering = Lowering(workload, two, costs(FREE, payload=1.0))
    least_s = least_step_s(workload, two)
    assert least_s == pytest.approx(0.1 + 0.4 + 0.05)
    assert least_s <= lowering.step_s(plan(across, workload, 2)) < least_s + 2e-4


def test_a_variable_that_is_ready_last_and_read_first_cannot_hide():
    two = cluster((1, 8), (1, 8), latency_s=1e-5, inner_latency_s=1e-6)

    def bound_s(ready_s, needed_s):
        first = Variable("first", (25_000,), ready_s=ready_s, needed_s=needed_s)
        last = Variable("last", (25_000,), ready_s=0.0, needed_s=0.1)
        return least_step_s(Workload("m", (last, first), (), 0.1, 0.2, 0.0), two)

    assert bound_s(0.2, 0.0) == pytest.approx(0.2 + 0.1 + 0.1)
    assert bound_s(0.1, 0.1) == pytest.approx(0.3)


def test_every_host_receives_the_rows_that_ranks_elsewhere_touch():
    """A rank touches a tenth of the rows, so three other ranks touch 1 - 0.9^3 of them."""
    rows = Variable("table", (1000, 25), "float32", True, 0.0, 0.0, touched_rows=100.0)
    workload = Workload("m", (rows,), (), 0.0, 0.0, 0.0)
    hosts = (2, 8), (1, 8), (1, 0.8)
    of_three = cluster(*hosts, latency_s=0.0, inner_latency_s=0.0)
    assert least_synchronization_s(workload, of_three) == pytest.approx(100_000 * 0.271 / 1e5)
    dense = Workload("m", (replace(rows, touched_rows=None),), (), 0.0, 0.0, 0.0)
    assert least_synchronization_s(dense, of_three) == pytest.approx(100_000 / 1e5)
    even = cluster((1, 8), (1, 8), (1, 8), latency_s=0.0, inner_latency_s=0.0)
    assert least_synchronization_s(workload, even) == pytest.approx(100_000 * 0.19 / 1e6)
    assert least_synchronization_s(dense, even) == pytest.approx(4 / 3 * 100_000 / 1e6)


@given(slow_worlds())
def test_dense_gradients_need_what_all_their_bytes_need(world):
    workload, on = world
    dense = tuple(replace(each, touched_rows=None) for each in workload.variables)
    all_s = least_synchronization_s(replace(workload, variables=dense), on)
    assert all_s == pytest.approx(least_transfer_s(on, workload.grad_bytes))
