"""cluster.yaml: what is read, what is derived, and how bad files are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.cluster import MAX_FITS, Bend, Cluster, CollectiveFit, Host, LinkFit, PairLink, Where
from autotune.cluster_file import cluster_yaml, read_cluster
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
FIT = "{primitive: all_reduce, group_size: 2, alpha_s: 0, relative_error: 0, smallest_bytes: 1, largest_bytes: 2"
BEND = "{until_bytes: 5, s_per_byte: 0}"
LINK = "{{host: {}, inside: false, bytes_per_s: {}, latency_s: 0, relative_error: 0, spread: 0}}"


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
    assert cluster.ring_bytes_per_s == min(
        cluster.bandwidth_bytes_per_s(r, (r + 1) % cluster.world_size) for r in ranks
    )
    assert Cluster.local(4).ring_bytes_per_s == 1e9
    assert Cluster.local(1).ring_bytes_per_s == 1e9


def test_fits_replace_assumptions_and_identity_is_the_hosts_and_links(tmp_path):
    cluster = read(tmp_path, GOOD)
    fit = CollectiveFit("all_reduce", 6, 1e-3, 2e-9, 0.02, 1024, 2**24)
    measured = cluster.with_fits((fit,))
    assert (measured.source, measured.fit("all_reduce", 6), measured.fit("push_pull", 6)) == (
        "measured",
        fit,
        None,
    )
    assert fit.seconds(1e6) == pytest.approx(3e-3)
    assert measured.id == cluster.id
    assert Cluster.from_data(json.loads(json.dumps(measured.to_data()))) == measured
    with pytest.raises(InvalidInput, match="reads cluster schema 1, but the file has 2"):
        Cluster.from_data({**measured.to_data(), "schema": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "hosts: [{name: a, devises: 2}]",
            "unknown field 'hosts.0.devises'; did you mean 'devices'",
        ),
        ("host: []", "field 'hosts' is required, but missing"),
        ("hosts: []", "needs at least one host"),
        ("hosts: [{name: a}, {name: a}]", "host names must be unique, but are a, a"),
        ("hosts: [{name: a, devices: 0}]", "host 'a' needs at least 1 device, but has 0"),
        ("hosts: [{name: a, devices: two}]", "hosts.0.devices: .*integer.*, but is 'two'"),
        (
            "hosts: [{name: a, bandwidth: 1Gbit}]",
            "bandwidth of a needs a rate such as 1Gbit/s or 10GB/s, but is '1Gbit'",
        ),
        ("hosts: [{name: a, bandwidth: 0}]", "host 'a' needs bandwidths above 0"),
        (
            "hosts: [{name: a, latency: .nan}]",
            "latency of a must be finite and at least 0, but is nan",
        ),
        ("hosts: [{name: a, memory: -1}]", "memory of a must be finite and at least 0, but is -1"),
        (
            "hosts: [{name: a}]\nlinks: [{between: [a, z], bandwidth: 1GB/s}]",
            "names host 'z', but the hosts are a",
        ),
        (
            "hosts: [{name: a}, {name: b}]\nlinks: [{between: [a, b], bandwidth: 0}]",
            "'a' - 'b' needs a bandwidth above 0",
        ),
        (
            "schema: 2\nracks: []",
            "this version reads cluster schema 1, but the file has 2; update autotune",
        ),
        ("hosts: [", "must be YAML, but is not"),
        ("hosts: 2024-99-99", "must be YAML, but is not"),
        ("[" * 5000, "must be YAML, but is not"),
        ("", "but is None"),
        ("hosts: !!python/object/apply:os.getcwd []", "must be YAML, but is not"),
        (
            "hosts: [{name: a}]\nsource: guessed",
            "source must be one of assumed, measured, but is 'guessed'",
        ),
        (
            "hosts: [{name: a}]\nfits: [{primitive: all_reduce}]",
            "field 'fits.0.group_size' is required",
        ),
        (
            f"hosts: [{{name: a}}]\nfits: [{FIT}, beta_s_per_byte: -1}}]",
            "finite costs and errors of at least 0, but has",
        ),
        (
            f"hosts: [{{name: a}}]\nfits: [{FIT}, beta_s_per_byte: .inf}}]",
            "finite costs and errors of at least 0, but has",
        ),
        (
            f"hosts: [{{name: a}}]\nfits: [{FIT}, beta_s_per_byte: 0, bends: [{BEND}, {BEND}]}}]",
            "bends at ascending finite sizes above 0",
        ),
        (
            f"hosts: [{{name: a}}]\nfits: [{', '.join([FIT + ', beta_s_per_byte: 0}'] * (MAX_FITS + 1))}]",
            "may hold at most 512 fits",
        ),
        (
            f"hosts: [{{name: a}}]\nlink_fits: [{LINK.format('z', 1)}]",
            "a fitted link names host 'z', but the hosts are a",
        ),
        (
            f"hosts: [{{name: a}}]\nlink_fits: [{LINK.format('a', 0)}]",
            "the link of 'a' needs a finite bandwidth above 0",
        ),
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


def test_aliases_that_stand_for_more_than_a_file_may_hold_are_refused_at_once(tmp_path):
    layers = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    layers += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    with pytest.raises(
        InvalidInput, match="may hold at most 500000 values, but its aliases stand for more"
    ):
        read(tmp_path, "\n".join([*layers, "hosts: *a9"]))
    with pytest.raises(InvalidInput, match="aliases stand for more"):
        read(tmp_path, "hosts: &own [*own]")


def test_a_fit_from_before_there_were_pieces_is_one_line_of_the_world(tmp_path):
    old = {
        "primitive": "all_reduce",
        "group_size": 2,
        "alpha_s": 1e-3,
        "beta_s_per_byte": 2e-9,
        "relative_error": 0.02,
    }
    stored = {
        **Cluster.local(2).to_data(),
        "fits": [{**old, "smallest_bytes": 1024, "largest_bytes": 2**24}],
    }
    for newer in ("link_fits", "measured_at", "software", "measured_on"):
        del stored[newer]
    fit = Cluster.from_data(stored).fit("all_reduce", 2)
    assert fit is not None and (fit.bends, fit.where, fit.loaded, fit.large_error) == (
        (),
        Where.WORLD,
        False,
        None,
    )
    assert fit.seconds(1e6) == pytest.approx(3e-3)


def fitted(primitive="all_reduce", size=4, where=Where.WORLD, loaded=False, alpha_s=1e-3):
    return CollectiveFit(
        primitive, size, alpha_s, 1e-8, 0.02, 1024, 2**24, where=where, loaded=loaded
    )


def test_a_fit_is_found_by_where_it_was_probed_and_the_world_speaks_first():
    hosts = tuple(Host(name, 4, 1e8, 1e-5, 1e10, 1e-6) for name in "ab")
    world, across, inside, loaded = (
        fitted(),
        fitted(where=Where.ACROSS),
        fitted(where=Where.HOST),
        fitted(loaded=True),
    )
    cluster = Cluster("c", hosts).with_fits((inside, loaded, across))
    assert (
        cluster.fit("all_reduce", 4) == across
        and cluster.fit("all_reduce", 4, Where.HOST) == inside
    )
    assert cluster.with_fits((world,)).fit("all_reduce", 4) == world
    assert cluster.fit("all_reduce", 4, loaded=True) == loaded
    assert (
        Cluster("c", hosts).with_fits((inside,)).fit("all_reduce", 4) is None
    )  # ranks of one host do not speak for others
    assert Cluster("c", hosts[:1]).with_fits((inside,)).fit("all_reduce", 4) == inside


def test_a_newer_fit_replaces_the_one_of_the_same_identity_and_no_other():
    old, loaded = fitted(alpha_s=1e-3), fitted(loaded=True)
    newer = fitted(alpha_s=2e-3)
    assert Cluster.local(4).with_fits((old, loaded)).with_fits((newer,)).fits == (newer, loaded)


figures = st.floats(0, 1e12, allow_subnormal=True)
rates = st.floats(1e-3, 1e15)
words = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)


@st.composite
def fits(draw):
    bends = sorted(draw(st.sets(st.floats(1, 1e9), max_size=4)))
    return CollectiveFit(
        draw(st.sampled_from(["all_reduce", "push_pull", "broadcast"])),
        draw(st.integers(2, 4000)),
        draw(figures),
        draw(figures),
        draw(figures),
        draw(st.integers(1, 2**12)),
        draw(st.integers(2**13, 2**40)),
        draw(figures),
        draw(figures),
        draw(st.sampled_from(list(Where))),
        draw(st.booleans()),
        tuple(Bend(place, draw(figures)) for place in bends),
        draw(st.none() | figures),
        draw(figures),
        draw(st.integers(0, 20)),
    )


@st.composite
def clusters(draw):
    names = draw(st.lists(words, min_size=1, max_size=4, unique=True))
    hosts = tuple(
        Host(
            name,
            draw(st.integers(1, 9)),
            draw(rates),
            draw(figures),
            draw(rates),
            draw(figures),
            draw(st.integers(0, 2**50)),
            draw(words),
        )
        for name in names
    )
    pairs = (
        (PairLink((names[0], names[-1]), draw(rates), draw(figures)),)
        if draw(st.booleans())
        else ()
    )
    links = tuple(
        LinkFit(name, draw(st.booleans()), draw(rates), draw(figures), draw(figures), draw(figures))
        for name in names
    )
    software = tuple(draw(st.dictionaries(words, words, max_size=3)).items())
    source = draw(st.sampled_from(["assumed", "measured"]))
    found, measured_on = tuple(draw(st.lists(fits(), max_size=4))), draw(st.just("") | words)
    return Cluster(
        draw(words), hosts, pairs, found, source, 1, links, draw(words), software, measured_on
    )


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(clusters())
def test_what_is_written_reads_back_exactly(tmp_path, cluster):
    assert read(tmp_path, cluster_yaml(cluster)) == cluster


def test_the_file_says_of_every_figure_whether_it_was_measured():
    hosts = (Host("a", 2, 1.25e8, 5e-5, 1e10, 5e-6), Host("b", 1, 1.25e8, 5e-5, 1e10, 5e-6))
    text = cluster_yaml(
        Cluster("c", hosts, link_fits=(LinkFit("a", False, 1.25e8, 5e-5, 0.012, 0.004),))
    )
    assert (
        "# link 1000 Mbit/s (119 MiB/s), 50 us: measured, fit error 1.2%, spread of the repeats 0.4%\n"
        in text
    )
    assert "# inside 8e+04 Mbit/s (9.31 GiB/s), 5 us: not measured\n" in text


def test_the_file_says_what_stood_for_a_real_cluster(tmp_path):
    emulated = replace(
        Cluster.local(2), measured_on="emulated network, bytes and rates divided by 4"
    )
    text = cluster_yaml(emulated)
    assert (
        "# What was probed stood for a real cluster:\nmeasured_on: emulated network, bytes and rates divided by 4\n"
        in text
    )
    assert read(tmp_path, text) == emulated
    assert "measured_on" not in cluster_yaml(Cluster.local(2))
