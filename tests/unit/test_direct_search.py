"""The search gives the sums of direct exchanges to the hosts whose links have room for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from synthetic_cluster import cluster

from autotune.cluster import Cluster
from autotune.lowering.lower import Lowering
from autotune.optimizer.bounds import least_transfer_s
from autotune.optimizer.budget import Budget
from autotune.optimizer.edits import exchanged
from autotune.optimizer.optimize import optimize
from autotune.optimizer.passes.direct_exchange import DirectExchange
from autotune.optimizer.registry import default_passes
from autotune.optimizer.replays import Replays
from autotune.optimizer.search import Search
from autotune.optimizer.state import Problem, State
from autotune.strategy_space.builders.collectives import single_bucket
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

DIRECT = Synchronizer.DIRECT_EXCHANGE
SPACE = replace(SearchSpace.default(), synchronizers=(Synchronizer.ALL_REDUCE, DIRECT))
MIXED = cluster((1, 2000), (1, 1000), (1, 1000), (1, 500))
WORKLOAD = Workload(
    "m",
    tuple(Variable(f"v{n}", (1024, 1024), ready_s=0.01 * n, needed_s=0.0) for n in range(1, 5)),
    (),
    0.02,
    0.05,
    0.001,
)


def bucket(shares: tuple[float, ...] | None, pieces: int = 16) -> Strategy:
    """All variables in one message."""
    shard = Shard(DIRECT, group=0, shares=shares, pieces=pieces)
    choices = tuple(VariableStrategy(v.name, (shard,)) for v in WORKLOAD.variables)
    return Strategy(choices, in_flight=2)


def climbed(strategy: Strategy, problem: Problem) -> tuple[State, float]:
    """Climb by the pass for owners and pieces alone."""
    replays, state = Replays(problem), State(strategy)
    step_s = replays.step_s(state)
    while True:
        proposals = list(DirectExchange().propose(state, replays.path(state)))
        best = min(proposals, key=replays.step_s)
        if replays.step_s(best) >= step_s:
            return state, step_s
        state, step_s = best, replays.step_s(best)


@pytest.mark.parametrize("on", [MIXED, cluster((2, 1000), (1, 400), (1, 4000))])
def test_replayed_owners_are_as_good_as_the_best_of_a_grid(on: Cluster) -> None:
    problem = Problem(WORKLOAD, on, SPACE)
    state, step_s = climbed(bucket(None), problem)
    (message,) = plan(state.strategy, WORKLOAD, 4).messages
    lowering, grid = Lowering(WORKLOAD, on), []
    for parts in product(range(6), repeat=4):
        if sum(parts) == 5:
            owned = bucket(tuple(part / 5 for part in parts), message.pieces)
            owned = replace(owned, in_flight=state.strategy.in_flight)
            grid.append(lowering.step_s(plan(owned, WORKLOAD, 4)))
    assert step_s <= min(grid) * 1.01
    assert step_s < 0.9 * lowering.step_s(plan(bucket(None), WORKLOAD, 4))


def test_a_search_on_mixed_hosts_exchanges_directly_and_comes_close_to_the_bound() -> None:
    found = optimize(WORKLOAD, MIXED, SPACE, budget=Budget(replays=80))
    ring = optimize(
        WORKLOAD, MIXED, replace(SPACE, synchronizers=SPACE.synchronizers[:1]), budget=Budget(80)
    )
    owners = [m.shares for m in found.plan.messages if m.synchronizer is DIRECT]
    assert owners and all(shares is not None and shares[3] < 0.05 for shares in owners)
    assert found.predicted_step_s < 0.85 * ring.predicted_step_s
    assert found.predicted_step_s < 1.3 * least_transfer_s(MIXED, WORKLOAD.grad_bytes)


def test_a_search_replays_a_plan_for_each_number_of_pieces_in_flight() -> None:
    replays = Replays(Problem(WORKLOAD, MIXED, SPACE))
    search = Search(replays.problem, replays, default_passes(), Budget())
    states = [State(replace(bucket(None), in_flight=count)) for count in (1, 2)]
    assert [search.step_s(state) for state in states] == [replays.step_s(one) for one in states]
    assert len({search.step_s(state) for state in states}) == 2


def test_a_pass_leaves_other_plans_alone_and_keeps_whole_what_must_be_whole() -> None:
    problem = Problem(WORKLOAD, MIXED, SPACE)
    replays, ring = Replays(problem), State(single_bucket(WORKLOAD))
    assert list(DirectExchange().propose(ring, replays.path(ring))) == []
    rows = replace(WORKLOAD.variables[0], sparse=True)
    sparse = replace(WORKLOAD, variables=(rows, *WORKLOAD.variables[1:]))
    handlings = [SparseHandling.GATHER_SCATTER, *[SparseHandling.DENSE] * 3]
    pairs = zip(sparse.variables, handlings, strict=True)
    mixed = Strategy(
        tuple(VariableStrategy(v.name, (Shard(DIRECT),), sparse=how) for v, how in pairs)
    )
    problem = Problem(sparse, MIXED, SPACE)
    cut = exchanged(State(mixed), problem, lambda shard: replace(shard, pieces=4), 3)
    assert [choice.shards[0].pieces for choice in cut.variables] == [1, 4, 4, 4]
    assert cut.in_flight == 3
