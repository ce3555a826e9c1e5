"""Testbeds of real namespaces have the rates and latencies of their cluster file. Needs root."""

from __future__ import annotations

import pytest
from testbed_traffic import (
    ABLE,
    assert_nothing_is_left,
    assert_reaches,
    cluster,
    counted,
    round_trip_s,
    stream,
)

from autotune.cluster import PairLink
from autotune.testbed import bed

pytestmark = pytest.mark.skipif(not ABLE.possible, reason=ABLE.message)
NEEDS_LATENCY = pytest.mark.skipif(
    not (ABLE.means.tun or ABLE.means.netem), reason="neither netem nor /dev/net/tun"
)
NEEDS_FILTERS = pytest.mark.skipif(not ABLE.means.filters, reason="tc has no u32 filter")


def test_an_even_cluster_has_its_rate_in_both_directions_at_once(bed_directory, bed_name) -> None:
    with bed.running(cluster(200, 200), name=bed_name, directory=bed_directory) as testbed:
        assert_reaches(testbed, [(0, 1), (1, 0)], [200, 200])
    assert_nothing_is_left(bed_directory, (bed_name,))


def test_an_uneven_cluster_has_each_hosts_rate_in_both_directions(bed_directory, bed_name) -> None:
    with bed.running(
        cluster(1000, 1000, 1000, 250), name=bed_name, directory=bed_directory
    ) as testbed:
        assert_reaches(testbed, [(0, 1)], [1000])
        assert_reaches(testbed, [(3, 0)], [250])
        assert_reaches(testbed, [(2, 3)], [250])


@NEEDS_FILTERS
def test_no_data_is_dropped_for_an_acknowledgement_number_that_is_too_old(
    bed_directory, bed_name
) -> None:
    """Receivers challenge such a segment (RFC 5961, section 5.2) and wait for its repetition."""
    with bed.running(
        cluster(1000, 1000, 1000, 250), name=bed_name, directory=bed_directory
    ) as testbed:
        # the slow host's queue is long
        one_way = [(3, target, False) for target in (0, 1, 1, 2, 2)]
        stream(testbed, [(3, 0, True), *one_way], seconds=1.5)
        assert [counted(host, "TCPChallengeACK") for host in testbed.hosts] == [0, 0, 0, 0]


def test_a_byte_scale_slows_the_links(bed_directory, bed_name) -> None:
    with bed.running(
        cluster(1000, 1000), name=bed_name, byte_scale=10, directory=bed_directory
    ) as testbed:
        assert_reaches(testbed, [(0, 1)], [100])


@NEEDS_FILTERS
def test_pairs_have_their_own_rates_below_and_above_their_interfaces(
    bed_directory, bed_name
) -> None:
    links = (PairLink(("h0", "h1"), 50 * 1.25e5, 5e-5), PairLink(("h0", "h2"), 400 * 1.25e5, 5e-5))
    with bed.running(
        cluster(200, 200, 200, links=links), name=bed_name, directory=bed_directory
    ) as testbed:
        assert_reaches(testbed, [(0, 1)], [50])
        assert_reaches(testbed, [(2, 0)], [400])
        assert_reaches(testbed, [(2, 1)], [200])


def test_the_inside_of_a_host_is_shaped_if_it_is_slower_than_memory(
    bed_directory, bed_name
) -> None:
    with bed.running(
        cluster(100, 100, inner=500 * 1.25e5), name=bed_name, directory=bed_directory
    ) as testbed:
        assert_reaches(testbed, [(0, 0)], [500])


@NEEDS_LATENCY
@pytest.mark.parametrize("latency_s", [5e-4, 5e-3])
def test_added_latency_is_reached_and_the_rate_with_it(bed_directory, bed_name, latency_s) -> None:
    with bed.running(
        cluster(200, 200, latency_s=latency_s), name=bed_name, directory=bed_directory
    ) as testbed:
        smallest_s, median_s = round_trip_s(testbed)
        assert_reaches(testbed, [(0, 1), (1, 0)], [200, 200], seconds=1.5)
    with bed.running(cluster(200, 200), name=bed_name, directory=bed_directory) as testbed:
        own_s, _ = round_trip_s(testbed)
    # A busy machine may add time: the median is not below twice the latency, the best not far
    # above.
    assert 2 * latency_s * 0.9 <= median_s
    assert smallest_s <= 2 * latency_s * 1.2 + own_s + 1e-3


@NEEDS_LATENCY
def test_only_the_named_pair_is_far_and_slow(bed_directory, bed_name) -> None:
    links = (PairLink(("h0", "h1"), 50 * 1.25e5, 4e-3),)
    with bed.running(
        cluster(200, 200, 200, links=links), name=bed_name, directory=bed_directory
    ) as testbed:
        assert round_trip_s(testbed)[1] >= 7.2e-3
        assert round_trip_s(testbed, 0, 2)[0] < 4e-3
        assert_reaches(testbed, [(0, 1)], [50], seconds=1.5)
        assert_reaches(testbed, [(2, 0)], [200])
