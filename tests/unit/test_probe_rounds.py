"""Rounds of pairs of hosts that show every own link, and the measurements that a probe repeats."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.profiling.fits.probe_fits import own_links
from autotune.recordings.probe import HostPair, LinkCost
from autotune.rng import generator
from runtime_rewriter.probe.rounds import (
    MAX_AT_ONCE,
    first_rounds,
    larger_are_known,
    last_rounds,
    one_way_times,
    pair_cost,
    peer_counts,
    peer_parts,
    spread_of,
    suspects,
)

SPEEDS = (31e6, 62e6, 125e6)


def probed(speeds: list[float]) -> tuple[dict[int, tuple[LinkCost, int]], list[list[HostPair]]]:
    """Own links as the rounds show them, and the rounds."""
    costs: dict[HostPair, LinkCost] = {}

    def run(rounds: list[list[HostPair]]) -> list[list[HostPair]]:
        for pairs in rounds:
            costs.update(
                {
                    (a, b): LinkCost(min(speeds[a], speeds[b]), 1e-5 * (a + b), 0.01, 0.02)
                    for a, b in pairs
                }
            )
        return rounds

    rounds = run(first_rounds(len(speeds)))
    rounds = [*rounds, *run(last_rounds(len(speeds), costs))]
    return own_links(len(speeds), costs), rounds


def test_one_slow_host_of_four_comes_out_as_such() -> None:
    links, rounds = probed([125e6, 125e6, 125e6, 31e6])
    assert [links[host][0].bytes_per_s for host in range(4)] == [125e6, 125e6, 125e6, 31e6]
    assert all(len(pairs) == 1 for pairs in rounds) and len(rounds) == 6
    assert links[3][0].latency_s == pytest.approx(3e-5)


def test_two_fast_hosts_among_slow_ones_are_found_wherever_they_stand() -> None:
    links, _ = probed([31e6, 125e6, 31e6, 31e6, 125e6])
    assert [links[host][0].bytes_per_s for host in range(5)] == [31e6, 125e6, 31e6, 31e6, 125e6]


def test_hosts_exchange_with_one_peer_and_with_all_before_the_numbers_between() -> None:
    assert [peer_counts(hosts) for hosts in (1, 2, 3, 4, 9)] == [
        [],
        [1],
        [1, 2],
        [1, 3, 2],
        [1, 8, 2, 4],
    ]


def test_the_fastest_peers_get_parts_in_proportion_to_their_links() -> None:
    speeds = (2.0, 1.0, 4.0, 1.0)
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    costs = {(a, b): LinkCost(min(speeds[a], speeds[b]), 0.0, 0.0, 0.0) for a, b in pairs}
    assert peer_parts(0, 3, 4, costs) == {2: 0.5, 1: 0.25, 3: 0.25}
    assert peer_parts(0, 1, 4, costs) == {2: 1.0}
    assert peer_parts(3, 2, 4, {}) == {0: 0.5, 1: 0.5}


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
    two = pair_cost(sizes[1:3], [[1.0], [5.0]])
    assert two is not None and two.bytes_per_s == pytest.approx((2**19 - 2**16) / 4)
    assert pair_cost(sizes, [[1.0]] * 5) is None


def test_the_way_back_takes_half_of_the_quickest_round_trip() -> None:
    assert one_way_times([[2.0, 3.0], [4.0, 5.0]]) == [[1.0, 2.0], [3.0, 4.0]]
    # All repeats of the smallest message were disturbed.
    assert one_way_times([[9.0, 8.0], [1.0, 4.0]]) == [[8.5, 7.5], [0.5, 3.5]]


def test_an_outlier_among_the_repeats_hardly_changes_the_spread() -> None:
    quiet = [1.0, 1.01, 1.02, 0.99, 1.0, 1.01, 0.98, 1.0]
    assert spread_of([*quiet, 30.0]) < 0.03
    assert spread_of([2.0]) == 0.0


STEADY = [0.02, 0.03, 0.02, 0.03]


@pytest.mark.parametrize(
    ("seconds", "spreads", "expected"),
    [
        ([1.0, 2.0, 4.0, 8.0], STEADY, ()),
        ([1.0, 2.0, 4.0, 8.0], [0.02, 0.03, 0.6, 0.03], (2,)),
        ([1.0, 9.9, 4.0, 8.0], STEADY, (1,)),
        ([1.0, 9.9, 4.0, 8.0], [0.02, 0.03, 0.9, 0.03], (2, 1)),
        # a rough network, not a disturbance
        ([1.0, 2.0, 4.0, 8.0], [0.4, 0.5, 0.4, 0.5], ()),
    ],
)
def test_disturbed_measurements_are_repeated_worst_first(seconds, spreads, expected) -> None:
    assert suspects([1.0, 2.0, 4.0, 8.0], seconds, spreads) == expected


@pytest.mark.parametrize(
    ("sizes", "seconds", "spreads", "expected"),
    [
        ([2**20, 2**22], [0.0131, 0.0515], [0.06, 0.02], True),
        ([2**20, 2**22], [0.0131, 0.0515], [0.06, 0.10], False),  # too rough to know
        ([2**20, 2**22], [0.0131, 0.0900], [0.02, 0.02], False),  # slower than by its bytes
        ([2**20, 2**22], [0.0310, 0.0350], [0.02, 0.02], False),  # mostly latency
        ([2**16, 2**18], [0.0009, 0.0035], [0.02, 0.02], False),  # sockets hide it
    ],
)
def test_larger_messages_are_known_once_bandwidth_decides(
    sizes, seconds, spreads, expected
) -> None:
    assert larger_are_known(sizes, seconds, spreads) is expected
