"""The hand-made strategies, each against what its system does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from autotune.cluster import Cluster, Host
from autotune.costs.issue_order import issue_order
from autotune.errors import InvalidInput
from autotune.features.extract import extract
from autotune.jobs.campaign.generated_models import MODELS
from autotune.rng import generator
from autotune.strategy_space.builders import collectives, registry, servers
from autotune.strategy_space.builders.collectives import MIB, large_alone
from autotune.strategy_space.builders.cross_step import cross_step_all_reduce
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
from autotune.workload import Variable, Workload

KB = Workload(
    "m", tuple(Variable(f"v{i}", (250,)) for i in range(6)), backward_s=0.06
)  # six gradients of 1000 bytes
FOUR = Cluster.local(4)


def sent_names(strategy, workload, ranks=4):
    """The variables of every message, in issue order."""
    return [
        [part.variable for part in message.slices]
        for message in plan(strategy, workload, ranks).messages
    ]


@pytest.mark.parametrize("seed", range(20))
def test_ddp_buckets_are_those_of_torch_itself(seed):
    rng = generator(seed)
    sizes = rng.integers(0, 60, size=40).tolist()
    dtypes = [("float32", "bfloat16")[index] for index in rng.integers(0, 2, size=40)]
    sparse = (rng.random(40) < 0.1).tolist()
    limits = [int(rng.integers(1, 200)), int(rng.integers(1, 600))]
    variables = [
        Variable(f"v{i:02d}", (n,), dtype, s)
        for i, (n, dtype, s) in enumerate(zip(sizes, dtypes, sparse, strict=True))
    ]
    tensors = [
        torch.empty(n, dtype=getattr(torch, dtype)) for n, dtype in zip(sizes, dtypes, strict=True)
    ]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, limits, sparse, list(range(40)))
    workload = Workload("m", tuple(variables))
    ours = collectives.ddp_buckets(workload, limits[1], limits[0])
    assert sorted(ours) == sorted(theirs)
    names = sent_names(collectives.ddp_default(workload, limits[1], limits[0]), workload)
    assert sorted(names) == sorted(
        [variables[position].name for position in bucket] for bucket in theirs
    )


def test_ddp_defaults_are_those_of_torch():
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == collectives.DDP_FIRST_BUCKET_BYTES
    model = Workload(
        "m", tuple(Variable(f"v{i:02d}", (2**18,)) for i in range(60))
    )  # 60 gradients of 1 MiB
    assert [len(names) for names in sent_names(collectives.ddp_default(model), model)] == [
        1,
        25,
        25,
        9,
    ]


def test_reduce_scatter_all_gather_uses_the_buckets_of_ddp():
    ours = plan(collectives.reduce_scatter_all_gather(KB, 2000, 1000), KB, 4)
    assert {message.synchronizer for message in ours.messages} == {
        Synchronizer.REDUCE_SCATTER_ALL_GATHER
    }
    assert sent_names(collectives.reduce_scatter_all_gather(KB, 2000, 1000), KB) == [
        ["v0"],
        ["v1", "v2"],
        ["v3", "v4"],
        ["v5"],
    ]


def test_chunks_single_bucket_and_per_variable_send_as_many_messages_as_they_say():
    assert sent_names(collectives.all_reduce_chunks(KB, 4), KB) == [
        ["v0", "v1", "v2", "v3"],
        ["v4", "v5"],
    ]
    assert sent_names(collectives.single_bucket(KB), KB) == [[f"v{i}" for i in range(6)]]
    assert sent_names(collectives.per_variable(KB), KB) == [[f"v{i}"] for i in range(6)]
    with pytest.raises(InvalidInput, match="at least 1 variable, but has 0"):
        collectives.all_reduce_chunks(KB, 0)


def test_a_single_bucket_of_two_dtypes_is_two_messages():
    mixed = Workload(
        "m", (Variable("a", (4,)), Variable("b", (4,), "float16"), Variable("c", (4,)))
    )
    assert sent_names(collectives.single_bucket(mixed), mixed) == [["b"], ["a", "c"]]


def test_horovod_fuses_what_is_ready_in_one_cycle_up_to_the_threshold():
    ready = [0.001, 0.002, 0.003, 0.011, 0.012, 0.031]
    measured = Workload(
        "m", tuple(Variable(f"v{i}", (250,), ready_s=at) for i, at in enumerate(ready))
    )
    assert sent_names(collectives.horovod_like(measured, 10_000, 0.01), measured) == [
        ["v0", "v1", "v2"],
        ["v3", "v4"],
        ["v5"],
    ]
    assert sent_names(collectives.horovod_like(measured, 2000, 0.01), measured) == [
        ["v0", "v1"],
        ["v2"],
        ["v3", "v4"],
        ["v5"],
    ]
    assert sent_names(collectives.horovod_like(measured, 10_000, 1.0), measured) == [
        [f"v{i}" for i in range(6)]
    ]
    assert sent_names(collectives.horovod_like(measured, 0, 1.0), measured) == [
        [f"v{i}"] for i in range(6)
    ]


def test_horovod_spreads_gradients_evenly_over_the_backward_pass_where_no_time_was_measured():
    """Six gradients in 60 ms are ready at 10, 20, ... 60 ms; cycles of 24 ms hold two each."""
    assert sent_names(collectives.horovod_like(KB, 10_000, 0.024), KB) == [
        ["v0", "v1"],
        ["v2", "v3"],
        ["v4", "v5"],
    ]
    untimed = Workload("m", KB.variables)
    assert sent_names(collectives.horovod_like(untimed, 10_000, 0.025), untimed) == [
        [f"v{i}" for i in range(6)]
    ]
    with pytest.raises(InvalidInput, match=r"above 0 s, but is 0\.0"):
        collectives.horovod_like(KB, 1, 0.0)
    with pytest.raises(InvalidInput, match="at least 0 bytes, but is -1"):
        collectives.horovod_like(KB, -1, 0.1)


def test_one_parameter_server_is_the_rank_with_the_widest_link():
    cluster = Cluster("c", (Host("slow", 2, 1e8, 0, 1e9, 0), Host("fast", 2, 1e9, 0, 1e9, 0)))
    owners = {
        message.owner for message in plan(servers.parameter_server(KB, cluster), KB, 4).messages
    }
    assert owners == {2}


def test_balanced_servers_get_the_largest_first_and_bytes_in_proportion_to_bandwidth():
    sizes = [10, 80, 30, 50, 20, 60]
    model = Workload("m", tuple(Variable(f"v{i}", (n,)) for i, n in enumerate(sizes)))
    loads = dict.fromkeys(range(2), 0)
    for message in plan(servers.ps_load_balanced(model, Cluster.local(2)), model, 2).messages:
        loads[message.owner] += message.elements
    assert loads == {0: 130, 1: 120}  # 80 | 60, 50 | 30 -> 110, 110; then 20 | 10
    uneven = Cluster("c", (Host("a", 1, 1e9, 0, 1e9, 0), Host("b", 1, 4e9, 0, 1e9, 0)))
    slow = sum(
        m.elements
        for m in plan(servers.ps_load_balanced(model, uneven), model, 2).messages
        if m.owner == 0
    )
    assert slow == 50


def test_partitioned_servers_cut_large_variables_evenly_into_a_shard_per_server():
    model = Workload(
        "m", (Variable("bias", (10,)), Variable("table", (30, 1000)), Variable("few", (3, 20_000)))
    )
    strategy = servers.partitioned_ps(model, FOUR)
    assert strategy.by_name["table"].partition == Partition(0, (8, 8, 7, 7))
    assert strategy.by_name["few"].partition == Partition(0, (1, 1, 1))
    assert strategy.by_name["bias"].partition is None
    table = Workload("m", model.variables[1:2])
    assert sorted(
        shard.placement for shard in servers.partitioned_ps(table, FOUR).variables[0].shards
    ) == [0, 1, 2, 3]


def test_seeds_are_filtered_by_the_space():
    model = Workload("m", tuple(Variable(f"v{i}", (300, 500)) for i in range(40)))
    names = [name for name, _ in registry.seed_strategies(model, FOUR, SearchSpace.default())]
    assert names[0] == "ddp_25mib"
    assert {
        "partitioned_ps",
        "reduce_scatter_all_gather_25mib",
        "per_variable",
        "single_bucket",
    } <= set(names)
    all_reduce_only = registry.seed_strategies(model, FOUR, SearchSpace((Synchronizer.ALL_REDUCE,)))
    assert {
        shard.synchronizer for _, s in all_reduce_only for c in s.variables for shard in c.shards
    } == {Synchronizer.ALL_REDUCE}


def test_the_default_space_is_what_the_runtime_enacts():
    lossless, lossy = SearchSpace.default(), SearchSpace.default(lossy=True)
    assert lossless.compressors == (Compressor.NONE,)
    assert set(lossy.compressors) == set(Compressor)
    assert set(lossy.synchronizers) == set(Synchronizer) and set(lossless.sparse) == set(
        SparseHandling
    )
    assert (
        lossless.hierarchical
        and lossless.cross_step
        and lossless.ring_orders
        and lossless.allow_uneven
    )
    assert (lossy.min_partition_bytes, lossy.max_shards, lossy.max_groups) == (100_000, 40, 20)


@pytest.mark.parametrize(
    ("choice", "cross_step", "reason"),
    [
        (
            VariableStrategy("w", (Shard(Synchronizer.REDUCE_BROADCAST, placement=0),)),
            False,
            "but the strategy uses reduce_broadcast",
        ),
        (
            VariableStrategy("w", (Shard(Synchronizer.ALL_REDUCE, Compressor.FP16),)),
            False,
            "but the strategy uses fp16",
        ),
        (
            VariableStrategy("w", (Shard(Synchronizer.ALL_REDUCE, hierarchical=True),)),
            False,
            "no hierarchical reduction",
        ),
        (
            VariableStrategy("w", (Shard(Synchronizer.ALL_REDUCE),)),
            True,
            "no synchronization across steps",
        ),
        (
            VariableStrategy("w", (Shard(Synchronizer.ALL_REDUCE),) * 3, Partition(0, (2, 2, 2))),
            False,
            "at most 2 shards, but the strategy 3",
        ),
        (
            VariableStrategy("w", (Shard(Synchronizer.ALL_REDUCE),) * 2, Partition(0, (5, 1))),
            False,
            "even partitions only",
        ),
        (
            VariableStrategy("w", (Shard(Synchronizer.ALL_REDUCE),) * 2, Partition(1, (1, 1))),
            False,
            r"axes \(0,\), but the strategy along 1",
        ),
    ],
)
def test_the_space_says_why_a_strategy_is_outside(choice, cross_step, reason):
    space = SearchSpace(
        (Synchronizer.ALL_REDUCE,), min_partition_bytes=0, max_shards=2, allow_uneven=False
    )
    workload = Workload("m", (Variable("w", (6, 2), sparse=True),))
    strategy = Strategy((choice,), cross_step=cross_step)
    problem = space.violation(strategy, workload, FOUR)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(problem)
    assert not space.contains(strategy, workload, FOUR)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"synchronizers": ()}, "at least one synchronizer"),
        ({"compressors": (Compressor.FP16,)}, "must contain 'none'"),
        ({"sparse": (SparseHandling.ALL_GATHER,)}, "must contain 'dense'"),
        (
            {"synchronizers": (Synchronizer.ALL_REDUCE,) * 2},
            "must differ from each other, but are all_reduce, all_reduce",
        ),
        ({"max_shards": 0}, "max_shards of a search space must be at least 1, but is 0"),
        ({"max_groups": 0}, "max_groups of a search space must be at least 1, but is 0"),
        ({"min_partition_bytes": -1}, "at least 0, but is -1"),
        ({"power_sgd_ranks": ()}, "power_sgd_ranks of a search space must have at least one value"),
        (
            {"cross_step": True, "cross_step_refused": "gradients are clipped"},
            "where it is refused: gradients are clipped",
        ),
    ],
)
def test_a_bad_space_is_refused_with_rule_and_value(fields, message):
    with pytest.raises(InvalidInput, match=message):
        SearchSpace(**{"synchronizers": (Synchronizer.ALL_REDUCE,), **fields})


def cut(*variables: Variable) -> Workload:
    return Workload("m", variables, backward_s=0.01 * len(variables))


def test_zero2_closes_a_bucket_before_it_would_hold_too_many_elements():
    strategy = collectives.zero2_like(KB, bucket_elements=600)
    assert sent_names(strategy, KB) == [["v0", "v1"], ["v2", "v3"], ["v4", "v5"]]
    assert {message.synchronizer for message in plan(strategy, KB, 4).messages} == {
        Synchronizer.REDUCE_SCATTER_ALL_GATHER
    }
    assert sent_names(collectives.zero2_like(KB, bucket_elements=1), KB) == [
        [f"v{i}"] for i in range(6)
    ]
    with pytest.raises(InvalidInput, match="at least 1 element, but has 0"):
        collectives.zero2_like(KB, bucket_elements=0)


def test_partitioned_all_reduce_cuts_by_the_smallest_divisor_and_leaves_primes_whole():
    workload = cut(
        Variable("nine", (9, 4)),
        Variable("prime", (97,)),
        Variable("even", (6,)),
        Variable("scalar", ()),
        Variable("row", (1, 8)),
    )
    by_name = collectives.partitioned_all_reduce(workload).by_name
    assert by_name["nine"].partition == Partition(0, (3, 3, 3)) and by_name[
        "even"
    ].partition == Partition(0, (3, 3))
    assert all(by_name[name].partition is None for name in ("prime", "scalar", "row"))
    chunks = collectives.partitioned_all_reduce(workload, shards_per_group=4).by_name
    assert [shard.group for shard in chunks["nine"].shards] == [0, 0, 0] and [
        shard.group for shard in chunks["even"].shards
    ] == [1, 1]


def test_random_axes_follow_the_seed_and_sparse_variables_are_cut_along_rows():
    workload = cut(
        *(Variable(f"v{i}", (4, 6, 8)) for i in range(12)), Variable("table", (10, 4), sparse=True)
    )
    drawn = collectives.random_axis_partitioned_all_reduce(workload, seed=1)
    assert drawn == collectives.random_axis_partitioned_all_reduce(workload, seed=1)
    assert drawn != collectives.random_axis_partitioned_all_reduce(workload, seed=2)
    axes = {
        choice.partition.axis
        for choice in drawn.variables
        if choice.partition and choice.variable != "table"
    }
    assert axes == {0, 1, 2}
    assert drawn.by_name["table"].partition == Partition(0, (5, 5))


def test_uneven_servers_cut_by_the_smallest_number_that_does_not_divide():
    workload = cut(Variable("six", (6, 2)), Variable("odd", (5,)), Variable("two", (2, 9)))
    by_name = servers.uneven_partitioned_ps(workload, FOUR).by_name
    assert by_name["six"].partition == Partition(0, (2, 2, 1, 1)) and by_name[
        "odd"
    ].partition == Partition(0, (3, 2))
    assert by_name["two"].partition is None


def test_parallax_reduces_dense_gradients_and_serves_sparse_ones():
    workload = cut(
        Variable("dense", (8, 8)), Variable("table", (100, 8), sparse=True), Variable("bias", (8,))
    )
    by_name = servers.parallax(workload, FOUR).by_name
    assert by_name["table"].shards[0].synchronizer is Synchronizer.PARAMETER_SERVER
    assert by_name["table"].sparse is SparseHandling.GATHER_SCATTER
    assert all(
        by_name[name].shards[0].synchronizer is Synchronizer.ALL_REDUCE
        for name in ("dense", "bias")
    )
    assert sent_names(servers.parallax(workload, FOUR), workload) == [["table"], ["dense", "bias"]]
    space = SearchSpace(tuple(Synchronizer))
    assert (
        "the space sends sparse gradients dense, but the strategy gather_scatter"
        in space.violation(servers.parallax(workload, FOUR), workload, FOUR)
    )


def test_cross_step_is_predicted_to_beat_the_best_bucket_size_and_issues_what_is_needed_late_last():
    """The example's large late layers: GROUNDWORK measured 1.22 on it, over the best bucket size
    and with a hand-made order.
    """
    model = replace(MODELS["layers"].workload(), update_s=0.0)
    gigabit = Cluster("c", tuple(Host(f"h{i}", 1, 1.25e8, 5e-5, 1e10, 5e-6) for i in range(4)))

    def step_s(strategy):
        return extract(PlannedStrategy.of(strategy, model, 4), model, gigabit).analytic_step_s

    best_s = min(
        step_s(collectives.ddp_default(model, size * MIB)) for size in (1, 2, 3, 5, 8, 10, 25)
    )
    strategy = cross_step_all_reduce(model, gigabit)
    assert strategy.cross_step and step_s(strategy) < best_s / 1.22
    assert plan(strategy, model, 4).messages[-1].slices[-1].variable in ("8.weight", "9.weight")
    assert step_s(strategy) < 0.9 * step_s(replace(collectives.ddp_default(model), cross_step=True))
    assert SearchSpace.default().contains(strategy, model, gigabit)


def test_large_variables_travel_alone_and_small_ones_together():
    model = cut(
        *(Variable(f"v{i}", (size,)) for i, size in enumerate((10, 10, 1000, 10, 10, 10))),
        Variable("t", (10, 1), sparse=True),
    )
    sent = sent_names(large_alone(model, bucket_bytes=120), model)
    assert sent == [["v2"], ["v0", "v1", "v3"], ["v4", "v5"], ["t"]]
    assert len(plan(large_alone(model, 120, piece_bytes=1000), model, 4).messages) == 7


def test_byteps_cuts_into_small_pieces_and_sends_urgent_ones_first_once_they_are_ready():
    late = Variable("first_layer", (100, 10), ready_s=0.020)
    workload = cut(Variable("last_layer", (1000, 10), ready_s=0.001), late)
    slow = Cluster(
        "slow", tuple(Host(f"h{i}", 1, 1e6, 5e-5, 1e10, 5e-6) for i in range(2))
    )  # 1 MB/s: 4 KB take 4 ms
    strategy = servers.byteps_like(workload, slow, partition_bytes=4000)
    sizes = [
        4 * part.elements
        for message in plan(strategy, workload, 2).messages
        for part in message.slices
    ]
    assert max(sizes) <= 4000 and sum(sizes) == workload.grad_bytes
    order = [name for (name,) in sent_names(strategy, workload, 2)]
    assert (
        order == ["last_layer"] * 5 + ["first_layer"] + ["last_layer"] * 5
    )  # at 21 ms it overtakes what still waits
    assert {shard.placement for choice in strategy.variables for shard in choice.shards} == {0, 1}
    with pytest.raises(InvalidInput, match="at least 1 byte, but has 0"):
        servers.byteps_like(workload, slow, partition_bytes=0)


def test_the_order_of_issue_never_leaves_the_link_idle_while_a_message_is_ready():
    rng = generator(3)
    for _ in range(50):
        count = int(rng.integers(1, 12))
        ready_s, taken_s = rng.random(count).tolist(), (rng.random(count) * 0.3).tolist()
        urgency = rng.integers(0, 4, size=count).tolist()
        now_s, left = 0.0, set(range(count))
        for number in issue_order(ready_s, taken_s, urgency):  # replayed step by step
            waiting = [other for other in left if ready_s[other] <= now_s]
            if not waiting:
                now_s = min(ready_s[other] for other in left)
                waiting = [other for other in left if ready_s[other] <= now_s]
            assert number == min(waiting, key=lambda other: (urgency[other], other))
            left.remove(number)
            now_s += taken_s[number]
        assert not left


def test_pieces_on_servers_are_small_and_few_enough_for_the_search_space():
    model = Workload(
        "m",
        (
            Variable("large", (30_000, 512)),
            Variable("middle", (1000, 1000)),
            Variable("small", (10_000,)),
        ),
    )
    strategy = servers.served_in_pieces(model, FOUR, MIB // 4)
    counts = {choice.variable: len(choice.shards) for choice in strategy.variables}
    assert counts == {"large": 40, "middle": 16, "small": 1}  # 58.6 MiB would be 235 pieces
    assert SearchSpace.default().contains(strategy, model, FOUR)
    assert {shard.placement for choice in strategy.variables for shard in choice.shards} == {
        0,
        1,
        2,
        3,
    }


def test_buckets_on_servers_are_merged_and_cut_to_one_size_and_balanced():
    names = [f"v{number}" for number in range(8)]
    model = Workload(
        "m", (Variable("large", (16_000, 1000)), *(Variable(name, (64, 1024)) for name in names))
    )
    strategy = servers.served_in_buckets(model, FOUR, MIB // 2)
    made = plan(strategy, model, 4)
    assert SearchSpace.default().contains(strategy, model, FOUR)
    assert len(strategy.by_name["large"].shards) == 40  # 61 MiB would be 123 pieces
    merged = [
        {part.variable for part in message.slices}
        for message in made.messages
        if len(message.slices) > 1
    ]
    assert merged == [set(names[at : at + 2]) for at in range(0, 8, 2)]
    loads = [sum(m.grad_bytes for m in made.messages if m.owner == rank) for rank in range(4)]
    assert sum(loads) == model.grad_bytes and max(loads) - min(loads) <= 2 * max(
        m.grad_bytes for m in made.messages
    )


def test_seeds_of_a_sparse_model_are_tried_dense_and_as_rows():
    sparse = Workload(
        "m",
        (Variable("head", (300, 200)), Variable("table", (9000, 64), sparse=True, touched_rows=90)),
    )
    names = [name for name, _ in registry.seed_strategies(sparse, FOUR, SearchSpace.default())]
    assert {"ddp_25mib", "ddp_25mib, rows", "parameter_server", "parameter_server, rows"} <= set(
        names
    )
    assert not any(
        "rows" in name for name, _ in registry.seed_strategies(KB, FOUR, SearchSpace.default())
    )
