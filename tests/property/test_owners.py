"""Owners and pieces of direct exchanges are drawn, moved, encoded and chosen by bandwidth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skopt.space import Space
from small_worlds import all_shards, cluster, model
from worlds import assert_inside

from autotune.lowering.lower import Lowering
from autotune.rng import generator
from autotune.sampler.encodings import SpaceChoices
from autotune.sampler.random import sample_many
from autotune.strategy_space.builders.collectives import per_variable
from autotune.strategy_space.constraints import MAX_SHARED_RANKS
from autotune.strategy_space.moves.changed_owners import changed_owners, drawn_owners, moved
from autotune.strategy_space.moves.choices import Drawn
from autotune.strategy_space.moves.neighbours import mutate
from autotune.strategy_space.owners import by_bandwidth, host_parts, one_owner
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy, Synchronizer
from autotune.workload import Variable

DIRECT = Synchronizer.DIRECT_EXCHANGE
MIXED = cluster(2e8, 1e8, 1e8, 5e7, devices=2)
TABLE = Variable("table", (900, 100), sparse=True)
WORKLOAD = model((3000, 200), (400, 300), (50,), TABLE, forward_s=0.1, backward_s=0.2)
SPACE = replace(SearchSpace.default(lossy=True), synchronizers=(Synchronizer.ALL_REDUCE, DIRECT))


def test_in_large_worlds_all_ranks_own_equal_parts() -> None:
    """A strategy of thousands of shards would hold as many shares of each rank."""
    large = cluster(2e8, 1e8, devices=MAX_SHARED_RANKS)
    rng = generator(0, "owners")
    assert {drawn_owners(large, rng) for _ in range(20)} == {None}
    assert {changed_owners(large, None, False, lambda count: int(rng.integers(count)))} == {None}
    small = cluster(2e8, 1e8, devices=MAX_SHARED_RANKS // 2)
    assert by_bandwidth(large) is None and by_bandwidth(small) is not None
    assert one_owner(large, 1) is None and one_owner(small, 1) is not None


def assert_reaches_all(strategies: list[Strategy]) -> None:
    """All lie in the space, are predicted, and differ in owners, pieces and pieces in flight."""
    for strategy in strategies[::10]:
        assert_inside(SPACE, strategy, WORKLOAD, MIXED)
    shards = [shard for strategy in strategies for shard in all_shards(strategy)]
    assert {shard.synchronizer for shard in shards} == set(SPACE.synchronizers)
    owners = {shard.shares for shard in shards}
    assert {None, by_bandwidth(MIXED)} < owners and any(
        shares and max(shares) == 1 for shares in owners
    )
    assert len({shard.pieces for shard in shards}) > 3
    assert {strategy.in_flight for strategy in strategies if strategy.direct} == set(range(1, 9))
    within = [s.in_flight for s in strategies if not s.cross_step and not s.direct]
    assert set(within) == {1}
    lowering = Lowering(WORKLOAD, MIXED)
    for strategy in strategies[:: len(strategies) // 10]:
        assert lowering.step_s(plan(strategy, WORKLOAD, MIXED.world_size)) >= WORKLOAD.compute_s


def test_random_draws_reach_every_kind_of_owner() -> None:
    assert_reaches_all(sample_many(WORKLOAD, MIXED, SPACE, 150, seed=0))


def test_moves_reach_every_kind_of_owner() -> None:
    path, rng = [per_variable(WORKLOAD)], generator(0)
    for _ in range(500):
        path.append(mutate(path[-1], WORKLOAD, MIXED, SPACE, rng))
    assert_reaches_all(path)


def test_points_of_the_encoding_reach_every_kind_of_owner() -> None:
    encoding = SpaceChoices(WORKLOAD, MIXED, SPACE, seed=0)
    dimensions = encoding.dimensions()
    assert {"owners", "pieces", "in flight"} <= {dimension.name for dimension in dimensions}
    points = Space(dimensions).rvs(n_samples=150, random_state=0)
    assert_reaches_all([encoding.strategy(point) for point in points])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([5e7, 1e8, 2e8]), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 10**6),
)
def test_drawn_and_changed_owners_are_shares_in_which_ranks_of_a_host_are_equal_or_one_owns_all(
    rates, devices, seed
) -> None:
    on, rng = cluster(*rates, devices=devices), generator(seed)
    shares = drawn_owners(on, rng)
    for _ in range(5):
        if shares is not None:
            assert len(shares) == on.world_size and sum(shares) == pytest.approx(1)
            by_host = np.array(shares).reshape(-1, devices)
            assert max(shares) == 1 or (by_host == by_host[:, :1]).all()
        shares = changed_owners(on, shares, False, Drawn(rng).pick)


def test_a_part_of_one_hosts_share_goes_to_another_host() -> None:
    assert host_parts(MIXED, by_bandwidth(MIXED)).tolist() == pytest.approx([0.6, 0.2, 0.2, 0])
    given_away = moved(MIXED, by_bandwidth(MIXED), giver=0, taker=3, part=0.5)
    assert host_parts(MIXED, given_away).tolist() == pytest.approx([0.3, 0.2, 0.2, 0.3])
    assert one_owner(MIXED, 1) == (0, 1, 0, 0, 0, 0, 0, 0)
    assert by_bandwidth(cluster(1e8, 1e8, 1e8)) is None
