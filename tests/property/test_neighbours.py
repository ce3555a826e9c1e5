"""Mutations: small, valid, reproducible, and of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import assert_inside, clusters, spaces, workloads

from autotune.cluster import Cluster, Host
from autotune.costs.issue_order import MessageTimes
from autotune.rng import generator
from autotune.sampler.random import sample
from autotune.strategy_space.builders.collectives import (
    all_reduce_chunks,
    ddp_default,
    per_variable,
)
from autotune.strategy_space.builders.servers import ps_load_balanced
from autotune.strategy_space.moves.neighbours import mutate
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Compressor, Shard, SparseHandling, Synchronizer
from autotune.workload import Variable, Workload

MODEL = Workload("m", tuple(Variable(f"v{9 - i}", (500, 100)) for i in range(9)))
FOUR = Cluster.local(4)
LOSSY = SearchSpace.default(lossy=True)


def messages_of(strategy):
    """What every message of the plan sends and how, without the group's number."""
    return [
        (m.slices, m.synchronizer, m.compressor, m.owner, m.hierarchical)
        for m in plan(strategy, MODEL, 4).messages
    ]


def neighbours(strategy, count, space=LOSSY):
    rng = generator(0)
    return [mutate(strategy, MODEL, FOUR, space, rng) for _ in range(count)]


@settings(deadline=None)
@given(workloads(), clusters(), spaces(), st.integers(0, 2**32))
def test_a_long_walk_stays_inside_the_space_and_is_reproducible(workload, cluster, space, seed):
    def walk():
        rng = generator(seed)
        strategy = sample(workload, cluster, space, rng)
        path = [strategy]
        for _ in range(15):
            path.append(mutate(path[-1], workload, cluster, space, rng))
        return path

    path = walk()
    assert [strategy.id for strategy in path] == [strategy.id for strategy in walk()]
    for strategy in path:
        assert_inside(space, strategy, workload, cluster)


def test_a_move_leaves_all_but_a_few_messages_as_they_were():
    start = all_reduce_chunks(MODEL, 1)
    before = set(messages_of(start))
    for neighbour in neighbours(start, 100):
        assert len(before - set(messages_of(neighbour))) <= 2


def test_every_kind_of_move_occurs_from_two_buckets():
    start = all_reduce_chunks(MODEL, 5)
    found = neighbours(start, 300)
    plans = [plan(strategy, MODEL, 4).messages for strategy in found]
    whole = [
        messages
        for strategy, messages in zip(found, plans, strict=True)
        if all(not c.partition for c in strategy.variables)
    ]
    pure = [
        messages
        for messages in whole
        if {m.synchronizer for m in messages} == {Synchronizer.ALL_REDUCE}
    ]
    assert any(len(messages) == 1 for messages in pure)  # merged
    assert any(len(messages) == 3 for messages in pure)  # split
    assert any(
        sorted(len(m.slices) for m in messages) != [4, 5] for messages in pure if len(messages) == 2
    )  # boundary
    assert any(
        {m.compressor for m in messages} == {Compressor.NONE, Compressor.BF16} for messages in pure
    )
    assert any(
        m.synchronizer is Synchronizer.PARAMETER_SERVER and len(m.slices) > 1
        for messages in whole
        for m in messages
    )  # a message
    assert any(
        m.synchronizer is Synchronizer.PARAMETER_SERVER and len(m.slices) == 1
        for messages in whole
        for m in messages
    )  # a variable
    assert any(choice.partition for strategy in found for choice in strategy.variables)
    swapped = [
        s for s in found if any(shard.priority for choice in s.variables for shard in choice.shards)
    ]
    assert swapped
    assert all(
        sorted(messages_of(s), key=repr) == sorted(messages_of(start), key=repr) for s in swapped
    )
    assert all(messages_of(s) == messages_of(start)[::-1] for s in swapped)


def test_every_field_is_reached_by_moves():
    model = Workload(
        "m", (*MODEL.variables, Variable("table", (900, 100), sparse=True)), (), 0.1, 0.2
    )
    hosts = tuple(Host(name, 2, 1e9 if name == "a" else 1e8, 1e-5, 1e10, 1e-6) for name in "abcde")
    cluster, rng = Cluster("c", hosts), generator(0)
    found = [ddp_default(model)]
    for _ in range(500):
        found.append(mutate(found[-1], model, cluster, LOSSY, rng))
    for strategy in found[::20]:
        assert_inside(LOSSY, strategy, model, cluster)
    shards = [
        shard for strategy in found for choice in strategy.variables for shard in choice.shards
    ]
    assert {shard.compressor for shard in shards} == set(Compressor)
    assert len({shard.ratio for shard in shards}) > 2 and len({shard.rank for shard in shards}) > 2
    assert {shard.synchronizer for shard in shards} == set(Synchronizer)
    assert (
        {shard.hierarchical for shard in shards}
        == {strategy.cross_step for strategy in found}
        == {True, False}
    )
    assert {strategy.by_name["table"].sparse for strategy in found} == set(SparseHandling)
    assert {(s.cross_step, s.in_flight) for s in found} == {(False, 1), (True, 1), (True, 2)}
    assert len({strategy.ring_order for strategy in found}) > 5


def test_across_steps_a_move_finds_the_order_that_is_predicted_to_be_fastest_and_a_switch_back_gives_it_up():
    large_late = Workload(
        "m",
        tuple(Variable(f"v{9 - i}", (500, 4000 if i == 1 else 100)) for i in range(9)),
        (),
        0.1,
        0.2,
    )
    slow = Cluster("c", tuple(Host(name, 1, 5e7, 1e-5, 1e10, 1e-6) for name in "abcd"))
    space = SearchSpace((Synchronizer.ALL_REDUCE,), cross_step=True, max_shards=1)
    rng = generator(0)

    def times(strategy):
        return MessageTimes.of(plan(strategy, large_late, 4), large_late, slow)

    start = per_variable(large_late)
    across = next(
        s for s in (mutate(start, large_late, slow, space, rng) for _ in range(100)) if s.cross_step
    )
    assert times(across).period_s == pytest.approx(times(across).ordered(100).bound_s, rel=2e-3)
    assert times(across).period_s < 0.95 * times(replace(start, cross_step=True)).period_s
    back = next(
        s
        for s in (mutate(across, large_late, slow, space, rng) for _ in range(100))
        if not s.cross_step
    )
    assert back == start


def test_a_partition_can_be_undone():
    space = SearchSpace((Synchronizer.ALL_REDUCE,))
    start = per_variable(MODEL)
    cut = next(
        strategy
        for strategy in neighbours(start, 100, space)
        if any(choice.partition for choice in strategy.variables)
    )
    assert any(
        all(not choice.partition for choice in strategy.variables)
        for strategy in neighbours(cut, 100, space)
    )


def test_a_switch_to_a_server_takes_the_least_loaded_one():
    """Of four equal variables two are on rank 0 and none on rank 3. What leaves rank 0 goes to rank
    3; any other was alone on its server, which is as free as rank 3 without it and comes first.
    """
    model = Workload("m", MODEL.variables[:4])
    start = ps_load_balanced(
        model, Cluster.local(3)
    )  # rank 0 has two, ranks 1 and 2 one each, rank 3 none
    before = {choice.variable: choice.shards[0].placement for choice in start.variables}
    assert sorted(before.values()) == [0, 0, 1, 2]
    space = SearchSpace(
        (Synchronizer.PARAMETER_SERVER, Synchronizer.REDUCE_BROADCAST), max_shards=1
    )
    rng = generator(0)
    seen = set()
    for _ in range(80):
        for choice in mutate(start, model, FOUR, space, rng).variables:
            if choice.shards[0].synchronizer is Synchronizer.REDUCE_BROADCAST:
                seen.add((before[choice.variable], choice.shards[0].placement))
    assert seen == {(0, 3), (1, 1), (2, 2)}


def test_splits_stop_at_the_groups_of_the_space_and_larger_hand_made_strategies_are_kept():
    space = SearchSpace((Synchronizer.ALL_REDUCE,), max_groups=2, max_shards=1)
    start = all_reduce_chunks(MODEL, 3)
    counts = {len(messages_of(strategy)) for strategy in neighbours(start, 60, space)}
    assert counts == {2, 3}


def test_where_no_move_is_possible_the_strategy_itself_comes_back():
    one = Workload("m", (Variable("v", (4,)),))
    start = ddp_default(one)
    assert mutate(start, one, FOUR, SearchSpace((Synchronizer.ALL_REDUCE,)), generator(0)) is start


def test_only_a_swap_gives_up_gradient_ready_order():
    """A whole variable that leaves a group can make the group ready earlier than messages that
    followed it.
    """
    start = ddp_default(MODEL, bucket_bytes=500_000, first_bucket_bytes=500_000)
    group = Shard(Synchronizer.ALL_REDUCE, group=0)
    interleaved = [
        replace(c, shards=(group,)) if c.variable in ("v9", "v2") else c for c in start.variables
    ]
    for strategy in neighbours(replace(start, variables=tuple(interleaved)), 400):
        if any(shard.priority for choice in strategy.variables for shard in choice.shards):
            assert set(messages_of(strategy)) == set(
                messages_of(replace(start, variables=tuple(interleaved)))
            )
