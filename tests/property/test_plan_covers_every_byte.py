"""Whatever proposes a strategy: its plan sends every gradient element once, and is the same in
every process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from known_examples import examples
from worlds import assert_inside, assert_sends_every_byte_once, clusters, spaces, workloads

from autotune.cluster import Cluster
from autotune.rng import generator
from autotune.sampler.random import sample, sample_many
from autotune.strategy_space.builders.collectives import horovod_like
from autotune.strategy_space.builders.direct import directly
from autotune.strategy_space.builders.registry import BUILDERS, seed_strategies
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.builders.servers import partitioned_ps
from autotune.strategy_space.moves.neighbours import mutate
from autotune.strategy_space.plan import Message, Plan, message_of, plan, slices_of
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import SparseHandling, Strategy, Synchronizer
from autotune.workload import Variable, Workload


@settings(max_examples=examples(100), deadline=None)
@given(workloads(), clusters(), spaces(), st.integers(0, 2**32))
def test_sampled_and_mutated_strategies_send_every_byte_once_and_stay_inside_the_space(
    workload, cluster, space, seed
):
    rng = generator(seed)
    strategy = sample(workload, cluster, space, rng)
    assert_inside(space, strategy, workload, cluster)
    for _ in range(5):
        strategy = mutate(strategy, workload, cluster, space, rng)
        assert_inside(space, strategy, workload, cluster)


def slow_messages(strategy: Strategy, workload: Workload) -> tuple[Message, ...]:
    """The messages of a plan without any shortcut: every shard is compared with every group."""
    groups: dict[Any, list[tuple[Any, ...]]] = {}
    for position, variable in enumerate(workload.variables):
        choice = strategy.by_name[variable.name]
        for number, part in enumerate(slices_of(variable, choice)):
            shard = choice.shards[number]
            merges = shard.group is not None and choice.sparse is SparseHandling.DENSE
            key = (replace(shard, priority=0), variable.dtype) if merges else (position, number)
            groups.setdefault(key, []).append(
                (shard, part, position, variable.dtype, choice.sparse)
            )
    issued = []
    for members in groups.values():
        shards, parts, positions, dtypes, sparse = zip(*members, strict=True)
        priority = (
            0
            if strategy.cross_step and workload.reads_norms
            else min(shard.priority for shard in shards)
        )
        turn = priority, max(positions), min(positions), parts[0].start
        issued.append((turn, message_of(shards[0], parts, dtypes[0], sparse[0])))
    return tuple(message for _, message in sorted(issued, key=lambda entry: entry[0]))


@settings(max_examples=examples(100), deadline=None)
@given(workloads(), clusters(), spaces(), st.integers(0, 2**32), st.booleans())
def test_a_plan_has_the_messages_of_its_slow_twin(workload, cluster, space, seed, norms):
    workload, rng = replace(workload, reads_norms=norms), generator(seed)
    strategy = sample(workload, cluster, space, rng)
    for _ in range(4):
        varied = tuple(
            replace(
                choice,
                shards=tuple(replace(s, priority=int(rng.integers(3))) for s in choice.shards),
            )
            for choice in strategy.variables
        )
        for each in (strategy, replace(strategy, variables=varied)):
            planned = plan(each, workload, cluster.world_size)
            assert planned.messages == slow_messages(each, workload)
        strategy = mutate(strategy, workload, cluster, space, rng)


@settings(max_examples=examples(100), deadline=None)
@given(workloads(), clusters(), st.integers(0, 500), st.sampled_from([1e-3, 0.015, 10.0]))
def test_hand_made_strategies_send_every_byte_once(workload, cluster, bound_bytes, cycle_time_s):
    for build in BUILDERS.values():
        assert_sends_every_byte_once(build(workload, cluster), workload, cluster.world_size)
    assert_sends_every_byte_once(
        horovod_like(workload, bound_bytes, cycle_time_s), workload, cluster.world_size
    )
    assert_sends_every_byte_once(
        partitioned_ps(workload, cluster, min_partition_bytes=bound_bytes),
        workload,
        cluster.world_size,
    )


@settings(max_examples=examples(100), deadline=None)
@given(workloads(), clusters(), spaces())
def test_seeds_lie_inside_the_space_and_differ(workload, cluster, space):
    seeds = list(seed_strategies(workload, cluster, space))
    for name, strategy in seeds:
        built = BUILDERS[name.removesuffix(", rows")](workload, cluster)
        if Synchronizer.DIRECT_EXCHANGE in space.synchronizers:
            built = directly(built, workload, cluster)
        assert strategy == (with_rows(built, workload) if name.endswith(", rows") else built)
        assert_inside(space, strategy, workload, cluster)
    assert len({strategy.id for _, strategy in seeds}) == len(seeds)


@settings(max_examples=examples(100), deadline=None)
@given(workloads(), clusters(), spaces(), st.integers(0, 2**32))
def test_strategy_and_plan_survive_json_with_the_same_id(workload, cluster, space, seed):
    strategy = sample(workload, cluster, space, generator(seed))
    assert (again := Strategy.from_json(strategy.to_json())) == strategy
    assert again.id == strategy.id
    planned = plan(strategy, workload, cluster.world_size)
    assert (read := Plan.from_json(planned.to_json())) == planned
    assert read.id == planned.id == plan(again, workload, cluster.world_size).id
    assert Workload.from_data(json.loads(json.dumps(workload.to_data()))) == workload


FRESH = """
import json, sys
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Strategy, Synchronizer
from autotune.workload import Workload
data = json.load(sys.stdin)
workload = Workload.from_data(data["workload"])
print(json.dumps([plan(Strategy.from_data(one), workload, 3).id for one in data["strategies"]]))
"""


def test_the_plan_is_identical_in_a_fresh_process_with_another_hash_seed():
    workload = Workload(
        "m",
        tuple(
            Variable(f"v{i}", (90, 40 + i), "float16" if i % 3 == 0 else "float32")
            for i in range(8)
        ),
    )
    cluster = Cluster.local(3)
    strategies = sample_many(workload, cluster, SearchSpace.default(lossy=True), 20, seed=1)
    sent = json.dumps(
        {
            "workload": workload.to_data(),
            "strategies": [strategy.to_data() for strategy in strategies],
        }
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    run = subprocess.run(
        [sys.executable, "-c", FRESH],
        input=sent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout) == [plan(strategy, workload, 3).id for strategy in strategies]
