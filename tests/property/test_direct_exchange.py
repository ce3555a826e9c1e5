"""Direct exchanges in the lowered graph: a slow twin, symmetry, and the analytic cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from known_examples import examples
from synthetic_cluster import FREE, cluster, costs

from autotune.cluster import Cluster, CollectiveFit, PairLink, PeerFit
from autotune.costs.direct_cost import direct_s_per_byte
from autotune.costs.sync_cost import message_costs
from autotune.dfg.replay import replay
from autotune.lowering.costs import Constant
from autotune.lowering.lower import Lowering
from autotune.optimizer.bounds import least_transfer_s
from autotune.strategy_space.constraints import exchange_shares
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.shares import Shares, normal_shares
from autotune.strategy_space.strategy import Compressor, SparseHandling, Synchronizer
from autotune.workload import Variable, Workload

PAYLOAD = FREE["payload"]
NUDGES = (1 + 1e-6, 1 - 2.3e-6, 1 + 4.1e-6, 1 - 7.7e-6)
PAIR = (PairLink(("h0", "h1"), 3e7, 0.0),)
CLUSTERS = {
    "even": cluster(*[(1, 1000)] * 4, latency_s=0.0),
    "mixed": cluster((1, 2000), (1, 1000), (1, 1000), (1, 500), latency_s=0.0),
    "devices": cluster((3, 1000), (1, 400), latency_s=0.0, inner_bytes_per_s=1e8),
    "pair": cluster((2, 900), (1, 500), (1, 1000), latency_s=0.0, pairs=PAIR),
}


def exchanged(
    elements: list[int], shares: list[Shares | None], pieces: int, in_flight: int = 2
) -> tuple[Workload, Plan]:
    """A plan of one direct exchange for each variable; the computation takes no time."""
    names = [f"v{number}" for number in range(len(elements))]
    pairs = list(zip(names, elements, strict=True))
    variables = tuple(Variable(name, (size,), ready_s=0.0, needed_s=0.0) for name, size in pairs)
    workload = Workload("m", variables, (), 0.0, 0.0, 0.0)
    messages = tuple(
        Message(
            (TensorSlice(name, size),),
            Synchronizer.DIRECT_EXCHANGE,
            Compressor.NONE,
            "float32",
            shares=normal_shares(owned),
            pieces=pieces,
        )
        for (name, size), owned in zip(pairs, shares, strict=True)
    )
    return workload, Plan(workload.id, 4, messages, in_flight=in_flight)


Transfers = list[tuple[int, int, float]]
"""(source, target, bytes) of sends between two ranks."""


def sends_of(shares: list[float], piece_bytes: float, pull: bool) -> Transfers:
    """The sends of a piece in one round, between every two ranks."""
    return [
        (source, target, piece_bytes * shares[source if pull else target])
        for source, target in permutations(range(4), 2)
    ]


def ring_of(message_bytes: float) -> Transfers:
    """The sends of an all-reduce in each of its rounds."""
    return [(rank, (rank + 1) % 4, message_bytes / 4) for rank in range(4)]


def transfer_times(on: Cluster, transfers: Transfers) -> dict[object, float]:
    """Seconds that each port is busy: send by send.

    Inside a host the busiest device counts.
    """
    links = {frozenset(link.between): link.link_bytes_per_s for link in on.pair_links}
    busy_s: dict[object, float] = defaultdict(float)
    inside_s: dict[tuple[str, int, str], float] = defaultdict(float)
    for source, target, size in transfers:
        a, b = (on.hosts[on.host_of_rank[rank]] for rank in (source, target))
        if a is b:
            for rank, what in ((source, "sends"), (target, "receives")):
                inside_s[a.name, rank, what] += size / a.inner_bytes_per_s
        elif frozenset((a.name, b.name)) in links:
            busy_s[a.name, b.name] += size / links[frozenset((a.name, b.name))]
        else:
            busy_s[a.name, "out"] += size / a.link_bytes_per_s
            busy_s[b.name, "in"] += size / b.link_bytes_per_s
    for (host, _, _), seconds in inside_s.items():
        busy_s[host, "inside"] = max(busy_s[host, "inside"], seconds)
    return {port: seconds / PAYLOAD for port, seconds in busy_s.items()}


RING_ROUNDS = 6
"""Of an all-reduce between four ranks."""
Shared = Sequence[list[float] | None]
"""The shares of each direct exchange; None for an all-reduce."""


class Twin:
    """Direct exchanges, most of them with several owners, and all-reduces, in small steps.

    There are at most two all-reduces, so that none waits for a thread of gloo. All messages start
    in order. A port serves pieces in the order of arrival; an all-reduce takes its thread first, so
    it enters behind pieces that start at the same time. Each round has its own connections. Those
    of an owner carry one piece after the other. A piece is pulled when all ranks have pushed it,
    and waits in each round for the piece `in_flight` places before.
    """

    def __init__(
        self, on: Cluster, sizes: list[int], shares: Shared, pieces: int, in_flight: int
    ) -> None:
        self.in_flight = in_flight
        self.owners: list[set[int]] = []  # by piece; an all-reduce is one without owners
        self.direct: list[int] = []
        self.left_s: dict[tuple[bool, int], list[dict[object, float]]] = {}  # of rounds to come
        for size, owned in zip(sizes, shares, strict=True):
            if owned is None:
                ring_s = transfer_times(on, ring_of(4 * size))
                self.left_s[False, len(self.owners)] = [dict(ring_s) for _ in range(RING_ROUNDS)]
                self.owners.append(set())
                continue
            for _ in range(pieces):
                self.direct.append(len(self.owners))
                for pull in (False, True):
                    sent = sends_of(owned, 4 * size / pieces, pull)
                    self.left_s[pull, len(self.owners)] = [transfer_times(on, sent)]
                self.owners.append({rank for rank in range(4) if owned[rank] > 0})
        self.under_way: list[tuple[bool, int]] = []
        self.ended: set[tuple[bool, int]] = set()
        self.lines: dict[object, list[tuple[bool, int, int]]] = defaultdict(list)

    def start(self) -> None:
        """Both lanes take their pieces in order, once those before have room."""
        for pull, pieces in ((False, range(len(self.owners))), (True, self.direct)):
            for at in pieces:
                if (pull, at) in self.ended or (pull, at) in self.under_way:
                    continue
                behind = [(False, at)] * pull
                if at in self.direct and (number := self.direct.index(at)) >= self.in_flight:
                    behind.append((pull, self.direct[number - self.in_flight]))
                if not self.ended.issuperset(behind):
                    break
                self.under_way.append((pull, at))

    def arrive(self) -> dict[object, dict[object, float]]:
        """The first round in the line of each port."""
        sending: dict[object, list[tuple[bool, int, int]]] = defaultdict(list)
        for pull in (False, True):
            busy: dict[object, set[int]] = defaultdict(set)  # owners that earlier pieces have
            for one in sorted(one for one in self.under_way if one[0] == pull):
                for port in (port for port, left in self.left_s[one][0].items() if left > 0):
                    if not busy[port] & self.owners[one[1]]:
                        sending[port].append((*one, len(self.left_s[one])))
                    busy[port] |= self.owners[one[1]]
        for port, sent in sending.items():
            line = [one for one in self.lines[port] if one in sent]
            new = [one for one in sent if one not in line]
            new.sort(key=lambda one: (one[2] == RING_ROUNDS, one[1], one[0]))
            self.lines[port] = line + new
        return {port: self.left_s[self.lines[port][0][:2]][0] for port in sending}

    def seconds(self) -> float:
        now_s = 0.0
        while len(self.ended) < len(self.left_s):
            self.start()
            first = self.arrive()
            passed_s = min(left_s[port] for port, left_s in first.items())
            now_s += passed_s
            for port, left_s in first.items():
                left_s[port] -= passed_s
                if left_s[port] < 1e-15:
                    left_s[port] = 0.0
            for one in self.under_way:
                if not any(self.left_s[one][0].values()):
                    self.left_s[one].pop(0)
            self.ended.update(one for one in self.under_way if not self.left_s[one])
            self.under_way = [one for one in self.under_way if one not in self.ended]
        return now_s


def twin_s(on: Cluster, sizes: list[int], shares: Shared, pieces: int, in_flight: int) -> float:
    return Twin(on, sizes, shares, pieces, in_flight).seconds()


def apart(owned: list[int]) -> list[float]:
    """Shares near these parts of which no sum equals another one.

    Else two ports may be done at one moment, and rounding decides which piece is sent first: with
    0.1, 0.3, 0.3 and 0.3 one has 1 - 0.1 to send, and others 0.3 + 0.3 + 0.3 to receive.
    """
    nudged = [part * nudge for part, nudge in zip(owned, NUDGES, strict=True)]
    return [part / sum(nudged) for part in nudged]


parts = st.lists(st.integers(0, 4), min_size=4, max_size=4).filter(any)
shared = parts.filter(lambda owned: sum(map(bool, owned)) > 1)
IN_FLIGHT = st.integers(1, 8)


@settings(max_examples=examples(60), deadline=None)
@example("devices", [([0, 1, 2, 0], 10_000)], 4, 1)  # other devices are the busiest in each stage
@example("even", [([1, 0, 1, 0], 90_000), ([0, 1, 0, 1], 10_000)], 4, 8)  # a small one behind
@example("even", [([1, 3, 3, 3], 10_000)], 4, 2)  # see `apart`
@given(
    st.sampled_from(sorted(CLUSTERS)),
    st.lists(st.tuples(shared, st.integers(10_000, 90_000)), min_size=1, max_size=3),
    st.integers(4, 7),
    st.integers(1, 8),
)
def test_pieces_take_as_long_as_in_a_simulation_of_every_send(
    name, messages, pieces, in_flight
) -> None:
    shares = [apart(owned) for owned, _ in messages]
    sizes = [size // pieces * pieces for _, size in messages]
    workload, plan = exchanged(sizes, [tuple(each) for each in shares], pieces)
    graph = Lowering(workload, CLUSTERS[name], FREE).message_graph(
        plan.messages, in_flight=in_flight
    )
    expected_s = twin_s(CLUSTERS[name], sizes, shares, pieces, in_flight)
    assert replay(graph).makespan_s == pytest.approx(expected_s, rel=1e-9)


mixed = st.lists(st.tuples(st.none() | shared, st.integers(10_000, 90_000)), min_size=2, max_size=4)


def is_mixed(messages: list[tuple[list[int] | None, int]]) -> bool:
    """Whether there are direct exchanges, and one or two all-reduces."""
    all_reduces = sum(owned is None for owned, _ in messages)
    return 0 < all_reduces < 3 and all_reduces < len(messages)


@settings(max_examples=examples(40), deadline=None)
@example("even", [([1, 2, 3, 4], 90_000), (None, 10_000)], 7, 2)
@example("mixed", [(None, 40_000), ([1, 2, 3, 0], 70_000), (None, 20_000)], 5, 1)
@given(st.sampled_from(sorted(CLUSTERS)), mixed.filter(is_mixed), st.integers(4, 7), IN_FLIGHT)
def test_all_reduces_start_in_order_with_pieces_as_in_a_simulation_of_every_send(
    name, messages, pieces, in_flight
) -> None:
    shares = [None if owned is None else apart(owned) for owned, _ in messages]
    sizes = [size // pieces * pieces for _, size in messages]
    owned_by = [None if owned is None else tuple(owned) for owned in shares]
    workload, plan = exchanged(sizes, owned_by, pieces)
    sent = list(plan.messages)
    for number, message in enumerate(plan.messages):
        if shares[number] is None:
            sent[number] = replace(message, synchronizer=Synchronizer.ALL_REDUCE, pieces=1)
    lowering = Lowering(workload, CLUSTERS[name], costs(FREE, collective_s=0.0))
    taken_s = replay(lowering.message_graph(sent, in_flight=in_flight)).makespan_s
    expected_s = twin_s(CLUSTERS[name], sizes, shares, pieces, in_flight)
    assert taken_s == pytest.approx(expected_s, rel=1e-9)


KINDS = st.sampled_from(
    [
        {},
        {"pieces": 3},
        {"pieces": 6, "compressor": Compressor.FP16},
        {"hierarchical": True, "pieces": 2},
        {"compressor": Compressor.INT8},
        {"compressor": Compressor.TOP_K, "ratio": 0.1},
        {"compressor": Compressor.POWER_SGD, "rank": 2, "hierarchical": True},
        {"sparse": SparseHandling.GATHER_SCATTER},
    ]
)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(sorted(CLUSTERS)),
    st.lists(st.tuples(KINDS, st.none() | parts), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 8),
)
def test_the_folded_graph_takes_as_long_as_that_of_every_rank(
    name, drawn, cross_step, in_flight
) -> None:
    """With compressors, rows, leaders and pieces, in plans within the step and across it."""
    variables = tuple(
        Variable(f"v{number}", (300, 40), sparse="sparse" in kind, ready_s=0.01 * number)
        for number, (kind, _) in enumerate(drawn)
    )
    workload = Workload("m", variables, (), 0.01, 0.05, 0.001)
    messages = tuple(
        Message(
            (TensorSlice(f"v{number}", 12_000, rows=300),),
            Synchronizer.DIRECT_EXCHANGE,
            dtype="float32",
            shares=normal_shares(owned and tuple(part / sum(owned) for part in owned)),
            **{"compressor": Compressor.NONE, **kind},
        )
        for number, (kind, owned) in enumerate(drawn)
    )
    plan = Plan(workload.id, 4, messages, cross_step, in_flight=in_flight)
    lowering = Lowering(workload, CLUSTERS[name])
    full_s = replay(lowering.period(plan, symmetric=False)).makespan_s
    assert lowering.step_s(plan) == pytest.approx(full_s, rel=1e-9)
    assert full_s > workload.compute_s


def test_a_thousand_equal_workers_need_as_many_ops_as_few() -> None:
    counts = []
    for workers in (16, 1024):
        workload, plan = exchanged([10**6], [None], 4)
        on = cluster(*[(1, 1000)] * workers)
        graph = Lowering(workload, on).period(replace(plan, world_size=workers))
        counts.append(graph.ops)
    assert counts[0] == counts[1]


def test_owners_by_bandwidth_take_little_more_than_the_bound_and_a_ring_far_more() -> None:
    """16 MiB in pieces of 256 KiB, two in flight, as GROUNDWORK's sketch sends them."""
    on, size = CLUSTERS["mixed"], 2**22
    workload, plan = exchanged([size], [exchange_shares(on)], 64)
    (message,) = plan.messages
    ring = replace(message, synchronizer=Synchronizer.ALL_REDUCE, shares=None, pieces=1)
    equal = replace(message, shares=None)
    lowering = Lowering(workload, on, FREE)
    bound_s = least_transfer_s(on, 4 * size) / PAYLOAD
    best_s, equal_s, ring_s = (
        replay(lowering.message_graph([one], in_flight=2)).makespan_s
        for one in (message, equal, ring)
    )
    assert bound_s * (1 - 1e-9) <= best_s < 1.02 * bound_s
    assert ring_s == pytest.approx(1.5 * bound_s, rel=1e-3)
    assert equal_s == pytest.approx(1.5 * bound_s, rel=0.02)


def test_a_slow_interface_with_all_peers_at_once_delays_the_rounds_that_load_it() -> None:
    on = CLUSTERS["even"]
    workload, plan = exchanged([10**6], [None], 4)
    whole_s = Lowering(workload, on, FREE).step_s(plan)
    half = PeerFit("h0", 3, True, 0.5 * 125e6 * PAYLOAD, 0.0, 0.0, 0.0)
    hidden = replace(half, peers=1, bytes_per_s=125e6 * PAYLOAD)
    far = replace(half, host="h1", outwards=False)
    for fits, factor in (((half,), 2.0), ((far,), 2.0), ((half, far), 2.0), ((hidden,), 1.0)):
        slowed = Lowering(workload, replace(on, peer_fits=fits), FREE)
        assert slowed.step_s(plan) == pytest.approx(factor * whole_s)
    costly = replace(on, peer_fits=(replace(hidden, message_s=1e-3),))
    # Of the three messages of each rank, those of the last round are not hidden.
    assert Lowering(workload, costly, FREE).step_s(plan) == pytest.approx(whole_s + 3e-3)


def test_the_analytic_cost_of_a_message_alone_is_that_of_its_twin() -> None:
    """On equal hosts and on unequal ones, whole and in pieces."""
    for name, pieces in (("even", 1), ("even", 4), ("mixed", 1), ("mixed", 4), ("mixed", 16)):
        on, size = CLUSTERS[name], 960_000
        shares = exchange_shares(on)
        workload, plan = exchanged([size], [shares], pieces)
        costs = message_costs(plan, on, workload)
        assert costs.transfer_s[0] / PAYLOAD == pytest.approx(
            twin_s(on, [size], [list(shares)], pieces, 2), rel=0.02
        )


def test_a_fit_of_whole_messages_is_scaled_to_the_owners_and_pieces() -> None:
    fit = CollectiveFit("direct_exchange", 4, 1e-3, 2e-8, 0.0, 4096, 2**24)
    on = CLUSTERS["mixed"].with_fits((fit,))
    equal, owned = (
        message_costs(plan, on, workload).channel_s[0]
        for workload, plan in (
            exchanged([10**6], [None], 1),
            exchanged([10**6], [exchange_shares(on)], 8),
        )
    )
    assert equal == pytest.approx(fit.seconds(4e6))
    ratio = direct_s_per_byte(on, exchange_shares(on), 8, False)[0]
    ratio /= direct_s_per_byte(on, None, 1, False)[0]
    assert owned == pytest.approx(ratio * fit.seconds(4e6) + 3.5 * fit.alpha_s)


@pytest.mark.parametrize("shares", [None, (1.0, 0.0, 0.0, 0.0)])
def test_pieces_pass_awake_threads_unless_one_is_under_way_at_a_time(shares: Shares | None) -> None:
    workload, plan = exchanged([10**6], [shares], 3)
    costs = replace(
        FREE,
        lane_s=Constant(1e-3, "test"),
        lane_first_s=Constant(2e-3, "test"),
        piece_s=Constant(1e-4, "test"),
    )
    lowering = Lowering(workload, CLUSTERS["even"], costs)
    for in_flight, expected_s in ((1, [1e-3, 1e-3, 1e-3]), (2, [1e-3, 1e-4, 1e-4])):
        graph = lowering.message_graph(plan.messages, in_flight=in_flight)
        for lane in range(3):
            on_lane = graph.queue == graph.names.queues.index(f"r0 lane {lane}")
            assert graph.duration_s[on_lane].tolist() == expected_s
        ranks = 1 if shares is None else 4
        wakes = np.isclose(graph.duration_s, costs["lane_first_s"], rtol=1e-9)
        assert wakes.sum() == ranks * 3 * (3 if in_flight == 1 else 1)


@pytest.mark.parametrize("shares", [None, (1.0, 0.0, 0.0, 0.0)])
@pytest.mark.parametrize("count", [1, 6])
def test_a_lane_wakes_up_once_for_a_stream_of_messages(shares: Shares | None, count: int) -> None:
    """Push, pull and arrival each have a thread, which wakes up beside its earlier messages."""
    workload, plan = exchanged([10] * count, [shares] * count, 1)
    steps_s = []
    for first_s in (0.0, 5e-4):
        rank = replace(FREE, lane_s=Constant(1e-3, "test"), lane_first_s=Constant(first_s, "test"))
        lowering = Lowering(workload, CLUSTERS["even"], rank)
        graph = lowering.message_graph(plan.messages, limit=count, in_flight=count)
        steps_s.append(replay(graph).makespan_s)
    assert steps_s[1] - steps_s[0] == pytest.approx(3 * 5e-4)
    assert steps_s[0] == pytest.approx((count + 2) * 1e-3, rel=0.1)
