"""Hosts' own links from pairs that show the slower of two: exact on small clusters, few probes on large ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.profiling.fits.host_links import (
    MAX_AT_ONCE,
    Pair,
    PairCost,
    first_rounds,
    last_rounds,
    own_links,
    pair_cost,
)
from autotune.rng import generator

SPEEDS = (31e6, 62e6, 125e6)


def probed(speeds: list[float]) -> tuple[dict[int, tuple[PairCost, int]], list[list[Pair]]]:
    """What the rounds tell of hosts with these links, and the rounds."""
    found: dict[Pair, PairCost] = {}

    def run(rounds: list[list[Pair]]) -> list[list[Pair]]:
        for pairs in rounds:
            found.update(
                {
                    (a, b): PairCost(min(speeds[a], speeds[b]), 1e-5 * (a + b), 0.01, 0.02)
                    for a, b in pairs
                }
            )
        return rounds

    rounds = run(first_rounds(len(speeds)))
    rounds = [*rounds, *run(last_rounds(len(speeds), found))]
    return own_links(len(speeds), found), rounds


def test_one_slow_host_of_four_comes_out_as_such() -> None:
    links, rounds = probed([125e6, 125e6, 125e6, 31e6])
    assert [links[host][0].bytes_per_s for host in range(4)] == [125e6, 125e6, 125e6, 31e6]
    assert all(len(pairs) == 1 for pairs in rounds) and len(rounds) == 6
    assert links[3][0].latency_s == pytest.approx(3e-5)


def test_two_fast_hosts_among_slow_ones_are_found_wherever_they_stand() -> None:
    links, _ = probed([31e6, 125e6, 31e6, 31e6, 125e6])
    assert [links[host][0].bytes_per_s for host in range(5)] == [31e6, 125e6, 31e6, 31e6, 125e6]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e6, 1e9), min_size=2, max_size=8))
def test_on_few_hosts_every_link_is_exact_but_the_fastest_which_shows_the_second(
    speeds: list[float],
) -> None:
    links, _ = probed(speeds)
    second = sorted(speeds)[-2]
    assert [links[host][0].bytes_per_s for host in range(len(speeds))] == [
        min(speed, second) for speed in speeds
    ]


@pytest.mark.parametrize("hosts", [33, 100, 1000])
def test_many_hosts_take_a_few_rounds_of_disjoint_pairs(hosts: int) -> None:
    speeds = generator(0, "links", hosts).choice(SPEEDS, size=hosts, p=[0.2, 0.2, 0.6]).tolist()
    links, rounds = probed(speeds)
    assert [links[host][0].bytes_per_s for host in range(hosts)] == speeds
    assert hosts > MAX_AT_ONCE and len(rounds) <= 10
    assert sum(len(pairs) for pairs in rounds) <= 5 * hosts
    for pairs in rounds:
        members = [host for pair in pairs for host in pair]
        assert len(members) == len(set(members)) and all(a < b for a, b in pairs)


def test_a_single_host_has_no_links_to_others() -> None:
    assert first_rounds(1) == []
    assert own_links(1, {}) == {}


def test_a_shaper_that_lets_a_burst_through_hides_neither_bandwidth_nor_latency() -> None:
    sizes = [2.0**power for power in (12, 16, 19, 21, 23)]
    times = [2e-4 + max(size - 65536, size / 1000) / 1e8 for size in sizes]
    cost = pair_cost(sizes, [[time, time * 1.01, time, 9.0, time] for time in times])
    assert cost is not None and cost.bytes_per_s == pytest.approx(1e8, rel=1e-6)
    assert cost.latency_s == pytest.approx(1.6e-4, rel=0.02)
    assert cost.relative_error < 1e-6 and cost.spread == pytest.approx(0.01)
    slow = pair_cost(sizes[:2], [[1.0], [5.0]])
    assert slow is not None and slow.bytes_per_s == pytest.approx((2**16 - 2**12) / 4)
    assert pair_cost(sizes, [[1.0]] * 5) is None
