"""cluster.yaml: what is read, what is derived, and how bad files are refused."""

from __future__ import annotations

import json

import pytest

from autotune.cluster import Cluster, CollectiveFit, Host, read_cluster
from autotune.errors import InvalidInput

GOOD = """
name: lab
hosts:
  - {name: a, devices: 2, bandwidth: 10Gbit/s, latency: 30us, inner_bandwidth: 20GB/s, memory: 16GB, address: 10.0.0.1}
  - {name: b, bandwidth: 1Gbit/s}
  - {name: c, devices: 3}
links:
  - {between: [a, c], bandwidth: 100Mbit/s, latency: 2ms}
"""


def read(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return read_cluster(path)


def test_a_file_with_units_becomes_si_figures(tmp_path):
    cluster = read(tmp_path, GOOD)
    assert cluster.hosts[0] == Host("a", 2, 1.25e9, 3e-5, 2e10, 5e-6, 16 * 10**9, "10.0.0.1")
    assert cluster.hosts[1] == Host("b", 1, 1.25e8, 5e-5, 1e10, 5e-6)
    assert (cluster.name, cluster.source, cluster.world_size) == ("lab", "assumed", 6)


def test_ranks_are_numbered_host_by_host_and_links_follow_the_hosts(tmp_path):
    cluster = read(tmp_path, GOOD)
    assert cluster.host_of_rank == (0, 0, 1, 2, 2, 2)
    assert cluster.bandwidth_bytes_per_s(0, 1) == 2e10  # inside a
    assert cluster.bandwidth_bytes_per_s(1, 2) == 1.25e8  # b's interface is the slower one
    assert cluster.bandwidth_bytes_per_s(5, 0) == 1.25e7  # the named pair, in both directions
    assert cluster.latency_s(0, 3) == pytest.approx(2e-3)
    assert cluster.latency_s(0, 2) == 5e-5
    assert cluster.own_bandwidth_bytes_per_s(1) == 1.25e9
    assert Cluster.local(3).own_bandwidth_bytes_per_s(0) == 1e9


def test_the_ring_is_as_slow_as_its_slowest_link_in_rank_order(tmp_path):
    cluster = read(tmp_path, GOOD)
    ranks = range(cluster.world_size)
    assert cluster.ring_bytes_per_s == min(cluster.bandwidth_bytes_per_s(r, (r + 1) % cluster.world_size) for r in ranks)
    assert Cluster.local(4).ring_bytes_per_s == 1e9
    assert Cluster.local(1).ring_bytes_per_s == 1e9


def test_fits_replace_assumptions_and_identity_is_the_hosts_and_links(tmp_path):
    cluster = read(tmp_path, GOOD)
    fit = CollectiveFit("all_reduce", 6, 1e-3, 2e-9, 0.02, 1024, 2**24)
    measured = cluster.with_fits((fit,))
    assert (measured.source, measured.fit("all_reduce", 6), measured.fit("push_pull", 6)) == ("measured", fit, None)
    assert fit.seconds(1e6) == pytest.approx(3e-3)
    assert measured.id == cluster.id
    assert Cluster.from_data(json.loads(json.dumps(measured.to_data()))) == measured
    with pytest.raises(InvalidInput, match="reads cluster schema 1, but the file has 2"):
        Cluster.from_data({**measured.to_data(), "schema": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: [{name: a, devises: 2}]", "unknown field 'hosts.0.devises'; did you mean 'devices'"),
        ("host: []", "field 'hosts' is required, but missing"),
        ("hosts: []", "needs at least one host"),
        ("hosts: [{name: a}, {name: a}]", "host names must be unique, but are a, a"),
        ("hosts: [{name: a, devices: 0}]", "host 'a' needs at least 1 device, but has 0"),
        ("hosts: [{name: a, devices: two}]", "hosts.0.devices: .*integer.*, but is 'two'"),
        ("hosts: [{name: a, bandwidth: 1Gbit}]", "bandwidth of a needs a rate such as 1Gbit/s or 10GB/s, but is '1Gbit'"),
        ("hosts: [{name: a, bandwidth: 0}]", "host 'a' needs bandwidths above 0"),
        ("hosts: [{name: a, latency: .nan}]", "latency of a must be finite and at least 0, but is nan"),
        ("hosts: [{name: a, memory: -1}]", "memory of a must be finite and at least 0, but is -1"),
        ("hosts: [{name: a}]\nlinks: [{between: [a, z], bandwidth: 1GB/s}]", "names host 'z', but the hosts are a"),
        ("hosts: [{name: a}, {name: b}]\nlinks: [{between: [a, b], bandwidth: 0}]", "'a' - 'b' needs a bandwidth above 0"),
        ("schema: 2\nracks: []", "this version reads cluster schema 1, but the file has 2; update autotune"),
        ("hosts: [", "must be YAML, but is not"),
        ("hosts: 2024-99-99", "must be YAML, but is not"),
        ("[" * 5000, "must be YAML, but is not"),
        ("", "but is None"),
        ("hosts: !!python/object/apply:os.getcwd []", "must be YAML, but is not"),
    ],
)
def test_a_bad_file_is_one_error_with_the_rule_and_the_value(tmp_path, text, message):
    with pytest.raises(InvalidInput, match=message):
        read(tmp_path, text)


def test_a_missing_binary_or_huge_file_is_refused_by_name(tmp_path):
    with pytest.raises(InvalidInput, match=r"cannot read .*none\.yaml: No such file"):
        read_cluster(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"hosts: \xff")
    with pytest.raises(InvalidInput, match=r"must be UTF-8 text, but byte 7 is not"):
        read_cluster(tmp_path / "binary.yaml")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(InvalidInput, match="at most 1048576 bytes, but has 1048577"):
        read_cluster(tmp_path / "huge.yaml")
