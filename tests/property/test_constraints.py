"""Algorithms 1 and 2 of AutoSync's supplement: against slow twins, their bounds, and their edge
cases.
"""

from __future__ import annotations

import itertools
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_cluster import cluster

from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput
from autotune.optimizer.bounds import least_transfer_s
from autotune.rng import generator
from autotune.strategy_space.builders.servers import least_loaded
from autotune.strategy_space.constraints import (
    balance_load,
    exchange_shares,
    host_shares,
    merge_adjacent,
    server_ranks,
    servers_of,
)

SIZES = st.lists(st.one_of(st.just(0), st.integers(1, 200), st.integers(1, 10**9)), max_size=40)
BANDWIDTHS = st.lists(st.sampled_from([1.25e8, 1.25e9, 3e9, 1e10]), min_size=1, max_size=6)


def literal_balance_load(sizes, bandwidths, rng):
    """Algorithm 1 line by line; a draw from softmax(logits) is the argmax of logits plus Gumbel
    noise.
    """
    noise = rng.gumbel(size=(len(sizes), len(bandwidths)))
    load = [0] * len(bandwidths)
    all_bandwidth = sum(bandwidths)
    placement = [-1] * len(sizes)
    for step, shard in enumerate(sorted(range(len(sizes)), key=lambda i: -sizes[i])):
        logits = [
            sum(load) * (b / all_bandwidth) - current
            for b, current in zip(bandwidths, load, strict=True)
        ]
        drawn = [logit + gumbel for logit, gumbel in zip(logits, noise[step], strict=True)]
        placement[shard] = drawn.index(max(drawn))
        load[placement[shard]] += sizes[shard]
    return placement


def literal_merge_adjacent(sizes, groups):
    """Algorithm 2 line by line, in exact fractions; the last group takes whatever it would leave
    over.
    """
    average = Fraction(sum(sizes), groups)
    load = [0] * groups
    result, group = [], 0
    for size in sizes:
        if load[group] >= average and group + 1 < groups and average > 0:
            group += 1
        result.append(group)
        load[group] += size
    return result


@given(SIZES, BANDWIDTHS, st.integers(0, 2**32))
def test_balance_load_equals_algorithm_1_line_by_line(sizes, bandwidths, seed):
    fast = balance_load(sizes, bandwidths, generator(seed))
    assert fast.tolist() == literal_balance_load(sizes, bandwidths, generator(seed))


@given(SIZES, BANDWIDTHS, st.integers(0, 2**32))
def test_no_device_exceeds_its_share_of_the_bandwidth_by_more_than_the_largest_shard_and_50_bytes(
    sizes, bandwidths, seed
):
    """With p_j = b_j / b_all and the excess e_j = l_j - p_j l_all (bytes), the logit of device j is
    -e_j.

    A shard of s bytes goes to the j that maximises -e_j + G_j (G: standard Gumbel noise). The
    excesses sum to 0, so some device k has e_k <= 0, and e_j <= e_k + G_j - G_k <= G_j - G_k.
    Afterwards e_j has grown by s (1 - p_j) and all others have shrunk. By induction e_j <= max(s)
    (1 - p_j) + max(G) - min(G) at any time. Gumbel noise exceeds 45 with probability e^-45 and is
    below -5 with probability exp(-e^5), so its range is taken to stay below 50 bytes.
    """
    placements = balance_load(sizes, bandwidths, generator(seed))
    for device, bandwidth in enumerate(bandwidths):
        share = bandwidth / sum(bandwidths)
        load = sum(size for size, placed in zip(sizes, placements, strict=True) if placed == device)
        assert load <= share * sum(sizes) + (1 - share) * max(sizes, default=0) + 50


def test_small_shards_are_placed_with_the_probabilities_of_the_softmax():
    sizes, bandwidths, draws = [3, 2, 1], [1.0, 3.0], 4000
    exact = {}
    for placement in itertools.product(range(2), repeat=3):  # sizes are in descending order already
        load, probability = [0, 0], 1.0
        for size, device in zip(sizes, placement, strict=True):
            weights = [
                math.exp(sum(load) * b / sum(bandwidths) - current)
                for b, current in zip(bandwidths, load, strict=True)
            ]
            probability *= weights[device] / sum(weights)
            load[device] += size
        exact[placement] = probability
    rng = generator(0, "softmax")
    placements = [tuple(balance_load(sizes, bandwidths, rng).tolist()) for _ in range(draws)]
    distance = (
        sum(
            abs(placements.count(placement) / draws - probability)
            for placement, probability in exact.items()
        )
        / 2
    )
    assert sum(exact.values()) == pytest.approx(1)
    assert distance < 0.03  # 8 outcomes, 4000 draws: about 0.01 is expected


@given(SIZES, st.integers(1, 60))
def test_merge_adjacent_equals_algorithm_2_line_by_line(sizes, groups):
    assert merge_adjacent(sizes, groups).tolist() == literal_merge_adjacent(sizes, groups)


@given(SIZES, st.integers(1, 60))
def test_groups_are_contiguous_and_stay_within_the_bound_of_algorithm_2(sizes, groups):
    """A group takes a shard only while it holds less than l_avg, so it ends below l_avg + max(s);
    and the next begins only when it holds l_avg or more, so all groups but the last used one hold
    at least that.
    """
    result = merge_adjacent(sizes, groups).tolist()
    assert result == sorted(result)
    assert set(result) == set(range(len(set(result))))
    assert len(set(result)) <= groups
    loads = [
        sum(size for size, group in zip(sizes, result, strict=True) if group == wanted)
        for wanted in sorted(set(result))
    ]
    average = Fraction(sum(sizes), groups)
    assert all(load < average + max(sizes) for load in loads) or sum(sizes) == 0
    assert all(load >= average for load in loads[:-1])


@settings(max_examples=50)
@given(st.integers(1, 10**15), st.integers(1, 50))
def test_equal_shards_never_open_a_group_beyond_the_last_however_the_average_rounds(size, groups):
    assert merge_adjacent([size] * groups * 3, groups).tolist() == [
        g for g in range(groups) for _ in range(3)
    ]


def test_zero_byte_shards_after_the_last_group_is_full_stay_in_it():
    assert merge_adjacent([4, 4, 0, 0], 2).tolist() == [0, 1, 1, 1]
    assert merge_adjacent([0, 0], 2).tolist() == [0, 0]
    assert merge_adjacent([], 3).tolist() == []
    assert merge_adjacent([7], 5).tolist() == [0]


def test_one_device_takes_everything_and_no_shard_is_no_placement():
    assert balance_load([5, 0, 9], [1e9], generator(0)).tolist() == [0, 0, 0]
    assert balance_load([], [1e9, 1e9], generator(0)).tolist() == []


def test_bad_sizes_bandwidths_and_group_counts_are_refused_with_the_value():
    with pytest.raises(InvalidInput, match=r"weights above 0, but they have \[1.0, 0.0\]"):
        balance_load([1], [1.0, 0.0], generator(0))
    with pytest.raises(InvalidInput, match="one or more devices"):
        balance_load([1], [], generator(0))
    with pytest.raises(InvalidInput, match="one has -2"):
        balance_load([3, -2], [1.0], generator(0))
    with pytest.raises(InvalidInput, match="at least 1 group, but has 0"):
        merge_adjacent([1], 0)
    with pytest.raises(InvalidInput, match="one has -1"):
        merge_adjacent([-1], 2)


def test_servers_are_all_ranks_and_in_large_worlds_the_first_rank_of_each_host():
    def host(name, devices, rate):
        return Host(name, devices, rate, 1e-5, 5e10, 1e-6)

    small = Cluster("c", (host("a", 2, 1e9), host("b", 1, 2e9)))
    assert server_ranks(small) == (0, 1, 2)
    large = Cluster("c", (host("a", 40, 1e9), host("b", 24, 1e9), host("c", 1, 2e9)))
    assert server_ranks(large) == (0, 40, 64)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from([1e8, 2e8, 5e8, 1e9, 1e10])),
        min_size=1,
        max_size=4,
    )
)
def test_no_other_shares_make_the_slowest_link_faster(hosts):
    """Brute force over a grid, also with a host that has most of the ranks."""
    devices, links = (np.array(column, dtype=np.float64) for column in zip(*hosts, strict=True))
    shares = host_shares(devices, links)
    assert shares.sum() == pytest.approx(1) and (shares >= 0).all()

    def slowest_s(shares):
        """For each byte of the model: what a host's workers do not own, and its sums to others."""
        sent = devices * (1 - shares) + (devices.sum() - devices) * shares
        return float((sent / links).max())

    cuts = 10
    grid = itertools.product(range(cuts + 1), repeat=len(hosts))
    best_s = min(slowest_s(np.array(one) / cuts) for one in grid if sum(one) == cuts)
    assert slowest_s(shares) <= best_s * (1 + 1e-9) + 1e-30


@pytest.mark.parametrize("hierarchical", [False, True])
def test_the_slowest_link_of_a_direct_exchange_carries_as_little_as_it_can(hierarchical):
    """The bound of every synchronization, and equal parts for the ranks of a host."""
    on = cluster((2, 2000), (2, 1000), (2, 1000), (2, 500))
    shares = np.array(exchange_shares(on, hierarchical)).reshape(4, 2)
    assert (shares[:, 0] == shares[:, 1]).all() and shares.sum() == pytest.approx(1)
    members = 1 if hierarchical else 2
    of_host, links = shares.sum(axis=1), np.array([host.link_bytes_per_s for host in on.hosts])
    load_s = (members + (4 * members - 2 * members) * of_host) / links
    assert load_s.max() == pytest.approx(members * least_transfer_s(on, 1.0))


def test_between_equal_hosts_all_serve_alike_and_a_slow_one_serves_nothing():
    even, uneven = (
        [Host(f"h{i}", 1, rate, 1e-5, 5e10, 1e-6) for i, rate in enumerate(rates)]
        for rates in ([1e9] * 4, [1e9, 1e9, 1e9, 2.5e8])
    )
    assert servers_of(Cluster("c", tuple(even))).shares == pytest.approx((0.25,) * 4)
    assert servers_of(Cluster("c", tuple(uneven))).ranks == (0, 1, 2)
    assert servers_of(Cluster.local(3)).shares == pytest.approx((1 / 3,) * 3)


def test_a_large_draw_equals_one_of_all_numbers_at_once_in_a_part_of_the_memory():
    sizes, weights = generator(0).integers(1, 10**9, 6000), np.linspace(1, 2, 2000)
    tracemalloc.start()
    placements = balance_load(sizes, weights, generator(1))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 * sizes.size * weights.size
    descending = np.argsort(-sizes, kind="stable")
    noise = generator(1).gumbel(size=(sizes.size, weights.size))
    load, placed_before = np.zeros(weights.size), 0
    for row, shard in enumerate(descending):
        device = int((placed_before * (weights / weights.sum()) + noise[row] - load).argmax())
        assert placements[shard] == device
        load[device] += sizes[shard]
        placed_before += sizes[shard]


SERVERS = st.lists(
    st.tuples(st.integers(0, 10**12), st.sampled_from([0.1, 0.25, 0.3])), min_size=1, max_size=6
)


@given(SERVERS, st.integers(0, 10**9))
def test_the_least_loaded_server_equals_a_slow_twin_also_in_ties(loaded, shard_bytes):
    """Repeated servers tie, and the first one wins."""
    loads, shares = zip(*(loaded * 2), strict=True)
    done = [(load + shard_bytes) / share for load, share in zip(loads, shares, strict=True)]
    assert least_loaded(loads, shares, shard_bytes) == done.index(min(done))
