"""Rows of shards, and what `extract` hands to the simulators."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput
from autotune.features.extract import MAX_SHARDS, MAX_VARIABLES, StrategyFeatures, extract
from autotune.features.raw import HOST_COLUMNS, MESSAGE_COLUMNS, RAW_FEATURES
from autotune.strategy_space.plan import PlannedStrategy
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


def hosts(count: int, devices: int = 1) -> Cluster:
    return Cluster(
        "c", tuple(Host(f"h{i}", devices, 1e8 * (i + 1), 1e-4, 1e10, 1e-5) for i in range(count))
    )


def workload(count: int = 3, edges: tuple[tuple[int, int], ...] = ()) -> Workload:
    return Workload(
        "m", tuple(Variable(f"v{i:02d}", (8, 2)) for i in range(count)), edges, 0.01, 0.02, 0.001
    )


def features(
    choices: list[VariableStrategy], model: Workload, cluster: Cluster, cross_step: bool = False
) -> StrategyFeatures:
    strategy = Strategy(tuple(choices), cross_step=cross_step)
    return extract(PlannedStrategy.of(strategy, model, cluster.world_size), model, cluster)


def alone(model: Workload, shard: Shard) -> list[VariableStrategy]:
    return [VariableStrategy(variable.name, (shard,)) for variable in model.variables]


def column(item: StrategyFeatures, name: str) -> list[float]:
    values: list[float] = item.shards[:, RAW_FEATURES.index(name)].tolist()
    return values


def test_one_row_per_shard_in_backward_order_whatever_the_issue_order() -> None:
    model = workload()
    shards = tuple(Shard(Synchronizer.ALL_REDUCE, priority=priority) for priority in (5, 1, 3))
    choices = [VariableStrategy("v01", shards, Partition(0, (2, 5, 1)))]
    choices += [
        VariableStrategy(name, (Shard(Synchronizer.ALL_REDUCE),)) for name in ("v00", "v02")
    ]
    item = features(choices, model, hosts(2))
    assert item.shards.shape == (5, len(RAW_FEATURES))
    assert item.shard_variable.tolist() == [0, 1, 1, 1, 2]
    assert column(item, "size_share") == pytest.approx([16 / 48, 4 / 48, 10 / 48, 2 / 48, 16 / 48])
    assert column(item, "issue") == pytest.approx([0.0, 0.8, 0.4, 0.6, 0.2])
    assert column(item, "ready") == pytest.approx([1 / 3, 2 / 3, 2 / 3, 2 / 3, 1.0])


@pytest.mark.parametrize(("cross_step", "in_flight"), [(False, 1), (True, 1), (True, 2)])
def test_rows_say_whether_messages_cross_the_step_and_go_side_by_side(
    cross_step: bool, in_flight: int
) -> None:
    model, cluster = workload(2), hosts(2)
    strategy = Strategy(
        tuple(alone(model, Shard(Synchronizer.ALL_REDUCE))), cross_step, in_flight=in_flight
    )
    item = extract(PlannedStrategy.of(strategy, model, 2), model, cluster)
    assert (
        column(item, "cross_step") == [float(cross_step)] * 2
        and column(item, "side_by_side") == [float(in_flight > 1)] * 2
    )


def test_shares_of_the_gradients_sum_to_one() -> None:
    model = workload(5)
    item = features(
        alone(model, Shard(Synchronizer.ALL_REDUCE, Compressor.FP16, group=0)), model, hosts(2)
    )
    assert sum(column(item, "size_share")) == pytest.approx(1.0)
    assert sum(column(item, "wire_share")) == pytest.approx(0.5)
    assert column(item, "message_share") == [1.0] * 5


def test_every_one_hot_has_one_bit_and_names_the_choice() -> None:
    model = workload(2)
    choices = [
        VariableStrategy(
            "v00", (Shard(Synchronizer.PARAMETER_SERVER, Compressor.INT8, placement=1),)
        ),
        VariableStrategy("v01", (Shard(Synchronizer.REDUCE_SCATTER_ALL_GATHER),)),
    ]
    item = features(choices, model, hosts(2))
    for block, totals in (
        ("host_", [1, 0]),
        ("message_", None),
        ("compressor_", [1, 1]),
        ("primitive_", [1, 1]),
    ):
        chosen = [
            i
            for i, name in enumerate(RAW_FEATURES)
            if name.startswith(block) and name != "message_share"
        ]
        assert item.shards[:, chosen].sum(axis=1).tolist() == (totals or [1, 1])
    assert column(item, "host_1") == [1, 0]
    assert column(item, "compressor_int8") == [1, 0]
    assert column(item, "primitive_reduce_scatter_all_gather") == [0, 1]
    assert column(item, "is_parameter_server") == [1, 0]
    assert column(item, "replica_share") == [0.5, 0]
    assert column(item, "log_link") == pytest.approx([np.log(2e8), np.log(1e8)])


def test_flags_of_hierarchy_sparsity_and_cross_step_are_seen() -> None:
    model = Workload("m", (Variable("a", (8, 2), sparse=True),), (), 0.01, 0.02)
    shard = Shard(Synchronizer.ALL_REDUCE, hierarchical=True)
    item = features(
        [VariableStrategy("a", (shard,), sparse=SparseHandling.ALL_GATHER)],
        model,
        hosts(2, devices=2),
        cross_step=True,
    )
    assert [column(item, name) for name in ("hierarchical", "sparse", "cross_step")] == [
        [1],
        [1],
        [1],
    ]


def test_hosts_and_messages_beyond_the_columns_share_the_last_one() -> None:
    model, cluster = workload(40), hosts(20)
    choices = [
        VariableStrategy(variable.name, (Shard(Synchronizer.PARAMETER_SERVER, placement=i % 20),))
        for i, variable in enumerate(model.variables)
    ]
    item = features(choices, model, cluster)
    assert sum(column(item, "host_other")) == 2 * (20 - HOST_COLUMNS)
    assert sum(column(item, "message_later")) == 40 - MESSAGE_COLUMNS + 1
    assert len(set(column(item, "issue"))) == 40


def test_group_labels_do_not_matter_only_what_is_sent_together() -> None:
    model, cluster = workload(4), hosts(2)

    def grouped(labels: tuple[int, ...]) -> StrategyFeatures:
        return features(
            [
                VariableStrategy(v.name, (Shard(Synchronizer.ALL_REDUCE, group=g),))
                for v, g in zip(model.variables, labels, strict=True)
            ],
            model,
            cluster,
        )

    np.testing.assert_array_equal(grouped((0, 0, 1, 1)).shards, grouped((7, 7, 3, 3)).shards)


def test_features_are_finite_without_any_measured_time_and_with_empty_tensors() -> None:
    model = Workload("m", (Variable("a", (0, 3)), Variable("b", (4,))))
    item = features(alone(model, Shard(Synchronizer.ALL_REDUCE)), model, Cluster.local(1))
    assert np.isfinite(item.shards).all()
    assert np.isfinite(item.global_features).all()


def test_partitioned_graph_links_each_shard_to_its_neighbours_once() -> None:
    model = workload(3, edges=((0, 2),))
    cut = VariableStrategy("v00", (Shard(Synchronizer.ALL_REDUCE),) * 4, Partition(0, (2, 2, 2, 2)))
    other = VariableStrategy("v02", (Shard(Synchronizer.ALL_REDUCE),) * 2, Partition(0, (4, 4)))
    item = features(
        [cut, VariableStrategy("v01", (Shard(Synchronizer.ALL_REDUCE),)), other], model, hosts(2)
    )
    chains = {(0, 1), (1, 2), (2, 3), (5, 6)}
    assert set(map(tuple, item.shard_edges.tolist())) == chains | {(0, 5), (1, 5), (2, 6), (3, 6)}
    assert len(item.shard_edges) == 8


def test_variables_form_a_chain_where_the_workload_names_no_edges() -> None:
    model = workload(3)
    assert features(
        alone(model, Shard(Synchronizer.ALL_REDUCE)), model, hosts(2)
    ).edges.tolist() == [[0, 1], [1, 2]]
    single = workload(1)
    assert features(
        alone(single, Shard(Synchronizer.ALL_REDUCE)), single, hosts(2)
    ).shard_edges.shape == (0, 2)


def test_more_variables_than_features_are_made_for_are_refused_with_the_numbers() -> None:
    model = workload(MAX_VARIABLES + 1)
    with pytest.raises(
        InvalidInput,
        match=f"at most {MAX_VARIABLES} variables and {MAX_SHARDS} shards, but .* has {MAX_VARIABLES + 1} and",
    ):
        features(alone(model, Shard(Synchronizer.ALL_REDUCE)), model, hosts(2))


def test_more_shards_than_features_are_made_for_are_refused_with_the_number() -> None:
    count = MAX_SHARDS + 1
    model = Workload("m", (Variable("v", (count,)),))
    cut = VariableStrategy(
        "v", (Shard(Synchronizer.ALL_REDUCE, group=0),) * count, Partition(0, (1,) * count)
    )
    with pytest.raises(InvalidInput, match=f"has 1 and {count}; use fewer shards per variable"):
        features([cut], model, hosts(2))


def test_a_plan_of_another_model_is_refused() -> None:
    model, other = workload(3), workload(2)
    strategy = Strategy(tuple(alone(model, Shard(Synchronizer.ALL_REDUCE))))
    with pytest.raises(InvalidInput, match="plan the strategy for this workload"):
        extract(PlannedStrategy.of(strategy, model, 2), other, hosts(2))
