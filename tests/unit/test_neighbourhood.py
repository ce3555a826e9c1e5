"""Moves propose other plans, not other names of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from autotune.cluster import Cluster, Host
from autotune.rng import generator
from autotune.strategy_space.builders.collectives import per_variable
from autotune.strategy_space.moves.changed_owners import changed_owners
from autotune.strategy_space.moves.neighbours import neighbourhood
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import SparseHandling
from autotune.workload import Variable, Workload


def cluster(hosts: int) -> Cluster:
    return Cluster("c", tuple(Host(f"h{i}", 1, 1.25e8, 1e-4, 1e10, 1e-5) for i in range(hosts)))


def picking(drawn: list[int]) -> Callable[[int], int]:
    numbers = iter(drawn)
    return lambda _: next(numbers)


@pytest.mark.parametrize("hosts", [3, 5, 7])
def test_a_host_that_gives_to_itself_changes_no_shares(hosts: int) -> None:
    for host in range(hosts):
        drawn = [3, host, host, 0]  # a part of one host's to another, which is the same
        assert changed_owners(cluster(hosts), None, False, picking(drawn)) is None


def test_a_cut_variable_that_travels_as_rows_is_one_plan_for_each_number_of_parts() -> None:
    rows = Variable("rows", (4000, 8), sparse=True)
    model = Workload("m", (rows, Variable("dense", (300, 200))), (), 0.1, 0.2)
    start = per_variable(model)
    as_rows = tuple(
        replace(choice, sparse=SparseHandling.ALL_GATHER) if choice.variable == "rows" else choice
        for choice in start.variables
    )
    start = replace(start, variables=as_rows)
    around = neighbourhood(start, model, cluster(2), SearchSpace.default(), generator(0))
    cut = Counter(
        plan(strategy, model, 2).enacted_id
        for strategy in around
        if any(choice.variable == "rows" and choice.partition for choice in strategy.variables)
    )
    assert len(cut) > 3 and set(cut.values()) == {1}


def test_a_ring_in_rank_order_is_the_plan_without_a_ring_order() -> None:
    model = Workload("m", (Variable("dense", (300, 200)),), (), 0.1, 0.2)
    plain = per_variable(model)
    assert plan(replace(plain, ring_order=(0, 1, 2)), model, 3) == plan(plain, model, 3)
    assert plan(replace(plain, ring_order=(1, 0, 2)), model, 3) != plan(plain, model, 3)
