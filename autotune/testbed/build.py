"""The commands that make a layout real, as argument vectors. Pure: `shell.run` carries them out.

Rates: `htb` on the way out of a host and on the switch's port towards it, so each direction has the host's rate.
"""

from __future__ import annotations

import math

from autotune.testbed.layout import HostLayout, Layout, Method, address, mac
from autotune.testbed.shaping import (
    FRAMING,
    LARGEST_FRAME_BYTES,
    LOOPBACK_FRAMING,
    MTU,
    SMALLEST_FRAME_BYTES,
    Branch,
    Command,
    Shaper,
    queue_bytes,
)

INTERFACE = "eth0"

FRAME_S = 0.5e-3
"""A GSO frame takes at most so long on its link, so that a slow link does not hand over 64 KiB in one piece."""

GROUPS = 2
"""Process groups that send at the same time: first and second steps of messages (runtime_rewriter/pytorch/exchange/lanes.py)."""

WINDOW_MARGIN = 1.1  # headers, of the frames that wait
SMALLEST_WINDOW_BYTES = 32 * 1024
LARGEST_WINDOW_BYTES = 2**30  # RFC 7323, section 2.3
UNSCALED_WINDOW_BYTES = (
    2**16 - 1
)  # RFC 7323: larger ones are this times a power of two, to which Linux rounds up


def add_namespace(namespace: str) -> Command:
    return ["ip", "netns", "add", namespace]


def delete_namespace(namespace: str) -> Command:
    return ["ip", "netns", "delete", namespace]


def network_commands(layout: Layout) -> list[Command]:
    """Everything inside the namespaces, which exist; for a relayed layout the relay has opened its TAP devices."""
    relayed = layout.method is Method.RELAY
    commands = [_ip(layout.switch, "link set lo up")]
    if not relayed:
        commands.append(
            _ip(
                layout.switch,
                "link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            )
        )
        commands.append(_ip(layout.switch, "link set br0 up"))
    windows = [window_bytes(layout, index) for index in range(len(layout.hosts))]
    for index, host in enumerate(layout.hosts):
        # No real host loses what it sends itself: its queue holds all that the windows of the others let it send.
        received = (
            sum(other.devices * window for other, window in zip(layout.hosts, windows, strict=True))
            - host.devices * windows[index]
        )
        sent_bytes = round(host.devices * received * GROUPS * WINDOW_MARGIN)
        commands += _tap(layout, index) if relayed else _veth(layout, index)
        commands += _host(layout, index, windows[index])
        peers = (
            [other.address for other in layout.hosts if other is not host] if layout.filters else []
        )
        outward = Shaper(host.namespace, INTERFACE, FRAMING, peers, sent_bytes)
        commands += outward.shaped(host.link_bytes_per_s, _out(layout, index), _delay(layout, host))
        if not relayed:
            commands += Shaper(layout.switch, port(index), FRAMING).shaped(
                host.link_bytes_per_s, _in(layout, index)
            )
        if host.inner_bytes_per_s:
            commands += Shaper(host.namespace, "lo", LOOPBACK_FRAMING).shaped(
                host.inner_bytes_per_s
            )
    if layout.steered_cpus:
        commands += [_steered(namespace, layout.steered_cpus) for namespace in layout.namespaces]
    return commands


def port(index: int) -> str:
    """The switch's device towards the host with this index."""
    return f"p{index}"


def frame_bytes(link_bytes_per_s: float) -> int:
    """Largest GSO frame of an interface: see `FRAME_S`."""
    return round(
        min(max(link_bytes_per_s * FRAMING * FRAME_S, SMALLEST_FRAME_BYTES), LARGEST_FRAME_BYTES)
    )


def _out(layout: Layout, index: int) -> list[Branch]:
    """Classes at the sender: where it can, the kernel has each pair's rate, and with netem its latency."""
    netem = layout.method is Method.NETEM
    return [
        Branch(
            "dst",
            address(lane.to),
            lane.link_bytes_per_s,
            lane.added_latency_s if netem else 0.0,
            lane.dedicated,
        )
        for lane in layout.hosts[index].lanes
        if layout.method is not Method.RELAY
        or lane.dedicated  # the relay has rate and latency of the slower ones
    ]


def _in(layout: Layout, index: int) -> list[Branch]:
    """Classes on the switch's port: only what has a link of its own must pass by the interface's rate."""
    branches = []
    for source in range(len(layout.hosts)):
        lane = (
            layout.lane(index, source) if source != index else None
        )  # both directions of a pair are alike
        if lane and lane.dedicated:
            branches.append(Branch("src", address(source), lane.link_bytes_per_s, 0.0, True))
    return branches


def _delay(layout: Layout, host: HostLayout) -> float:
    return host.added_latency_s if layout.method is Method.NETEM else 0.0


def _veth(layout: Layout, index: int) -> list[Command]:
    host = layout.hosts[index]
    ends = f"link add {INTERFACE} netns {host.namespace} address {mac(index)} mtu {MTU} type veth"
    return [
        ["ip", *f"{ends} peer name {port(index)} netns {layout.switch} mtu {MTU}".split()],
        _ip(layout.switch, f"link set {port(index)} master br0 up"),
    ]


def _tap(layout: Layout, index: int) -> list[Command]:
    host = layout.hosts[index]
    return [
        _ip(layout.switch, f"link set {port(index)} netns {host.namespace}"),
        _ip(
            host.namespace,
            f"link set {port(index)} name {INTERFACE} address {mac(index)} mtu {MTU} txqueuelen 1000",
        ),
    ]


def window_bytes(layout: Layout, index: int) -> int:
    """What a host lets each connection have under way towards it: all of them at once just fill its queue, and nothing is lost.

    Every two devices have a connection in each of the process groups that carry data.

    Losses at the end of a message cost a wait of many times the link's latency, at random: the same all-reduce through a slow host
    took 0 to 15 % more than its rate says. Networks for training avoid them too, by pausing senders or marking packets.
    """
    host = layout.hosts[index]
    connections = (
        GROUPS * host.devices * max(1, sum(other.devices for other in layout.hosts) - host.devices)
    )
    slower = [lane.link_bytes_per_s for lane in host.lanes if not lane.dedicated]
    room = min(
        [
            queue_bytes(host.link_bytes_per_s * FRAMING) / connections,
            *(queue_bytes(rate * FRAMING) for rate in slower),
        ]
    )
    latency_s = max([host.added_latency_s, *(lane.added_latency_s for lane in host.lanes)])
    fastest = max([host.link_bytes_per_s, *(lane.link_bytes_per_s for lane in host.lanes)])
    return _tcp_window(max(room / WINDOW_MARGIN, SMALLEST_WINDOW_BYTES), 2 * latency_s * fastest)


def _tcp_window(room_bytes: float, under_way_bytes: float) -> int:
    """The largest window that TCP can have within the sum, unless that does not cover what is under way during a round trip."""
    wanted = min(room_bytes + under_way_bytes, LARGEST_WINDOW_BYTES)
    if wanted <= UNSCALED_WINDOW_BYTES:
        return int(wanted)
    window = UNSCALED_WINDOW_BYTES << int(math.log2(wanted / UNSCALED_WINDOW_BYTES))
    return window if window > under_way_bytes else min(2 * window, LARGEST_WINDOW_BYTES)


def _host(layout: Layout, index: int, window: int) -> list[Command]:
    """Addresses, routes and TCP's settings. New connections start alike: nothing is remembered from the ones before."""
    host = layout.hosts[index]
    # A namespace may not set the congestion control by sysctl where it is not the machine's default; a route may.
    tcp = f"window {window}" + (" congctl cubic" if layout.cubic else "")
    settings = {"tcp_slow_start_after_idle": 0, "tcp_no_metrics_save": 1}
    write = " && ".join(
        f"echo {value} > /proc/sys/net/ipv4/{name}" for name, value in settings.items()
    )
    widest = max(
        [host.link_bytes_per_s, *(lane.link_bytes_per_s for lane in host.lanes if lane.dedicated)]
    )
    return [
        ["ip", "netns", "exec", host.namespace, "sh", "-c", write],
        _ip(host.namespace, "link set lo up"),
        _ip(
            host.namespace,
            f"link set {INTERFACE} gso_max_size {frame_bytes(widest)} addrgenmode none",
        ),
        _ip(host.namespace, f"link set {INTERFACE} up"),
        _ip(host.namespace, f"addr add {host.address}/16 dev {INTERFACE}"),
        _ip(
            host.namespace,
            f"route change 10.77.0.0/16 dev {INTERFACE} proto kernel scope link src {host.address} {tcp}",
        ),
    ]


def _steered(namespace: str, cpus: int) -> Command:
    """Each connection's packets wait for one CPU, chosen by hash (RPS), at every device of a namespace.

    Otherwise they wait for whichever CPU sent them on, so that they overtake each other. TCP takes that for losses: windows
    shrink by chance, and connections of one run stay slower than those of the next.
    """
    mask = f"{(1 << cpus) - 1:x}"
    chunks = [mask[max(0, end - 8) : end] for end in range(len(mask), 0, -8)]
    write = f"for queue in /sys/class/net/*/queues/rx-*/rps_cpus; do echo {','.join(reversed(chunks))} > $queue || exit; done"
    return ["ip", "netns", "exec", namespace, "sh", "-c", write]


def _ip(namespace: str, words: str) -> Command:
    return ["ip", "-n", namespace, *words.split()]
