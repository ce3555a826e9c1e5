"""cluster.yaml: values read, values derived, and refusals of bad files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from known_examples import examples
from small_worlds import cluster as hosts_with

from autotune.cluster import (
    MAX_FITS,
    Bend,
    Cluster,
    CollectiveFit,
    Host,
    LinkFit,
    PairLink,
    PeerFit,
    Where,
)
from autotune.cluster_file import cluster_yaml, read_cluster
from autotune.errors import InvalidInput

A = "{name: a, devices: 2, bandwidth: 10Gbit/s, latency: 30us, inner_bandwidth: 20GB/s"
GOOD = f"""
name: lab
hosts:
  - {A}, memory: 16GB, address: 10.0.0.1}}
  - {{name: b, bandwidth: 1Gbit/s}}
  - {{name: c, devices: 3}}
links:
  - {{between: [a, c], bandwidth: 100Mbit/s, latency: 2ms}}
"""


def read(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return read_cluster(path)


def fit(primitive="all_reduce", size=4, alpha_s=1e-3, **fields):
    return CollectiveFit(primitive, size, alpha_s, 1e-8, 0.02, 1024, 2**24, **fields)


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
    pairs = [(rank, (rank + 1) % cluster.world_size) for rank in range(cluster.world_size)]
    slowest = min(cluster.bandwidth_bytes_per_s(*pair) for pair in pairs)
    assert cluster.ring_bytes_per_s == slowest
    assert [Cluster.local(ranks).ring_bytes_per_s for ranks in (1, 4)] == [1e9, 1e9]


def test_fits_replace_assumptions_and_identity_is_the_hosts_and_links(tmp_path):
    cluster = read(tmp_path, GOOD)
    probed = fit(size=6)
    measured = cluster.with_fits((probed,))
    assert measured.source == "measured" and measured.id == cluster.id
    assert measured.fit("all_reduce", 6) == probed and measured.fit("push_pull", 6) is None
    assert probed.seconds(1e6) == pytest.approx(1.1e-2)
    assert Cluster.from_data(json.loads(json.dumps(measured.to_data()))) == measured
    with pytest.raises(InvalidInput, match="reads cluster schema 1, but the file has 2"):
        Cluster.from_data({**measured.to_data(), "schema": 2})


def of_a(fields):
    return f"hosts: [{{name: a, {fields}}}]"


def with_fits(fields, count=1):
    given = (
        "{primitive: all_reduce, group_size: 2, alpha_s: 0, relative_error: 0, "
        f"smallest_bytes: 1, largest_bytes: 2, {fields}}}"
    )
    return f"hosts: [{{name: a}}]\nfits: [{', '.join([given] * count)}]"


def with_link_fit(host, rate):
    given = f"{{host: {host}, inside: false, bytes_per_s: {rate}, latency_s: 0"
    return f"hosts: [{{name: a}}]\nlink_fits: [{given}, relative_error: 0, spread: 0}}]"


BENDS = (
    "beta_s_per_byte: 0, bends: [{until_bytes: 5, s_per_byte: 0}, {until_bytes: 5, s_per_byte: 0}]"
)
NOT_YAML = "must be YAML, but is not"
NOT_FINITE = "must be finite and at least 0, but is"
BAD_COSTS = r"costs of the fit of 'all_reduce' \(seconds per byte\) must be from 0 to 1"
TWO_HOSTS = "hosts: [{name: a}, {name: b}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (of_a("devises: 2"), "unknown field 'hosts.0.devises'; did you mean 'devices'"),
        ("host: []", "field 'hosts' is required, but missing"),
        ("hosts: []", "needs at least one host"),
        ("hosts: [{name: a}, {name: a}]", "host names must be unique, but are a, a"),
        (of_a("devices: 0"), "devices of host 'a' must be from 1 to 131072, but is 0"),
        (of_a("devices: two"), "hosts.0.devices: .*integer.*, but is 'two'"),
        (
            of_a("bandwidth: 1Gbit"),
            "bandwidth of a needs a rate such as 1Gbit/s or 10GB/s, but is '1Gbit'",
        ),
        (
            of_a("bandwidth: 0"),
            r"bandwidth of host 'a' \(bytes per second\) must be from 1 to .*, but is 0",
        ),
        (of_a("latency: .nan"), f"latency of a {NOT_FINITE} nan"),
        (of_a("memory: -1"), f"memory of a {NOT_FINITE} -1"),
        (
            "hosts: [{name: a}]\nlinks: [{between: [a, z], bandwidth: 1GB/s}]",
            "names host 'z', but the hosts are a",
        ),
        (
            f"{TWO_HOSTS}\nlinks: [{{between: [a, b], bandwidth: 0}}]",
            "bandwidth of link 'a' - 'b' \\(bytes per second\\) must be from 1",
        ),
        (
            "schema: 2\nracks: []",
            "this version reads cluster schema 1, but the file has 2; update autotune",
        ),
        (
            f"{TWO_HOSTS}\nlinks: [{{between: [a, a], bandwidth: 1GB/s}}]",
            "must join two hosts that no other link joins, but one is between a and a",
        ),
        (
            f"{TWO_HOSTS}\nlinks: [{{between: [a, b], bandwidth: 1GB/s}}, "
            "{between: [b, a], bandwidth: 2GB/s}]",
            "must join two hosts that no other link joins, but one is between b and a",
        ),
        (of_a("bandwidth: yes"), "bandwidth in hosts must be a number or text, but is a boolean"),
        (
            f"{TWO_HOSTS}\nmachine_cores: -4",
            "machine_cores of cluster 'cluster' must be from 0 to 131072, but is -4",
        ),
        (f"{TWO_HOSTS}\nschema: 0", "the schema of cluster must be from 1 to 1, but is 0"),
        ("hosts: [", NOT_YAML),
        ("hosts: 2024-99-99", NOT_YAML),
        ("[" * 5000, NOT_YAML),
        ("", "but is None"),
        ("hosts: !!python/object/apply:os.getcwd []", NOT_YAML),
        ("hosts: [{name: a}]\nsource: guessed", "one of assumed, measured, but is 'guessed'"),
        ("hosts: [{name: a}]\nfits: [{primitive: x}]", "field 'fits.0.group_size' is required"),
        (with_fits("beta_s_per_byte: -1"), BAD_COSTS),
        (with_fits("beta_s_per_byte: .inf"), BAD_COSTS),
        (with_fits(BENDS), "bends at ascending finite sizes above 0"),
        (with_fits("beta_s_per_byte: 0", MAX_FITS + 1), "may hold at most 512 fits"),
        (with_link_fit("z", 1), "a fitted link names host 'z', but the hosts are a"),
        (with_link_fit("a", 0), "bandwidth of the link of 'a' .* must be from 1"),
    ],
)
def test_a_bad_file_is_one_error_with_the_rule_and_the_value(tmp_path, text, message):
    with pytest.raises(InvalidInput, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read .*bad\.yaml: No such file"),
        (b"hosts: \xff", r"must be UTF-8 text, but byte 7 is not"),
        (b"#" * (2**22 + 1), "at most 4194304 bytes, but has 4194305"),
    ],
    ids=["missing", "binary", "huge"],
)
def test_a_missing_binary_or_huge_file_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        read_cluster(path)


def test_aliases_for_more_than_a_file_may_hold_are_refused_at_once(tmp_path):
    layers = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    layers += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    text = "\n".join([*layers, "hosts: *a9"])
    with pytest.raises(InvalidInput, match="at most 500000 values, but its aliases stand for more"):
        read(tmp_path, text)
    with pytest.raises(InvalidInput, match="an alias must not name a value that contains it"):
        read(tmp_path, "hosts: &own [*own]")


def test_a_fit_from_before_there_were_pieces_is_one_line_of_the_world():
    stored = Cluster.local(2).with_fits((fit(size=2),)).to_data()
    old = ("primitive", "group_size", "alpha_s", "beta_s_per_byte", "relative_error")
    fields = (*old, "smallest_bytes", "largest_bytes")
    stored["fits"] = [{name: stored["fits"][0][name] for name in fields}]
    for newer in ("link_fits", "measured_at", "software", "measured_on"):
        del stored[newer]
    again = Cluster.from_data(stored).fit("all_reduce", 2)
    assert again is not None and (again.bends, again.where) == ((), Where.WORLD)
    assert not again.loaded and again.large_error is None
    assert again.seconds(1e6) == pytest.approx(1.1e-2)


def test_a_fit_is_found_by_where_it_was_probed_and_the_world_comes_first():
    world, loaded = fit(), fit(loaded=True)
    across, inside = fit(where=Where.ACROSS), fit(where=Where.HOST)
    pair, one = hosts_with(1e8, 1e8, devices=4), hosts_with(1e8, devices=4)
    cluster = pair.with_fits((inside, loaded, across))
    assert cluster.fit("all_reduce", 4) == across
    assert cluster.fit("all_reduce", 4, Where.HOST) == inside
    assert cluster.with_fits((world,)).fit("all_reduce", 4) == world
    assert cluster.fit("all_reduce", 4, loaded=True) == loaded
    # a fit inside one host holds for others only if there are none
    assert pair.with_fits((inside,)).fit("all_reduce", 4) is None
    assert one.with_fits((inside,)).fit("all_reduce", 4) == inside


def test_the_nearest_number_of_peers_stands_for_another_one():
    fits = tuple(
        PeerFit("a", k, out, 1e8 / k, 1e-4, 0.0, 0.0) for k in (1, 2, 4) for out in (False, True)
    )
    cluster = replace(Cluster("c", (Host("a", 1, 1e8, 0, 1e8, 0),)), peer_fits=fits)
    found = [cluster.peer_fit("a", k, True) for k in (1, 3, 9)]
    assert [fit and fit.peers for fit in found] == [1, 4, 4]
    assert cluster.peer_fit("a", 2, False) == fits[2]
    assert Cluster.local(2).peer_fit("localhost", 1, True) is None
    unknown = PeerFit("z", 1, True, 1e8, 0, 0, 0)
    with pytest.raises(InvalidInput, match="a fitted link names host 'z'"):
        replace(cluster, peer_fits=(unknown,))


def test_a_newer_fit_replaces_the_one_of_the_same_identity_and_no_other():
    older = Cluster.local(4).with_fits((fit(), fit(loaded=True)))
    assert older.with_fits((fit(alpha_s=2e-3),)).fits == (fit(alpha_s=2e-3), fit(loaded=True))


figures = st.floats(0, 1, allow_subnormal=True)
rates = st.floats(1, 1e15)
words = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
fits = st.builds(
    CollectiveFit,
    st.sampled_from(["all_reduce", "push_pull", "broadcast"]),
    st.integers(2, 4000),
    figures,
    figures,
    figures,
    st.integers(1, 2**12),
    st.integers(2**13, 2**40),
    figures,
    figures,
    st.sampled_from(list(Where)),
    st.booleans(),
    st.sets(st.floats(1, 1e9), max_size=4).flatmap(
        lambda places: st.tuples(*(st.builds(Bend, st.just(p), figures) for p in sorted(places)))
    ),
    st.none() | figures,
    figures,
    st.integers(0, 20),
)


@st.composite
def clusters(draw):
    names = draw(st.lists(words, min_size=1, max_size=4, unique=True))
    sizes, memory = st.integers(1, 9), st.integers(0, 2**50)
    hosts = [
        draw(st.builds(Host, st.just(name), sizes, rates, figures, rates, figures, memory, words))
        for name in names
    ]
    pair = st.builds(PairLink, st.just((names[0], names[-1])), rates, figures)
    links = [
        draw(st.builds(LinkFit, st.just(name), st.booleans(), rates, figures, figures, figures))
        for name in names
    ]
    counts = st.integers(1, 4000)
    peer = st.builds(
        PeerFit, st.sampled_from(names), counts, st.booleans(), rates, figures, figures, figures
    )
    return Cluster(
        draw(words),
        tuple(hosts),
        draw(st.just(()) | st.tuples(pair)) if len(names) > 1 else (),
        tuple(draw(st.lists(fits, max_size=4))),
        draw(st.sampled_from(["assumed", "measured"])),
        link_fits=tuple(links),
        measured_at=draw(words),
        software=tuple(draw(st.dictionaries(words, words, max_size=3)).items()),
        measured_on=draw(st.just("") | words),
        peer_fits=tuple(draw(st.lists(peer, max_size=3))),
    )


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(clusters())
def test_a_written_file_reads_back_exactly(tmp_path, cluster):
    assert read(tmp_path, cluster_yaml(cluster)) == cluster


def test_the_file_states_for_every_figure_whether_it_was_measured():
    hosts = (Host("a", 2, 1.25e8, 5e-5, 1e10, 5e-6), Host("b", 1, 1.25e8, 5e-5, 1e10, 5e-6))
    link = LinkFit("a", False, 1.25e8, 5e-5, 0.012, 0.004)
    text = cluster_yaml(Cluster("c", hosts, link_fits=(link,)))
    measured = "measured, fit error 1.2%, spread of the repeats 0.4%"
    assert f"# link 1 Gbit/s (119 MiB/s), 50 us: {measured}\n" in text
    assert "# inside 80 Gbit/s (9.31 GiB/s), 5 us: not measured\n" in text


def test_the_file_states_what_was_emulated(tmp_path):
    conditions = "emulated network, bytes and rates divided by 4"
    emulated = replace(Cluster.local(2), measured_on=conditions)
    text = cluster_yaml(emulated)
    assert f"# What was probed stood for a real cluster:\nmeasured_on: {conditions}\n" in text
    assert read(tmp_path, text) == emulated
    assert "measured_on" not in cluster_yaml(Cluster.local(2))
