"""What the measured profile makes of the cluster: an assumed one becomes real, a described one stays."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from autotune.canonical import to_data
from autotune.cluster import Bend, Cluster, CollectiveFit, Host, LinkFit, PairLink
from autotune.jobs.driver import probed
from autotune.jobs.probe import measured_cluster
from autotune.parsing import parse
from autotune.profiling.fits.host_links import PairCost, own_links
from autotune.workload import Variable, Workload
from runtime_rewriter.probe.link import ProbedLink
from runtime_rewriter.world.findings import Probe, Profile

WORKLOAD = Workload("m", (Variable("v", (4,)),))
SOFTWARE = {"torch": "2.13.0"}


FITS = (CollectiveFit("all_reduce", 4, 1e-3, 1.5e-8, 0.05, 4096, 2**24),)


def profile_of(*hosts: tuple[str, int], cores: int = 8, fits=FITS) -> Profile:
    return Profile(WORKLOAD, fits, SOFTWARE, cores, "", hosts)


def test_an_assumed_cluster_on_one_host_gets_the_bandwidth_of_its_ring_and_its_cores() -> None:
    found = probed(Cluster.local(4), profile_of(("machine", 4)), True)
    assert [host.name for host in found.hosts] == ["localhost"]
    assert found.hosts[0].inner_bytes_per_s == pytest.approx(
        1e8
    )  # 2 * 3/4 bytes on a link for each of the tensor
    assert found.hosts[0].cores == 8 and found.source == "measured" and found.fits


def test_an_assumed_cluster_becomes_the_hosts_that_the_ranks_are_on() -> None:
    found = probed(Cluster.local(4), profile_of(("a", 3), ("b", 1)), False)
    assert [(host.name, host.devices) for host in found.hosts] == [("a", 3), ("b", 1)]
    assert found.world_size == 4


def test_a_described_cluster_keeps_its_hosts_and_bandwidths() -> None:
    described = Cluster("mine", (Host("x", 4, 1e9, 1e-5, 1e10, 1e-6, cores=64),))
    found = probed(described, profile_of(("a", 4)), False)
    assert found.hosts == described.hosts and found.fits
    assert replace(found, fits=(), source="assumed") == described


def test_hosts_that_are_emulated_on_one_machine_share_its_cores() -> None:
    four = Cluster("bed", tuple(Host(name, 1, 1e8, 1e-5, 1e10, 1e-6) for name in "abcd"))
    ranks = tuple((name, 1) for name in "abcd")
    assert [host.cores for host in probed(four, profile_of(*ranks), True).hosts] == [2, 2, 2, 2]
    assert [host.cores for host in probed(four, profile_of(*ranks), False).hosts] == [8, 8, 8, 8]
    assert probed(four, profile_of(*ranks, cores=2), True).hosts[0].cores == 1
    assert probed(four, profile_of(*ranks, cores=0), True).hosts[0].cores == 0


def test_the_ring_of_a_cost_in_pieces_has_the_bandwidth_of_large_messages() -> None:
    small_first = replace(FITS[0], bends=(Bend(2.0**16, 1e-9),))
    found = probed(Cluster.local(4), profile_of(("machine", 4), fits=(small_first,)), True)
    assert found.hosts[0].inner_bytes_per_s == pytest.approx(1e8)


NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
COST = PairCost(3e7, 2e-4, 0.01, 0.02)


def probe_of(*hosts: tuple[str, int]) -> Probe:
    links = (ProbedLink(1, False, COST, 3), ProbedLink(0, True, replace(COST, bytes_per_s=5e9)))
    return Probe(
        FITS,
        links[: len(hosts)] if len(hosts) > 1 else links[1:],
        SOFTWARE,
        (4,) * len(hosts),
        hosts,
    )


def test_a_probe_without_a_file_describes_the_hosts_that_were_found() -> None:
    cluster, remark = measured_cluster(None, probe_of(("a", 3), ("b", 1)), NOW)
    assert [(host.name, host.devices, host.cores) for host in cluster.hosts] == [
        ("a", 3, 4),
        ("b", 1, 4),
    ]
    assert (cluster.hosts[1].link_bytes_per_s, cluster.hosts[1].latency_s) == (3e7, 2e-4)
    assert cluster.hosts[0].inner_bytes_per_s == 5e9
    assert cluster.link_fits[0] == LinkFit("b", False, 3e7, 2e-4, 0.01, 0.02, 3)
    assert (cluster.source, cluster.measured_at, cluster.fits, remark) == (
        "measured",
        "2026-01-02T03:04:05+00:00",
        FITS,
        "",
    )
    assert dict(cluster.software)["torch"] == "2.13.0" and "autotune" in dict(cluster.software)


def test_a_probe_of_a_described_cluster_keeps_names_memory_and_addresses() -> None:
    described = Cluster(
        "mine", tuple(Host(name, 2, 1e9, 1e-5, 1e10, 1e-6, 7, f"10.0.0.{name}") for name in "12")
    )
    cluster, _ = measured_cluster(described, probe_of(("x", 2), ("y", 2)), NOW)
    assert [(host.name, host.memory_bytes, host.address) for host in cluster.hosts] == [
        ("1", 7, "10.0.0.1"),
        ("2", 7, "10.0.0.2"),
    ]
    assert [host.link_bytes_per_s for host in cluster.hosts] == [1e9, 3e7]


def test_ranks_on_other_hosts_than_the_files_say_nothing_about_its_links() -> None:
    described = Cluster("mine", tuple(Host(name, 2, 1e9, 1e-5, 1e10, 1e-6) for name in "ab"))
    cluster, remark = measured_cluster(described, probe_of(("machine", 4)), NOW)
    assert cluster.hosts == described.hosts and cluster.link_fits == () and cluster.fits == FITS
    assert "The ranks ran on 1 host(s) with 4, not on the 2 of the file" in remark


def probe_of_pairs(costs: dict[tuple[int, int], float], hosts: int) -> Probe:
    """What ranks on hosts of one rank each tell of these bandwidths, sent as a message."""
    found = {pair: replace(COST, bytes_per_s=rate) for pair, rate in costs.items()}
    links = tuple(
        ProbedLink(
            host,
            False,
            cost,
            probes,
            tuple((sum(pair) - host, each) for pair, each in found.items() if host in pair),
        )
        for host, (cost, probes) in own_links(hosts, found).items()
    )
    return parse(
        Probe,
        to_data(
            Probe((), links, SOFTWARE, (4,) * hosts, tuple((name, 1) for name in "abc"[:hosts]))
        ),
        "probe",
    )


def test_a_pair_with_a_link_of_its_own_says_nothing_about_its_hosts_own_links() -> None:
    hosts = tuple(Host(name, 1, 1e9, 1e-5, 1e10, 1e-6) for name in "abc")
    pairs = {(0, 1): 9e8, (0, 2): 3e7, (1, 2): 2e7}
    plain, _ = measured_cluster(Cluster("mine", hosts), probe_of_pairs(pairs, 3), NOW)
    assert [host.link_bytes_per_s for host in plain.hosts] == [9e8, 9e8, 3e7]
    direct = PairLink(("b", "a"), 8e8, 1e-6)
    cluster, _ = measured_cluster(Cluster("mine", hosts, (direct,)), probe_of_pairs(pairs, 3), NOW)
    assert [host.link_bytes_per_s for host in cluster.hosts] == [3e7, 2e7, 3e7]
    assert [(link.bytes_per_s, link.probes) for link in cluster.link_fits] == [
        (3e7, 1),
        (2e7, 1),
        (3e7, 2),
    ]
    assert cluster.pair_links == (direct,)


def test_a_host_that_only_pairs_with_links_of_their_own_told_of_keeps_its_figures() -> None:
    hosts = tuple(Host(name, 1, 1e9, 1e-5, 1e10, 1e-6) for name in "ab")
    given = Cluster("mine", hosts, (PairLink(("a", "b"), 8e8, 1e-6),))
    cluster, _ = measured_cluster(given, probe_of_pairs({(0, 1): 9e8}, 2), NOW)
    assert [host.link_bytes_per_s for host in cluster.hosts] == [
        1e9,
        1e9,
    ] and cluster.link_fits == ()
    assert [host.cores for host in cluster.hosts] == [4, 4]


def test_the_cluster_says_what_stood_for_a_real_one_in_its_newest_probe() -> None:
    first, _ = measured_cluster(None, probe_of(("a", 3), ("b", 1)), NOW, "emulated network")
    again, _ = measured_cluster(first, probe_of(("a", 3), ("b", 1)), NOW)
    assert (first.measured_on, again.measured_on) == ("emulated network", "")


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (
            (2.5e8, 1.25e8, 6e7),
            (2.5e8, 1.2e8, 6e7),
        ),  # nobody is fast enough to show the first one's link
        (
            (2.5e8, 2.5e8, 6e7),
            (1.2e8, 1.2e8, 6e7),
        ),  # these two have met: what the file says of both is refuted
        ((1e9, 1e9, 1e9), (1.2e8, 1.2e8, 6e7)),
        ((1.25e8, 1.25e8, 1.25e8), (1.2e8, 1.2e8, 6e7)),
    ],
)
def test_a_link_that_is_faster_than_all_others_keeps_the_bandwidth_of_the_file(
    described: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    hosts = tuple(
        Host(name, 1, rate, 1e-5, 1e10, 1e-6) for name, rate in zip("abc", described, strict=True)
    )
    links = tuple(
        ProbedLink(number, False, replace(COST, bytes_per_s=rate), 3)
        for number, rate in enumerate((1.2e8, 1.2e8, 6e7))
    )
    found = Probe(FITS, links, SOFTWARE, (4, 4, 4), tuple((host.name, 1) for host in hosts))
    cluster, _ = measured_cluster(Cluster("mixed", hosts), found, NOW)
    assert tuple(host.link_bytes_per_s for host in cluster.hosts) == expected
