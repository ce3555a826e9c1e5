"""The relay's switch on random traffic: compared with a slow reference, and with network rules."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.cluster import Cluster, Host, PairLink
from autotune.testbed.forwarding import (
    HEADERS_BYTES,
    VNET_HEADER_BYTES,
    Forwarding,
    Paths,
    paths_of,
    wire_bytes,
)
from autotune.testbed.layout import Means, lay_out, mac

RELAYED = Means(netem=False, filters=True, tun=True, cubic=True, steered_cpus=2)


def frame(target: int, payload: int, segment: int = 0, group: bool = False) -> bytes:
    header = bytes(4) + segment.to_bytes(2, "little") + bytes(4)
    to = b"\xff" * 6 if group else bytes.fromhex(mac(target).replace(":", ""))
    return header + to + bytes(HEADERS_BYTES - 6 + payload)


@st.composite
def traffic(draw: st.DrawFn) -> tuple[Paths, list[tuple[float, int, int, int]]]:
    """Paths of 2 to 4 hosts, and frames (time s, source, target, payload bytes) by time."""
    count = draw(st.integers(2, 4))
    rate = st.floats(1e5, 1e8)
    hosts = tuple(
        Host(f"h{i}", 1, draw(rate), draw(st.sampled_from([5e-5, 1e-3, 3e-3])), 1e10, 5e-6)
        for i in range(count)
    )
    link_bytes_per_s = draw(rate) if draw(st.booleans()) else hosts[0].link_bytes_per_s
    links = (PairLink(("h0", "h1"), link_bytes_per_s, 2e-3),)
    paths = paths_of(lay_out(Cluster("c", hosts, links), RELAYED))
    times = sorted(draw(st.lists(st.floats(0, 0.02), min_size=1, max_size=40)))
    sends = []
    for time_s in times:
        source = draw(st.integers(0, count - 1))
        others = [host for host in range(count) if host != source]
        target = draw(st.sampled_from(others))
        sends.append((time_s, source, target, draw(st.integers(0, 3000))))
    return paths, sends


def reference(
    paths: Paths, sends: list[tuple[float, int, int, int]]
) -> list[tuple[float, int, int]]:
    """(arrival s, target, index of the send) of frames that are not dropped.

    Links are clocks, and frames are sorted by the time at which they reach the switch.
    """
    free = [0.0] * len(paths.link_bytes_per_s)
    reached = sorted(
        (time_s + paths.latency_s[source][target], index, source, target)
        for index, (time_s, source, target, _) in enumerate(sends)
    )
    arrivals = []
    for ready, index, source, target in reached:
        links = paths.links[source][target]
        rooms = {link: max(0.05, 256 * 1024 / paths.link_bytes_per_s[link]) for link in links}
        if any(free[link] - ready > rooms[link] for link in links):
            continue
        wire = HEADERS_BYTES + sends[index][3]
        for link in links:
            free[link] = max(ready, free[link]) + wire / paths.link_bytes_per_s[link]
        arrivals.append((max([ready, *(free[link] for link in links)]), target, index))
    return sorted(arrivals, key=lambda arrival: arrival[0])


def run_all(
    forwarding: Forwarding, sends: list[tuple[float, int, int, int]]
) -> list[tuple[float, int, int]]:
    """Drive it as the relay does: wake at each send and at `next_s`."""
    arrived, waiting = [], list(enumerate(sends))
    frames = [frame(target, payload) for _, _, target, payload in sends]
    numbers = {id(data): index for index, data in enumerate(frames)}
    while waiting or forwarding.next_s() is not None:
        next_s = forwarding.next_s()
        if waiting and (next_s is None or waiting[0][1][0] <= next_s):
            index, (now, source, _, _) = waiting.pop(0)
            forwarding.take(now, source, frames[index])
        else:
            assert next_s is not None
            now = next_s
        arrived += [(now, target, numbers[id(data)]) for target, data in forwarding.due(now)]
    return arrived


@given(traffic())
@settings(max_examples=150, deadline=None)
def test_frames_arrive_as_in_the_reference(
    drawn: tuple[Paths, list[tuple[float, int, int, int]]],
) -> None:
    paths, sends = drawn
    forwarding = Forwarding(paths)
    arrived, expected = run_all(forwarding, sends), reference(paths, sends)
    times = {(target, index): time_s for time_s, target, index in expected}
    assert {(target, index) for _, target, index in arrived} == set(times)
    assert all(abs(time_s - times[target, index]) < 1e-9 for time_s, target, index in arrived)
    assert forwarding.dropped == len(sends) - len(expected)


@given(traffic())
@settings(max_examples=100, deadline=None)
def test_a_pairs_frames_keep_their_order_and_their_latency(
    drawn: tuple[Paths, list[tuple[float, int, int, int]]],
) -> None:
    paths, sends = drawn
    last: dict[tuple[int, int], int] = {}
    for time_s, target, index in run_all(Forwarding(paths), sends):
        sent_s, source, _, _ = sends[index]
        assert time_s >= sent_s + paths.latency_s[source][target]
        assert last.get((source, target), -1) < index
        last[source, target] = index


def test_a_group_frame_goes_to_all_other_hosts_and_an_unknown_one_to_none() -> None:
    hosts = tuple(Host(f"h{i}", 1, 1e8, 1e-3, 1e10, 5e-6) for i in range(3))
    forwarding = Forwarding(paths_of(lay_out(Cluster("c", hosts), RELAYED)))
    forwarding.take(0.0, 1, frame(0, 10, group=True))
    forwarding.take(0.0, 1, frame(77, 10))
    forwarding.take(0.0, 1, frame(1, 10))
    forwarding.take(0.0, 1, b"")
    assert sorted(target for target, _ in forwarding.due(1.0)) == [0, 2]
    assert forwarding.next_s() is None


def test_a_gso_frame_counts_the_headers_of_all_its_segments() -> None:
    payload, segment = 10_000, 1448
    one_by_one = sum(
        HEADERS_BYTES + min(segment, payload - start) for start in range(0, payload, segment)
    )
    assert wire_bytes(frame(0, payload, segment)) == one_by_one
    assert wire_bytes(frame(0, 20, segment)) == HEADERS_BYTES + 20
    assert wire_bytes(frame(0, 500)) == HEADERS_BYTES + 500
    assert VNET_HEADER_BYTES == 10
