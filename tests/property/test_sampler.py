"""The random sampler: distinct, reproducible, balanced, and with mass on pure strategies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from known_examples import examples
from small_worlds import FOUR, all_shards, cluster, host, model
from worlds import assert_every_in_flight, assert_inside, clusters, spaces, workloads

from autotune.cluster import Cluster, PairLink
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
from autotune.workload import DTYPE_BYTES, Variable

SHAPES = [(200,), (300, 200)] * 15
MODEL = model(*SHAPES)
DEFAULT = SearchSpace.default()
LOSSY = SearchSpace.default(lossy=True)
SEEDS = st.integers(0, 2**32)


def tables(rows=None):
    return tuple(Variable(f"t{i}", (900, 100), sparse=True, touched_rows=rows) for i in range(2))


def drawn(count, seed=0, workload=MODEL, on=FOUR, space=DEFAULT):
    return sample_many(workload, on, space, count, seed)


def sizes_of(strategy, workload):
    """(shard, bytes) of all shards in gradient-ready order."""
    for variable in workload.variables:
        choice = strategy.by_name[variable.name]
        for shard, part in zip(choice.shards, slices_of(variable, choice), strict=True):
            yield shard, part.elements * DTYPE_BYTES[variable.dtype]


@settings(deadline=None)
@given(workloads(), clusters(), spaces(), SEEDS)
def test_collective_groups_are_contiguous_in_gradient_ready_order_and_bounded(
    workload, on, space, seed
):
    shards = list(sizes_of(sample(workload, on, space, generator(seed)), workload))
    assert all(shard.group is None for shard, _ in shards if shard.synchronizer in ROOTED)
    collective = [(shard.group, size) for shard, size in shards if shard.synchronizer not in ROOTED]
    groups = [group for group, _ in collective]
    used = set(groups)
    assert groups == sorted(groups) and used == set(range(len(used)))
    assert len(used) <= min(space.max_groups, max(len(groups), 1))
    sizes = [size for _, size in collective]
    if sum(sizes):  # Algorithm 2 ran with N >= the used groups, so l_avg <= total / used
        bound = Fraction(sum(sizes), len(used)) + max(sizes) + 1
        for group in used:
            assert sum(size for other, size in collective if other == group) < bound


SMALL = model(28, 28, 3)
ONE_SERVER = Cluster(
    "one fast host", (*(host(name, 3, 1.25e9) for name in "abc"), host("d", 1, 5e9))
)


@settings(deadline=None)
@given(workloads(), clusters(), spaces(), SEEDS)
@example(SMALL, ONE_SERVER, SearchSpace((Synchronizer.PARAMETER_SERVER,)), 0)
def test_servers_are_loaded_by_their_shares_within_the_bound_of_algorithm_1(
    workload, on, space, seed
):
    """Algorithm 1 runs on the shares p_j of `servers_of`, and other ranks serve nothing.

    These shares differ from the shares of the bandwidth: workers use the same links, so a host with
    a slow link may serve nothing at all. In `ONE_SERVER` the links of the slow hosts are busy with
    their own three workers, so the fast host serves every byte although it has 5 / 16.25 of the
    bandwidth of all ranks. The induction in `test_constraints` holds for any p_j that sum to 1:
    load_j <= p_j total + (1 - p_j) largest + 50 bytes, the range of the Gumbel noise.
    """
    servers = servers_of(on)
    shares = dict(zip(servers.ranks, servers.shares, strict=True))
    loads = dict.fromkeys(shares, 0)
    largest = 0
    for shard, size in sizes_of(sample(workload, on, space, generator(seed)), workload):
        if shard.placement is not None:
            loads[shard.placement] += size
            largest = max(largest, size)
    for rank, share in shares.items():
        assert loads[rank] <= share * sum(loads.values()) + (1 - share) * largest + 50


@settings(deadline=None, max_examples=examples(40))
@given(workloads(), clusters(), spaces(), SEEDS)
def test_draws_are_distinct_inside_the_space_and_a_prefix_of_more(workload, on, space, seed):
    strategies = drawn(12, seed, workload, on, space)
    assert len({strategy.id for strategy in strategies}) == len(strategies) >= 1
    assert strategies[:5] == drawn(5, seed, workload, on, space)
    for strategy in strategies:
        assert_inside(space, strategy, workload, on)


def test_pure_nearly_pure_whole_and_mixed_strategies_all_occur():
    strategies = drawn(300, space=LOSSY)
    assert len(strategies) == 300
    kinds = [[shard.synchronizer for shard in all_shards(strategy)] for strategy in strategies]
    for synchronizer in DEFAULT.synchronizers:
        assert sum(set(used) == {synchronizer} for used in kinds) >= 15
    purest = [max(used.count(kind) for kind in used) / len(used) for used in kinds]
    assert sum(0.8 < share < 1 for share in purest) >= 15
    assert sum(share < 0.6 for share in purest) >= 15
    assert sum(strategy.lossless for strategy in strategies) >= 30
    partitions = [[c.partition for c in s.variables if c.partition] for s in strategies]
    assert 75 <= sum(not cut for cut in partitions) <= 225
    sizes = [partition.sizes for cut in partitions for partition in cut]
    assert {len(shards) for shards in sizes} > {2, 3, 10, 30}
    uneven = sum(max(shards) - min(shards) > 1 for shards in sizes)
    assert 0 < uneven < len(sizes) * 2 / 3


def test_most_strategies_keep_gradient_ready_order_and_some_do_not():
    within = [strategy for strategy in drawn(200) if not strategy.cross_step]
    reordered = [any(shard.priority for shard in all_shards(strategy)) for strategy in within]
    assert 10 <= sum(reordered) <= 50 and len(reordered) >= 100


def test_most_orders_across_steps_are_predicted_to_be_good_and_some_are_not():
    shapes = [(1000, 1000 if i == 3 else 50) for i in range(30)]
    workload = model(*shapes, forward_s=0.1, backward_s=0.2)
    slow = cluster(*[5e7] * 4)
    across = [strategy for strategy in drawn(200, 0, workload, slow) if strategy.cross_step]
    assert 40 <= len(across) <= 110
    times = [MessageTimes.of(plan(strategy, workload, 4), workload, slow) for strategy in across]
    good = [time.period_s <= 1.03 * time.ordered(50).period_s for time in times]
    assert 0.7 * len(good) < sum(good) < len(good)


def test_the_order_is_planned_with_the_bytes_that_the_messages_weigh():
    workload = model(*SHAPES[:6], *tables(rows=90), forward_s=0.1, backward_s=0.2)
    context, traffic = Context.of(workload, FOUR, DEFAULT), RowTraffic(workload)
    planned, writer, rng = PlannedOrder(context), Writer(context), np.random.default_rng(0)
    for _ in range(50):
        choices = draw(context, rng)
        messages = plan(writer.written(choices), workload, FOUR.world_size).messages
        weighed = traffic.collective_bytes(messages, FOUR.world_size).sum()
        np.testing.assert_allclose(planned._wire_bytes(choices).sum(), weighed)


def test_every_field_of_a_strategy_is_drawn():
    workload = model(*SHAPES[:6], *tables())
    pairs = cluster(*[1e9] * 5, devices=2, links=(PairLink(("a", "c"), 1e8, 1e-5),))
    strategies = drawn(400, 0, workload, pairs, LOSSY)
    shards = [shard for strategy in strategies for shard in all_shards(strategy)]
    compressions = {s for kind in Compressor for s in LOSSY.settings_of(kind)}
    assert {shard.synchronizer for shard in shards} == set(SearchSpace.default().synchronizers)
    assert {(s.compressor, s.ratio, s.rank) for s in shards} == compressions
    assert {shard.hierarchical for shard in shards} == {True, False}
    handled = {(c.variable[0], c.sparse) for s in strategies for c in s.variables}
    assert handled == {("v", SparseHandling.DENSE), *(("t", way) for way in SparseHandling)}
    assert_every_in_flight(strategies)
    assert len({strategy.ring_order for strategy in strategies}) > 10
    assert sum(strategy.ring_order is None for strategy in strategies) > 250


@pytest.mark.parametrize(
    ("rates", "orders"),
    [
        ((1e9, 1e9, 1e9, 1e9), {None}),
        ((1e9, 1e8, 1e9), {None}),
        ((1e9, 1e8, 1e9, 1e9), {None, (0, 2, 1, 3), (0, 1, 3, 2)}),
    ],
)
def test_ring_orders_are_drawn_only_for_four_or_more_hosts_that_differ(rates, orders):
    assert {strategy.ring_order for strategy in drawn(120, on=cluster(*rates))} == orders


def test_a_space_whose_script_refuses_cross_step_draws_none_and_gives_the_reason():
    reason = "gradients are clipped by their global norm"
    space = DEFAULT.without_cross_step(reason)
    assert not any(strategy.cross_step for strategy in drawn(60, space=space))
    across = next(strategy for strategy in drawn(60) if strategy.cross_step)
    assert space.violation(across, MODEL, FOUR) == reason


def test_casts_are_given_only_to_gradients_that_they_shorten():
    workload = model(*(Variable(dtype, (8,), dtype) for dtype in DTYPE_BYTES))
    space = SearchSpace((Synchronizer.ALL_REDUCE,), (Compressor.NONE, Compressor.BF16))
    choices = [c for s in drawn(40, workload=workload, space=space) for c in s.variables]
    compressed = {(c.shards[0].compressor, c.variable) for c in choices}
    cast = {(Compressor.BF16, dtype) for dtype in ("float32", "float64")}
    assert compressed == cast | {(Compressor.NONE, dtype) for dtype in DTYPE_BYTES}


@pytest.mark.parametrize(
    ("on", "expected"),
    [(cluster(1e9, 1e9, devices=2), True), (cluster(*[1e9] * 4), False), (FOUR, False)],
)
def test_hierarchical_reduction_needs_several_hosts_with_several_devices(on, expected):
    space = SearchSpace((Synchronizer.ALL_REDUCE,), hierarchical=True)
    shards = [shard for strategy in drawn(30, on=on, space=space) for shard in all_shards(strategy)]
    assert any(shard.hierarchical for shard in shards) is expected


def test_a_space_with_few_strategies_yields_them_all_and_ends():
    served = SearchSpace((Synchronizer.PARAMETER_SERVER,))
    assert len(drawn(10, 0, model(4), Cluster.local(1), served)) == 1
    assert len(drawn(10, 0, model(4), FOUR, served)) == 4
    with pytest.raises(InvalidInput, match="at least 0, but is -1"):
        drawn(-1, 0, model(4))


FRESH = """
import json
from autotune.cluster import Cluster
from autotune.sampler.random import sample_many
from autotune.strategy_space.space import SearchSpace
from autotune.workload import Variable, Workload
model = Workload("m", tuple(Variable(f"v{i}", (300, 200) if i % 2 else (200,)) for i in range(30)))
space = SearchSpace.default(lossy=True)
print(json.dumps([s.id for s in sample_many(model, Cluster.local(4), space, 30, seed=7)]))
"""


def test_a_seed_gives_the_same_strategies_in_fresh_processes_with_any_hash_seed():
    here = [strategy.id for strategy in drawn(30, seed=7, space=LOSSY)]
    for hash_seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        words = [sys.executable, "-c", FRESH]
        output = subprocess.check_output(words, env=environment, text=True)
        assert json.loads(output) == here
    assert here != [strategy.id for strategy in drawn(30, seed=8, space=LOSSY)]
