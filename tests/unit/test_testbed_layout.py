"""A testbed's layout and commands follow from the cluster file alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.cluster import Cluster, Host, PairLink
from autotune.errors import EmulationUnavailable, InvalidInput
from autotune.testbed.build import frame_bytes, network_commands, window_bytes
from autotune.testbed.layout import (
    MOST_RELAYED_HOSTS,
    Means,
    Method,
    address,
    lay_out,
    mac,
    safe_name,
    safe_names,
)
from autotune.testbed.processes import Process
from autotune.testbed.scratch import make_scratch, new_scratch, remove_scratch
from autotune.testbed.shaping import FRAMING, queue_bytes
from autotune.testbed.state import Namespace, Recorded, States

ALL = Means(netem=True, filters=True, tun=True, cubic=True, steered_cpus=2)
NONE = Means(netem=False, filters=False, tun=False, cubic=False, steered_cpus=0)
GBIT = 1.25e8


def host(
    name: str,
    gbit: float = 1.0,
    latency_s: float = 5e-5,
    inner: float = 1e10,
    inner_latency_s: float = 5e-6,
) -> Host:
    return Host(name, 1, gbit * GBIT, latency_s, inner, inner_latency_s)


def lines(cluster: Cluster, means: Means = ALL, **options: Any) -> list[str]:
    return [" ".join(command) for command in network_commands(lay_out(cluster, means, **options))]


def test_both_directions_of_a_host_have_its_rate_with_framing_on_top() -> None:
    made = lines(Cluster("c", (host("a"), host("b", 0.25))))
    for namespace, device, gbit in [
        ("autotune.c.a", "eth0", 1),
        ("autotune.c", "p0", 1),
        ("autotune.c.b", "eth0", 0.25),
        ("autotune.c", "p1", 0.25),
    ]:
        rate = round(gbit * 1e9 * FRAMING)
        assert any(
            f"tc -n {namespace} class add dev {device} parent 1: classid 1:1 htb rate {rate}bit ceil {rate}bit"
            in line
            for line in made
        )


@pytest.mark.parametrize(
    ("cpus", "mask"), [(0, None), (2, "3"), (40, "ff,ffffffff"), (64, "ffffffff,ffffffff")]
)
def test_connections_keep_to_one_cpu_where_the_kernel_can(cpus: int, mask: str | None) -> None:
    layout = lay_out(Cluster("c", (host("a"), host("b"))), replace(ALL, steered_cpus=cpus))
    steered = [command for command in network_commands(layout) if "rps_cpus" in command[-1]]
    assert [command[3] for command in steered] == (list(layout.namespaces) if mask else [])
    assert all(f"echo {mask} >" in command[-1] for command in steered)


def test_a_byte_scale_divides_every_rate_the_inner_ones_too() -> None:
    cluster = Cluster("c", (host("a"), host("b")), (PairLink(("a", "b"), 0.5 * GBIT, 5e-5),))
    plain, scaled = lay_out(cluster, ALL), lay_out(cluster, ALL, byte_scale=8)
    assert scaled.hosts[0].link_bytes_per_s == plain.hosts[0].link_bytes_per_s / 8
    assert scaled.hosts[0].lanes[0].link_bytes_per_s == plain.hosts[0].lanes[0].link_bytes_per_s / 8
    assert plain.hosts[0].inner_bytes_per_s == 0 and scaled.hosts[0].inner_bytes_per_s == 1e10 / 8


def test_a_scale_below_one_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"--byte-scale must be at least 1, but is 0.5"):
        lay_out(Cluster("c", (host("a"),)), ALL, byte_scale=0.5)


def test_a_slower_pair_is_a_class_inside_its_interface_and_a_faster_one_beside_it() -> None:
    slow = lines(Cluster("c", (host("a"), host("b")), (PairLink(("a", "b"), 0.1 * GBIT, 5e-5),)))
    assert any(
        "autotune.c.a class add dev eth0 parent 1:1 classid 1:20 htb" in line
        and f"ceil {round(1e8 * FRAMING)}bit" in line
        for line in slow
    )
    assert any("dst 10.77.0.2/32 flowid 1:20" in line for line in slow)
    assert not any("dev p1" in line and "filter" in line for line in slow)
    fast = lines(Cluster("c", (host("a"), host("b")), (PairLink(("a", "b"), 4 * GBIT, 5e-5),)))
    assert any(
        "autotune.c.a class add dev eth0 parent 1: classid 1:20 htb" in line for line in fast
    )
    assert any(
        "autotune.c filter add dev p1" in line and "src 10.77.0.1/32" in line for line in fast
    )


def test_what_goes_to_different_hosts_waits_in_different_queues_where_the_kernel_has_filters() -> (
    None
):
    cluster = Cluster("c", tuple(host(name) for name in "abcd"))
    made = [line for line in lines(cluster) if "autotune.c.b " in line and "dev eth0" in line]
    filters = [line.partition("u32 ")[2] for line in made if " filter " in line]
    assert filters == [
        f"match u8 {bits:#x} 0xf at 19 flowid 1:{name}" for bits, name in ((1, 3), (3, 4), (4, 5))
    ]
    assert [line.split("parent ")[1].split()[0] for line in made if "bfifo" in line] == [
        "1:3",
        "1:4",
        "1:5",
    ]
    rates = [
        int(line.split(" rate ")[1].split("bit")[0])
        for line in made
        if " class " in line and "parent 1:2 " in line
    ]
    assert len(rates) == 3 and sum(rates) == pytest.approx(1e9 * FRAMING, abs=3)
    assert not any(
        "filter" in line and "autotune.c filter" in line for line in lines(cluster)
    )  # a switch's port has one queue
    assert not any("filter" in line for line in lines(cluster, NONE))


def test_many_hosts_share_a_few_queues() -> None:
    made = [
        line
        for line in lines(Cluster("c", tuple(host(f"h{number}") for number in range(600))))
        if "autotune.c.h7 filter" in line
    ]
    assert len(made) == 16


def test_a_host_never_loses_what_it_sends_itself() -> None:
    cluster = Cluster("c", (host("a"), host("b"), host("c"), host("d", 0.25)))
    queues = [
        line for line in lines(cluster) if "autotune.c.d qdisc add dev eth0 parent 1:" in line
    ]
    layout = lay_out(cluster, ALL)
    sent = sum(window_bytes(layout, other) for other in range(3))
    assert len(queues) == 3
    assert (
        min(int(queue.split("limit ")[1]) for queue in queues)
        > sent
        > queue_bytes(layout.hosts[3].link_bytes_per_s * FRAMING)
    )


def test_guaranteed_rates_of_classes_never_exceed_their_interface() -> None:
    links = tuple(PairLink(("a", other), 0.9 * GBIT, 5e-5) for other in "bcd")
    made = lines(Cluster("c", tuple(host(name) for name in "abcd"), links))
    rates = [
        int(line.split(" rate ")[1].split("bit")[0])
        for line in made
        if "autotune.c.a class add dev eth0 parent 1:1 " in line
    ]
    assert len(rates) == 4 and sum(rates) <= round(1e9 * FRAMING) + len(rates)


@pytest.mark.parametrize(
    ("latency_s", "means", "method"),
    [
        (1e-4, NONE, Method.SWITCH),  # what namespaces have anyway
        (1e-3, ALL, Method.NETEM),
        (
            1e-3,
            Means(netem=False, filters=True, tun=True, cubic=True, steered_cpus=2),
            Method.RELAY,
        ),
    ],
)
def test_latency_takes_the_simplest_means_that_the_kernel_has(
    latency_s: float, means: Means, method: Method
) -> None:
    layout = lay_out(Cluster("c", (host("a", latency_s=latency_s), host("b"))), means)
    assert layout.method is method
    assert (
        layout.added_latency_s(0, 1)
        == layout.added_latency_s(1, 0)
        == (latency_s if latency_s > 1e-4 else 0.0)
    )


def test_with_netem_each_latency_has_its_own_queue() -> None:
    cluster = Cluster(
        "c",
        (host("a", latency_s=1e-3), host("b"), host("c"), host("d")),
        (PairLink(("a", "b"), GBIT, 3e-3),),
    )
    made = [line for line in lines(cluster) if "autotune.c.a qdisc" in line]
    for leaf, delay_us in (("1:3", 1000), ("1:4", 1000), ("1:5", 1000), ("1:20", 3000)):
        assert any(f"parent {leaf} netem delay {delay_us}us" in line for line in made)
    back = [line for line in lines(cluster) if "autotune.c.c qdisc" in line]
    assert any("parent 1:4 bfifo" in line for line in back) and any(
        "parent 1:20 netem delay 1000us" in line for line in back
    )


def test_pairs_without_filters_go_through_the_relay_unless_they_are_faster_than_their_interface() -> (
    None
):
    means = Means(netem=False, filters=False, tun=True, cubic=True, steered_cpus=2)
    assert (
        lay_out(
            Cluster("c", (host("a"), host("b")), (PairLink(("a", "b"), 0.1 * GBIT, 5e-5),)), means
        ).method
        is Method.RELAY
    )
    with pytest.raises(
        EmulationUnavailable, match="faster than the interface of 'a', which needs tc's u32 filter"
    ):
        lay_out(
            Cluster("c", (host("a"), host("b")), (PairLink(("a", "b"), 2 * GBIT, 2e-4),)), means
        )


def test_what_the_kernel_cannot_do_is_refused_with_the_reason() -> None:
    with pytest.raises(
        EmulationUnavailable, match="latencies above 100 us need netem or TAP devices"
    ):
        lay_out(Cluster("c", (host("a", latency_s=1e-3), host("b"))), NONE)
    with pytest.raises(
        EmulationUnavailable, match="inner_latency of 'a' must be at most 100 us, but is 1 ms"
    ):
        lay_out(Cluster("c", (host("a", inner_latency_s=1e-3),)), ALL)


def test_more_hosts_than_the_relay_can_wait_for_are_refused() -> None:
    crowd = Cluster(
        "c", tuple(host(f"h{number}", latency_s=1e-3) for number in range(MOST_RELAYED_HOSTS + 1))
    )
    with pytest.raises(
        EmulationUnavailable, match="which serves at most 1000 hosts, but 'c' has 1001"
    ):
        lay_out(crowd, replace(NONE, tun=True))


def test_names_are_safe_unique_and_lasting() -> None:
    assert safe_names(("c/1", "c-1", "c 1", "ok")) == ("c-1-2", "c-1", "c-1-3", "ok")
    assert safe_name("../..") == "host" and len(safe_name("x" * 300)) <= 32
    assert safe_name("x" * 300) != safe_name("x" * 301)
    many = safe_names(tuple("y" * 40 + "é" * number for number in range(1, 30)))
    assert len(set(many)) == 29 and all(len(name) <= 32 for name in many)
    with pytest.raises(InvalidInput, match=r"1 to 32 letters, digits and '-', but is 'a\.b'"):
        lay_out(Cluster("c", (host("a"),)), ALL, name="a.b")


def test_no_host_can_have_the_switchs_namespace_or_anothers_address() -> None:
    layout = lay_out(Cluster("c", tuple(host(f"h{number}") for number in range(600))), ALL)
    assert len(set(layout.namespaces)) == 601
    addresses = [address(number) for number in range(600)]
    assert len(set(addresses)) == 600 and len({mac(number) for number in range(600)}) == 600
    assert all(int(part) < 255 for text in addresses for part in text.split("."))


def test_slow_links_get_small_frames_and_a_link_beyond_the_machine_gets_a_note() -> None:
    assert (
        frame_bytes(10 * GBIT) == 65536
        and frame_bytes(0.1 * GBIT) < 7000
        and frame_bytes(1.0) == 3028
    )
    assert not lay_out(Cluster("c", (host("a", 8.0),)), ALL).notes
    assert (
        "links of a are faster than the 10 Gbit/s"
        in lay_out(Cluster("c", (host("a", 100.0),)), ALL).notes[0]
    )
    assert not lay_out(Cluster("c", (host("a", 100.0),)), ALL, byte_scale=20).notes
    (note,) = lay_out(Cluster("c", tuple(host(name, 5.0) for name in "abcd")), ALL).notes
    assert (
        note
        == "all hosts sending at once move 20 Gbit/s, which takes about 3 cores of this machine"
    )


def test_all_senders_windows_together_fit_into_the_receivers_queue_and_latency_comes_on_top() -> (
    None
):
    hosts = (host("a"), host("b"), host("c"), replace(host("d", 0.25), devices=2))
    near = lay_out(Cluster("c", hosts), ALL)
    for index, connections in (
        (0, 2 * 4),
        (3, 2 * 2 * 3),
    ):  # two process groups; every device with every other
        queue = queue_bytes(hosts[index].link_bytes_per_s * FRAMING)
        assert 0.45 * queue < connections * window_bytes(near, index) * FRAMING < queue
        assert window_bytes(near, index) % 65535 == 0  # TCP would round others up
    far = lay_out(Cluster("c", tuple(replace(one, latency_s=5e-3) for one in hosts)), ALL)
    assert window_bytes(far, 0) > 2 * far.hosts[0].added_latency_s * 1.0 * GBIT
    crowd = lay_out(Cluster("c", tuple(host(f"h{number}", 0.1) for number in range(40))), ALL)
    assert window_bytes(crowd, 0) == 32 * 1024
    assert (
        window_bytes(lay_out(Cluster("c", (host("a", 1e6), host("b", 1e6))), ALL), 0)
        == 65535 * 2**14
    )


def test_a_state_file_gives_back_the_record_and_a_partial_one_is_not_seen(tmp_path: Path) -> None:
    layout = lay_out(
        Cluster("c", (host("a"), host("b", 4.0)), (PairLink(("a", "b"), 2 * GBIT, 5e-5),)), ALL
    )
    states, record = (
        States(tmp_path),
        Recorded(
            layout,
            Process.current(),
            True,
            None,
            tuple(Namespace(name) for name in layout.namespaces),
        ),
    )
    states.write(record)
    (tmp_path / "d.partial").write_text("{")
    assert states.all() == (record,) and states.read("absent") is None
    (tmp_path / "e.json").write_text('{"schema": 99}')
    with pytest.raises(InvalidInput, match="reads testbed schema 3, but the file has 99"):
        states.read("e")


def test_records_that_cannot_be_read_are_told_and_hinder_no_others(tmp_path: Path) -> None:
    states, record = (
        States(tmp_path),
        Recorded(lay_out(Cluster("c", (host("a"),)), ALL), Process.current(), True, None),
    )
    states.write(record)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "newer.json").write_text('{"schema": 99}')
    assert states.all() == (record,)
    assert [
        (item.name, item.reason.startswith(str(states.path(item.name))))
        for item in states.unreadable()
    ] == [
        ("broken", True),
        ("newer", True),
    ]


def test_a_scratch_directory_is_private_short_enough_for_rays_sockets_and_removed_with_all_in_it(
    tmp_path: Path,
) -> None:
    path = new_scratch()
    socket = (
        path
        / "abcdefgh"
        / "session_2026-11-21_13-49-41_123456_1234567"
        / "sockets"
        / "plasma_store.1"
    )
    assert len(str(socket)) <= 107 and not path.exists()
    assert make_scratch(path) == "" and path.stat().st_mode & 0o777 == 0o700
    assert make_scratch(path) == "File exists"
    (tmp_path / "kept").write_text("")
    (path / "link").symlink_to(tmp_path)
    (path / "inner").mkdir()
    (path / "inner" / "file").write_text("")
    remove_scratch(path)
    assert not path.exists() and (tmp_path / "kept").exists()
    remove_scratch(path)


def test_a_link_a_file_and_a_directory_of_another_name_are_not_removed_as_scratch(
    tmp_path: Path,
) -> None:
    other, link, file = tmp_path / "other", tmp_path / "autotune.link", tmp_path / "autotune.file"
    other.mkdir()
    link.symlink_to(other)
    file.write_text("")
    for path in (other, link, file):
        remove_scratch(path)
    assert other.is_dir() and link.is_symlink() and file.is_file()


def test_a_namespace_is_surely_ours_only_once_its_inode_is_recorded() -> None:
    layout = lay_out(Cluster("c", (host("a"), host("b"))), ALL)
    record = Recorded(layout, Process.current(), True, None).making("autotune.none.a")
    assert record.namespaces == (Namespace("autotune.none.a", 0),) and record.inodes == frozenset()
    assert Namespace("autotune.none.a").undecided is None, "there is none of this name"
    assert record.making("x").not_made("x") == record


def test_a_dead_owner_or_maker_leaves_leftovers_and_a_living_one_none() -> None:
    layout = lay_out(Cluster("c", (host("a"),)), ALL)
    me, dead = (
        Process.current(),
        Process(Process.current().pid, 1),
    )  # the same id, another start: somebody else

    def left_over(maker: Process, owned: bool, complete: bool) -> bool:
        return Recorded(layout, maker, owned, None, (), complete).left_over

    assert not any(
        left_over(me, owned, complete) for owned in (True, False) for complete in (True, False)
    )
    assert (
        left_over(dead, True, True)
        and left_over(dead, True, False)
        and left_over(dead, False, False)
    )
    assert not left_over(dead, False, True), "made by `testbed up`, it stays"


def test_a_name_that_is_a_path_names_no_testbed(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    assert States(tmp_path / "inner").read("../x") is None
