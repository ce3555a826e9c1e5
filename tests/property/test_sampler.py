"""The random sampler: distinct, reproducible, under both constraints, and with mass on pure strategies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import assert_inside, clusters, spaces, workloads

from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput
from autotune.rng import generator
from autotune.sampler.random import sample, sample_many
from autotune.strategy_space.plan import slices_of
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import ROOTED, Compressor, Synchronizer
from autotune.workload import DTYPE_BYTES, Variable, Workload

MODEL = Workload("m", tuple(Variable(f"v{i}", (300, 200) if i % 2 else (200,)) for i in range(30)))
FOUR = Cluster.local(4)


def flat_shards(strategy, workload):
    """(shard, bytes) of all shards in gradient-ready order."""
    return [
        (shard, part.elements * DTYPE_BYTES[variable.dtype])
        for variable in workload.variables
        for shard, part in zip(strategy.by_name[variable.name].shards, slices_of(variable, strategy.by_name[variable.name]), strict=True)
    ]


@settings(deadline=None)
@given(workloads(), clusters(), spaces(), st.integers(0, 2**32))
def test_collective_groups_are_contiguous_in_gradient_ready_order_and_bounded(workload, cluster, space, seed):
    shards = flat_shards(sample(workload, cluster, space, generator(seed)), workload)
    collective = [(shard.group, size) for shard, size in shards if shard.synchronizer not in ROOTED]
    assert all(shard.group is None for shard, _ in shards if shard.synchronizer in ROOTED)
    groups = [group for group, _ in collective]
    assert groups == sorted(groups)
    assert set(groups) == set(range(len(set(groups))))
    assert len(set(groups)) <= min(space.max_groups, max(len(groups), 1))
    if sum(size for _, size in collective):  # c_am ran with N >= the used groups, so l_avg <= total / used
        average = Fraction(sum(size for _, size in collective), len(set(groups)))
        for group in set(groups):
            assert sum(size for own, size in collective if own == group) < average + max(size for _, size in collective) + 1


@settings(deadline=None)
@given(workloads(), clusters(), spaces(), st.integers(0, 2**32))
def test_servers_are_loaded_by_their_bandwidth_within_the_bound_of_algorithm_1(workload, cluster, space, seed):
    """See test_constraints for the bound: share of the bandwidth, the largest shard and 50 bytes."""
    served = [
        (s.placement, size)
        for s, size in flat_shards(sample(workload, cluster, space, generator(seed)), workload)
        if s.placement is not None
    ]
    rates = [cluster.own_bandwidth_bytes_per_s(rank) for rank in range(cluster.world_size)]
    total, largest = sum(size for _, size in served), max((size for _, size in served), default=0)
    for rank, rate in enumerate(rates):
        assert sum(size for placement, size in served if placement == rank) <= total * rate / sum(rates) + largest + 50


@settings(deadline=None, max_examples=40)
@given(workloads(), clusters(), spaces(), st.integers(0, 2**32))
def test_sample_many_is_distinct_inside_the_space_and_a_prefix_of_more(workload, cluster, space, seed):
    strategies = sample_many(workload, cluster, space, 12, seed)
    assert len({strategy.id for strategy in strategies}) == len(strategies) >= 1
    assert strategies[:5] == sample_many(workload, cluster, space, 5, seed)
    for strategy in strategies:
        assert_inside(space, strategy, workload, cluster)


def test_pure_nearly_pure_whole_and_mixed_strategies_all_occur():
    strategies = sample_many(MODEL, FOUR, SearchSpace.default(lossy=True), 300, seed=0)
    assert len(strategies) == 300
    kinds = [[shard.synchronizer for shard, _ in flat_shards(strategy, MODEL)] for strategy in strategies]
    for synchronizer in SearchSpace.default().synchronizers:
        assert sum(set(own) == {synchronizer} for own in kinds) >= 15
    purest = [max(own.count(kind) for kind in own) / len(own) for own in kinds]
    assert sum(0.8 < share < 1 for share in purest) >= 15
    assert sum(share < 0.6 for share in purest) >= 15
    assert sum(strategy.lossless for strategy in strategies) >= 30
    assert sum(all(choice.partition is None for choice in strategy.variables) for strategy in strategies) >= 75
    assert sum(any(choice.partition for choice in strategy.variables) for strategy in strategies) >= 75
    sizes = [choice.partition.sizes for strategy in strategies for choice in strategy.variables if choice.partition]
    assert {len(own) for own in sizes} > {2, 3, 10, 30}
    assert any(max(own) - min(own) > 1 for own in sizes)
    assert sum(max(own) - min(own) <= 1 for own in sizes) > len(sizes) / 3


def test_most_strategies_keep_gradient_ready_order_and_some_do_not():
    strategies = sample_many(MODEL, FOUR, SearchSpace.default(), 200, seed=0)
    reordered = [any(shard.priority for shard, _ in flat_shards(strategy, MODEL)) for strategy in strategies]
    assert 10 <= sum(reordered) <= 70


def test_casts_are_given_only_to_gradients_that_they_shorten():
    variables = tuple(Variable(dtype, (8,), dtype) for dtype in DTYPE_BYTES)
    space = SearchSpace((Synchronizer.ALL_REDUCE,), (Compressor.NONE, Compressor.BF16))
    seen = {Compressor.NONE: set(), Compressor.BF16: set()}
    for strategy in sample_many(Workload("m", variables), FOUR, space, 40, seed=0):
        for choice in strategy.variables:
            seen[choice.shards[0].compressor].add(choice.variable)
    assert seen == {Compressor.NONE: set(DTYPE_BYTES), Compressor.BF16: {"float32", "float64"}}


def test_hierarchical_reduction_occurs_only_where_hosts_have_several_devices():
    space = SearchSpace((Synchronizer.ALL_REDUCE,), hierarchical=True)
    pairs = Cluster("c", tuple(Host(name, 2, 1e9, 1e-5, 1e10, 1e-6) for name in "ab"))
    singles = Cluster("c", tuple(Host(name, 1, 1e9, 1e-5, 1e10, 1e-6) for name in "abcd"))

    def any_hierarchical(cluster):
        return any(s.hierarchical for x in sample_many(MODEL, cluster, space, 30, seed=0) for s, _ in flat_shards(x, MODEL))

    assert any_hierarchical(pairs)
    assert not any_hierarchical(singles)
    assert not any_hierarchical(FOUR)


def test_a_space_with_few_strategies_yields_them_all_and_ends():
    one = Workload("m", (Variable("v", (4,)),))
    assert len(sample_many(one, Cluster.local(1), SearchSpace((Synchronizer.PARAMETER_SERVER,)), 10, seed=0)) == 1
    assert len(sample_many(one, FOUR, SearchSpace((Synchronizer.PARAMETER_SERVER,)), 10, seed=0)) == 4
    with pytest.raises(InvalidInput, match="at least 0, but is -1"):
        sample_many(one, FOUR, SearchSpace.default(), -1, seed=0)


FRESH = """
import json
from autotune.cluster import Cluster
from autotune.sampler.random import sample_many
from autotune.strategy_space.space import SearchSpace
from autotune.workload import Variable, Workload
model = Workload("m", tuple(Variable(f"v{i}", (300, 200) if i % 2 else (200,)) for i in range(30)))
print(json.dumps([s.id for s in sample_many(model, Cluster.local(4), SearchSpace.default(lossy=True), 30, seed=7)]))
"""


def test_the_same_seed_gives_the_same_strategies_in_fresh_processes_whatever_the_hash_seed():
    here = [strategy.id for strategy in sample_many(MODEL, FOUR, SearchSpace.default(lossy=True), 30, seed=7)]
    for hash_seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run([sys.executable, "-c", FRESH], env=environment, capture_output=True, text=True, check=True)
        assert json.loads(run.stdout) == here
    assert here != [strategy.id for strategy in sample_many(MODEL, FOUR, SearchSpace.default(lossy=True), 30, seed=8)]
