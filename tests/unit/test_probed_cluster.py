"""What the measured profile makes of the cluster: an assumed one becomes real, a described one stays."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from autotune.cluster import Cluster, CollectiveFit, Host
from autotune.driver import probed
from autotune.workload import Variable, Workload

WORKLOAD = Workload("m", (Variable("v", (4,)),))
SOFTWARE = {"torch": "2.13.0"}


@dataclass(frozen=True)
class Measured:
    hosts: tuple[tuple[str, int], ...]
    cores: int = 8
    fits: tuple[CollectiveFit, ...] = (CollectiveFit("all_reduce", 4, 1e-3, 1.5e-8, 0.05, 4096, 2**24),)

    @property
    def workload(self) -> Workload:
        return WORKLOAD

    @property
    def software(self) -> dict[str, str]:
        return SOFTWARE


def test_an_assumed_cluster_on_one_host_gets_the_bandwidth_of_its_ring_and_its_cores() -> None:
    found = probed(Cluster.local(4), Measured((("machine", 4),)))
    assert [host.name for host in found.hosts] == ["localhost"]
    assert found.hosts[0].inner_bytes_per_s == pytest.approx(1e8)  # 2 * 3/4 bytes on a link for each of the tensor
    assert found.hosts[0].cores == 8 and found.source == "measured" and found.fits


def test_an_assumed_cluster_becomes_the_hosts_that_the_ranks_are_on() -> None:
    found = probed(Cluster.local(4), Measured((("a", 3), ("b", 1))))
    assert [(host.name, host.devices) for host in found.hosts] == [("a", 3), ("b", 1)]
    assert found.world_size == 4


def test_a_described_cluster_keeps_its_hosts_and_bandwidths() -> None:
    described = Cluster("mine", (Host("x", 4, 1e9, 1e-5, 1e10, 1e-6, cores=64),))
    found = probed(described, Measured((("a", 4),)))
    assert found.hosts == described.hosts and found.fits
    assert replace(found, fits=(), source="assumed") == described
