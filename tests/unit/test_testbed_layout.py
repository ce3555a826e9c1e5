"""A testbed's layout and commands follow from the cluster file alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.cluster import Cluster, Host, PairLink
from autotune.errors import EmulationUnavailable, InvalidInput
from autotune.testbed.build import FRAMING, frame_bytes, network_commands, queue_bytes, window_bytes
from autotune.testbed.layout import Means, Method, address, lay_out, mac, safe_name, safe_names
from autotune.testbed.machine import Process
from autotune.testbed.state import (
    Namespace,
    Recorded,
    States,
    make_scratch,
    new_scratch,
    remove_scratch,
)

ALL = Means(netem=True, filters=True, tun=True, cubic=True, steered_cpus=2)
NONE = Means(netem=False, filters=False, tun=False, cubic=False, steered_cpus=0)
GBIT = 1.25e8


def host(name: str, gbit: float = 1.0, latency_s: float = 5e-5, **other: Any) -> Host:
    fields: dict[str, Any] = {"inner_bytes_per_s": 1e10, "inner_latency_s": 5e-6, **other}
    return Host(name, 1, gbit * GBIT, latency_s, **fields)


def cluster(*gbits: float, pair: tuple[float, float] | None = None) -> Cluster:
    """Hosts a, b, ... with these bandwidths; `pair`: bandwidth and latency of a dedicated link."""
    hosts = tuple(host("abcd"[i], gbit) for i, gbit in enumerate(gbits))
    links = () if pair is None else (PairLink(("a", "b"), pair[0] * GBIT, pair[1]),)
    return Cluster("c", hosts, links)


def crowd(count: int, **fields: Any) -> Cluster:
    return Cluster("c", tuple(host(f"h{number}", **fields) for number in range(count)))


ONE, PAIR, QUAD = cluster(1), cluster(1, 1), cluster(1, 1, 1, 1)


def rate_of(command: str) -> int:
    return int(command.split(" rate ")[1].split("bit")[0])


def lines(cluster: Cluster, means: Means = ALL) -> list[str]:
    return [" ".join(command) for command in network_commands(lay_out(cluster, means))]


def test_both_directions_of_a_host_have_its_rate_with_framing_on_top() -> None:
    commands = lines(cluster(1, 0.25))
    for inside, port, gbit in (("a", "p0", 1), ("b", "p1", 0.25)):
        rate = round(gbit * 1e9 * FRAMING)
        shaped = f"parent 1: classid 1:1 htb rate {rate}bit ceil {rate}bit"
        for device in (
            f"autotune.c.{inside} class add dev eth0",
            f"autotune.c class add dev {port}",
        ):
            assert any(f"tc -n {device} {shaped}" in line for line in commands)


@pytest.mark.parametrize(
    ("cpus", "mask"), [(0, None), (2, "3"), (40, "ff,ffffffff"), (64, "ffffffff,ffffffff")]
)
def test_each_connection_keeps_one_cpu_if_the_kernel_can_steer(cpus: int, mask: str | None) -> None:
    layout = lay_out(PAIR, replace(ALL, steered_cpus=cpus))
    steered = [command for command in network_commands(layout) if "rps_cpus" in command[-1]]
    assert [command[3] for command in steered] == (list(layout.namespaces) if mask else [])
    assert all(f"echo {mask} >" in command[-1] for command in steered)


def test_a_byte_scale_divides_every_rate_also_inside_hosts() -> None:
    direct = cluster(1, 1, pair=(0.5, 5e-5))
    plain, scaled = (lay_out(direct, ALL, byte_scale=scale).hosts[0] for scale in (1, 8))
    assert scaled.link_bytes_per_s == plain.link_bytes_per_s / 8
    assert scaled.lanes[0].link_bytes_per_s == plain.lanes[0].link_bytes_per_s / 8
    assert plain.inner_bytes_per_s == 0 and scaled.inner_bytes_per_s == 1e10 / 8
    with pytest.raises(InvalidInput, match=r"--byte-scale must be at least 1, but is 0.5"):
        lay_out(ONE, ALL, byte_scale=0.5)


def test_a_slower_pair_is_a_class_inside_its_interface_and_a_faster_one_outside() -> None:
    def has(commands: list[str], *parts: str) -> bool:
        return any(all(part in line for part in parts) for line in commands)

    added = "autotune.c.a class add dev eth0 parent"
    slow = lines(cluster(1, 1, pair=(0.1, 5e-5)))
    assert has(slow, f"{added} 1:1 classid 1:20 htb", f"ceil {round(1e8 * FRAMING)}bit")
    assert has(slow, "dst 10.77.0.2/32 flowid 1:20") and not has(slow, "dev p1", "filter")
    fast = lines(cluster(1, 1, pair=(4, 5e-5)))
    assert has(fast, f"{added} 1: classid 1:20 htb")
    assert has(fast, "autotune.c filter add dev p1", "src 10.77.0.1/32")


def test_frames_to_different_hosts_wait_in_different_queues_with_filters() -> None:
    commands = [line for line in lines(QUAD) if "autotune.c.b " in line and "dev eth0" in line]
    filters = [line.partition("u32 ")[2] for line in commands if " filter " in line]
    assert filters == [
        f"match u8 {bits:#x} 0xf at 19 flowid 1:{leaf}" for bits, leaf in ((1, 3), (3, 4), (4, 5))
    ]
    parents = [line.split("parent ")[1].split()[0] for line in commands if "bfifo" in line]
    assert parents == ["1:3", "1:4", "1:5"]
    rates = [rate_of(line) for line in commands if " class " in line and "parent 1:2 " in line]
    assert len(rates) == 3 and sum(rates) == pytest.approx(1e9 * FRAMING, abs=3)
    # a switch's port has one queue
    assert not any("autotune.c filter" in line for line in lines(QUAD))
    assert not any("filter" in line for line in lines(QUAD, NONE))
    # many hosts share a few queues
    assert sum("autotune.c.h7 filter" in line for line in lines(crowd(600))) == 16


def test_a_host_never_loses_its_own_frames() -> None:
    slow_last = cluster(1, 1, 1, 0.25)
    queue = "autotune.c.d qdisc add dev eth0 parent 1:"
    rooms = [int(line.split("limit ")[1]) for line in lines(slow_last) if queue in line]
    layout = lay_out(slow_last, ALL)
    sent = sum(window_bytes(layout, other) for other in range(3))
    assert len(rooms) == 3
    assert min(rooms) > sent > queue_bytes(layout.hosts[3].link_bytes_per_s * FRAMING)


def test_guaranteed_rates_of_classes_never_exceed_their_interface() -> None:
    links = tuple(PairLink(("a", other), 0.9 * GBIT, 5e-5) for other in "bcd")
    commands = lines(replace(QUAD, pair_links=links))
    child = "autotune.c.a class add dev eth0 parent 1:1 "
    rates = [rate_of(line) for line in commands if child in line]
    assert len(rates) == 4 and sum(rates) <= round(1e9 * FRAMING) + len(rates)


WITHOUT_FILTERS = replace(ALL, netem=False, filters=False)
SLOW_PAIR = PairLink(("a", "b"), 0.1 * GBIT, 5e-5)


@pytest.mark.parametrize(
    ("latency_s", "links", "means", "method"),
    [
        (1e-4, (), NONE, Method.SWITCH),  # namespaces have it anyway
        (1e-3, (), ALL, Method.NETEM),
        (1e-3, (), replace(ALL, netem=False), Method.RELAY),
        (5e-5, (SLOW_PAIR,), WITHOUT_FILTERS, Method.RELAY),
    ],
)
def test_a_cluster_takes_the_simplest_method_that_the_kernel_has(
    latency_s: float, links: tuple[PairLink, ...], means: Means, method: Method
) -> None:
    layout = lay_out(Cluster("c", (host("a", latency_s=latency_s), host("b")), links), means)
    assert layout.method is method
    added_s = latency_s if latency_s > 1e-4 else 0.0
    assert layout.added_latency_s(0, 1) == layout.added_latency_s(1, 0) == added_s


def test_with_netem_each_latency_has_its_own_queue() -> None:
    hosts = (host("a", latency_s=1e-3), *QUAD.hosts[1:])
    commands = lines(Cluster("c", hosts, (PairLink(("a", "b"), GBIT, 3e-3),)))
    for name, leaf, queue in (
        ("a", "1:3", "netem delay 1000us"),
        ("a", "1:4", "netem delay 1000us"),
        ("a", "1:5", "netem delay 1000us"),
        ("a", "1:20", "netem delay 3000us"),
        ("c", "1:4", "bfifo"),
        ("c", "1:20", "netem delay 1000us"),
    ):
        start, end = f"autotune.c.{name} qdisc", f"parent {leaf} {queue}"
        assert any(start in line and end in line for line in commands)


@pytest.mark.parametrize(
    ("cluster", "means", "reason"),
    [
        (
            cluster(1, 1, pair=(2, 2e-4)),
            WITHOUT_FILTERS,
            "faster than the interface of 'a', which needs tc's u32 filter",
        ),
        (crowd(2, latency_s=1e-3), NONE, "latencies above 100 us need netem or TAP devices"),
        (
            Cluster("c", (host("a", inner_latency_s=1e-3),)),
            ALL,
            "inner_latency of 'a' must be at most 100 us, but is 1 ms",
        ),
        (
            crowd(1001, latency_s=1e-3),
            replace(NONE, tun=True),
            "which serves at most 1000 hosts, but 'c' has 1001",
        ),
    ],
)
def test_a_cluster_that_the_kernel_cannot_emulate_is_refused_with_the_reason(
    cluster: Cluster, means: Means, reason: str
) -> None:
    with pytest.raises(EmulationUnavailable, match=reason):
        lay_out(cluster, means)


def test_names_are_safe_unique_and_lasting() -> None:
    assert safe_names(("c/1", "c-1", "c 1", "ok")) == ("c-1-2", "c-1", "c-1-3", "ok")
    assert safe_name("../..") == "host" and len(safe_name("x" * 300)) <= 32
    assert safe_name("x" * 300) != safe_name("x" * 301)
    many = safe_names(tuple("y" * 40 + "é" * number for number in range(1, 30)))
    assert len(set(many)) == 29 and all(len(name) <= 32 for name in many)
    with pytest.raises(InvalidInput, match=r"1 to 32 letters, digits and '-', but is 'a\.b'"):
        lay_out(ONE, ALL, name="a.b")


def test_no_host_can_have_the_switchs_namespace_or_anothers_address() -> None:
    layout = lay_out(crowd(600), ALL)
    assert len(set(layout.namespaces)) == 601
    addresses = [address(number) for number in range(600)]
    assert len(set(addresses)) == 600 and len({mac(number) for number in range(600)}) == 600
    assert all(int(part) < 255 for text in addresses for part in text.split("."))


def test_slow_links_get_small_frames_and_a_link_beyond_the_machine_gets_a_note() -> None:
    assert [frame_bytes(rate) for rate in (10 * GBIT, 1.0)] == [65536, 3028]
    assert frame_bytes(0.1 * GBIT) < 7000
    assert not lay_out(cluster(8), ALL).notes
    fast = cluster(100)
    assert "links of a are faster than the 10 Gbit/s" in lay_out(fast, ALL).notes[0]
    assert not lay_out(fast, ALL, byte_scale=20).notes
    (note,) = lay_out(cluster(5, 5, 5, 5), ALL).notes
    assert "move 20 Gbit/s, which takes about 3 cores of this machine" in note


def test_all_senders_windows_fit_into_the_receivers_queue_and_latency_comes_on_top() -> None:
    hosts = (host("a"), host("b"), host("c"), replace(host("d", 0.25), devices=2))
    near = lay_out(Cluster("c", hosts), ALL)
    # two process groups; every device with every other
    for index, connections in ((0, 2 * 4), (3, 2 * 2 * 3)):
        queue = queue_bytes(hosts[index].link_bytes_per_s * FRAMING)
        assert 0.45 * queue < connections * window_bytes(near, index) * FRAMING < queue
        assert window_bytes(near, index) % 65535 == 0  # TCP would round others up
    far = lay_out(Cluster("c", tuple(replace(one, latency_s=5e-3) for one in hosts)), ALL)
    assert window_bytes(far, 0) > 2 * far.hosts[0].added_latency_s * 1.0 * GBIT
    assert window_bytes(lay_out(crowd(40, gbit=0.1), ALL), 0) == 32 * 1024
    assert window_bytes(lay_out(cluster(1e6, 1e6), ALL), 0) == 65535 * 2**14


def test_a_state_file_returns_the_record_also_among_unreadable_ones(tmp_path: Path) -> None:
    layout = lay_out(cluster(1, 4, pair=(2, 5e-5)), ALL)
    namespaces = tuple(Namespace(name) for name in layout.namespaces)
    record = Recorded(layout, Process.current(), True, None, namespaces)
    states = States(tmp_path)
    states.write(record)
    for name, text in (("d.partial", "{"), ("broken.json", "{"), ("newer.json", '{"schema": 99}')):
        (tmp_path / name).write_text(text)
    assert states.all() == (record,) and states.read("absent") is None
    with pytest.raises(InvalidInput, match="reads testbed schema 3, but the file has 99"):
        states.read("newer")
    unreadable = states.unreadable()
    assert [item.name for item in unreadable] == ["broken", "newer"]
    assert all(item.reason.startswith(str(states.path(item.name))) for item in unreadable)
    # a name that is a path names no testbed
    (tmp_path / "x.json").write_text("{")
    assert States(tmp_path / "inner").read("../x") is None


def test_scratch_is_private_short_enough_for_rays_sockets_and_fully_removed(tmp_path: Path) -> None:
    path = new_scratch()
    session = path / "abcdefgh" / "session_2026-11-21_13-49-41_123456_1234567"
    assert len(str(session / "sockets" / "plasma_store.1")) <= 107 and not path.exists()
    assert make_scratch(path) == "" and path.stat().st_mode & 0o777 == 0o700
    assert make_scratch(path) == "File exists"
    (tmp_path / "outside").write_text("")
    (path / "link").symlink_to(tmp_path)
    (path / "inner").mkdir()
    (path / "inner" / "file").write_text("")
    remove_scratch(path)
    assert not path.exists() and (tmp_path / "outside").exists()
    remove_scratch(path)


def test_links_files_and_other_directories_are_not_removed_as_scratch(tmp_path: Path) -> None:
    other, link, file = tmp_path / "other", tmp_path / "autotune.link", tmp_path / "autotune.file"
    other.mkdir()
    link.symlink_to(other)
    file.write_text("")
    for path in (other, link, file):
        remove_scratch(path)
    assert other.is_dir() and link.is_symlink() and file.is_file()


def test_a_namespace_is_surely_ours_only_once_its_inode_is_recorded() -> None:
    record = Recorded(lay_out(PAIR, ALL), Process.current(), True, None).before_creating(
        "autotune.none.a"
    )
    assert record.namespaces == (Namespace("autotune.none.a", 0),) and record.inodes == frozenset()
    assert Namespace("autotune.none.a").undecided is None, "there is none of this name"
    assert record.before_creating("x").without("x") == record


def test_a_dead_owner_or_maker_leaves_leftovers_and_a_living_one_none() -> None:
    layout = lay_out(ONE, ALL)
    living = Process.current()
    dead = Process(living.pid, 1)  # the same id, but another start
    # by (owned, complete); a complete testbed of `testbed up` stays
    cases = {(True, True): True, (True, False): True, (False, False): True, (False, True): False}
    for (owned, complete), expected in cases.items():
        assert Recorded(layout, dead, owned, None, (), complete).left_over is expected
        assert not Recorded(layout, living, owned, None, (), complete).left_over
