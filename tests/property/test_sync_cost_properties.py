"""Flat sums over hosts equal slow sums over ranks; more bandwidth is never slower."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.cluster import Cluster, Host, PairLink
from autotune.costs.issue_order import channel_ends_s
from autotune.costs.sync_cost import KERNEL_LATENCY_S, message_costs, network_overhead_s
from autotune.features.compute_cost import overlap_step_s, slowed_ready_s
from autotune.features.flat import FlatPlan
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Variable, Workload

rates = st.floats(1e6, 1e10)
latencies = st.floats(0, 1e-2)
MODEL = Workload("m", (Variable("v", ()),))  # costs need only the rows of its sparse gradients


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    count = draw(st.integers(1, 5))
    fields = (st.integers(1, 4), rates, latencies, rates, latencies)
    hosts = tuple(draw(st.builds(Host, st.just(f"h{i}"), *fields)) for i in range(count))
    pairs: tuple[PairLink, ...] = ()
    if count > 1 and draw(st.booleans()):
        ends = ("h0", f"h{draw(st.integers(1, count - 1))}")
        pairs = (PairLink(ends, draw(rates), draw(latencies)),)
    return Cluster("c", hosts, pairs)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Cluster, Plan]:
    cluster = draw(clusters())
    messages = []
    for number in range(draw(st.integers(1, 6))):
        synchronizer = draw(st.sampled_from(SearchSpace.default().synchronizers))
        rooted = synchronizer in (Synchronizer.PARAMETER_SERVER, Synchronizer.REDUCE_BROADCAST)
        owner = draw(st.integers(0, cluster.world_size - 1)) if rooted else None
        parts = (TensorSlice(f"v{number}", draw(st.integers(1, 10**7))),)
        one = Message(parts, synchronizer, Compressor.NONE, "float32", owner=owner)
        messages.append(replace(one, hierarchical=draw(st.booleans())))
    return cluster, Plan("model", cluster.world_size, tuple(messages))


def slow_cost_s(message: Message, cluster: Cluster) -> float:
    """Eq. 2 and Eq. 3 summed rank by rank, flat reduction only."""
    world, phi = cluster.world_size, network_overhead_s(cluster)
    if world == 1:
        return 0.0
    if message.synchronizer is Synchronizer.PARAMETER_SERVER:
        assert message.owner is not None
        seconds = 0.0
        for rank in range(world):
            elsewhere = cluster.host_of_rank[rank] != cluster.host_of_rank[message.owner]
            if elsewhere or (len(cluster.hosts) == 1 and rank != message.owner):
                seconds += message.wire_bytes / cluster.bandwidth_bytes_per_s(message.owner, rank)
                seconds += phi
        return seconds + KERNEL_LATENCY_S
    if message.synchronizer is Synchronizer.DIRECT_EXCHANGE:
        return 2 * slow_round_s(message, cluster) + 2 * (world * phi + KERNEL_LATENCY_S)
    slowest = min(cluster.bandwidth_bytes_per_s(rank, (rank + 1) % world) for rank in range(world))
    factors = {
        Synchronizer.ALL_REDUCE: [2 * (world - 1) / world],
        Synchronizer.REDUCE_SCATTER_ALL_GATHER: [(world - 1) / world] * 2,
        Synchronizer.REDUCE_BROADCAST: [1.0, 1.0],
    }[message.synchronizer]
    return sum(
        factor * message.wire_bytes / slowest + world * phi + KERNEL_LATENCY_S for factor in factors
    )


def slow_round_s(message: Message, cluster: Cluster) -> float:
    """Each rank sends every other one its equal share over the links of their hosts."""
    hosts, world = cluster.host_of_rank, cluster.world_size
    links = [host.link_bytes_per_s for host in cluster.hosts]
    if len(links) == 1:
        hosts, links = tuple(range(world)), [cluster.hosts[0].inner_bytes_per_s] * world
    busy_s = [0.0] * len(links)
    for sender, receiver in permutations(range(world), 2):
        if hosts[sender] != hosts[receiver]:
            busy_s[hosts[sender]] += message.wire_bytes / world / links[hosts[sender]]
    return max(busy_s)


def with_hierarchy(drawn: Plan, messages: Iterable[Message], hierarchical: bool) -> Plan:
    changed = tuple(replace(message, hierarchical=hierarchical) for message in messages)
    return replace(drawn, messages=changed)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_flat_costs_equal_the_slow_sum_over_ranks(case: tuple[Cluster, Plan]) -> None:
    cluster, drawn = case
    flat = with_hierarchy(drawn, drawn.messages, False)
    expected = [slow_cost_s(message, cluster) for message in flat.messages]
    np.testing.assert_allclose(message_costs(flat, cluster, MODEL).sync_s, expected, rtol=1e-9)


@settings(max_examples=60, deadline=None)
@given(plans(), st.floats(1, 100))
def test_more_bandwidth_is_never_slower(case: tuple[Cluster, Plan], times: float) -> None:
    cluster, drawn = case

    def faster(part: Any, *rates: str) -> Any:
        return replace(part, **{name: getattr(part, name) * times for name in rates})

    fast = replace(
        cluster,
        hosts=tuple(faster(h, "link_bytes_per_s", "inner_bytes_per_s") for h in cluster.hosts),
        pair_links=tuple(faster(link, "link_bytes_per_s") for link in cluster.pair_links),
    )
    before, after = (message_costs(drawn, each, MODEL) for each in (cluster, fast))
    assert (after.channel_s <= before.channel_s * (1 + 1e-9)).all()
    assert after.paper_sync_s <= before.paper_sync_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(plans())
def test_hierarchy_never_sends_more_over_a_servers_interface(case: tuple[Cluster, Plan]) -> None:
    cluster, drawn = case
    served = [m for m in drawn.messages if m.synchronizer is Synchronizer.PARAMETER_SERVER]
    if served:
        two_level, flat = (
            message_costs(with_hierarchy(drawn, served, way), cluster, MODEL).transfer_s
            for way in (True, False)
        )
        assert (two_level <= flat * (1 + 1e-9)).all()


@st.composite
def schedules(draw: st.DrawFn) -> tuple[FlatPlan, np.ndarray, Workload]:
    """A workload of up to 8 variables, each in one message, and the messages' costs."""
    count = draw(st.integers(1, 8))
    times = st.floats(0, 1)
    ready = sorted(draw(st.lists(times, min_size=count, max_size=count)))
    workload = Workload(
        "m",
        tuple(Variable(f"v{i}", (3,), ready_s=r) for i, r in enumerate(ready)),
        (),
        draw(times),
        max(ready[-1], draw(times)),
        draw(times),
    )
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(draw(st.integers(1, count - sum(sizes))))
    order = np.array(draw(st.permutations(range(count))), dtype=np.int64)
    message = np.repeat(np.arange(len(sizes)), sizes)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    flat = FlatPlan(order, message, np.full(count, 3), np.zeros(count, dtype=np.int64), first)
    return flat, np.array(draw(st.lists(times, min_size=len(sizes), max_size=len(sizes)))), workload


def slow_step_s(flat: FlatPlan, cost_s: np.ndarray, workload: Workload, cross_step: bool) -> float:
    """The same step, event by event; time 0 is the start of the backward pass."""
    free_s, arrival_s = 0.0, {}
    for number, cost in enumerate(cost_s.tolist()):
        members = [
            int(flat.variable[i]) for i in range(len(flat.variable)) if flat.message[i] == number
        ]
        ready_s = max(workload.variables[member].ready_s or 0.0 for member in members)
        free_s = max(free_s, ready_s) + cost
        arrival_s.update(dict.fromkeys(members, free_s))
    if not cross_step:
        return workload.forward_s + max(workload.backward_s, free_s) + workload.update_s
    now_s = workload.backward_s + workload.update_s
    for variable in reversed(range(len(workload.variables))):
        now_s = max(now_s, arrival_s[variable]) + workload.forward_s / len(workload.variables)
    return now_s


@settings(max_examples=80, deadline=None)
@given(schedules(), st.booleans())
def test_overlap_equals_its_slow_twin(
    case: tuple[FlatPlan, np.ndarray, Workload], cross_step: bool
) -> None:
    flat, cost_s, workload = case
    assert np.isclose(
        overlap_step_s(flat, cost_s, workload, cross_step),
        slow_step_s(flat, cost_s, workload, cross_step),
    )


@settings(max_examples=80, deadline=None)
@given(schedules())
def test_a_step_is_bounded_by_its_queues_and_cross_step_never_lengthens_it(
    case: tuple[FlatPlan, np.ndarray, Workload],
) -> None:
    flat, cost_s, workload = case
    within, across = (
        overlap_step_s(flat, cost_s, workload, cross_step) for cross_step in (False, True)
    )
    slack = 1e-9
    assert max(workload.compute_s, cost_s.sum()) <= across + slack
    assert across <= within + slack
    assert within <= workload.compute_s + cost_s.sum() + slack


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=20))
def test_channel_ends_equal_the_recurrence(rows: list[tuple[float, float]]) -> None:
    end, expected = 0.0, []
    for ready, cost in rows:
        end = max(end, ready) + cost
        expected.append(end)
    table = np.array(rows)
    np.testing.assert_allclose(channel_ends_s(table[:, 0], table[:, 1]), expected, atol=1e-9)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10)), min_size=1, max_size=20),
    st.integers(0, 6),
)
def test_cpu_taken_from_the_backward_pass_equals_the_sum_over_earlier_messages(
    rows: list[tuple[int, float]], end: int
) -> None:
    table = np.array(rows, dtype=np.float64)
    slowed, slowed_end = slowed_ready_s(table[:, 0], table[:, 1], float(end))
    expected = [ready + sum(taken for other, taken in rows if other < ready) for ready, _ in rows]
    np.testing.assert_allclose(slowed, expected, atol=1e-9)
    assert np.isclose(slowed_end, end + sum(taken for ready, taken in rows if ready < end))
