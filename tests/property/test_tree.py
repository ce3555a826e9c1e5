"""Gloo's tree: its senders, and its time on evenly shared links, against simple twins."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_cluster import cluster

from autotune.cluster import Cluster, PairLink
from autotune.lowering.traffic import Collective, Ports
from autotune.lowering.tree import senders, tree_s_per_byte


def parents_as_gloo_finds_them(size: int) -> list[int]:
    """The loop of gloo/broadcast.cc: a rank receives in the iteration of its highest bit."""
    parents = [-1] * size
    for rank in range(size):
        mask = (1 << (size - 1).bit_length()) - 1
        for bit in range((size - 1).bit_length()):
            mask ^= 1 << bit
            if rank & mask == 0 and rank ^ (1 << bit) < size and rank & (1 << bit):
                parents[rank] = rank ^ (1 << bit)
    return parents[1:]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 12, 16, 33])
def test_senders_are_those_of_gloos_loop(size: int) -> None:
    assert senders(size).tolist() == parents_as_gloo_finds_them(size)


def played_through(paths: list[tuple[int, ...]], s_per_byte: list[Fraction]) -> Fraction:
    """The tree in exact fractions, event by event; the most contended port sets its rates first."""
    parents = parents_as_gloo_finds_them(len(paths) + 1)
    left = dict.fromkeys(range(len(paths)), Fraction(1))
    have, now = {0}, Fraction(0)
    while left:
        active = [t for t in left if parents[t] in have]
        free = {port: 1 / cost for port, cost in enumerate(s_per_byte)}
        rate: dict[int, Fraction] = {}
        while len(rate) < len(active):
            waiting = [t for t in active if t not in rate]
            users = {port: [t for t in waiting if port in paths[t]] for port in free}
            port = min((p for p in users if users[p]), key=lambda p: free[p] / len(users[p]))
            share = free[port] / len(users[port])
            for t in users[port]:
                rate[t] = share
                for other in paths[t]:
                    free[other] -= share
        step = min(left[t] / rate[t] for t in active)
        now += step
        for t in active:
            left[t] -= rate[t] * step
            if left[t] == 0:
                del left[t]
                have.add(t + 1)
    return now


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 9))
def test_the_trees_time_matches_exact_events(data: st.DataObject, size: int) -> None:
    costs = data.draw(st.lists(st.integers(1, 5), min_size=6, max_size=6))
    port = st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True).map(tuple)
    paths = data.draw(st.lists(port, min_size=size - 1, max_size=size - 1))
    exact = played_through(paths, [Fraction(cost) for cost in costs])
    per_byte_s = tree_s_per_byte(paths, np.array(costs, dtype=np.float64))
    assert per_byte_s == pytest.approx(float(exact), rel=1e-9)


def tree_units(ports: Ports, ranks: int, roots: Iterable[int]) -> list[float]:
    """By root, in units of the time of a byte at 1 Gbit/s."""
    trees = (ports.traffic(Collective.BROADCAST, range(ranks), root) for root in roots)
    return [tree.alone_s_per_byte * 125e6 for tree in trees]


INNER: dict[str, Any] = {"inner_bytes_per_s": 5e12}
SLOW_PAIR = PairLink(("h0", "h1"), 12.5e6, 5e-5)
EVEN = [(1, 1000)] * 4


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        # Two leave the root's link at once, the third follows the first of them.
        (cluster(*EVEN, **INNER), [3, 3, 3, 3]),
        (cluster(*EVEN[:3], (1, 250), **INNER), [6, 4, 8, 9]),
        # From the second device of a host, one comes back.
        (cluster(*[(2, 1000)] * 2, **INNER), [2, 3, 2, 3]),
    ],
)
def test_times_match_manual_results(cluster: Cluster, expected: list[float]) -> None:
    assert tree_units(Ports(cluster), 4, range(4)) == pytest.approx(expected, rel=1e-3)


def test_a_pair_link_counts_at_its_place_in_the_tree() -> None:
    """The tree from h0 sends over the slow link and on from h1; the tree from h2 avoids it."""
    ports = Ports(cluster(*EVEN, pairs=[SLOW_PAIR], **INNER))
    assert tree_units(ports, 4, (0, 2)) == [pytest.approx(11), pytest.approx(3)]


def test_equal_hosts_share_one_simulated_tree() -> None:
    ports = Ports(cluster(*[(8, 1000)] * 16, **INNER))
    assert len(set(tree_units(ports, 128, range(0, 128, 8)))) == 1
    assert len(ports._trees) == 1
