"""Eq. 2 and Eq. 3 by hand, fits, global numbers, and the overlap of computation and communication."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.cluster import Bend, Cluster, CollectiveFit, Host, PairLink, Where
from autotune.costs.issue_order import channel_ends_s
from autotune.costs.row_traffic import RowTraffic
from autotune.costs.sync_cost import (
    COLLECTIVES,
    KERNEL_LATENCY_S,
    collective_factor,
    message_costs,
    network_overhead_s,
)
from autotune.costs.timing import ready_times_s
from autotune.errors import InvalidInput
from autotune.features.compute_cost import message_cpu_s, overlap_step_s, paper_step_s, taken_share
from autotune.features.flat import flatten
from autotune.strategy_space.plan import Message, Plan, TensorSlice, plan
from autotune.strategy_space.strategy import (
    Compressor,
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

ELEMENTS = 1_000_000
WIRE = 4 * ELEMENTS
MODEL = Workload(
    "m",
    (Variable("v", (1000, 1000)), Variable("rows", (1000, 1000), sparse=True, touched_rows=100)),
)


def host(name: str, devices: int = 1, link: float = 1e8, latency_s: float = 1e-3) -> Host:
    return Host(name, devices, link, latency_s, 1e10, 1e-5)


def message(primitive: Synchronizer, owner: int | None = None, **other: Any) -> Message:
    return Message(
        (TensorSlice("v", ELEMENTS),), primitive, Compressor.NONE, "float32", owner=owner, **other
    )


def plan_of(
    cluster: Cluster, *messages: Message, ring_order: tuple[int, ...] | None = None
) -> Plan:
    return Plan("model", cluster.world_size, messages, ring_order=ring_order)


def test_the_five_collectives_move_the_message_as_often_as_eq_3_says() -> None:
    assert [collective_factor(primitive, 4) for primitive in COLLECTIVES] == pytest.approx(
        [1.5, 0.75, 0.75, 1.0, 1.0]
    )
    assert [collective_factor(primitive, 1) for primitive in COLLECTIVES] == [0.0] * 5
    with pytest.raises(InvalidInput, match="must be one of"):
        collective_factor("all_to_all", 4)


def test_all_reduce_costs_eq_3_on_the_slowest_link_of_the_ring() -> None:
    cluster = Cluster("c", (host("a"), host("b", link=5e7), host("c")))
    costs = message_costs(plan_of(cluster, message(Synchronizer.ALL_REDUCE)), cluster, MODEL)
    assert costs.transfer_s[0] == pytest.approx(2 * 2 / 3 * WIRE / 5e7)
    assert (costs.overhead_count[0], costs.kernel_count[0]) == (3.0, 1.0)
    assert costs.sync_s[0] == pytest.approx(2 * 2 / 3 * WIRE / 5e7 + 3 * 1e-3 + KERNEL_LATENCY_S)


def test_two_primitives_cost_their_sum() -> None:
    cluster = Cluster("c", (host("a"), host("b"), host("c"), host("d")))
    costs = message_costs(
        plan_of(
            cluster,
            message(Synchronizer.REDUCE_SCATTER_ALL_GATHER),
            message(Synchronizer.REDUCE_BROADCAST, 0),
        ),
        cluster,
        MODEL,
    )
    assert costs.transfer_s == pytest.approx([1.5 * WIRE / 1e8, 2 * WIRE / 1e8])
    assert costs.overhead_count.tolist() == [8.0, 8.0]
    assert costs.kernel_count.tolist() == [2.0, 2.0]


def test_parameter_server_costs_eq_2_flat_and_hierarchical() -> None:
    cluster = Cluster("c", (host("a", 2), host("b", 4, link=5e7), host("c", 1)))
    flat, hierarchical = (
        message(Synchronizer.PARAMETER_SERVER, 1),
        message(Synchronizer.PARAMETER_SERVER, 1, hierarchical=True),
    )
    costs = message_costs(plan_of(cluster, flat, hierarchical), cluster, MODEL)
    assert costs.transfer_s == pytest.approx([4 * WIRE / 5e7 + WIRE / 1e8, WIRE / 5e7 + WIRE / 1e8])
    assert costs.overhead_count.tolist() == [7.0, 3.0]
    assert costs.kernel_count.tolist() == [1.0, 1.0]
    assert costs.server.tolist() == [0, 0]


def test_a_server_on_a_cluster_of_one_host_is_not_free() -> None:
    cluster = Cluster.local(4)
    costs = message_costs(
        plan_of(cluster, message(Synchronizer.PARAMETER_SERVER, 2)), cluster, MODEL
    )
    assert costs.transfer_s[0] == pytest.approx(3 * WIRE / 1e9)
    assert costs.server[0] == 2


def test_the_named_link_of_a_pair_counts_for_its_server() -> None:
    cluster = Cluster("c", (host("a"), host("b"), host("c")), (PairLink(("c", "a"), 1e7, 0.0),))
    costs = message_costs(
        plan_of(
            cluster,
            message(Synchronizer.PARAMETER_SERVER, 0),
            message(Synchronizer.PARAMETER_SERVER, 1),
        ),
        cluster,
        MODEL,
    )
    assert costs.transfer_s == pytest.approx([WIRE / 1e8 + WIRE / 1e7, 2 * WIRE / 1e8])


def test_hierarchical_all_reduce_takes_the_slow_link_once_per_host() -> None:
    cluster = Cluster("c", (host("a", 4), host("b", 4)))
    costs = message_costs(
        plan_of(cluster, message(Synchronizer.ALL_REDUCE, hierarchical=True)), cluster, MODEL
    )
    assert costs.transfer_s[0] == pytest.approx(2 * WIRE / 1e10 + 2 * 0.5 * WIRE / 1e8)
    assert costs.overhead_s[0] == pytest.approx(2 * 4 * 1e-5 + 2 * 1e-3)
    assert costs.kernel_count[0] == 3.0


def test_hierarchy_means_nothing_where_every_host_has_one_worker() -> None:
    cluster = Cluster("c", (host("a"), host("b")))
    costs = message_costs(
        plan_of(
            cluster,
            message(Synchronizer.ALL_REDUCE),
            message(Synchronizer.ALL_REDUCE, hierarchical=True),
        ),
        cluster,
        MODEL,
    )
    assert costs.sync_s[0] == costs.sync_s[1]


def test_a_ring_order_that_crosses_a_slow_pair_is_slower() -> None:
    cluster = Cluster("c", tuple(host(name) for name in "abcd"), (PairLink(("a", "c"), 1e7, 0.0),))
    costs = [
        message_costs(
            plan_of(cluster, message(Synchronizer.ALL_REDUCE), ring_order=order), cluster, MODEL
        )
        for order in (None, (0, 2, 1, 3))
    ]
    assert costs[0].link_bytes_per_s[0] == 1e8
    assert costs[1].link_bytes_per_s[0] == 1e7


def test_the_leaders_of_hosts_follow_the_ring_order() -> None:
    cluster = Cluster(
        "c", tuple(host(name, 2) for name in "abcd"), (PairLink(("a", "c"), 1e7, 0.0),)
    )
    two_level = message(Synchronizer.ALL_REDUCE, hierarchical=True)
    orders = (None, (1, 0, 4, 5, 2, 3, 6, 7), (4, 3, 2, 1, 0, 7, 6, 5))
    costs = [
        message_costs(plan_of(cluster, two_level, ring_order=order), cluster, MODEL)
        for order in orders
    ]
    assert [cost.link_bytes_per_s[0] for cost in costs] == [1e8, 1e7, 1e8]


def test_a_message_of_some_ranks_involves_only_these() -> None:
    cluster = Cluster("c", (host("a", 2), host("b", 2), host("c", 2, link=1e6)))
    some = message(Synchronizer.ALL_REDUCE, ranks=(0, 2))
    costs = message_costs(
        plan_of(cluster, some, message(Synchronizer.PARAMETER_SERVER, 0, ranks=(0, 1, 3))),
        cluster,
        MODEL,
    )
    assert costs.transfer_s == pytest.approx([WIRE / 1e8, WIRE / 1e8])
    assert costs.overhead_count.tolist() == [2.0, 3.0]


def test_rows_of_sparse_gradients_cost_the_rows_that_the_ranks_touch() -> None:
    cluster = Cluster("c", tuple(host(name) for name in "abc"))
    rows = (TensorSlice("rows", ELEMENTS, 0, 0, 1000),)
    gathered = replace(
        message(Synchronizer.ALL_REDUCE, sparse=SparseHandling.ALL_GATHER), slices=rows
    )
    served = replace(
        message(Synchronizer.PARAMETER_SERVER, 0, sparse=SparseHandling.GATHER_SCATTER), slices=rows
    )
    traffic = RowTraffic(MODEL)
    own_bytes = 100 * (4 * 1000 + 4)  # values and the row's number
    assert traffic.sent_bytes(gathered) == traffic.sent_bytes(served) == own_bytes
    assert traffic.summed_bytes(served, 3) == pytest.approx(own_bytes * (1 - 0.9**3) / 0.1)
    costs = message_costs(plan_of(cluster, gathered, served), cluster, MODEL)
    assert costs.transfer_s[0] == pytest.approx(
        2 / 3 * 3 * own_bytes / 1e8
    )  # one all-gather of what all touch
    assert costs.wire_bytes[1] == pytest.approx((own_bytes + traffic.summed_bytes(served, 3)) / 2)


def test_all_rows_count_where_nobody_counted_them() -> None:
    unknown = Workload("m", (Variable("rows", (1000, 1000), sparse=True),))
    served = replace(
        message(Synchronizer.PARAMETER_SERVER, 0, sparse=SparseHandling.GATHER_SCATTER),
        slices=(TensorSlice("rows", ELEMENTS, 0, 0, 1000),),
    )
    assert (
        RowTraffic(unknown).sent_bytes(served)
        == RowTraffic(unknown).summed_bytes(served, 3)
        == WIRE + 4000
    )


def test_the_fitted_cost_is_offered_where_every_part_was_probed() -> None:
    fits = (
        CollectiveFit("all_reduce", 2, 1e-3, 1e-8, 0.02, 1, 10**8),
        CollectiveFit("reduce_scatter", 2, 1e-3, 2e-8, 0.02, 1, 10**8),
        CollectiveFit("all_gather", 2, 2e-3, 3e-8, 0.02, 1, 10**8),
        CollectiveFit("reduce", 2, 2e-3, 3e-8, 0.02, 1, 10**8),
    )
    cluster = Cluster("c", (host("a"), host("b"))).with_fits(fits)
    kinds = (
        Synchronizer.ALL_REDUCE,
        Synchronizer.REDUCE_SCATTER_ALL_GATHER,
        Synchronizer.REDUCE_BROADCAST,
        Synchronizer.PARAMETER_SERVER,
    )
    made = plan_of(cluster, *(message(kind, 0 if kind in kinds[2:] else None) for kind in kinds))
    costs = message_costs(made, cluster, MODEL)
    assert costs.fitted_sync_s[:2] == pytest.approx([1e-3 + 1e-8 * WIRE, 3e-3 + 5e-8 * WIRE])
    assert np.isnan(costs.fitted_sync_s[2:]).all()
    assert costs.channel_s[0] == costs.fitted_sync_s[0]
    assert costs.channel_s[2] == costs.sync_s[2]
    assert network_overhead_s(cluster) == pytest.approx((1e-3 - KERNEL_LATENCY_S) / 2)


def fit_of(
    primitive: str,
    size: int,
    where: Where = Where.WORLD,
    bends: tuple[Bend, ...] = (),
    alpha_s: float = 1e-3,
) -> CollectiveFit:
    return CollectiveFit(primitive, size, alpha_s, 1e-8, 0.02, 1, 10**8, where=where, bends=bends)


def test_costs_in_pieces_are_summed_message_by_message() -> None:
    fits = (
        fit_of("reduce_scatter", 2, bends=(Bend(1e6, 5e-9),)),
        fit_of("all_gather", 2, bends=(Bend(3e5, 1e-9), Bend(2e6, 3e-8))),
    )
    cluster = Cluster("c", (host("a"), host("b"))).with_fits(fits)
    sizes = (1000, 50_000, 100_000, 250_000, 400_000, 1_000_000)
    parts = [
        replace(
            message(Synchronizer.REDUCE_SCATTER_ALL_GATHER),
            slices=(TensorSlice(f"v{number}", size),),
        )
        for number, size in enumerate(sizes)
    ]
    made = plan_of(cluster, message(Synchronizer.PARAMETER_SERVER, 0), *parts)
    fitted = message_costs(made, cluster, MODEL).fitted_sync_s
    assert np.isnan(fitted[0])  # a server was not probed
    for seconds, size in zip(fitted[1:].tolist(), sizes, strict=True):
        wire = 4.0 * size
        scattered = 1e-3 + 5e-9 * min(wire, 1e6) + 1e-8 * max(wire - 1e6, 0)
        gathered = (
            1e-3
            + 1e-9 * min(wire, 3e5)
            + 3e-8 * min(max(wire - 3e5, 0), 1.7e6)
            + 1e-8 * max(wire - 2e6, 0)
        )
        assert seconds == pytest.approx(scattered + gathered)


def test_a_hierarchical_message_costs_what_was_probed_inside_the_hosts_and_among_them() -> None:
    cluster = Cluster("c", (host("a", 4), host("b", 4), host("c", 2)))
    made = plan_of(
        cluster,
        message(Synchronizer.ALL_REDUCE, hierarchical=True),
        message(Synchronizer.ALL_REDUCE),
    )
    fits = (
        fit_of("reduce", 4, Where.HOST, alpha_s=1e-5),
        fit_of("broadcast", 4, Where.HOST, alpha_s=2e-5),
        fit_of("all_reduce", 3, Where.ACROSS, alpha_s=3e-3),
    )
    costs = message_costs(made, cluster.with_fits(fits), MODEL)
    assert costs.fitted_sync_s[0] == pytest.approx(3.03e-3 + 3e-8 * WIRE)
    assert np.isnan(costs.fitted_sync_s[1])  # the world was not probed
    assert np.isnan(message_costs(made, cluster.with_fits(fits[:2]), MODEL).fitted_sync_s).all()


def test_a_message_among_the_ranks_of_one_host_costs_what_was_probed_inside_a_host() -> None:
    cluster = Cluster("c", (host("a", 2), host("b", 2))).with_fits(
        (
            fit_of("all_reduce", 2, Where.HOST, alpha_s=1e-5),
            fit_of("all_reduce", 2, Where.ACROSS, alpha_s=5e-3),
        )
    )
    made = plan_of(
        cluster,
        message(Synchronizer.ALL_REDUCE, ranks=(2, 3)),
        message(Synchronizer.ALL_REDUCE, ranks=(0, 2)),
    )
    assert message_costs(made, cluster, MODEL).fitted_sync_s == pytest.approx(
        [1e-5 + 1e-8 * WIRE, 5e-3 + 1e-8 * WIRE]
    )


def test_without_a_fit_a_server_holds_the_channel_for_push_and_pull() -> None:
    cluster = Cluster("c", (host("a"), host("b")))
    costs = message_costs(
        plan_of(cluster, message(Synchronizer.PARAMETER_SERVER, 0)), cluster, MODEL
    )
    assert costs.channel_s[0] == pytest.approx(2 * (WIRE / 1e8 + 2 * 1e-3) + KERNEL_LATENCY_S)


def test_a_world_of_one_rank_synchronizes_for_free() -> None:
    cluster = Cluster("c", (host("a"),))
    costs = message_costs(
        plan_of(
            cluster, message(Synchronizer.ALL_REDUCE), message(Synchronizer.PARAMETER_SERVER, 0)
        ),
        cluster,
        MODEL,
    )
    assert costs.channel_s.tolist() == [0.0, 0.0]


def test_global_features_take_max_and_sum_over_servers_and_over_collectives() -> None:
    cluster = Cluster("c", (host("a"), host("b")))
    served = [message(Synchronizer.PARAMETER_SERVER, owner) for owner in (0, 0, 1)]
    costs = message_costs(
        plan_of(
            cluster,
            *served,
            message(Synchronizer.ALL_REDUCE),
            message(Synchronizer.REDUCE_SCATTER_ALL_GATHER),
        ),
        cluster,
        MODEL,
    )
    second = WIRE / 1e8
    assert costs.global_features == pytest.approx(
        [2 * second, 4, 2, 3 * second, 6, 3, second, 4, 2, 2 * second, 6, 3]
    )
    assert costs.features[:, 3].tolist() == [1, 1, 1, 0, 0]
    one_server = 2 * (second + 2 * 1e-3 + KERNEL_LATENCY_S)
    assert costs.paper_sync_s == pytest.approx(
        one_server + 2 * second + 6 * 1e-3 + 3 * KERNEL_LATENCY_S
    )


def test_global_features_of_an_absent_kind_are_zero() -> None:
    cluster = Cluster("c", (host("a"), host("b")))
    assert (
        not message_costs(plan_of(cluster, message(Synchronizer.ALL_REDUCE)), cluster, MODEL)
        .global_features[:6]
        .any()
    )


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    cluster = Cluster("c", (host("a"), host("b")))
    with pytest.raises(InvalidInput, match="2 ranks"):
        message_costs(plan_of(cluster, message(Synchronizer.ALL_REDUCE)), Cluster.local(3), MODEL)


def three_variables(**other: float) -> Workload:
    times = {"forward_s": 1.0, "backward_s": 3.0, "update_s": 0.5, **other}
    return Workload("m", tuple(Variable(f"v{i}", (10,)) for i in range(3)), **times)  # type: ignore[arg-type]


def one_message_each(workload: Workload) -> Plan:
    shard = Shard(Synchronizer.ALL_REDUCE)
    return plan(
        Strategy(tuple(VariableStrategy(v.name, (shard,)) for v in workload.variables)), workload, 2
    )


def test_unmeasured_readiness_is_proportional_to_the_position() -> None:
    assert ready_times_s(three_variables()).tolist() == [1.0, 2.0, 3.0]
    mixed = Workload("m", (Variable("a", (1,), ready_s=0.25), Variable("b", (1,))), backward_s=1.0)
    assert ready_times_s(mixed).tolist() == [0.25, 1.0]


def test_only_the_message_that_cannot_hide_behind_computation_lengthens_the_step() -> None:
    workload = three_variables()
    flat = flatten(one_message_each(workload), workload)
    assert overlap_step_s(flat, np.array([0.1, 0.1, 0.2]), workload) == pytest.approx(
        1.0 + 3.2 + 0.5
    )
    assert overlap_step_s(flat, np.array([4.0, 0.1, 0.2]), workload) == pytest.approx(
        1.0 + 1.0 + 4.3 + 0.5
    )
    assert overlap_step_s(flat, np.zeros(3), workload) == pytest.approx(workload.compute_s)


def test_cross_step_hides_messages_behind_the_next_forward_pass() -> None:
    workload = three_variables(forward_s=3.0)
    flat = flatten(one_message_each(workload), workload)
    late = np.array(
        [0.0, 0.0, 1.0]
    )  # ready last, used first by the next forward pass: only the update hides some of it
    assert overlap_step_s(flat, late, workload, cross_step=True) == pytest.approx(3.0 + 1.0 + 3.0)
    early = np.array(
        [4.0, 0.0, 0.0]
    )  # in order, so all three arrive at 5.0, and the forward pass can only start then
    assert overlap_step_s(flat, early, workload, cross_step=True) == pytest.approx(5.0 + 3.0)


def test_channel_ends_equal_their_slow_twin() -> None:
    ready, cost, end = np.array([0.5, 0.2, 3.0, 3.1]), np.array([1.0, 0.5, 0.1, 0.2]), 0.0
    expected = [end := max(end, r) + c for r, c in zip(ready.tolist(), cost.tolist(), strict=True)]
    assert channel_ends_s(ready, cost) == pytest.approx(expected)


def test_the_papers_step_is_the_larger_of_computation_and_synchronization() -> None:
    cluster = Cluster("c", (host("a"), host("b")))
    costs = message_costs(plan_of(cluster, message(Synchronizer.ALL_REDUCE)), cluster, MODEL)
    assert paper_step_s(three_variables(), costs) == 4.5
    assert (
        paper_step_s(three_variables(forward_s=0.0, backward_s=0.0, update_s=0.0), costs)
        == costs.paper_sync_s
    )


def test_sending_takes_cores_from_computation_only_where_the_cpu_computes() -> None:
    fit = CollectiveFit(
        "all_reduce", 4, 1e-3, 1e-8, 0.02, 1, 10**8, cpu_alpha_s=1e-4, cpu_beta_s_per_byte=1e-9
    )
    counted = Cluster("c", (replace(host("a", 4), cores=8),)).with_fits((fit,))
    workload = Workload("m", (Variable("v", (ELEMENTS,)),), backward_s=1.0, threads=1)
    assert taken_share(workload, counted) == 0.5
    assert taken_share(replace(workload, threads=4), counted) == 1.0
    assert taken_share(replace(workload, device="cuda", threads=0), counted) == 0.0
    assert taken_share(workload, Cluster("c", (host("a", 4),))) == 0.0
    sent = plan_of(
        counted, message(Synchronizer.ALL_REDUCE), message(Synchronizer.REDUCE_SCATTER_ALL_GATHER)
    )
    assert message_cpu_s(sent, counted, MODEL) == pytest.approx([1e-4 + 1e-9 * WIRE, 0.0])
