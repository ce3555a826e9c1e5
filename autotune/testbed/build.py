"""The commands that make a layout real, as argument vectors. Pure: `shell.run` carries them out.

Rates: `htb` on the way out of a host and on the switch's port towards it, so each direction has the host's rate. htb counts whole
Ethernet frames (of every segment of a GSO frame), so it is set higher than the payload's rate by the framing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.testbed.layout import HostLayout, Layout, Method, address, mac

INTERFACE = "eth0"
MTU = 1500
FRAMING = 1514 / 1448  # Ethernet frame over TCP payload: MTU 1500, IPv4 and TCP headers of 20 bytes, 12 of timestamps
LOOPBACK_MTU = 65536
LOOPBACK_FRAMING = (LOOPBACK_MTU + 14) / (LOOPBACK_MTU - 52)

BURST_S = 0.25e-3
"""htb may send so much at once, at most 64 KiB, which covers late timers. Less costs rate on a busy machine, more favours messages after
a pause."""

FRAME_S = 0.5e-3
"""A GSO frame takes at most so long on its link, so that a slow link does not hand over 64 KiB in one piece."""

LARGEST_FRAME_BYTES = 65536
SMALLEST_FRAME_BYTES = 2 * 1514

QUEUE_S = 10e-3
"""Room of a queue, in time. With 50 ms, acknowledgements waited behind a ring's own data, and a slow host cost 10 % more than its rate."""

SMALLEST_QUEUE_BYTES = 256 * 1024  # room for a GSO frame of four senders at once

WINDOW_MARGIN = 1.1  # headers, of the frames that wait
SMALLEST_WINDOW_BYTES = 32 * 1024
LARGEST_WINDOW_BYTES = 2**30  # RFC 7323, section 2.3

FIRST_LANE = 0x10  # class ids: 1:1 the interface, 1:2 what has no lane, from 1:10 on the lanes

Command = list[str]


@dataclass(frozen=True)
class Branch:
    """Traffic from or to one address with a class of its own; `match` is u32's name of the address field."""

    match: str
    address: str
    link_bytes_per_s: float
    added_latency_s: float
    dedicated: bool


def add_namespace(namespace: str) -> Command:
    return ["ip", "netns", "add", namespace]


def delete_namespace(namespace: str) -> Command:
    return ["ip", "netns", "delete", namespace]


def network_commands(layout: Layout) -> list[Command]:
    """Everything inside the namespaces, which exist; for a relayed layout the relay has opened its TAP devices."""
    relayed = layout.method is Method.RELAY
    commands = [_ip(layout.switch, "link set lo up")]
    if not relayed:
        commands.append(_ip(layout.switch, "link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0"))
        commands.append(_ip(layout.switch, "link set br0 up"))
    for index, host in enumerate(layout.hosts):
        commands += _tap(layout, index) if relayed else _veth(layout, index)
        commands += _host(layout, index)
        commands += shaped(host.namespace, INTERFACE, host.link_bytes_per_s, _out(layout, index), _delay(layout, host), FRAMING)
        if not relayed:
            commands += shaped(layout.switch, port(index), host.link_bytes_per_s, _in(layout, index), 0.0, FRAMING)
        if host.inner_bytes_per_s:
            commands += shaped(host.namespace, "lo", host.inner_bytes_per_s, (), 0.0, LOOPBACK_FRAMING)
    if layout.steered_cpus:
        commands += [_steered(namespace, layout.steered_cpus) for namespace in layout.namespaces]
    return commands


def port(index: int) -> str:
    """The switch's device towards the host with this index."""
    return f"p{index}"


def frame_bytes(link_bytes_per_s: float) -> int:
    """Largest GSO frame of an interface: see `FRAME_S`."""
    return round(min(max(link_bytes_per_s * FRAMING * FRAME_S, SMALLEST_FRAME_BYTES), LARGEST_FRAME_BYTES))


def queue_bytes(wire_bytes_per_s: float) -> int:
    return round(max(wire_bytes_per_s * QUEUE_S, SMALLEST_QUEUE_BYTES))


def shaped(
    namespace: str, device: str, link_bytes_per_s: float, branches: Sequence[Branch], delay_s: float, framing: float
) -> list[Command]:
    """htb on a device: 1:1 has the interface's rate and shares it among 1:2 (no branch matched) and the slower branches.

    A child's guaranteed rate is an equal share, because htb lets children send their guaranteed rates even where the sum
    is above the parent's; up to their ceilings they borrow.
    """
    inside = [branch for branch in branches if not branch.dedicated]
    wire = link_bytes_per_s * framing
    share = wire / (len(inside) + 1)
    commands = [_tc(namespace, f"qdisc add dev {device} root handle 1: htb default 2")]
    commands.append(_class(namespace, device, "1:", "1:1", wire, wire))
    commands.append(_class(namespace, device, "1:1", "1:2", share, wire))
    commands.append(_queue(namespace, device, "1:2", wire, delay_s))
    for number, branch in enumerate(branches):
        name = f"1:{FIRST_LANE + number:x}"
        ceiling = branch.link_bytes_per_s * framing
        parent, rate = ("1:", ceiling) if branch.dedicated else ("1:1", min(share, ceiling))
        commands.append(_class(namespace, device, parent, name, rate, ceiling))
        commands.append(_queue(namespace, device, name, ceiling, branch.added_latency_s))
        match = f"u32 match ip {branch.match} {branch.address}/32 flowid {name}"
        commands.append(_tc(namespace, f"filter add dev {device} parent 1: protocol ip prio 1 {match}"))
    return commands


def _out(layout: Layout, index: int) -> list[Branch]:
    """Classes at the sender: where it can, the kernel has each pair's rate, and with netem its latency."""
    netem = layout.method is Method.NETEM
    return [
        Branch("dst", address(lane.to), lane.link_bytes_per_s, lane.added_latency_s if netem else 0.0, lane.dedicated)
        for lane in layout.hosts[index].lanes
        if layout.method is not Method.RELAY or lane.dedicated  # the relay has rate and latency of the slower ones
    ]


def _in(layout: Layout, index: int) -> list[Branch]:
    """Classes on the switch's port: only what has a link of its own must pass by the interface's rate."""
    branches = []
    for source in range(len(layout.hosts)):
        lane = layout.lane(index, source) if source != index else None  # both directions of a pair are alike
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
        _ip(host.namespace, f"link set {port(index)} name {INTERFACE} address {mac(index)} mtu {MTU} txqueuelen 1000"),
    ]


def window_bytes(layout: Layout, index: int) -> int:
    """What a host lets each sender have under way towards it: all others at once just fill its queue, and none is lost.

    Losses at the end of a message cost a wait of many times the link's latency, at random: the same all-reduce through a slow host
    took 0 to 15 % more than its rate says. Networks for training avoid them too, by pausing senders or marking packets.
    """
    host = layout.hosts[index]
    senders = max(1, sum(other.devices for other in layout.hosts) - host.devices)
    slower = [lane.link_bytes_per_s for lane in host.lanes if not lane.dedicated]
    room = min([queue_bytes(host.link_bytes_per_s * FRAMING) / senders, *(queue_bytes(rate * FRAMING) for rate in slower)])
    latency_s = max([host.added_latency_s, *(lane.added_latency_s for lane in host.lanes)])
    fastest = max([host.link_bytes_per_s, *(lane.link_bytes_per_s for lane in host.lanes)])
    return round(min(max(room / WINDOW_MARGIN, SMALLEST_WINDOW_BYTES) + 2 * latency_s * fastest, LARGEST_WINDOW_BYTES))


def _host(layout: Layout, index: int) -> list[Command]:
    """Addresses, routes and TCP's settings. New connections start alike: nothing is remembered from the ones before."""
    host = layout.hosts[index]
    # A namespace may not set the congestion control by sysctl where it is not the machine's default; a route may.
    tcp = f"window {window_bytes(layout, index)}" + (" congctl cubic" if layout.cubic else "")
    settings = {"tcp_slow_start_after_idle": 0, "tcp_no_metrics_save": 1}
    write = " && ".join(f"echo {value} > /proc/sys/net/ipv4/{name}" for name, value in settings.items())
    widest = max([host.link_bytes_per_s, *(lane.link_bytes_per_s for lane in host.lanes if lane.dedicated)])
    return [
        ["ip", "netns", "exec", host.namespace, "sh", "-c", write],
        _ip(host.namespace, "link set lo up"),
        _ip(host.namespace, f"link set {INTERFACE} gso_max_size {frame_bytes(widest)} addrgenmode none"),
        _ip(host.namespace, f"link set {INTERFACE} up"),
        _ip(host.namespace, f"addr add {host.address}/16 dev {INTERFACE}"),
        _ip(host.namespace, f"route change 10.77.0.0/16 dev {INTERFACE} proto kernel scope link src {host.address} {tcp}"),
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


def _class(namespace: str, device: str, parent: str, name: str, rate_bytes_per_s: float, ceiling_bytes_per_s: float) -> Command:
    burst = round(min(max(ceiling_bytes_per_s * BURST_S, SMALLEST_FRAME_BYTES), LARGEST_FRAME_BYTES))
    rates = f"rate {round(rate_bytes_per_s * 8)}bit ceil {round(ceiling_bytes_per_s * 8)}bit"
    limits = f"burst {burst}b cburst {burst}b quantum 60000"
    return _tc(namespace, f"class add dev {device} parent {parent} classid {name} htb {rates} {limits}")


def _queue(namespace: str, device: str, parent: str, wire_bytes_per_s: float, delay_s: float) -> Command:
    if not delay_s:
        return _tc(namespace, f"qdisc add dev {device} parent {parent} bfifo limit {queue_bytes(wire_bytes_per_s)}")
    packets = 1000 + round(wire_bytes_per_s * (delay_s + QUEUE_S) / 1514)  # netem counts packets; the smallest are whole ones
    return _tc(namespace, f"qdisc add dev {device} parent {parent} netem delay {round(delay_s * 1e6)}us limit {packets}")


def _ip(namespace: str, words: str) -> Command:
    return ["ip", "-n", namespace, *words.split()]


def _tc(namespace: str, words: str) -> Command:
    return ["tc", "-n", namespace, *words.split()]
