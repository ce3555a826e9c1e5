"""The random sampler: distinct, reproducible, under both constraints, and with mass on pure
strategies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from worlds import assert_inside, clusters, spaces, workloads

from autotune.cluster import Cluster, Host, PairLink
from autotune.costs.issue_order import MessageTimes
from autotune.costs.row_traffic import RowTraffic
from autotune.errors import InvalidInput
from autotune.rng import generator
from autotune.sampler.draws import Context, draw
from autotune.sampler.order import PlannedOrder
from autotune.sampler.random import sample, sample_many
from autotune.sampler.writer import Writer
from autotune.strategy_space.constraints import servers_of
from autotune.strategy_space.plan import plan, slices_of
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import ROOTED, Compressor, SparseHandling, Synchronizer
from autotune.workload import DTYPE_BYTES, Variable, Workload

MODEL = Workload("m", tuple(Variable(f"v{i}", (300, 200) if i % 2 else (200,)) for i in range(30)))
FOUR = Cluster.local(4)


def flat_shards(strategy, workload):
    """(shard, bytes) of all shards in gradient-ready order."""
    return [
        (shard, part.elements * DTYPE_BYTES[variable.dtype])
        for variable in workload.variables
        for shard, part in zip(
            strategy.by_name[variable.name].shards,
            slices_of(variable, strategy.by_name[variable.name]),
            strict=True,
        )
    ]


@settings(deadline=None)
@given(workloads(), clusters(), spaces(), st.integers(0, 2**32))
def test_collective_groups_are_contiguous_in_gradient_ready_order_and_bounded(
    workload, cluster, space, seed
):
    shards = flat_shards(sample(workload, cluster, space, generator(seed)), workload)
    collective = [(shard.group, size) for shard, size in shards if shard.synchronizer not in ROOTED]
    assert all(shard.group is None for shard, _ in shards if shard.synchronizer in ROOTED)
    groups = [group for group, _ in collective]
    assert groups == sorted(groups)
    assert set(groups) == set(range(len(set(groups))))
    assert len(set(groups)) <= min(space.max_groups, max(len(groups), 1))
    if sum(
        size for _, size in collective
    ):  # c_am ran with N >= the used groups, so l_avg <= total / used
        average = Fraction(sum(size for _, size in collective), len(set(groups)))
        for group in set(groups):
            assert (
                sum(size for own, size in collective if own == group)
                < average + max(size for _, size in collective) + 1
            )


SMALL = Workload("model", (Variable("a", (28,)), Variable("b", (28,)), Variable("c", (3,))))
ONE_SERVER = Cluster(
    "one fast host",
    tuple(
        Host(name, devices, link_bytes_per_s, 1e-5, 1e10, 1e-6)
        for name, devices, link_bytes_per_s in (
            *(("a", 3, 1.25e9), ("b", 3, 1.25e9), ("c", 3, 1.25e9)),
            ("d", 1, 5e9),
        )
    ),
)


@settings(deadline=None)
@given(workloads(), clusters(), spaces(), st.integers(0, 2**32))
@example(SMALL, ONE_SERVER, SearchSpace((Synchronizer.PARAMETER_SERVER,)), 0)
def test_servers_are_loaded_by_their_shares_within_the_bound_of_algorithm_1(
    workload, cluster, space, seed
):
    """Algorithm 1 runs on the shares p_j of `servers_of`, and other ranks serve nothing.

    These shares differ from the shares of the bandwidth: workers use the same links, so a host with
    a slow link may serve nothing at all. In `ONE_SERVER` the links of the slow hosts are busy with
    their own three workers, so the fast host serves every byte although it has 5 / 16.25 of the
    bandwidth of all ranks. The induction in `test_constraints` holds for any p_j that sum to 1:
    load_j <= p_j total + (1 - p_j) largest + 50 bytes, the range of the Gumbel noise.
    """
    servers = servers_of(cluster)
    shares = dict(zip(servers.ranks, servers.shares, strict=True))
    loads = dict.fromkeys(shares, 0)
    largest = 0
    for shard, size in flat_shards(sample(workload, cluster, space, generator(seed)), workload):
        if shard.placement is not None:
            loads[shard.placement] += size
            largest = max(largest, size)
    for rank, share in shares.items():
        assert loads[rank] <= share * sum(loads.values()) + (1 - share) * largest + 50


@settings(deadline=None, max_examples=40)
@given(workloads(), clusters(), spaces(), st.integers(0, 2**32))
def test_sample_many_is_distinct_inside_the_space_and_a_prefix_of_more(
    workload, cluster, space, seed
):
    strategies = sample_many(workload, cluster, space, 12, seed)
    assert len({strategy.id for strategy in strategies}) == len(strategies) >= 1
    assert strategies[:5] == sample_many(workload, cluster, space, 5, seed)
    for strategy in strategies:
        assert_inside(space, strategy, workload, cluster)


def test_pure_nearly_pure_whole_and_mixed_strategies_all_occur():
    strategies = sample_many(MODEL, FOUR, SearchSpace.default(lossy=True), 300, seed=0)
    assert len(strategies) == 300
    kinds = [
        [shard.synchronizer for shard, _ in flat_shards(strategy, MODEL)] for strategy in strategies
    ]
    for synchronizer in SearchSpace.default().synchronizers:
        assert sum(set(own) == {synchronizer} for own in kinds) >= 15
    purest = [max(own.count(kind) for kind in own) / len(own) for own in kinds]
    assert sum(0.8 < share < 1 for share in purest) >= 15
    assert sum(share < 0.6 for share in purest) >= 15
    assert sum(strategy.lossless for strategy in strategies) >= 30
    assert (
        sum(
            all(choice.partition is None for choice in strategy.variables)
            for strategy in strategies
        )
        >= 75
    )
    assert (
        sum(any(choice.partition for choice in strategy.variables) for strategy in strategies) >= 75
    )
    sizes = [
        choice.partition.sizes
        for strategy in strategies
        for choice in strategy.variables
        if choice.partition
    ]
    assert {len(own) for own in sizes} > {2, 3, 10, 30}
    assert any(max(own) - min(own) > 1 for own in sizes)
    assert sum(max(own) - min(own) <= 1 for own in sizes) > len(sizes) / 3


def test_most_strategies_keep_gradient_ready_order_and_some_do_not():
    strategies = sample_many(MODEL, FOUR, SearchSpace.default(), 200, seed=0)
    reordered = [
        any(s.priority for s, _ in flat_shards(strategy, MODEL))
        for strategy in strategies
        if not strategy.cross_step
    ]
    assert 10 <= sum(reordered) <= 50 and len(reordered) >= 100


def test_across_steps_most_strategies_are_issued_in_an_order_predicted_to_be_good_and_some_are_not():
    model = Workload(
        "m",
        tuple(Variable(f"v{i}", (1000, 1000 if i == 3 else 50)) for i in range(30)),
        (),
        0.1,
        0.2,
    )
    slow = Cluster("c", tuple(Host(name, 1, 5e7, 1e-5, 1e10, 1e-6) for name in "abcd"))
    across = [
        strategy
        for strategy in sample_many(model, slow, SearchSpace.default(), 200, seed=0)
        if strategy.cross_step
    ]
    assert 40 <= len(across) <= 110
    good = [is_near_the_best_order(strategy, model, slow) for strategy in across]
    assert 0.7 * len(good) < sum(good) < len(good)


def test_the_order_is_planned_with_the_bytes_that_the_messages_weigh():
    tables = tuple(
        Variable(f"table{i}", (900, 100), sparse=True, touched_rows=90) for i in range(2)
    )
    model = Workload("m", (*MODEL.variables[:6], *tables), (), 0.1, 0.2)
    context, traffic = Context.of(model, FOUR, SearchSpace.default()), RowTraffic(model)
    planned, writer, rng = PlannedOrder(context), Writer(context), np.random.default_rng(0)
    for _ in range(50):
        drawn = draw(context, rng)
        messages = plan(writer.written(drawn), model, FOUR.world_size).messages
        np.testing.assert_allclose(
            planned._wire_bytes(drawn).sum(),
            traffic.collective_bytes(messages, FOUR.world_size).sum(),
        )


def is_near_the_best_order(strategy, model, cluster):
    times = MessageTimes.of(plan(strategy, model, cluster.world_size), model, cluster)
    return times.period_s <= 1.03 * times.ordered(50).period_s


def test_every_field_of_a_strategy_is_drawn():
    model = Workload(
        "m",
        (*MODEL.variables[:6], *(Variable(f"table{i}", (900, 100), sparse=True) for i in range(2))),
    )
    hosts = tuple(Host(name, 2, 1e9, 1e-5, 1e10, 1e-6) for name in "abcde")
    pairs = Cluster("c", hosts, (PairLink(("a", "c"), 1e8, 1e-5),))
    space = SearchSpace.default(lossy=True)
    strategies = sample_many(model, pairs, space, 400, seed=0)
    shards = [shard for strategy in strategies for shard, _ in flat_shards(strategy, model)]
    assert {shard.synchronizer for shard in shards} == set(Synchronizer)
    assert {(s.compressor, s.ratio, s.rank) for s in shards} == {
        s for kind in Compressor for s in space.settings_of(kind)
    }
    assert (
        {shard.hierarchical for shard in shards}
        == {strategy.cross_step for strategy in strategies}
        == {True, False}
    )
    assert {
        c.sparse
        for strategy in strategies
        for c in strategy.variables
        if c.variable.startswith("table")
    } == set(SparseHandling)
    assert {
        c.sparse
        for strategy in strategies
        for c in strategy.variables
        if c.variable.startswith("v")
    } == {SparseHandling.DENSE}
    assert {(s.cross_step, s.in_flight) for s in strategies} == {(False, 1), (True, 1), (True, 2)}
    assert len({strategy.ring_order for strategy in strategies}) > 10
    assert sum(strategy.ring_order is None for strategy in strategies) > 250


def test_ring_orders_are_drawn_only_where_hosts_differ_and_are_more_than_three():
    def rings(*hosts):
        found = sample_many(MODEL, Cluster("c", hosts), SearchSpace.default(), 120, seed=0)
        return {strategy.ring_order for strategy in found}

    hosts = [
        Host(name, 1, rate, 1e-5, 1e10, 1e-6)
        for name, rate in (("a", 1e9), ("b", 1e8), ("c", 1e9), ("d", 1e9))
    ]
    assert rings(hosts[0], *(replace(host, link_bytes_per_s=1e9) for host in hosts[1:])) == {None}
    assert rings(*hosts[:3]) == {None}
    assert rings(*hosts) == {None, (0, 2, 1, 3), (0, 1, 3, 2)}


def test_a_space_whose_script_refuses_cross_step_draws_none_and_says_why():
    space = SearchSpace.default().without_cross_step("gradients are clipped by their global norm")
    assert not any(strategy.cross_step for strategy in sample_many(MODEL, FOUR, space, 60, seed=0))
    across = next(
        strategy
        for strategy in sample_many(MODEL, FOUR, SearchSpace.default(), 60, seed=0)
        if strategy.cross_step
    )
    assert space.violation(across, MODEL, FOUR) == "gradients are clipped by their global norm"


def test_casts_are_given_only_to_gradients_that_they_shorten():
    variables = tuple(Variable(dtype, (8,), dtype) for dtype in DTYPE_BYTES)
    space = SearchSpace((Synchronizer.ALL_REDUCE,), (Compressor.NONE, Compressor.BF16))
    seen: dict[Compressor, set[Any]] = {Compressor.NONE: set(), Compressor.BF16: set()}
    for strategy in sample_many(Workload("m", variables), FOUR, space, 40, seed=0):
        for choice in strategy.variables:
            seen[choice.shards[0].compressor].add(choice.variable)
    assert seen == {Compressor.NONE: set(DTYPE_BYTES), Compressor.BF16: {"float32", "float64"}}


def test_hierarchical_reduction_occurs_only_where_hosts_have_several_devices():
    space = SearchSpace((Synchronizer.ALL_REDUCE,), hierarchical=True)
    pairs = Cluster("c", tuple(Host(name, 2, 1e9, 1e-5, 1e10, 1e-6) for name in "ab"))
    singles = Cluster("c", tuple(Host(name, 1, 1e9, 1e-5, 1e10, 1e-6) for name in "abcd"))

    def any_hierarchical(cluster):
        return any(
            s.hierarchical
            for x in sample_many(MODEL, cluster, space, 30, seed=0)
            for s, _ in flat_shards(x, MODEL)
        )

    assert any_hierarchical(pairs)
    assert not any_hierarchical(singles)
    assert not any_hierarchical(FOUR)


def test_a_space_with_few_strategies_yields_them_all_and_ends():
    one = Workload("m", (Variable("v", (4,)),))
    assert (
        len(
            sample_many(
                one, Cluster.local(1), SearchSpace((Synchronizer.PARAMETER_SERVER,)), 10, seed=0
            )
        )
        == 1
    )
    assert (
        len(sample_many(one, FOUR, SearchSpace((Synchronizer.PARAMETER_SERVER,)), 10, seed=0)) == 4
    )
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
    here = [
        strategy.id
        for strategy in sample_many(MODEL, FOUR, SearchSpace.default(lossy=True), 30, seed=7)
    ]
    for hash_seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", FRESH],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(run.stdout) == here
    assert here != [
        strategy.id
        for strategy in sample_many(MODEL, FOUR, SearchSpace.default(lossy=True), 30, seed=8)
    ]
