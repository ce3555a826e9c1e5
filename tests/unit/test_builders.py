"""The hand-made strategies, each against what its system does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from small_worlds import FOUR, all_shards, cluster, model, sent

from autotune.cluster import Cluster, Host
from autotune.costs.issue_order import issue_order
from autotune.errors import InvalidInput
from autotune.features.extract import extract
from autotune.jobs.campaign.generated_models import MODELS
from autotune.rng import generator
from autotune.sampler.random import sample_many
from autotune.strategy_space.builders import collectives, registry, servers
from autotune.strategy_space.builders.collectives import MIB, large_alone
from autotune.strategy_space.builders.cross_step import cross_step_all_reduce
from autotune.strategy_space.builders.direct import PIECE_BYTES, directly
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.owners import by_bandwidth
from autotune.strategy_space.plan import PlannedStrategy, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    Compressor,
    Partition,
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable

KB = model(*[250] * 6, backward_s=0.06)  # six gradients of 1000 bytes, ready every 10 ms
UNTIMED = model(*[250] * 6)
CYCLES = model(
    *(Variable(f"v{i}", (250,), ready_s=s / 1e3) for i, s in enumerate((1, 2, 3, 11, 12, 31)))
)
DTYPES = model(Variable("a", (4,)), Variable("b", (4,), "float16"), Variable("c", (4,)))
SIZES = model(10, 10, 1000, 10, 10, 10, Variable("t", (10, 1), sparse=True))
PARALLAX = model(
    Variable("dense", (8, 8)), Variable("table", (100, 8), sparse=True), Variable("bias", (8,))
)
ONE_EACH = "v0|v1|v2|v3|v4|v5"
REDUCE = Synchronizer.ALL_REDUCE
SCATTER_GATHER = Synchronizer.REDUCE_SCATTER_ALL_GATHER


def synchronizers(strategy):
    return {shard.synchronizer for shard in all_shards(strategy)}


def partitions(strategy):
    """Sizes by variable; every partition is along the first axis."""
    cut = {c.variable: c.partition for c in strategy.variables if c.partition}
    assert all(partition.axis == 0 for partition in cut.values())
    return {name: partition.sizes for name, partition in cut.items()}


@pytest.mark.parametrize("seed", range(20))
def test_ddp_buckets_are_those_of_torch_itself(seed):
    rng = generator(seed)
    sizes = rng.integers(0, 60, size=40).tolist()
    dtypes = [("float32", "bfloat16")[index] for index in rng.integers(0, 2, size=40)]
    sparse = (rng.random(40) < 0.1).tolist()
    limits = [int(rng.integers(1, 200)), int(rng.integers(1, 600))]
    fields = list(zip(sizes, dtypes, sparse, strict=True))
    workload = model(*(Variable(f"v{i:02d}", (n,), d, s) for i, (n, d, s) in enumerate(fields)))
    tensors = [torch.empty(n, dtype=getattr(torch, dtype)) for n, dtype, _ in fields]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, limits, sparse, list(range(40)))
    assert sorted(collectives.ddp_buckets(workload, limits[1], limits[0])) == sorted(theirs)
    messages = sent(collectives.ddp_default(workload, limits[1], limits[0]), workload).split("|")
    assert sorted(messages) == sorted(" ".join(f"v{i:02d}" for i in bucket) for bucket in theirs)


def test_ddp_defaults_are_those_of_torch():
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == collectives.DDP_FIRST_BUCKET_BYTES
    megabytes = model(*(Variable(f"v{i:02d}", (2**18,)) for i in range(60)))
    messages = plan(collectives.ddp_default(megabytes), megabytes, 4).messages
    assert [len(message.slices) for message in messages] == [1, 25, 25, 9]


@pytest.mark.parametrize(
    ("workload", "build", "arguments", "messages"),
    [
        (KB, collectives.reduce_scatter_all_gather, (2000, 1000), "v0|v1 v2|v3 v4|v5"),
        (KB, collectives.all_reduce_chunks, (4,), "v0 v1 v2 v3|v4 v5"),
        (KB, collectives.single_bucket, (), "v0 v1 v2 v3 v4 v5"),
        (DTYPES, collectives.single_bucket, (), "b|a c"),
        (KB, collectives.per_variable, (), ONE_EACH),
        # Horovod fuses what is ready in one cycle, up to the threshold
        (CYCLES, collectives.horovod_like, (10_000, 0.01), "v0 v1 v2|v3 v4|v5"),
        (CYCLES, collectives.horovod_like, (2000, 0.01), "v0 v1|v2|v3 v4|v5"),
        (CYCLES, collectives.horovod_like, (10_000, 1.0), "v0 v1 v2 v3 v4 v5"),
        (CYCLES, collectives.horovod_like, (0, 1.0), ONE_EACH),
        # without measured times: at 10, 20, ... 60 ms
        (KB, collectives.horovod_like, (10_000, 0.024), "v0 v1|v2 v3|v4 v5"),
        (UNTIMED, collectives.horovod_like, (10_000, 0.025), "v0 v1 v2 v3 v4 v5"),
        # ZeRO-2 closes a bucket before it holds too many elements
        (KB, collectives.zero2_like, (600,), "v0 v1|v2 v3|v4 v5"),
        (KB, collectives.zero2_like, (1,), ONE_EACH),
        (SIZES, large_alone, (120,), "v2|v0 v1 v3|v4 v5|t"),
        (SIZES, large_alone, (120, 1000), "v2|v2|v2|v2|v0 v1 v3|v4 v5|t"),
        (PARALLAX, servers.parallax, (FOUR,), "table|dense bias"),
    ],
)
def test_a_builder_sends_together_what_its_system_does(workload, build, arguments, messages):
    strategy = build(workload, *arguments)
    assert sent(strategy, workload) == messages
    if build in (collectives.reduce_scatter_all_gather, collectives.zero2_like):
        assert synchronizers(strategy) == {SCATTER_GATHER}


@pytest.mark.parametrize(
    ("build", "arguments", "rule"),
    [
        (collectives.all_reduce_chunks, (0,), "at least 1 variable, but has 0"),
        (collectives.horovod_like, (1, 0.0), r"above 0 s, but is 0\.0"),
        (collectives.horovod_like, (-1, 0.1), "at least 0 bytes, but is -1"),
        (collectives.zero2_like, (0,), "at least 1 element, but has 0"),
        (servers.byteps_like, (FOUR, 0), "at least 1 byte, but has 0"),
    ],
)
def test_a_builder_refuses_a_bad_parameter(build, arguments, rule):
    with pytest.raises(InvalidInput, match=rule):
        build(KB, *arguments)


def test_one_parameter_server_is_the_rank_with_the_widest_link():
    served = servers.parameter_server(KB, cluster(1e8, 1e9, devices=2))
    assert {message.owner for message in plan(served, KB, 4).messages} == {2}


@pytest.mark.parametrize(
    ("hosts", "loads"),
    [
        (Cluster.local(2), [130, 120]),  # 80 | 60, 50 | 30 -> 110, 110; then 20 | 10
        (cluster(1e9, 4e9), [50, 200]),
    ],
)
def test_balanced_servers_get_the_largest_first_in_proportion_to_bandwidth(hosts, loads):
    sizes = model(10, 80, 30, 50, 20, 60)
    messages = plan(servers.ps_load_balanced(sizes, hosts), sizes, 2).messages
    assert [sum(m.elements for m in messages if m.owner == rank) for rank in (0, 1)] == loads


def test_partitioned_servers_cut_large_variables_into_a_shard_per_server():
    table = Variable("table", (30, 1000))
    workload = model(Variable("bias", (10,)), table, Variable("few", (3, 20_000)))
    strategy = servers.partitioned_ps(workload, FOUR)
    assert partitions(strategy) == {"table": (8, 8, 7, 7), "few": (1, 1, 1)}
    alone = all_shards(servers.partitioned_ps(model(table), FOUR))
    assert sorted(shard.placement for shard in alone) == [0, 1, 2, 3]


def test_partitions_follow_the_divisors_of_the_first_axis():
    shapes = {"nine": (9, 4), "prime": (97,), "even": (6,), "scalar": (), "row": (1, 8)}
    workload = model(*(Variable(name, shape) for name, shape in shapes.items()))
    smallest = {"nine": (3, 3, 3), "even": (3, 3)}
    assert partitions(collectives.partitioned_all_reduce(workload)) == smallest
    chunks = collectives.partitioned_all_reduce(workload, shards_per_group=4).by_name
    groups = [[shard.group for shard in chunks[name].shards] for name in ("nine", "even")]
    assert groups == [[0, 0, 0], [1, 1]]
    workload = model((6, 2), 5, (2, 9))
    uneven = servers.uneven_partitioned_ps(workload, FOUR)
    assert partitions(uneven) == {"v0": (2, 2, 1, 1), "v1": (3, 2)}  # the first non-divisor


def test_random_axes_follow_the_seed_and_sparse_variables_are_cut_along_rows():
    workload = model(*[(4, 6, 8)] * 12, Variable("table", (10, 4), sparse=True))
    drawn, again, other = (
        collectives.random_axis_partitioned_all_reduce(workload, seed=seed) for seed in (1, 1, 2)
    )
    assert drawn == again != other
    assert {c.partition.axis for c in drawn.variables[:-1] if c.partition} == {0, 1, 2}
    assert drawn.by_name["table"].partition == Partition(0, (5, 5))


def test_parallax_reduces_dense_gradients_and_serves_sparse_ones():
    strategy = servers.parallax(PARALLAX, FOUR)
    kinds = {c.variable: (c.shards[0].synchronizer, c.sparse) for c in strategy.variables}
    dense = (REDUCE, SparseHandling.DENSE)
    served = (Synchronizer.PARAMETER_SERVER, SparseHandling.GATHER_SCATTER)
    assert kinds == {"dense": dense, "table": served, "bias": dense}
    problem = SearchSpace(tuple(Synchronizer)).violation(strategy, PARALLAX, FOUR)
    assert "the space sends sparse gradients dense, but the strategy gather_scatter" in problem


def test_cross_step_is_predicted_to_beat_every_bucket_size():
    """The example has large late layers; 1.22 was measured with a hand-made order."""
    workload = replace(MODELS["layers"].workload(), update_s=0.0)
    gigabit = Cluster("c", tuple(Host(f"h{i}", 1, 1.25e8, 5e-5, 1e10, 5e-6) for i in range(4)))

    def step_s(strategy):
        planned = PlannedStrategy.of(strategy, workload, 4)
        return extract(planned, workload, gigabit).analytic_step_s

    sizes = (1, 2, 3, 5, 8, 10, 25)
    best_s = min(step_s(collectives.ddp_default(workload, size * MIB)) for size in sizes)
    strategy = cross_step_all_reduce(workload, gigabit)
    assert strategy.cross_step and step_s(strategy) < best_s / 1.22
    # what the next forward pass needs late is issued last
    assert plan(strategy, workload, 4).messages[-1].slices[-1].variable in ("8.weight", "9.weight")
    ddp_across = replace(collectives.ddp_default(workload), cross_step=True)
    assert step_s(strategy) < 0.9 * step_s(ddp_across)
    assert SearchSpace.default().contains(strategy, workload, gigabit)


def test_byteps_cuts_into_small_pieces_and_sends_ready_urgent_ones_first():
    late = Variable("late", (100, 10), ready_s=0.020)
    workload = model(Variable("early", (1000, 10), ready_s=0.001), late)
    slow = cluster(1e6, 1e6)  # 1 MB/s: 4 KB take 4 ms
    strategy = servers.byteps_like(workload, slow, partition_bytes=4000)
    messages = plan(strategy, workload, 2).messages
    sizes = [4 * part.elements for message in messages for part in message.slices]
    assert max(sizes) <= 4000 and sum(sizes) == workload.grad_bytes
    # at 21 ms it overtakes what still waits
    assert sent(strategy, workload, 2).split("|") == ["early"] * 5 + ["late"] + ["early"] * 5
    assert {shard.placement for shard in all_shards(strategy)} == {0, 1}


def test_the_order_of_issue_never_leaves_the_link_idle_while_a_message_is_ready():
    rng = generator(3)
    for _ in range(50):
        count = int(rng.integers(1, 12))
        ready_s, taken_s = rng.random(count).tolist(), (rng.random(count) * 0.3).tolist()
        urgency = rng.integers(0, 4, size=count).tolist()
        now_s, left = 0.0, set(range(count))
        for number in issue_order(ready_s, taken_s, urgency):  # replayed step by step
            now_s = max(now_s, min(ready_s[other] for other in left))
            waiting = [other for other in left if ready_s[other] <= now_s]
            assert number == min(waiting, key=lambda other: (urgency[other], other))
            left.remove(number)
            now_s += taken_s[number]
        assert not left


def test_pieces_on_servers_are_small_and_few_enough_for_the_search_space():
    workload = model((30_000, 512), (1000, 1000), 10_000)
    strategy = servers.served_in_pieces(workload, FOUR, MIB // 4)
    assert [len(c.shards) for _, c in sorted(strategy.by_name.items())] == [40, 16, 1]  # 40 < 235
    assert SearchSpace.default().contains(strategy, workload, FOUR)
    assert {shard.placement for shard in all_shards(strategy)} == {0, 1, 2, 3}


def test_buckets_on_servers_are_merged_and_cut_to_one_size_and_balanced():
    workload = model(*[(64, 1024)] * 8, Variable("large", (16_000, 1000)))
    strategy = servers.served_in_buckets(workload, FOUR, MIB // 2)
    assert SearchSpace.default().contains(strategy, workload, FOUR)
    assert len(strategy.by_name["large"].shards) == 40  # 61 MiB would be 123 pieces
    merged = [names for names in sent(strategy, workload).split("|") if " " in names]
    assert merged == ["v0 v1", "v2 v3", "v4 v5", "v6 v7"]
    messages = plan(strategy, workload, 4).messages
    loads = [sum(m.grad_bytes for m in messages if m.owner == rank) for rank in range(4)]
    assert sum(loads) == workload.grad_bytes
    assert max(loads) - min(loads) <= 2 * max(m.grad_bytes for m in messages)


def test_seeds_are_filtered_by_the_space():
    workload = model(*[(300, 500)] * 40)
    names = [name for name, _ in registry.seed_strategies(workload, FOUR, SearchSpace.default())]
    assert names[0] == "ddp_25mib"
    two_level = "reduce_scatter_all_gather_25mib"
    assert {"partitioned_ps", two_level, "per_variable", "single_bucket"} <= set(names)
    reduced = registry.seed_strategies(workload, FOUR, SearchSpace((REDUCE,)))
    assert set().union(*(synchronizers(strategy) for _, strategy in reduced)) == {REDUCE}


def test_servers_and_reduce_scatters_are_exchanged_directly_in_the_same_messages():
    hosts = cluster(2e6, 1e6, 1e6, 5e5)
    workload = model((3000, 200), 7, (40, 50), Variable("t", (90, 64), sparse=True))
    for build in (
        lambda: servers.served_in_buckets(workload, hosts, MIB // 4),
        lambda: collectives.zero2_like(workload),
        lambda: servers.byteps_across_steps(workload, hosts),
        lambda: with_rows(servers.parallax(workload, hosts), workload),
    ):
        before = build()
        after = directly(before, workload, hosts)
        pairs = zip(
            plan(before, workload, 4).messages, plan(after, workload, 4).messages, strict=True
        )
        for old, new in pairs:
            assert (new.slices, new.sparse) == (old.slices, old.sparse)
            if old.synchronizer is REDUCE:
                assert new == old
                continue
            assert new.synchronizer is Synchronizer.DIRECT_EXCHANGE and new.owner is None
            if old.owner is None:
                assert new.shares == by_bandwidth(hosts)
            else:
                assert new.shares == tuple(float(rank == old.owner) for rank in range(4))
            dense = new.sparse is SparseHandling.DENSE
            assert new.pieces == (max(-(-new.grad_bytes // PIECE_BYTES), 1) if dense else 1)
        assert (after.cross_step, after.in_flight) == (before.cross_step, 4)
    reduced = collectives.ddp_default(workload)
    assert directly(reduced, workload, hosts) == reduced


@pytest.mark.parametrize(
    "shard",
    [
        Shard(Synchronizer.DIRECT_EXCHANGE, pieces=4, hierarchical=True),
        Shard(REDUCE, hierarchical=True),
        Shard(REDUCE, Compressor.BF16),
        Shard(REDUCE, Compressor.INT8),
        Shard(SCATTER_GATHER, Compressor.TOP_K, ratio=0.1),
        Shard(Synchronizer.PARAMETER_SERVER, Compressor.POWER_SGD, placement=1, rank=4),
    ],
    ids=lambda shard: f"{shard.synchronizer}, {shard.compressor}",
)
def test_rows_travel_flat_in_one_piece_and_without_a_compressor_that_needs_them_dense(shard):
    built = Strategy(tuple(VariableStrategy(one.name, (shard,)) for one in PARALLAX.variables))
    with_sparse = with_rows(built, PARALLAX)
    table = with_sparse.by_name["table"]
    cast = shard.compressor is Compressor.BF16
    as_rows = Shard(
        shard.synchronizer, Compressor.BF16 if cast else Compressor.NONE, placement=shard.placement
    )
    assert table.shards == (as_rows,) and table.sparse is not SparseHandling.DENSE
    assert with_sparse.by_name["dense"] == built.by_name["dense"]
    assert refusal_reason(plan(with_sparse, PARALLAX, 4)) is None


def test_servers_of_a_large_world_stay_stars():
    hosts = cluster(*[1e6] * 20, devices=4)
    workload = model((300, 200))
    served = servers.parameter_server(workload, hosts)
    assert directly(served, workload, hosts) == served
    (message,) = plan(
        directly(collectives.zero2_like(workload), workload, hosts), workload, 80
    ).messages
    assert message.synchronizer is Synchronizer.DIRECT_EXCHANGE and message.shares is None


def test_seeds_exchange_directly_where_the_space_can():
    kinds = (*SearchSpace.default().synchronizers, Synchronizer.DIRECT_EXCHANGE)
    space = replace(SearchSpace.default(), synchronizers=tuple(dict.fromkeys(kinds)))
    seeds = dict(registry.seed_strategies(KB, FOUR, space))
    direct = {Synchronizer.DIRECT_EXCHANGE}
    for name in ("parameter_server", "byteps_like", "reduce_scatter_all_gather_25mib"):
        assert synchronizers(seeds[name]) == direct, name
    table = model((300, 200), Variable("t", (9000, 64), sparse=True, touched_rows=90))
    rows = dict(registry.seed_strategies(table, FOUR, space))["parameter_server, rows"]
    assert rows.by_name["t"].sparse is SparseHandling.GATHER_SCATTER
    assert [shard.pieces for shard in rows.by_name["t"].shards] == [1]
    star = replace(space, synchronizers=(REDUCE, Synchronizer.PARAMETER_SERVER))
    stars = dict(registry.seed_strategies(KB, FOUR, star))
    assert synchronizers(stars["byteps_like"]) == {Synchronizer.PARAMETER_SERVER}


def test_seeds_of_a_sparse_model_are_tried_dense_and_as_rows():
    def seed_names(workload):
        return {n for n, _ in registry.seed_strategies(workload, FOUR, SearchSpace.default())}

    names = seed_names(model((300, 200), Variable("t", (9000, 64), sparse=True, touched_rows=90)))
    pairs = {
        f"{name}{suffix}" for name in ("ddp_25mib", "parameter_server") for suffix in ("", ", rows")
    }
    assert pairs <= names
    assert not any("rows" in name for name in seed_names(KB))


def test_the_default_space_is_what_the_runtime_enacts():
    lossless, lossy = SearchSpace.default(), SearchSpace.default(lossy=True)
    assert lossless.compressors == (Compressor.NONE,)
    assert set(lossy.compressors) == set(Compressor)
    assert set(lossy.synchronizers) == set(Synchronizer)
    assert set(lossless.sparse) == set(SparseHandling)
    assert lossless.hierarchical and lossless.cross_step
    assert lossless.ring_orders and lossless.allow_uneven
    assert (lossy.min_partition_bytes, lossy.max_shards, lossy.max_groups) == (100_000, 40, 20)


def cut(*sizes, axis=0):
    return VariableStrategy("w", (Shard(REDUCE),) * len(sizes), Partition(axis, sizes))


def whole(*shard, **fields):
    return VariableStrategy("w", (Shard(*shard, **fields),))


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (whole(Synchronizer.REDUCE_BROADCAST, placement=0), "the strategy uses reduce_broadcast"),
        (whole(REDUCE, Compressor.FP16), "but the strategy uses fp16"),
        (whole(REDUCE, hierarchical=True), "no hierarchical reduction"),
        (whole(REDUCE), "no synchronization across steps"),
        (cut(2, 2, 2), "at most 2 shards, but the strategy 3"),
        (cut(5, 1), "even partitions only"),
        (cut(1, 1, axis=1), r"axes \(0,\), but the strategy along 1"),
    ],
)
def test_the_space_gives_the_reason_why_a_strategy_is_outside(choice, reason):
    space = SearchSpace((REDUCE,), min_partition_bytes=0, max_shards=2, allow_uneven=False)
    workload = model(Variable("w", (6, 2), sparse=True))
    strategy = Strategy((choice,), cross_step="across" in reason)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(space.violation(strategy, workload, FOUR))
    assert not space.contains(strategy, workload, FOUR)


def test_a_lossy_search_proposes_only_settings_whose_convergence_a_test_shows():
    space, workload = SearchSpace.default(lossy=True), model(Variable("w", (600, 200)))
    drawn = sample_many(workload, FOUR, space, 200, seed=0)
    shards = {shard for one in drawn for choice in one.variables for shard in choice.shards}
    assert {shard.ratio for shard in shards} == {None, 0.1}
    assert {shard.rank for shard in shards} == {None, 4}
    for shard, values in (
        (Shard(REDUCE, Compressor.TOP_K, ratio=0.01), "top_k with 0.1, but the strategy uses 0.01"),
        (Shard(REDUCE, Compressor.POWER_SGD, rank=2), "power_sgd with 4, but the strategy uses 2"),
    ):
        strategy = Strategy((VariableStrategy("w", (shard,)),))
        assert values in space.violation(strategy, workload, FOUR)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"synchronizers": ()}, "at least one synchronizer"),
        ({"compressors": (Compressor.FP16,)}, "must contain 'none'"),
        ({"sparse": (SparseHandling.ALL_GATHER,)}, "must contain 'dense'"),
        ({"synchronizers": (REDUCE,) * 2}, "must differ from each other, but are all_reduce, all_"),
        ({"max_shards": 0}, "max_shards of a search space must be at least 1, but is 0"),
        ({"max_groups": 0}, "max_groups of a search space must be at least 1, but is 0"),
        ({"min_partition_bytes": -1}, "at least 0, but is -1"),
        ({"power_sgd_ranks": ()}, "power_sgd_ranks of a search space must have at least one value"),
        ({"cross_step": True, "cross_step_refused": "clipped"}, "where it is refused: clipped"),
    ],
)
def test_a_bad_space_is_refused_with_rule_and_value(fields, message):
    with pytest.raises(InvalidInput, match=message):
        SearchSpace(**{"synchronizers": (REDUCE,), **fields})
