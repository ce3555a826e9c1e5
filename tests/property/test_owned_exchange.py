"""Direct exchanges with one owner each: every rank goes on by itself, against a slow twin."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from known_examples import examples
from synthetic_cluster import FREE
from test_direct_exchange import CLUSTERS, PAYLOAD, exchanged

from autotune.cluster import Cluster
from autotune.dfg.replay import replay
from autotune.lowering.flows import PARTS
from autotune.lowering.lower import Lowering

RANKS = range(4)


def path(on: Cluster, source: int, target: int) -> list[tuple[object, float]]:
    """The ports of a transfer in order, each with its seconds per byte."""
    links = {frozenset(link.between): link.link_bytes_per_s for link in on.pair_links}
    a, b = (on.hosts[on.host_of_rank[rank]] for rank in (source, target))
    if a is b:
        return [((a.name, "inside"), 1 / a.inner_bytes_per_s)]
    if frozenset((a.name, b.name)) in links:
        return [((a.name, b.name), 1 / links[frozenset((a.name, b.name))])]
    return [((a.name, "out"), 1 / a.link_bytes_per_s), ((b.name, "in"), 1 / b.link_bytes_per_s)]


@dataclass
class Part:
    """A part of a transfer: the seconds left on each of its ports, in order."""

    left: list[tuple[object, float]]


@dataclass
class Transfer:
    """From `source` to `target`; parts leave one after the other."""

    source: int
    target: int
    parts: list[Part] = field(default_factory=list)

    @property
    def arrived(self) -> bool:
        return not any(part.left for part in self.parts)

    @property
    def left(self) -> bool:
        """Whether all parts have left the first port."""
        return all(len(part.left) < 2 - self.single for part in self.parts)

    @property
    def single(self) -> int:
        return 0 if len(path(self.on, self.source, self.target)) == 2 else 1

    on: Cluster = field(default=CLUSTERS["even"])


class Twin:
    """All exchanges of a plan in small steps; a port serves all parts on it evenly.

    Between two hosts it serves them in the order of arrival.
    """

    def __init__(self, on: Cluster, pieces: list[tuple[float, int]], in_flight: int) -> None:
        """`pieces`: bytes and owner of each, in order."""
        self.owners, self.in_flight = [owner for _, owner in pieces], in_flight
        self.in_order = len(on.hosts) == 2
        self.lines: dict[object, list[Part]] = defaultdict(list)  # in the order of arrival
        self.passed: list[set[tuple[int, int]]] = [set(), set()]  # (rank, piece) on both lanes
        self.transfers: list[list[list[Transfer]]] = [[], []]
        for size, owner in pieces:
            others = [rank for rank in RANKS if rank != owner]
            for pull in (0, 1):
                ends = [(owner, rank) if pull else (rank, owner) for rank in others]
                self.transfers[pull].append([self.transfer(on, size, a, b) for a, b in ends])

    @staticmethod
    def transfer(on: Cluster, size: float, a: int, b: int) -> Transfer:
        parts = [
            Part([(port, size * part * s / PAYLOAD) for port, s in path(on, a, b)])
            for part in PARTS
        ]
        return Transfer(a, b, parts, on=on)

    def ended(self, lane: int, rank: int, piece: int) -> bool:
        """A rank that only sends has done its part when it has begun."""
        received = [one for one in self.transfers[lane][piece] if one.target == rank]
        return (rank, piece) in self.passed[lane] and all(one.arrived for one in received)

    def advance(self) -> None:
        """Each rank's threads take the pieces in order, and at most `in_flight` of them."""
        for lane in (0, 1):
            for rank in RANKS:
                for piece in range(len(self.owners)):
                    if (rank, piece) in self.passed[lane]:
                        continue
                    behind = piece - self.in_flight
                    room = behind < 0 or self.ended(lane, rank, behind)
                    if not room or (lane == 1 and not self.ended(0, rank, piece)):
                        break
                    self.passed[lane].add((rank, piece))

    def on_ports(self) -> dict[object, list[Part]]:
        """The parts that each port serves."""
        sending: dict[object, list[Part]] = defaultdict(list)
        busy: set[tuple[int, int, int]] = set()  # connections whose earlier pieces have not left
        for piece in range(len(self.owners)):
            for lane in (0, 1):
                for one in self.transfers[lane][piece]:
                    begun = (one.source, piece) in self.passed[lane]
                    posted = (one.target, piece) in self.passed[0]
                    connection = (lane, one.source, one.target)
                    if not (begun and posted) or connection in busy:
                        busy.add(connection)
                        continue
                    for part in one.parts:
                        if part.left:
                            sending[part.left[0][0]].append(part)
                        if len(part.left) == 2 - one.single:  # the next one leaves behind it
                            break
                    if not one.left:
                        busy.add(connection)
        return self.first_in_line(sending) if self.in_order else sending

    def first_in_line(self, waiting: dict[object, list[Part]]) -> dict[object, list[Part]]:
        served: dict[object, list[Part]] = {}
        for port, parts in waiting.items():
            line = [part for part in self.lines[port] if any(part is other for other in parts)]
            line += [part for part in parts if not any(part is other for other in line)]
            self.lines[port] = line
            served[port] = line[:1]
        return served

    def seconds(self) -> float:
        now_s = 0.0
        while True:
            self.advance()
            sending = self.on_ports()
            if not sending:
                assert all(one.arrived for each in self.transfers[1] for one in each)
                return now_s
            passed_s = min(len(on) * part.left[0][1] for on in sending.values() for part in on)
            now_s += passed_s
            for on in sending.values():
                for part in on:
                    port, left_s = part.left[0]
                    part.left[0] = (port, left_s - passed_s / len(on))
            for on in sending.values():
                for part in on:
                    if part.left[0][1] < 1e-15:
                        del part.left[0]


@settings(max_examples=examples(30), deadline=None)
@example("mixed", [(0, 90_000), (1, 10_000), (0, 20_000)], 2, 2)
@example("devices", [(0, 90_000), (3, 90_000)], 3, 1)
@given(
    st.sampled_from(sorted(CLUSTERS)),
    st.lists(
        st.tuples(st.sampled_from(RANKS), st.integers(10_000, 90_000)), min_size=1, max_size=4
    ),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_owners_take_as_long_as_in_a_simulation_of_every_rank(
    name, messages, pieces, in_flight
) -> None:
    sizes = [size // pieces * pieces for _, size in messages]
    shares = [tuple(float(rank == owner) for rank in RANKS) for owner, _ in messages]
    workload, plan = exchanged(sizes, shares, pieces)
    graph = Lowering(workload, CLUSTERS[name], FREE).message_graph(
        plan.messages, in_flight=in_flight
    )
    each = [
        (4 * size / pieces, owner)
        for (owner, _), size in zip(messages, sizes, strict=True)
        for _ in range(pieces)
    ]
    expected_s = Twin(CLUSTERS[name], each, in_flight).seconds()
    assert replay(graph).makespan_s == pytest.approx(expected_s, rel=1e-6)


def test_ranks_that_only_send_do_not_wait_for_the_owner() -> None:
    """With one piece under way, rank 2 sends to the second owner before the first has its parts.

    Rank 0 owns the first message, so it waits for its parts before it sends.
    """
    shares = [tuple(float(rank == owner) for rank in RANKS) for owner in (0, 1)]
    workload, plan = exchanged([250_000, 250_000], shares, 1)
    graph = Lowering(workload, CLUSTERS["even"], FREE).message_graph(plan.messages, in_flight=1)
    timeline = replay(graph)
    numbers = {name: number for number, name in enumerate(graph.names.ops)}
    has_parts_s = timeline.end_s[numbers["message 0 push arrived r0"]]
    begins_s = {
        rank: timeline.start_s[numbers[f"message 1 push {rank} to 1 0 h{rank} out"]]
        for rank in (0, 2)
    }
    assert begins_s[2] < has_parts_s <= begins_s[0]


def test_an_exchange_alone_takes_little_more_than_its_slowest_port() -> None:
    """A part passes one port while the other is idle; on unequal hosts it may be a large one."""
    for name, owner, most in (("even", 0, 1.06), ("mixed", 3, 1.06), ("mixed", 0, 1.15)):
        workload, plan = exchanged([10**6], [tuple(float(rank == owner) for rank in RANKS)], 1)
        on = CLUSTERS[name]
        graph = Lowering(workload, on, FREE).message_graph(plan.messages)
        others = [rank for rank in RANKS if rank != owner]
        bytes_per_s = [host.link_bytes_per_s for host in on.hosts]
        slowest_s = (
            max(3 / bytes_per_s[owner], *(1 / bytes_per_s[rank] for rank in others)) * 4e6 / PAYLOAD
        )
        assert 2 * slowest_s < replay(graph).makespan_s < 2 * most * slowest_s
