"""Eq. 2 and Eq. 3 by hand, fits, global features, and overlap with computation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_worlds import model, strategy

from autotune.cluster import Bend, Cluster, CollectiveFit, Host, PairLink, Where
from autotune.costs.row_traffic import RowTraffic
from autotune.costs.sync_cost import (
    COLLECTIVES,
    KERNEL_LATENCY_S,
    MessageCosts,
    collective_factor,
    message_costs,
    network_overhead_s,
)
from autotune.costs.timing import ready_times_s
from autotune.errors import InvalidInput
from autotune.features.compute_cost import overlap_step_s, paper_step_s, taken_share
from autotune.features.flat import flatten
from autotune.lowering.message_cpu import message_cpu_s
from autotune.strategy_space.plan import Message, Plan, TensorSlice, plan
from autotune.strategy_space.strategy import Compressor, Shard, SparseHandling, Synchronizer
from autotune.workload import Variable, Workload

ELEMENTS = 1_000_000
WIRE = 4 * ELEMENTS
MODEL = model((1000, 1000), Variable("rows", (1000, 1000), sparse=True, touched_rows=100))


def host(name: str, devices: int = 1, link: float = 1e8) -> Host:
    return Host(name, devices, link, 1e-3, 1e10, 1e-5)


def cluster(names: str, devices: int = 1, links: tuple[PairLink, ...] = ()) -> Cluster:
    return Cluster("c", tuple(host(name, devices) for name in names), links)


def message(kind: Synchronizer, owner: int | None = None, **other: Any) -> Message:
    fields: dict[str, Any] = {"slices": (TensorSlice("v0", ELEMENTS),), "owner": owner, **other}
    return Message(synchronizer=kind, compressor=Compressor.NONE, dtype="float32", **fields)


def served(owner: int, **other: Any) -> Message:
    return message(Synchronizer.PARAMETER_SERVER, owner, **other)


REDUCED = message(Synchronizer.ALL_REDUCE)
TWO_LEVEL = message(Synchronizer.ALL_REDUCE, hierarchical=True)
SCATTERED = message(Synchronizer.REDUCE_SCATTER_ALL_GATHER)
ROOTED = message(Synchronizer.REDUCE_BROADCAST, 0)
ROWS = (TensorSlice("rows", ELEMENTS, 0, 0, 1000),)
GATHERED_ROWS = replace(REDUCED, sparse=SparseHandling.ALL_GATHER, slices=ROWS)
SERVED_ROWS = served(0, sparse=SparseHandling.GATHER_SCATTER, slices=ROWS)
SLOW_PAIR = (PairLink(("c", "a"), 1e7, 0.0),)
PAIR = cluster("ab")


def plan_of(on: Cluster, *messages: Message, ring_order: tuple[int, ...] | None = None) -> Plan:
    return Plan("model", on.world_size, messages, ring_order=ring_order)


def costs_of(on: Cluster, *messages: Message, **fields: Any) -> MessageCosts:
    return message_costs(plan_of(on, *messages, **fields), on, MODEL)


def test_each_collective_moves_the_message_as_often_as_in_eq_3() -> None:
    factors = [collective_factor(kind, 4) for kind in COLLECTIVES]
    assert factors == pytest.approx([1.5, 0.75, 0.75, 1.0, 1.0])
    assert [collective_factor(kind, 1) for kind in COLLECTIVES] == [0.0] * 5
    with pytest.raises(InvalidInput, match="must be one of"):
        collective_factor("all_to_all", 4)


ONE_SLOW = Cluster("c", (host("a"), host("b", link=5e7), host("c")))
UNEVEN = Cluster("c", (host("a", 2), host("b", 4, link=5e7), host("c", 1)))
SLOW_LAST = Cluster("c", (host("a", 2), host("b", 2), host("c", 2, link=1e6)))
SOME = (message(Synchronizer.ALL_REDUCE, ranks=(0, 2)), served(0, ranks=(0, 1, 3)))


@pytest.mark.parametrize(
    ("on", "messages", "transfer_s", "overheads", "kernels"),
    [
        # the slowest link of the ring
        (ONE_SLOW, (REDUCED,), [4 / 3 * WIRE / 5e7], [3], [1]),
        # two collectives cost their sum
        (cluster("abcd"), (SCATTERED, ROOTED), [1.5 * WIRE / 1e8, 2 * WIRE / 1e8], [8, 8], [2, 2]),
        # a server, flat and hierarchical: the replicas on other hosts than its own, or these hosts
        (
            UNEVEN,
            (served(1), served(1, hierarchical=True), served(2)),
            [4 * WIRE / 5e7 + WIRE / 1e8, WIRE / 5e7 + WIRE / 1e8, 3 * WIRE / 5e7],
            [5, 2, 3],
            [1, 1, 1],
        ),
        # a server on a cluster of one host is not free
        (Cluster.local(4), (served(2),), [3 * WIRE / 1e9], [3], [1]),
        # a dedicated link counts for the server at its end
        (
            cluster("abc", links=SLOW_PAIR),
            (served(0), served(1)),
            [WIRE / 1e8 + WIRE / 1e7, 2 * WIRE / 1e8],
            [2, 2],
            [1, 1],
        ),
        # two levels take the slow link once per host
        (cluster("ab", 4), (TWO_LEVEL,), [2 * WIRE / 1e10 + WIRE / 1e8], [10], [3]),
        # only the ranks of the message
        (SLOW_LAST, SOME, [WIRE / 1e8, WIRE / 1e8], [2, 1], [1, 1]),
    ],
)
def test_costs_follow_eq_2_and_eq_3(
    on: Cluster,
    messages: tuple[Message, ...],
    transfer_s: list[float],
    overheads: list[float],
    kernels: list[float],
) -> None:
    costs = costs_of(on, *messages)
    assert costs.transfer_s == pytest.approx(transfer_s)
    assert costs.overhead_count.tolist() == overheads
    assert costs.kernel_count.tolist() == kernels


def test_overheads_and_kernels_add_to_the_transfer() -> None:
    expected_s = 4 / 3 * WIRE / 5e7 + 3 * 1e-3 + KERNEL_LATENCY_S
    assert costs_of(ONE_SLOW, REDUCED).sync_s == pytest.approx([expected_s])
    assert costs_of(cluster("ab", 4), TWO_LEVEL).overhead_s == pytest.approx([8 * 1e-5 + 2 * 1e-3])
    flat, two_level = costs_of(PAIR, REDUCED, TWO_LEVEL).sync_s
    assert flat == two_level, "every host has one worker"


def test_a_server_is_numbered_by_its_host_or_by_its_rank_on_one_host() -> None:
    assert costs_of(UNEVEN, served(1), served(1, hierarchical=True)).server.tolist() == [0, 0]
    assert costs_of(Cluster.local(4), served(2)).server.tolist() == [2]


@pytest.mark.parametrize(
    ("sent", "devices", "order", "slowest"),
    [
        (REDUCED, 1, None, 1e8),
        (REDUCED, 1, (0, 2, 1, 3), 1e7),
        (TWO_LEVEL, 2, None, 1e8),
        (TWO_LEVEL, 2, (1, 0, 4, 5, 2, 3, 6, 7), 1e7),
        (TWO_LEVEL, 2, (4, 3, 2, 1, 0, 7, 6, 5), 1e8),
    ],
)
def test_the_ring_and_the_leaders_of_hosts_follow_the_ring_order(
    sent: Message, devices: int, order: tuple[int, ...] | None, slowest: float
) -> None:
    costs = costs_of(cluster("abcd", devices, SLOW_PAIR), sent, ring_order=order)
    assert costs.link_bytes_per_s.tolist() == [slowest]


def test_rows_of_sparse_gradients_cost_the_rows_that_the_ranks_touch() -> None:
    traffic = RowTraffic(MODEL)
    own_bytes = 100 * (4 * 1000 + 4)  # values and the row's number
    assert traffic.sent_bytes(GATHERED_ROWS) == traffic.sent_bytes(SERVED_ROWS) == own_bytes
    summed_bytes = traffic.summed_bytes(SERVED_ROWS, 3)
    assert summed_bytes == pytest.approx(own_bytes * (1 - 0.9**3) / 0.1)
    costs = costs_of(cluster("abc"), GATHERED_ROWS, SERVED_ROWS)
    assert costs.transfer_s[0] == pytest.approx(2 * own_bytes / 1e8)  # an all-gather of all three
    assert costs.wire_bytes[1] == pytest.approx((own_bytes + summed_bytes) / 2)


def test_rows_cost_the_same_with_hierarchy_as_without() -> None:
    on = cluster("ab", 4)
    rows = (GATHERED_ROWS, SERVED_ROWS)
    flat = costs_of(on, *rows)
    two_level = costs_of(on, *(replace(each, hierarchical=True) for each in rows))
    assert two_level.features.tolist() == flat.features.tolist()


def test_a_collective_costs_the_same_from_any_root() -> None:
    rooted = [replace(ROOTED, owner=owner) for owner in range(7)]
    assert len(set(costs_of(UNEVEN, *rooted).sync_s.tolist())) == 1


def test_all_rows_count_where_nobody_counted_them() -> None:
    traffic = RowTraffic(model(Variable("rows", (1000, 1000), sparse=True)))
    assert traffic.sent_bytes(SERVED_ROWS) == traffic.summed_bytes(SERVED_ROWS, 3) == WIRE + 4000


def fit_of(
    primitive: str,
    size: int = 2,
    where: Where = Where.WORLD,
    alpha_s: float = 1e-3,
    beta: float = 1e-8,
    **other: Any,
) -> CollectiveFit:
    return CollectiveFit(primitive, size, alpha_s, beta, 0.02, 1, 10**8, where=where, **other)


def test_the_fitted_cost_is_offered_where_every_part_was_probed() -> None:
    on = PAIR.with_fits(
        (
            fit_of("all_reduce"),
            fit_of("reduce_scatter", beta=2e-8),
            fit_of("all_gather", alpha_s=2e-3, beta=3e-8),
            fit_of("reduce", alpha_s=2e-3, beta=3e-8),
        )
    )
    costs = costs_of(on, REDUCED, SCATTERED, ROOTED, served(0))
    assert costs.fitted_sync_s[:2] == pytest.approx([1e-3 + 1e-8 * WIRE, 3e-3 + 5e-8 * WIRE])
    assert np.isnan(costs.fitted_sync_s[2:]).all()
    assert costs.channel_s[0] == costs.fitted_sync_s[0]
    assert costs.channel_s[2] == costs.sync_s[2]
    assert network_overhead_s(on) == pytest.approx((1e-3 - KERNEL_LATENCY_S) / 2)


def test_costs_in_pieces_are_summed_message_by_message() -> None:
    bends = (Bend(3e5, 1e-9), Bend(2e6, 3e-8))
    scatter, gather = (
        fit_of("reduce_scatter", bends=(Bend(1e6, 5e-9),)),
        fit_of("all_gather", bends=bends),
    )
    sizes = (1000, 50_000, 100_000, 250_000, 400_000, 1_000_000)
    parts = [replace(SCATTERED, slices=(TensorSlice("v0", size),)) for size in sizes]
    fitted = costs_of(PAIR.with_fits((scatter, gather)), served(0), *parts).fitted_sync_s
    assert np.isnan(fitted[0])  # a server was not probed
    for seconds, size in zip(fitted[1:].tolist(), sizes, strict=True):
        wire = 4.0 * size
        scattered = 1e-3 + 5e-9 * min(wire, 1e6) + 1e-8 * max(wire - 1e6, 0)
        gathered = 1e-3 + 1e-9 * min(wire, 3e5) + 3e-8 * min(max(wire - 3e5, 0), 1.7e6)
        assert seconds == pytest.approx(scattered + gathered + 1e-8 * max(wire - 2e6, 0))


def test_two_levels_cost_what_was_probed_inside_the_hosts_and_among_them() -> None:
    on = Cluster("c", (host("a", 4), host("b", 4), host("c", 2)))
    fits = (
        fit_of("reduce", 4, Where.HOST, alpha_s=1e-5),
        fit_of("broadcast", 4, Where.HOST, alpha_s=2e-5),
        fit_of("all_reduce", 3, Where.ACROSS, alpha_s=3e-3),
    )
    fitted = costs_of(on.with_fits(fits), TWO_LEVEL, REDUCED).fitted_sync_s
    assert fitted[0] == pytest.approx(3.03e-3 + 3e-8 * WIRE)
    assert np.isnan(fitted[1])  # the world was not probed
    assert np.isnan(costs_of(on.with_fits(fits[:2]), TWO_LEVEL, REDUCED).fitted_sync_s).all()


def test_ranks_of_one_host_cost_what_was_probed_inside_a_host() -> None:
    inside = fit_of("all_reduce", where=Where.HOST, alpha_s=1e-5)
    across = fit_of("all_reduce", where=Where.ACROSS, alpha_s=5e-3)
    parts = [replace(REDUCED, ranks=ranks) for ranks in ((2, 3), (0, 2))]
    fitted = costs_of(cluster("ab", 2).with_fits((inside, across)), *parts).fitted_sync_s
    assert fitted == pytest.approx([1e-5 + 1e-8 * WIRE, 5e-3 + 1e-8 * WIRE])


def test_without_a_fit_a_server_holds_the_channel_for_push_and_pull() -> None:
    expected_s = 2 * (WIRE / 1e8 + 1e-3) + KERNEL_LATENCY_S
    assert costs_of(PAIR, served(0)).channel_s == pytest.approx([expected_s])
    assert costs_of(cluster("a"), REDUCED, served(0)).channel_s.tolist() == [0.0, 0.0]


def test_global_features_take_max_and_sum_over_servers_and_over_collectives() -> None:
    costs = costs_of(PAIR, served(0), served(0), served(1), REDUCED, SCATTERED)
    second = WIRE / 1e8
    servers, collectives = [2 * second, 2, 2, 3 * second, 3, 3], [second, 4, 2, 2 * second, 6, 3]
    assert costs.global_features == pytest.approx(servers + collectives)
    assert costs.features[:, 3].tolist() == [1, 1, 1, 0, 0]
    one_server = 2 * (second + 1e-3 + KERNEL_LATENCY_S)
    others = 2 * second + 6 * 1e-3 + 3 * KERNEL_LATENCY_S
    assert costs.paper_sync_s == pytest.approx(one_server + others)
    assert not costs_of(PAIR, REDUCED).global_features[:6].any(), "no server"


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(InvalidInput, match="2 ranks"):
        message_costs(plan_of(PAIR, REDUCED), Cluster.local(3), MODEL)


def three_variables(**other: float) -> Workload:
    return model(10, 10, 10, **{"forward_s": 1.0, "backward_s": 3.0, "update_s": 0.5, **other})


def step_s(workload: Workload, *costs_s: float, **settings: Any) -> float:
    """A step in which each variable is a message with its cost."""
    one_each = plan(strategy(workload, Shard(Synchronizer.ALL_REDUCE)), workload, 2)
    return overlap_step_s(flatten(one_each, workload), np.array(costs_s), workload, **settings)


def test_unmeasured_readiness_is_proportional_to_the_position() -> None:
    assert ready_times_s(three_variables()).tolist() == [1.0, 2.0, 3.0]
    mixed = model(Variable("a", (1,), ready_s=0.25), Variable("b", (1,)), backward_s=1.0)
    assert ready_times_s(mixed).tolist() == [0.25, 1.0]


def test_only_a_message_that_cannot_hide_behind_computation_lengthens_the_step() -> None:
    workload = three_variables()
    assert step_s(workload, 0.1, 0.1, 0.2) == pytest.approx(1.0 + 3.2 + 0.5)
    assert step_s(workload, 4.0, 0.1, 0.2) == pytest.approx(1.0 + 1.0 + 4.3 + 0.5)
    assert step_s(workload, 0.0, 0.0, 0.0) == pytest.approx(workload.compute_s)


def test_cross_step_hides_messages_behind_the_next_forward_pass() -> None:
    workload = three_variables(forward_s=3.0)
    # ready last and used first by the next forward pass: only the update hides some of it
    assert step_s(workload, 0.0, 0.0, 1.0, cross_step=True) == pytest.approx(3.0 + 1.0 + 3.0)
    # in order, so all three arrive at 5.0, and the forward pass can only start then
    assert step_s(workload, 4.0, 0.0, 0.0, cross_step=True) == pytest.approx(5.0 + 3.0)


def test_the_papers_step_is_the_larger_of_computation_and_synchronization() -> None:
    costs = costs_of(PAIR, REDUCED)
    assert paper_step_s(three_variables(), costs) == 4.5
    idle = three_variables(forward_s=0.0, backward_s=0.0, update_s=0.0)
    assert paper_step_s(idle, costs) == costs.paper_sync_s


def test_sending_takes_cores_from_computation_only_where_the_cpu_computes() -> None:
    fit = fit_of("all_reduce", 4, cpu_alpha_s=1e-4, cpu_beta_s_per_byte=1e-9)
    counted = Cluster("c", (replace(host("a", 4), cores=8),)).with_fits((fit,))
    workload = model(ELEMENTS, backward_s=1.0, threads=1)
    assert taken_share(workload, counted) == 0.5
    assert taken_share(replace(workload, threads=4), counted) == 1.0
    assert taken_share(replace(workload, device="cuda", threads=0), counted) == 0.0
    assert taken_share(workload, cluster("a", 4)) == 0.0
    messages = plan_of(counted, REDUCED, SCATTERED)
    cpu_s = message_cpu_s(messages, counted, RowTraffic(MODEL))
    assert cpu_s == pytest.approx([1e-4 + 1e-9 * WIRE, 0.0])


def test_each_piece_of_a_direct_exchange_costs_cpu_time() -> None:
    fit = fit_of("direct_exchange", 4, cpu_alpha_s=1e-4, cpu_beta_s_per_byte=1e-9)
    counted = cluster("a", 4).with_fits((fit,))
    exchanged = replace(message(Synchronizer.DIRECT_EXCHANGE), pieces=4)
    cpu_s = message_cpu_s(plan_of(counted, exchanged), counted, RowTraffic(MODEL))
    assert cpu_s == pytest.approx([4 * 1e-4 + 1e-9 * WIRE])
