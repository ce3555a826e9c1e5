"""Measured figures replace assumed ones, in a job's cluster and in a probe's cluster file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from autotune.cluster import Cluster, Host, LinkFit, PairLink, PeerFit, Where
from autotune.errors import InvalidInput, LaunchError
from autotune.jobs.driver import probed
from autotune.jobs.probe import measured_cluster
from autotune.profiling.fits.probe_fits import collective_fits
from autotune.recordings.probe import (
    HostPair,
    LinkCost,
    NoCost,
    PeerCost,
    ProbedLinks,
    ProbePoint,
    ProbeSeries,
)
from autotune.workload import Variable, Workload
from runtime_rewriter.world.results import Probe, Profile

SOFTWARE = {"torch": "2.13.0"}
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
COST = LinkCost(3e7, 2e-4, 0.01, 0.02)


def ring_series(fast_bytes: int = 0) -> tuple[ProbeSeries, ...]:
    """A ring whose bytes cost 1.5e-8 s, but 1e-9 s for the first `fast_bytes`."""
    points = []
    for size in (2**power for power in range(12, 26, 2)):
        fast = min(size, fast_bytes)
        seconds = 1e-3 + 1e-9 * fast + 1.5e-8 * (size - fast)
        points.append(ProbePoint(size, seconds, 0.01, 5, 0.0))
    return (ProbeSeries("all_reduce", 4, Where.WORLD, False, tuple(points)),)


SERIES = ring_series()


def profile_of(
    *hosts: tuple[str, int], cores: int = 8, series: tuple[ProbeSeries, ...] = SERIES
) -> Profile:
    workload = Workload("m", (Variable("v", (4,)),))
    return Profile(workload, series, SOFTWARE, cores, "", hosts)


def hosts_of(names: str, devices: int = 1) -> tuple[Host, ...]:
    return tuple(Host(name, devices, 1e9, 1e-5, 1e10, 1e-6) for name in names)


@pytest.mark.parametrize("sizes", [(4096, 4096), (8192, 4096)])
def test_the_sizes_of_a_probe_ascend(sizes: tuple[int, ...]) -> None:
    points = tuple(ProbePoint(size, 1e-3, 0.01, 5, 0.0) for size in sizes)
    with pytest.raises(InvalidInput, match="the sizes of a probe must ascend"):
        ProbeSeries("all_reduce", 4, Where.WORLD, False, points)


@pytest.mark.parametrize("fast_bytes", [0, 2**16])
def test_an_assumed_cluster_gets_the_bandwidth_of_its_ring_and_its_cores(fast_bytes) -> None:
    """A ring sends 2 * 3/4 of the tensor's bytes over each link.

    Large messages count, if the cost has a bend.
    """
    profile = profile_of(("machine", 4), series=ring_series(fast_bytes))
    cluster = probed(Cluster.local(4), profile, True)
    assert [host.name for host in cluster.hosts] == ["localhost"]
    assert cluster.hosts[0].inner_bytes_per_s == pytest.approx(1e8)
    assert cluster.hosts[0].cores == 8 and cluster.source == "measured"
    assert [bend.until_bytes for bend in cluster.fits[0].bends] == [fast_bytes][: fast_bytes > 0]


def test_an_assumed_cluster_becomes_the_hosts_that_the_ranks_are_on() -> None:
    cluster = probed(Cluster.local(4), profile_of(("a", 3), ("b", 1)), False)
    assert [(host.name, host.devices) for host in cluster.hosts] == [("a", 3), ("b", 1)]
    assert cluster.world_size == 4


def test_hosts_of_ranks_are_known_by_their_addresses_also_without_a_probe_of_the_links() -> None:
    profile = profile_of(("a", 3), ("b", 1), series=())
    cluster = probed(Cluster.local(4), replace(profile, addresses=("10.0.0.1", "10.0.0.2")), False)
    hosts = [(host.name, host.devices, host.address) for host in cluster.hosts]
    assert hosts == [("a", 3, "10.0.0.1"), ("b", 1, "10.0.0.2")]
    assert cluster.source == "assumed"


def test_hosts_of_a_file_get_the_addresses_that_it_does_not_give() -> None:
    first, second = hosts_of("ab", 2)
    described = Cluster("described", (replace(first, address="10.0.0.1"), second))
    profile = replace(profile_of(("x", 2), ("y", 2)), addresses=("10.0.0.1", "10.0.0.2"))
    cluster = probed(described, profile, False)
    assert [host.address for host in cluster.hosts] == ["10.0.0.1", "10.0.0.2"]


def test_ranks_on_other_machines_than_those_of_the_file_are_refused() -> None:
    described = Cluster("one", hosts_of("a", 4))
    message = r"like the 1 of cluster .one., but run on 2 with 3, 1 ranks; describe these hosts"
    with pytest.raises(LaunchError, match=message):
        probed(described, profile_of(("a", 3), ("b", 1)), False)


def test_a_described_cluster_keeps_its_hosts_and_bandwidths() -> None:
    described = Cluster("described", (Host("x", 4, 1e9, 1e-5, 1e10, 1e-6, cores=64),))
    cluster = probed(described, profile_of(("a", 4)), False)
    assert cluster.hosts == described.hosts and cluster.fits == collective_fits(SERIES)
    assert replace(cluster, fits=(), source="assumed") == described


@pytest.mark.parametrize(
    ("cores", "one_machine", "expected"), [(8, True, 2), (8, False, 8), (2, True, 1), (0, True, 0)]
)
def test_hosts_that_are_emulated_on_one_machine_share_its_cores(
    cores, one_machine, expected
) -> None:
    profile = profile_of(*((name, 1) for name in "abcd"), cores=cores)
    cluster = probed(Cluster("bed", hosts_of("abcd")), profile, one_machine)
    assert [host.cores for host in cluster.hosts] == [expected] * 4


def probe_of(*hosts: tuple[str, int], pairs: Mapping[HostPair, float] | None = None) -> Probe:
    """`pairs`: bandwidth of every pair of hosts that was probed."""
    pairs = {(0, 1): 3e7} if pairs is None else pairs
    between = tuple((pair, replace(COST, bytes_per_s=rate)) for pair, rate in pairs.items())
    inside = tuple(
        (number, replace(COST, bytes_per_s=5e9))
        for number, (_, ranks) in enumerate(hosts)
        if ranks > 1
    )
    links = ProbedLinks(inside, between if len(hosts) > 1 else ())
    return Probe(SERIES, links, SOFTWARE, (4,) * len(hosts), hosts)


def test_a_probe_without_a_file_describes_the_hosts_of_its_ranks() -> None:
    cluster, remark = measured_cluster(None, probe_of(("a", 3), ("b", 1)), NOW)
    hosts = [(host.name, host.devices, host.cores) for host in cluster.hosts]
    assert hosts == [("a", 3, 4), ("b", 1, 4)]
    assert (cluster.hosts[1].link_bytes_per_s, cluster.hosts[1].latency_s) == (3e7, 2e-4)
    assert cluster.hosts[0].inner_bytes_per_s == 5e9
    assert cluster.link_fits[0] == LinkFit("a", True, 5e9, 2e-4, 0.01, 0.02, 1)
    assert cluster.link_fits[2] == LinkFit("b", False, 3e7, 2e-4, 0.01, 0.02, 1)
    assert (cluster.source, cluster.measured_at) == ("measured", "2026-01-02T03:04:05+00:00")
    assert cluster.fits == collective_fits(SERIES) and remark == ""
    assert dict(cluster.software)["torch"] == "2.13.0" and "autotune" in dict(cluster.software)


def test_a_probe_of_a_described_cluster_keeps_names_memory_and_addresses() -> None:
    hosts = tuple(replace(host, memory_bytes=7, address="10.0.0.9") for host in hosts_of("12", 2))
    cluster, _ = measured_cluster(Cluster("described", hosts), probe_of(("x", 2), ("y", 2)), NOW)
    identities = [(host.name, host.memory_bytes, host.address) for host in cluster.hosts]
    assert identities == [("1", 7, "10.0.0.9"), ("2", 7, "10.0.0.9")]
    assert [host.link_bytes_per_s for host in cluster.hosts] == [3e7, 3e7]


def test_a_probe_writes_the_addresses_of_the_nodes_that_it_measured() -> None:
    addresses = ("10.0.0.1", "10.0.0.2")
    probe = replace(probe_of(("x", 2), ("y", 2)), addresses=addresses)
    discovered, _ = measured_cluster(None, probe, NOW)
    described, _ = measured_cluster(Cluster("described", hosts_of("ab", 2)), probe, NOW)
    for cluster in (discovered, described):
        assert tuple(host.address for host in cluster.hosts) == addresses


def test_the_costs_of_peers_at_once_belong_to_the_hosts_of_the_file() -> None:
    probe = probe_of(("x", 1), ("y", 1))
    of_hosts = tuple(PeerCost(host, 1, True, 2e7, 1e-4, 0.01, 0.02) for host in (0, 1))
    probe = replace(probe, links=replace(probe.links, peers=of_hosts))
    cluster, _ = measured_cluster(Cluster("described", hosts_of("ab")), probe, NOW)
    fits = tuple(PeerFit(host, 1, True, 2e7, 1e-4, 0.01, 0.02) for host in "ab")
    assert cluster.peer_fits == fits
    elsewhere, _ = measured_cluster(Cluster("one", hosts_of("a", 2)), probe, NOW)
    assert elsewhere.peer_fits == ()


def test_links_without_a_measured_cost_are_named_with_the_reason() -> None:
    probe = probe_of(("a", 2), ("b", 1), ("c", 1), pairs={(0, 1): 3e7})
    missing = (((0, 0), NoCost.FLAT), ((0, 2), NoCost.TIME), ((1, 2), NoCost.TIME))
    probe = replace(probe, links=replace(probe.links, missing=missing))
    hosts = (replace(hosts_of("a")[0], devices=2), *hosts_of("bc"))
    cluster, remark = measured_cluster(Cluster("described", hosts), probe, NOW)
    assert cluster.hosts[2].link_bytes_per_s == 1e9
    lines = remark.splitlines()
    assert lines[0].startswith("No cost of 2 link(s) (a - c, b - c): the time did not suffice")
    assert lines[1].startswith("No cost of 1 link(s) (inside a): larger messages took no longer")
    assert lines[2:] == ["The links of c keep given or assumed figures."]
    many = tuple(((0, 2), NoCost.TIME) for _ in range(9))
    _, remark = measured_cluster(
        None, replace(probe, links=replace(probe.links, missing=many)), NOW
    )
    assert "(a - c, a - c, a - c, a - c and 5 more)" in remark


def test_ranks_on_other_hosts_than_the_files_do_not_change_its_links() -> None:
    described = Cluster("described", hosts_of("ab", 2))
    cluster, remark = measured_cluster(described, probe_of(("machine", 4)), NOW)
    assert cluster.hosts == described.hosts and cluster.link_fits == ()
    assert cluster.fits == collective_fits(SERIES)
    assert "The ranks ran on 1 host(s) with 4, not on the 2 of the file" in remark


def test_a_pair_with_a_dedicated_link_does_not_show_its_hosts_own_links() -> None:
    pairs = {(0, 1): 9e8, (0, 2): 3e7, (1, 2): 2e7}
    probe = probe_of(("a", 1), ("b", 1), ("c", 1), pairs=pairs)
    plain, _ = measured_cluster(Cluster("described", hosts_of("abc")), probe, NOW)
    assert [host.link_bytes_per_s for host in plain.hosts] == [9e8, 9e8, 3e7]
    direct = PairLink(("b", "a"), 8e8, 1e-6)
    cluster, _ = measured_cluster(Cluster("described", hosts_of("abc"), (direct,)), probe, NOW)
    assert [host.link_bytes_per_s for host in cluster.hosts] == [3e7, 2e7, 3e7]
    links = [(link.bytes_per_s, link.probes) for link in cluster.link_fits]
    assert links == [(3e7, 1), (2e7, 1), (3e7, 2)]
    assert cluster.pair_links == (direct,)


def test_a_host_that_only_dedicated_links_measured_keeps_its_figures() -> None:
    given = Cluster("described", hosts_of("ab"), (PairLink(("a", "b"), 8e8, 1e-6),))
    cluster, _ = measured_cluster(given, probe_of(("a", 1), ("b", 1)), NOW)
    assert [host.link_bytes_per_s for host in cluster.hosts] == [1e9, 1e9]
    assert cluster.link_fits == () and [host.cores for host in cluster.hosts] == [4, 4]


def test_the_cluster_states_the_conditions_of_its_newest_probe() -> None:
    first, _ = measured_cluster(None, probe_of(("a", 3), ("b", 1)), NOW, "emulated network")
    again, _ = measured_cluster(first, probe_of(("a", 3), ("b", 1)), NOW)
    assert (first.measured_on, again.measured_on) == ("emulated network", "")


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        # no partner is fast enough to show the first host's link
        ((2.5e8, 1.25e8, 6e7), (2.5e8, 1.2e8, 6e7)),
        # the first two have met, which refutes the file
        ((2.5e8, 2.5e8, 6e7), (1.2e8, 1.2e8, 6e7)),
        ((1e9, 1e9, 1e9), (1.2e8, 1.2e8, 6e7)),
        ((1.25e8, 1.25e8, 1.25e8), (1.2e8, 1.2e8, 6e7)),
    ],
)
def test_a_link_that_is_faster_than_all_others_keeps_the_bandwidth_of_the_file(
    described: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    hosts = tuple(
        replace(host, link_bytes_per_s=rate)
        for host, rate in zip(hosts_of("abc"), described, strict=True)
    )
    pairs = {(0, 1): 1.2e8, (0, 2): 6e7, (1, 2): 6e7}
    probe = probe_of(("a", 1), ("b", 1), ("c", 1), pairs=pairs)
    cluster, _ = measured_cluster(Cluster("mixed", hosts), probe, NOW)
    assert tuple(host.link_bytes_per_s for host in cluster.hosts) == expected
