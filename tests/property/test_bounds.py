"""Lower bounds of a step hold for every plan, and the one of an interruptible channel is the largest that its subsets give."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import clusters, workloads

from autotune.cluster import Cluster, Host
from autotune.lowering.lower import Lowering
from autotune.optimizer.bounds import interruptible_s, least_step_s
from autotune.rng import generator
from autotune.sampler.random import sample
from autotune.strategy_space.cross_step import planned_order
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.workload import Variable, Workload

JOBS = st.lists(st.tuples(*[st.integers(0, 20).map(float)] * 3), min_size=1, max_size=7)
"""(ready, cost, tail) of each message."""


def of_subsets(jobs: list[tuple[float, float, float]]) -> float:
    """Of any messages, the first is ready, all are sent, and the shortest tail follows the last."""
    chosen = (own for count in range(1, len(jobs) + 1) for own in combinations(jobs, count))
    return max(min(job[0] for job in own) + sum(job[1] for job in own) + min(job[2] for job in own) for own in chosen)


@given(JOBS)
def test_an_interruptible_channel_takes_as_long_as_its_worst_subset(jobs):
    columns = [list(column) for column in zip(*jobs, strict=True)]
    assert interruptible_s(*columns) == of_subsets(jobs)
    ready_s, cost_s, tail_s = map(np.array, columns)
    forward_s = float(tail_s.max())
    assert planned_order(ready_s, cost_s, forward_s - tail_s, 0.0, forward_s).period_s >= interruptible_s(*columns)


def test_nothing_to_send_takes_no_time():
    assert interruptible_s([], [], []) == 0.0


@settings(max_examples=150, deadline=None)
@given(workloads(), clusters(), st.integers(0, 10**6))
def test_no_lossless_strategy_is_replayed_faster(workload, cluster, seed):
    space = replace(SearchSpace.default(), min_partition_bytes=0)
    wanted = plan(sample(workload, cluster, space, generator(seed, "test")), workload, cluster.world_size)
    assert Lowering(workload, cluster).step_s(wanted) >= least_step_s(workload, cluster) * (1 - 1e-9)


def test_a_variable_that_is_ready_last_and_read_first_cannot_hide():
    cluster = Cluster("c", tuple(Host(f"h{i}", 1, 1e6, 1e-5, 1e10, 1e-6) for i in range(2)))
    first = Variable("first", (25_000,), ready_s=0.2, needed_s=0.0)
    last = Variable("last", (25_000,), ready_s=0.0, needed_s=0.1)
    workload = Workload("m", (last, first), (), 0.1, 0.2, 0.0)
    assert least_step_s(workload, cluster) == pytest.approx(0.2 + 0.1 + 0.1)
    hidden = replace(workload, variables=(replace(last, needed_s=0.1), replace(first, ready_s=0.1, needed_s=0.1)))
    assert least_step_s(hidden, cluster) == pytest.approx(0.3)
