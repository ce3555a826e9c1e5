"""Rows of shards, and what `extract` hands to the simulators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from small_worlds import strategy as strategy_of

from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput
from autotune.features.extract import Extractor, StrategyFeatures, extract
from autotune.features.raw import HOST_COLUMNS, MESSAGE_COLUMNS, RAW_FEATURES
from autotune.strategy_space.plan import PlannedStrategy
from autotune.strategy_space.strategy import (
    Compressor,
    Partition,
    Shard,
    SparseHandling,
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


REDUCE = Shard(Synchronizer.ALL_REDUCE)


def features(
    model: Workload,
    cluster: Cluster,
    choices: Mapping[str, Shard | VariableStrategy] | None = None,
    default: Shard = REDUCE,
    **settings: Any,
) -> StrategyFeatures:
    strategy = strategy_of(model, default, choices, **settings)
    return extract(PlannedStrategy.of(strategy, model, cluster.world_size), model, cluster)


def cut(name: str, *sizes: int, shards: tuple[Shard, ...] = ()) -> dict[str, Any]:
    shards = shards or (REDUCE,) * len(sizes)
    return {name: VariableStrategy(name, shards, Partition(0, sizes))}


def column(item: StrategyFeatures, name: str) -> list[float]:
    values: list[float] = item.shards[:, RAW_FEATURES.index(name)].tolist()
    return values


def test_one_row_per_shard_in_backward_order_whatever_the_issue_order() -> None:
    shards = tuple(Shard(Synchronizer.ALL_REDUCE, priority=priority) for priority in (5, 1, 3))
    item = features(workload(), hosts(2), cut("v01", 2, 5, 1, shards=shards))
    assert item.shards.shape == (5, len(RAW_FEATURES))
    assert item.shard_variable.tolist() == [0, 1, 1, 1, 2]
    assert column(item, "size_share") == pytest.approx([16 / 48, 4 / 48, 10 / 48, 2 / 48, 16 / 48])
    assert column(item, "issue") == pytest.approx([0.0, 0.8, 0.4, 0.6, 0.2])
    assert column(item, "ready") == pytest.approx([1 / 3, 2 / 3, 2 / 3, 2 / 3, 1.0])


@pytest.mark.parametrize(("cross_step", "in_flight"), [(False, 1), (True, 1), (True, 2)])
def test_rows_show_whether_messages_cross_the_step_and_go_side_by_side(
    cross_step: bool, in_flight: int
) -> None:
    item = features(workload(2), hosts(2), cross_step=cross_step, in_flight=in_flight)
    assert column(item, "cross_step") == [float(cross_step)] * 2
    assert column(item, "side_by_side") == [float(in_flight > 1)] * 2


def test_shares_of_the_gradients_sum_to_one() -> None:
    cast = Shard(Synchronizer.ALL_REDUCE, Compressor.FP16, group=0)
    item = features(workload(5), hosts(2), default=cast)
    assert sum(column(item, "size_share")) == pytest.approx(1.0)
    assert sum(column(item, "wire_share")) == pytest.approx(0.5)
    assert column(item, "message_share") == [1.0] * 5


def test_every_one_hot_has_one_bit_and_names_the_choice() -> None:
    served = Shard(Synchronizer.PARAMETER_SERVER, Compressor.INT8, placement=1)
    scattered = Shard(Synchronizer.REDUCE_SCATTER_ALL_GATHER)
    item = features(workload(2), hosts(2), {"v00": served, "v01": scattered})
    names = [name for name in RAW_FEATURES if name != "message_share"]
    for block in ("host_", "message_", "compressor_", "primitive_"):
        bits = sum(np.array(column(item, name)) for name in names if name.startswith(block))
        assert np.array_equal(bits, [1, 0] if block == "host_" else [1, 1])
    assert column(item, "host_1") == [1, 0]
    assert column(item, "compressor_int8") == [1, 0]
    assert column(item, "primitive_reduce_scatter_all_gather") == [0, 1]
    assert column(item, "is_parameter_server") == [1, 0]
    assert column(item, "replica_share") == [0.5, 0]
    assert column(item, "log_link") == pytest.approx([np.log(2e8), np.log(1e8)])


def test_flags_of_hierarchy_sparsity_and_cross_step_are_set() -> None:
    model = Workload("m", (Variable("a", (8, 2), sparse=True),), (), 0.01, 0.02)
    shard = Shard(Synchronizer.ALL_REDUCE, hierarchical=True)
    rows = VariableStrategy("a", (shard,), sparse=SparseHandling.ALL_GATHER)
    item = features(model, hosts(2, devices=2), {"a": rows}, cross_step=True)
    assert [column(item, name) for name in ("hierarchical", "sparse", "cross_step")] == [[1]] * 3


def test_hosts_and_messages_beyond_the_columns_share_the_last_one() -> None:
    model = workload(40)
    served = {
        variable.name: Shard(Synchronizer.PARAMETER_SERVER, placement=i % 20)
        for i, variable in enumerate(model.variables)
    }
    item = features(model, hosts(20), served)
    assert sum(column(item, "host_other")) == 2 * (20 - HOST_COLUMNS)
    assert sum(column(item, "message_later")) == 40 - MESSAGE_COLUMNS + 1
    assert len(set(column(item, "issue"))) == 40


def test_group_labels_do_not_matter_only_what_is_sent_together() -> None:
    def grouped(*labels: int) -> StrategyFeatures:
        shards = {
            f"v{i:02d}": Shard(Synchronizer.ALL_REDUCE, group=g) for i, g in enumerate(labels)
        }
        return features(workload(4), hosts(2), shards)

    np.testing.assert_array_equal(grouped(0, 0, 1, 1).shards, grouped(7, 7, 3, 3).shards)


def test_features_are_finite_without_any_measured_time_and_with_empty_tensors() -> None:
    model = Workload("m", (Variable("a", (0, 3)), Variable("b", (4,))))
    item = features(model, Cluster.local(1))
    assert np.isfinite(item.shards).all()
    assert np.isfinite(item.global_features).all()


def test_partitioned_graph_links_each_shard_to_its_neighbours_once() -> None:
    model = workload(3, edges=((0, 2),))
    item = features(model, hosts(2), cut("v00", 2, 2, 2, 2) | cut("v02", 4, 4))
    chains = {(0, 1), (1, 2), (2, 3), (5, 6)}
    assert set(map(tuple, item.shard_edges.tolist())) == chains | {(0, 5), (1, 5), (2, 6), (3, 6)}
    assert len(item.shard_edges) == 8


def test_variables_form_a_chain_where_the_workload_names_no_edges() -> None:
    assert features(workload(3), hosts(2)).edges.tolist() == [[0, 1], [1, 2]]
    assert features(workload(1), hosts(2)).shard_edges.shape == (0, 2)


def test_features_without_shards_are_those_of_the_whole_strategy() -> None:
    model = workload(3)
    planned = PlannedStrategy.of(strategy_of(model, REDUCE), model, 2)
    extractor = Extractor(model, hosts(2))
    whole, light = extractor.features(planned), extractor.features(planned, with_shards=False)
    assert len(whole.shards) == 3 and light.shards.shape == (0, len(RAW_FEATURES))
    for one in (light, whole.without_shards()):
        assert len(one.shards) == len(one.shard_variable) == len(one.shard_edges) == 0
        assert one.shards.base is None, "a view keeps the rows in memory"
        np.testing.assert_array_equal(one.global_features, whole.global_features)
        assert one.analytic_step_s == whole.analytic_step_s


def test_a_plan_of_another_model_is_refused() -> None:
    planned = PlannedStrategy.of(strategy_of(workload(3), REDUCE), workload(3), 2)
    with pytest.raises(InvalidInput, match="plan the strategy for this workload"):
        extract(planned, workload(2), hosts(2))
