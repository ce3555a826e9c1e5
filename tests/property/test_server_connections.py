"""Pushes and pulls of TensorFlow's servers: a slow twin, and symmetry."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from known_examples import examples
from synthetic_cluster import FREE, cluster

from autotune.cluster import Cluster, PairLink
from autotune.dfg.replay import replay
from autotune.lowering.costs import TENSORFLOW_COSTS, Constant
from autotune.lowering.lower import Lowering
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Variable, Workload

IN_ORDER = replace(
    FREE,
    collective_s=Constant(0.0, "test"),
    **{
        name: getattr(TENSORFLOW_COSTS, name)
        for name in ("star_threads", "star_turns", "star_order")
    },
)
"""Servers of TensorFlow that cost nothing besides the network."""
PAIR = (PairLink(("h0", "h1"), 3e7, 0.0),)
Port = tuple[str, str]
"""A host and a direction, or two hosts with a link of their own."""
Link = tuple[bool, int, int]
"""Whether it pulls, the root, and the number of a connection."""
CLUSTERS = {
    "even": cluster(*[(1, 1000)] * 4, latency_s=0.0),
    "mixed": cluster((1, 2000), (1, 1000), (1, 1000), (1, 250), latency_s=0.0),
    "devices": cluster(
        (3, 1000), (1, 400), latency_s=0.0, inner_latency_s=0.0, inner_bytes_per_s=1e8
    ),
    "pair": cluster((2, 900), (1, 500), (1, 1000), latency_s=0.0, inner_latency_s=0.0, pairs=PAIR),
}


def served(sizes: list[int], owners: list[int]) -> tuple[Workload, Plan]:
    """A plan of one message for each variable and its server; the computation takes no time."""
    variables = tuple(
        Variable(f"v{number}", (size,), ready_s=0.0, needed_s=0.0)
        for number, size in enumerate(sizes)
    )
    workload = Workload("m", variables, (), 0.0, 0.0, 0.0)
    messages = tuple(
        Message(
            (TensorSlice(f"v{number}", size),),
            Synchronizer.PARAMETER_SERVER,
            Compressor.NONE,
            "float32",
            owner=owner,
        )
        for number, (size, owner) in enumerate(zip(sizes, owners, strict=True))
    )
    return workload, Plan(workload.id, 4, messages)


def tensors_on_ports(on: Cluster, root: int, pull: bool) -> dict[Port, int]:
    """Tensors that pass each port, between the root and every other rank.

    Inside a host the busiest device counts.
    """
    linked = {frozenset(link.between) for link in on.pair_links}
    passed: Counter[Port] = Counter()
    inside: Counter[tuple[str, int, str]] = Counter()
    for rank in range(4):
        source, target = (root, rank) if pull else (rank, root)
        a, b = (on.hosts[on.host_of_rank[one]].name for one in (source, target))
        if rank == root:
            continue
        if a == b:
            inside[a, source, "sends"] += 1
            inside[a, target, "receives"] += 1
        elif frozenset((a, b)) in linked:
            passed[a, b] += 1
        else:
            passed[a, "out"] += 1
            passed[b, "in"] += 1
    for (host, _, _), count in inside.items():
        passed[host, "inside"] = max(passed[host, "inside"], count)
    return dict(passed)


def bytes_per_s(on: Cluster, port: Port) -> float:
    hosts = {host.name: host for host in on.hosts}
    a, b = port
    if b == "inside":
        return hosts[a].inner_bytes_per_s
    if b in hosts:
        return next(link.link_bytes_per_s for link in on.pair_links if set(link.between) == {a, b})
    return hosts[a].link_bytes_per_s


def twin_s(on: Cluster, sizes: list[int], owners: list[int]) -> list[float]:
    """When each message has been pushed and pulled, in small steps.

    A port serves all its connections evenly. A connection carries one tensor after the other,
    whatever other connections of the same message do. A sum is pulled when all have pushed.
    """
    waiting: dict[Port, dict[Link, list[int]]] = defaultdict(dict)
    left_s: dict[tuple[Port, Link, int], float] = {}
    pending: Counter[tuple[bool, int]] = Counter()

    def start(pull: bool, number: int) -> None:
        root = owners[number]
        for port, tensors in tensors_on_ports(on, root, pull).items():
            for place in range(tensors):
                connection = (pull, root, place)
                waiting[port].setdefault(connection, []).append(number)
                seconds = 4 * sizes[number] / bytes_per_s(on, port) / IN_ORDER["payload"]
                left_s[port, connection, number] = seconds
                pending[pull, number] += 1

    for number in range(len(sizes)):
        start(False, number)
    now_s, arrived_s = 0.0, [0.0] * len(sizes)
    while any(pending.values()):
        sending = [
            (port, connection, numbers[0], sum(map(bool, waiting[port].values())))
            for port in waiting
            for connection, numbers in waiting[port].items()
            if numbers
        ]
        passed_s = min(left_s[one[:3]] * one[3] for one in sending)
        now_s += passed_s
        for port, connection, number, share in sending:
            left_s[port, connection, number] -= passed_s / share
            if left_s[port, connection, number] > 1e-15:
                continue
            waiting[port][connection].pop(0)
            pull = connection[0]
            pending[pull, number] -= 1
            if not pending[pull, number]:
                arrived_s[number] = now_s
                if not pull:
                    start(True, number)
    return arrived_s


messages = st.lists(
    st.tuples(st.integers(10_000, 90_000), st.integers(0, 3)), min_size=1, max_size=6
)


@settings(max_examples=examples(60), deadline=None)
@example("mixed", [(90_000, 0), (90_000, 1), (10_000, 0)])  # whose connections end far apart
@given(st.sampled_from(sorted(CLUSTERS)), messages)
def test_messages_arrive_as_in_a_simulation_of_every_connection(name, drawn) -> None:
    sizes, owners = map(list, zip(*drawn, strict=True))
    workload, plan = served(sizes, owners)
    lowering = Lowering(workload, CLUSTERS[name], IN_ORDER)
    graph, message_ops = lowering.period_with_messages(plan)
    arrived_s = replay(graph).end_s[message_ops.ends]
    assert arrived_s.tolist() == pytest.approx(twin_s(CLUSTERS[name], sizes, owners), rel=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(sorted(CLUSTERS)), messages)
def test_the_folded_graph_takes_as_long_as_that_of_every_port(name, drawn) -> None:
    sizes, owners = map(list, zip(*drawn, strict=True))
    workload, plan = served(sizes, owners)
    lowering = Lowering(workload, CLUSTERS[name], TENSORFLOW_COSTS)
    full_s = replay(lowering.period(plan, symmetric=False)).makespan_s
    assert lowering.step_s(plan) == pytest.approx(full_s, rel=1e-9)


def test_a_thousand_equal_workers_need_as_many_ops_as_few() -> None:
    counts = []
    for workers in (16, 1024):
        workload, plan = served([10**6], [0])
        on = cluster(*[(1, 1000)] * workers)
        lowering = Lowering(workload, on, TENSORFLOW_COSTS)
        counts.append(lowering.period(replace(plan, world_size=workers)).ops)
    assert counts[0] == counts[1]
