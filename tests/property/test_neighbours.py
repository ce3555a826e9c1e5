"""Mutations: small, valid, reproducible, and of every kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_examples import examples
from small_worlds import FOUR, all_shards, cluster, model
from worlds import assert_every_in_flight, assert_inside, clusters, spaces, workloads

from autotune.cluster import Cluster
from autotune.costs.issue_order import MessageTimes
from autotune.rng import generator
from autotune.sampler.random import sample
from autotune.strategy_space.builders.collectives import (
    all_reduce_chunks,
    ddp_default,
    per_variable,
)
from autotune.strategy_space.builders.servers import ps_load_balanced
from autotune.strategy_space.moves.choices import InTurn
from autotune.strategy_space.moves.draft import Draft
from autotune.strategy_space.moves.neighbours import MOVES, mutate, neighbourhood
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Compressor, Shard, SparseHandling, Synchronizer
from autotune.workload import Variable
from autotune.zoo.assumed_models import assumed_ops

MODEL = model(*(Variable(f"v{9 - i}", (500, 100)) for i in range(9)))
LOSSY = SearchSpace.default(lossy=True)
REDUCE, SERVER = Synchronizer.ALL_REDUCE, Synchronizer.PARAMETER_SERVER


def messages_of(strategy):
    """The content and method of every message, without the group's number."""
    return [
        (m.slices, m.synchronizer, m.compressor, m.owner, m.hierarchical)
        for m in plan(strategy, MODEL, 4).messages
    ]


def neighbours(strategy, count, space=LOSSY, workload=MODEL, on=FOUR):
    rng = generator(0)
    return [mutate(strategy, workload, on, space, rng) for _ in range(count)]


def is_cut(strategy):
    return any(choice.partition for choice in strategy.variables)


def is_reordered(strategy):
    return any(shard.priority for shard in all_shards(strategy))


@settings(max_examples=examples(100), deadline=None)
@given(workloads(), clusters(), spaces(), st.integers(0, 2**32))
def test_a_long_walk_stays_inside_the_space_and_is_reproducible(workload, on, space, seed):
    def walk():
        rng = generator(seed)
        path = [sample(workload, on, space, rng)]
        for _ in range(15):
            path.append(mutate(path[-1], workload, on, space, rng))
        return path

    path = walk()
    assert [strategy.id for strategy in path] == [strategy.id for strategy in walk()]
    for strategy in path:
        assert_inside(space, strategy, workload, on)


def test_a_move_leaves_all_but_a_few_messages_as_they_were():
    start = all_reduce_chunks(MODEL, 1)
    before = set(messages_of(start))
    for neighbour in neighbours(start, 100):
        assert len(before - set(messages_of(neighbour))) <= 2


def test_a_move_leaves_where_replicas_read_variables():
    remote = replace(ps_load_balanced(MODEL, FOUR), local_copies=False)
    assert not any(neighbour.local_copies for neighbour in neighbours(remote, 10))


def test_every_kind_of_move_occurs_from_two_buckets():
    start = all_reduce_chunks(MODEL, 5)
    moved = neighbours(start, 300)
    whole = [plan(strategy, MODEL, 4).messages for strategy in moved if not is_cut(strategy)]
    pure = [messages for messages in whole if {m.synchronizer for m in messages} == {REDUCE}]
    assert {len(messages) for messages in pure} >= {1, 2, 3}  # merged and split
    lengths = {tuple(sorted(len(m.slices) for m in messages)) for messages in pure}
    assert any(len(buckets) == 2 and buckets != (4, 5) for buckets in lengths)  # a boundary moved
    compressors = [{m.compressor for m in messages} for messages in pure]
    assert {Compressor.NONE, Compressor.BF16} in compressors
    served = {len(m.slices) > 1 for messages in whole for m in messages if m.synchronizer is SERVER}
    assert served == {True, False}  # a message, and a variable
    assert any(map(is_cut, moved))
    swapped = [messages_of(strategy) for strategy in moved if is_reordered(strategy)]
    assert swapped and all(messages == messages_of(start)[::-1] for messages in swapped)


def test_every_field_is_reached_by_moves():
    table = Variable("table", (900, 100), sparse=True)
    workload = model(*MODEL.variables, table, forward_s=0.1, backward_s=0.2)
    on, rng = cluster(1e9, *[1e8] * 4, devices=2), generator(0)
    path = [ddp_default(workload)]
    space = replace(LOSSY, top_k_ratios=(0.001, 0.01, 0.1), power_sgd_ranks=(1, 2, 4, 8))
    for _ in range(700):
        path.append(mutate(path[-1], workload, on, space, rng))
    others = [ddp_default(workload)]  # the path soon exchanges some message directly
    for _ in range(100):
        others.append(mutate(others[-1], workload, on, space.without_direct(), rng))
    for strategy in path[::20]:
        assert_inside(space, strategy, workload, on)
    shards = [shard for strategy in path for shard in all_shards(strategy)]
    assert {shard.compressor for shard in shards} == set(Compressor)
    assert len({shard.ratio for shard in shards}) > 2 and len({shard.rank for shard in shards}) > 2
    assert {shard.synchronizer for shard in shards} == set(SearchSpace.default().synchronizers)
    assert {shard.hierarchical for shard in shards} == {True, False}
    assert {strategy.by_name["table"].sparse for strategy in path} == set(SparseHandling)
    assert_every_in_flight([*path, *others])
    assert len({strategy.ring_order for strategy in path}) > 5


def test_across_steps_a_move_takes_the_predicted_order_and_a_move_back_drops_it():
    late = [Variable(f"v{9 - i}", (500, 4000 if i == 1 else 100)) for i in range(9)]
    workload = model(*late, forward_s=0.1, backward_s=0.2)
    slow = cluster(*[5e7] * 4)
    space = SearchSpace((REDUCE,), cross_step=True, max_shards=1)

    def times(strategy):
        return MessageTimes.of(plan(strategy, workload, 4), workload, slow)

    start = per_variable(workload)
    across = next(s for s in neighbours(start, 100, space, workload, slow) if s.cross_step)
    assert times(across).period_s == pytest.approx(times(across).ordered(100).bound_s, rel=2e-3)
    assert times(across).period_s < 0.95 * times(replace(start, cross_step=True)).period_s
    moved_on = neighbours(across, 100, space, workload, slow)
    assert next(s for s in moved_on if not s.cross_step) == start


def test_a_partition_can_be_undone():
    space = SearchSpace((REDUCE,))
    cut = next(s for s in neighbours(per_variable(MODEL), 100, space) if is_cut(s))
    assert not all(map(is_cut, neighbours(cut, 100, space)))


def test_a_switch_to_a_server_takes_the_least_loaded_one():
    """A variable that leaves the two on rank 0 goes to the free rank 3.

    Any other was alone on its server, which is as free as rank 3 without it and comes first.
    """
    workload = model(*MODEL.variables[:4])
    start = ps_load_balanced(workload, Cluster.local(3))
    before = {choice.variable: choice.shards[0].placement for choice in start.variables}
    assert sorted(before.values()) == [0, 0, 1, 2]
    space = SearchSpace((SERVER, Synchronizer.REDUCE_BROADCAST), max_shards=1)
    switched = {
        (before[choice.variable], choice.shards[0].placement)
        for strategy in neighbours(start, 80, space, workload)
        for choice in strategy.variables
        if choice.shards[0].synchronizer is Synchronizer.REDUCE_BROADCAST
    }
    assert switched == {(0, 3), (1, 1), (2, 2)}


def test_splits_stop_at_the_groups_of_the_space_but_larger_seeds_are_kept():
    space = SearchSpace((REDUCE,), max_groups=2, max_shards=1)
    moved = neighbours(all_reduce_chunks(MODEL, 3), 60, space)
    assert {len(messages_of(strategy)) for strategy in moved} == {2, 3}


def test_without_a_possible_move_the_strategy_itself_comes_back():
    start = ddp_default(model(4))
    assert mutate(start, model(4), FOUR, SearchSpace((REDUCE,)), generator(0)) is start


def test_only_a_swap_gives_up_gradient_ready_order():
    """A group that loses a whole variable can become ready before messages that followed it."""
    start = ddp_default(MODEL, bucket_bytes=500_000, first_bucket_bytes=500_000)
    group = (Shard(REDUCE, group=0),)
    interleaved = [
        replace(c, shards=group) if c.variable in ("v9", "v2") else c for c in start.variables
    ]
    start = replace(start, variables=tuple(interleaved))
    for strategy in neighbours(start, 400):
        if is_reordered(strategy):
            assert set(messages_of(strategy)) == set(messages_of(start))


@settings(deadline=None, max_examples=examples(20))
@given(workloads(), clusters(), spaces(), st.integers(0, 2**32))
def test_the_neighbourhood_is_inside_the_space_and_names_each_neighbour_once(
    workload, on, space, seed
):
    start = sample(workload, on, space, generator(seed))
    first = list(islice(neighbourhood(start, workload, on, space, generator(seed)), 60))
    assert start not in first and len(set(first)) == len(first)
    for neighbour in first:
        assert_inside(space, neighbour, workload, on)


def test_every_random_move_leads_into_the_neighbourhood():
    """Variables of two rows are cut in two or not at all, so shares of shards are no samples."""
    table = Variable("table", (2, 100), sparse=True)
    workload = model(*(Variable(f"v{9 - i}", (2, 100)) for i in range(5)), table, forward_s=0.1)
    on = cluster(1e9, 2e8, 1e8)
    start = sample(workload, on, LOSSY, generator(4))
    around = set(neighbourhood(start, workload, on, LOSSY, generator(0)))
    rings = {neighbour.ring_order for neighbour in around}
    for neighbour in neighbours(start, 1500, LOSSY, workload, on):
        assert neighbour in around or neighbour.ring_order not in rings


def test_the_first_neighbours_are_of_all_kinds():
    start = all_reduce_chunks(MODEL, 5)
    first = list(islice(neighbourhood(start, MODEL, FOUR, LOSSY, generator(0)), 12))
    assert any(neighbour.cross_step for neighbour in first)
    assert any(map(is_cut, first)) and any(map(is_reordered, first))
    assert {len(messages_of(neighbour)) for neighbour in first} >= {1, 3}


def test_the_first_neighbours_are_a_fair_sample_of_messages_and_variables():
    """They reach the last messages of the issue order, and large variables that are ready late."""
    workload = assumed_ops("bert-base").workload()
    rng = generator(0)
    around = neighbourhood(per_variable(workload), workload, FOUR, SearchSpace.default(), rng)
    choices = [choice for one in islice(around, 600) for choice in one.variables]
    switched = {c.variable for c in choices if c.shards[0].synchronizer is not REDUCE}
    assert {variable.name for variable in workload.variables[-3:]} & switched
    assert len(switched) > len(workload.variables) / 2
    third_largest = sorted(workload.variables, key=lambda variable: variable.grad_bytes)[-3]
    assert third_largest.name in {choice.variable for choice in choices if choice.partition}


def test_another_seed_gives_the_same_neighbours_in_another_order():
    space = SearchSpace((REDUCE, SERVER), max_shards=1)
    start = all_reduce_chunks(MODEL, 3)
    one, same, other = (
        list(neighbourhood(start, MODEL, FOUR, space, generator(seed))) for seed in (0, 0, 1)
    )
    assert one == same != other and set(one) == set(other)


@pytest.mark.parametrize("kind", MOVES, ids=lambda move: move.__name__)
def test_a_kind_of_move_that_changes_nothing_asks_for_no_choices(kind):
    """In a lossless job; a draft for each of thousands of messages would take the round's time."""
    start = per_variable(MODEL)
    changed = [
        kind(Draft(start, MODEL, FOUR, SearchSpace.default(), choices))
        for choices in InTurn(generator(0))
    ]
    assert any(changed) or len(changed) == 1
