"""Every point of the encoding is a strategy of the space, and all kinds of choices are
reached.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from known_examples import examples
from skopt.space import Categorical
from worlds import assert_every_in_flight

from autotune.cluster import Cluster, Host
from autotune.sampler.bayes import BayesianSearch
from autotune.sampler.encodings import SpaceChoices
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Compressor, SparseHandling, Synchronizer
from autotune.workload import Variable, Workload

VARIABLES = (
    Variable("head", (1000, 256)),
    Variable("bias", (1000,)),
    Variable("half", (300, 300), dtype="float16"),
    Variable("scalar", ()),
    Variable("rows", (50_000, 16), sparse=True),
    Variable("only rows", (40_000, 16), sparse=True, rows_only=True),
)
MODEL = Workload("m", VARIABLES, forward_s=0.1, backward_s=0.2)
CLUSTER = Cluster(
    "c", tuple(Host(f"h{i}", 1 + i % 2, (1 + i) * 1e8, 1e-4, 1e10, 1e-6) for i in range(4))
)
SEARCHES = {
    lossy: SpaceChoices(MODEL, CLUSTER, SearchSpace.default(lossy=lossy), seed=0)
    for lossy in (False, True)
}


def values_of(dimension: Any) -> st.SearchStrategy[float | int]:
    if isinstance(dimension, Categorical):
        return st.sampled_from(dimension.categories)
    return st.floats(*dimension.bounds)


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), st.booleans())
def test_a_point_is_a_strategy_of_the_space(data: st.DataObject, lossy: bool) -> None:
    encoding = SEARCHES[lossy]
    point = [data.draw(values_of(dimension)) for dimension in encoding.dimensions()]
    strategy = encoding.strategy(point)
    assert SearchSpace.default(lossy=lossy).violation(strategy, MODEL, CLUSTER) is None
    plan(strategy, MODEL, CLUSTER.world_size)
    assert encoding.strategy(point) == strategy


def test_random_points_reach_every_kind_of_choice() -> None:
    search = BayesianSearch(SEARCHES[True], seed=1)
    points = search._optimizer.space.rvs(n_samples=400, random_state=0)
    strategies = [SEARCHES[True].strategy(point) for point in points]
    shards = {
        shard for strategy in strategies for choice in strategy.variables for shard in choice.shards
    }
    assert {shard.synchronizer for shard in shards} == set(SearchSpace.default().synchronizers)
    assert {shard.compressor for shard in shards} == set(Compressor)
    assert {choice.sparse for strategy in strategies for choice in strategy.variables} == set(
        SparseHandling
    )
    assert (
        {shard.hierarchical for shard in shards}
        == {strategy.cross_step for strategy in strategies}
        == {False, True}
    )
    assert (
        max(len(choice.shards) for strategy in strategies for choice in strategy.variables)
        == SearchSpace.default().max_shards
    )
    assert_every_in_flight(strategies)
    assert len({strategy.ring_order for strategy in strategies}) == 3  # all that four hosts have
    assert len({strategy.id for strategy in strategies}) > 300


def test_what_has_one_option_is_no_dimension() -> None:
    dense = Workload("m", (Variable("v", (100,)),))
    even = Cluster("c", tuple(Host(f"h{i}", 1, 1e8, 1e-4, 1e10, 1e-6) for i in range(4)))
    space = SearchSpace((Synchronizer.ALL_REDUCE,))
    names = [dimension.name for dimension in SpaceChoices(dense, even, space, seed=0).dimensions()]
    assert names == ["large", "parts", "groups", "planned order"]
