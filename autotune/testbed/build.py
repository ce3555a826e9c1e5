"""Commands that build a layout: namespaces, devices, routes, and htb classes for the rates. Pure.

The commands are argument vectors; `machine.run` executes them. htb shapes what leaves a host, and
the switch's port towards the host, so that each direction has the host's rate. htb counts whole
Ethernet frames (of every segment of a GSO frame). Its rates are therefore the payload's times the
framing.

Frames that leave a host wait in one queue per target host (several targets share one if there are
many hosts). The queues take turns, like connections in Linux's default fair queues, which this
kernel may lack. In a single queue, the acknowledgements of received data wait behind the host's own
data, the longer the wider that connection's window has grown: an all-reduce through a slow host
took 10 % longer after some hundred messages. Acknowledgements must not overtake data of their own
connection either: a receiver drops data whose acknowledgement number is more than a window old (RFC
5961, section 5.2). The repetition took 0.2 s if it was the last segment of a message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.testbed.layout import Layout, Method, address, mac

INTERFACE = "eth0"
MTU = 1500
FRAMING = 1514 / 1448
"""Ethernet frame over TCP payload: MTU 1500, IPv4 and TCP headers of 20 bytes, 12 of timestamps."""
LOOPBACK_MTU = 65536
LOOPBACK_FRAMING = (LOOPBACK_MTU + 14) / (LOOPBACK_MTU - 52)

FRAME_S = 0.5e-3
"""Longest time of a GSO frame on its link: a slow link must not pass on 64 KiB in one piece."""
SMALLEST_FRAME_BYTES = 2 * 1514
LARGEST_FRAME_BYTES = 65536

BURST_S = 0.25e-3
"""Burst of htb, at most 64 KiB, which covers late timers. A smaller burst costs rate on a busy
machine, a larger one favours messages after a pause."""

QUEUE_S = 40e-3
"""Room of a queue, in time."""
SMALLEST_QUEUE_BYTES = 256 * 1024  # room for a GSO frame of four senders at once
LARGEST_QUEUE_BYTES = 2**32 - 1  # a bfifo counts in 32 bits

ROOT = 0  # minor class ids
INTERFACE_CLASS = 1
DEFAULT_CLASS = 2
"""For all traffic without a lane."""
FIRST_QUEUE = 3
FIRST_LANE = 0x20
MOST_QUEUES = 16
"""Queues of the default class: many hosts need no class per pair. A power of two for u32."""

GROUPS = 2
"""Process groups that send at the same time: first and second steps of messages
(runtime_rewriter/pytorch/exchange/lanes.py)."""
WINDOW_MARGIN = 1.1  # headers of the frames that wait
SMALLEST_WINDOW_BYTES = 32 * 1024
LARGEST_WINDOW_BYTES = 2**30  # RFC 7323, section 2.3
UNSCALED_WINDOW_BYTES = 2**16 - 1
"""RFC 7323: a larger window is this times a power of two, to which Linux rounds up."""

Command = list[str]


def add_namespace(namespace: str) -> Command:
    return ["ip", "netns", "add", namespace]


def delete_namespace(namespace: str) -> Command:
    return ["ip", "netns", "delete", namespace]


def port(index: int) -> str:
    """The switch's device towards the host with this index."""
    return f"p{index}"


def network_commands(layout: Layout) -> list[Command]:
    """All commands inside the existing namespaces.

    The relay, if any, has opened its TAP devices.
    """
    relayed = layout.method is Method.RELAY
    commands = [_ip(layout.switch, "link set lo up")]
    if not relayed:
        bridge = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
        commands.append(_ip(layout.switch, f"link add br0 {bridge}"))
        commands.append(_ip(layout.switch, "link set br0 up"))
    windows = [window_bytes(layout, index) for index in range(len(layout.hosts))]
    all_windows = sum(
        host.devices * window for host, window in zip(layout.hosts, windows, strict=True)
    )
    for index, host in enumerate(layout.hosts):
        # A real host does not lose its own frames: its queue holds all that the windows of the
        # others permit.
        received = all_windows - host.devices * windows[index]
        least_queue_bytes = round(host.devices * received * GROUPS * WINDOW_MARGIN)
        commands += _tap(layout, index) if relayed else _veth(layout, index)
        commands += _host(layout, index, windows[index])
        peers = [other.address for other in layout.hosts if other is not host]
        outward = Shaper(
            host.namespace, INTERFACE, FRAMING, peers if layout.filters else [], least_queue_bytes
        )
        delay_s = host.added_latency_s if layout.method is Method.NETEM else 0.0
        commands += outward.commands(host.link_bytes_per_s, _outward(layout, index), delay_s)
        if not relayed:
            inward = Shaper(layout.switch, port(index), FRAMING)
            commands += inward.commands(host.link_bytes_per_s, _inward(layout, index))
        if host.inner_bytes_per_s:
            loopback = Shaper(host.namespace, "lo", LOOPBACK_FRAMING)
            commands += loopback.commands(host.inner_bytes_per_s)
    if layout.steered_cpus:
        commands += [_steered(namespace, layout.steered_cpus) for namespace in layout.namespaces]
    return commands


@dataclass(frozen=True)
class Branch:
    """Traffic of one address with a class of its own; `match`: u32's name of the address field."""

    match: str
    address: str
    link_bytes_per_s: float
    added_latency_s: float
    dedicated: bool


@dataclass(frozen=True)
class Shaper:
    """htb on one device. `peers`: addresses with queues; `least_queue_bytes`: least room of one."""

    namespace: str
    device: str
    framing: float
    peers: Sequence[str] = ()
    least_queue_bytes: int = 0

    def commands(
        self, link_bytes_per_s: float, branches: Sequence[Branch] = (), delay_s: float = 0.0
    ) -> list[Command]:
        """Class 1:1 has the interface's rate; the default class and slower branches share it.

        A child's guaranteed rate is an equal share, because htb lets children send their guaranteed
        rates even if their sum exceeds the parent's. Up to their ceilings they borrow.
        """
        wire = link_bytes_per_s * self.framing
        share = wire / (1 + sum(not branch.dedicated for branch in branches))
        queues = self._queues()
        default = FIRST_QUEUE if queues else DEFAULT_CLASS
        commands = [self._tc(f"qdisc add dev {self.device} root handle 1: htb default {default:x}")]
        commands.append(self._class(ROOT, INTERFACE_CLASS, wire, wire))
        commands.append(self._class(INTERFACE_CLASS, DEFAULT_CLASS, share, wire))
        for name in queues:
            commands.append(self._class(DEFAULT_CLASS, name, share / len(queues), wire))
        for name in queues or (DEFAULT_CLASS,):
            commands.append(self._queue(name, wire, delay_s))
        commands += [self._filter(2, match, name) for name, match in queues.items()]
        for name, branch in enumerate(branches, FIRST_LANE):
            ceiling = branch.link_bytes_per_s * self.framing
            parent, rate = INTERFACE_CLASS, min(share, ceiling)
            if branch.dedicated:
                parent, rate = ROOT, ceiling
            commands.append(self._class(parent, name, rate, ceiling))
            commands.append(self._queue(name, ceiling, branch.added_latency_s))
            commands.append(self._filter(1, f"match ip {branch.match} {branch.address}/32", name))
        return commands

    def _queues(self) -> dict[int, str]:
        """u32's match of the target address, by class id; equal low bits share a queue."""
        low_bits = sorted({int(address.rpartition(".")[2]) % MOST_QUEUES for address in self.peers})
        return {
            name: f"match u8 {bits:#x} {MOST_QUEUES - 1:#x} at 19"
            for name, bits in enumerate(low_bits, FIRST_QUEUE)
        }

    def _class(
        self, parent: int, name: int, rate_bytes_per_s: float, ceiling_bytes_per_s: float
    ) -> Command:
        burst = _frame_limited(ceiling_bytes_per_s * BURST_S)
        rates = f"rate {round(rate_bytes_per_s * 8)}bit ceil {round(ceiling_bytes_per_s * 8)}bit"
        limits = f"burst {burst}b cburst {burst}b quantum 60000"
        above = f"1:{parent:x}" if parent else "1:"
        return self._tc(
            f"class add dev {self.device} parent {above} classid 1:{name:x} htb {rates} {limits}"
        )

    def _queue(self, parent: int, wire_bytes_per_s: float, delay_s: float) -> Command:
        if delay_s:
            waiting = max(wire_bytes_per_s * (delay_s + QUEUE_S), self.least_queue_bytes)
            # netem counts packets; the smallest are whole ones
            packets = 1000 + round(waiting / 1514)
            kind = f"netem delay {round(delay_s * 1e6)}us limit {packets}"
        else:
            room = max(self.least_queue_bytes, queue_bytes(wire_bytes_per_s))
            kind = f"bfifo limit {min(room, LARGEST_QUEUE_BYTES)}"
        return self._tc(f"qdisc add dev {self.device} parent 1:{parent:x} {kind}")

    def _filter(self, order: int, match: str, name: int) -> Command:
        selector = f"parent 1: protocol ip prio {order} u32 {match}"
        return self._tc(f"filter add dev {self.device} {selector} flowid 1:{name:x}")

    def _tc(self, words: str) -> Command:
        return ["tc", "-n", self.namespace, *words.split()]


def queue_bytes(wire_bytes_per_s: float) -> int:
    """Room of a queue that is served at this rate of frames."""
    return round(max(wire_bytes_per_s * QUEUE_S, SMALLEST_QUEUE_BYTES))


def frame_bytes(link_bytes_per_s: float) -> int:
    """Largest GSO frame of an interface, see `FRAME_S`."""
    return _frame_limited(link_bytes_per_s * FRAMING * FRAME_S)


def _frame_limited(size_bytes: float) -> int:
    return round(min(max(size_bytes, SMALLEST_FRAME_BYTES), LARGEST_FRAME_BYTES))


def _outward(layout: Layout, index: int) -> list[Branch]:
    """Classes at the sender: the rate of each pair, and with netem its latency.

    The relay applies rate and latency of lanes that are slower than the interface.
    """
    netem = layout.method is Method.NETEM
    relayed = layout.method is Method.RELAY
    return [
        Branch(
            "dst",
            address(lane.to),
            lane.link_bytes_per_s,
            lane.added_latency_s if netem else 0.0,
            lane.dedicated,
        )
        for lane in layout.hosts[index].lanes
        if lane.dedicated or not relayed
    ]


def _inward(layout: Layout, index: int) -> list[Branch]:
    """Classes on the switch's port: dedicated links bypass the interface's rate."""
    branches = []
    for source in range(len(layout.hosts)):
        # both directions of a pair are equal
        lane = layout.lane(index, source) if source != index else None
        if lane and lane.dedicated:
            branches.append(Branch("src", address(source), lane.link_bytes_per_s, 0.0, True))
    return branches


def _veth(layout: Layout, index: int) -> list[Command]:
    host = layout.hosts[index]
    ends = f"link add {INTERFACE} netns {host.namespace} address {mac(index)} mtu {MTU} type veth"
    return [
        ["ip", *f"{ends} peer name {port(index)} netns {layout.switch} mtu {MTU}".split()],
        _ip(layout.switch, f"link set {port(index)} master br0 up"),
    ]


def _tap(layout: Layout, index: int) -> list[Command]:
    host = layout.hosts[index]
    settings = f"name {INTERFACE} address {mac(index)} mtu {MTU} txqueuelen 1000"
    return [
        _ip(layout.switch, f"link set {port(index)} netns {host.namespace}"),
        _ip(host.namespace, f"link set {port(index)} {settings}"),
    ]


def window_bytes(layout: Layout, index: int) -> int:
    """TCP window of connections towards a host: all of them together just fill the host's queue.

    Every two devices have a connection in each of the process groups that carry data. A loss at the
    end of a message would cost a random wait of many times the link's latency: the same all-reduce
    through a slow host took 0 to 15 % longer than its rate allows. Networks for training avoid
    losses too, by pausing senders or marking packets.
    """
    host = layout.hosts[index]
    other_devices = sum(other.devices for other in layout.hosts) - host.devices
    connections = GROUPS * host.devices * max(1, other_devices)
    slower = [lane.link_bytes_per_s for lane in host.lanes if not lane.dedicated]
    room = min(
        queue_bytes(host.link_bytes_per_s * FRAMING) / connections,
        *(queue_bytes(rate * FRAMING) for rate in slower),
        math.inf,
    )
    latency_s = max([host.added_latency_s, *(lane.added_latency_s for lane in host.lanes)])
    fastest = max([host.link_bytes_per_s, *(lane.link_bytes_per_s for lane in host.lanes)])
    return _tcp_window(max(room / WINDOW_MARGIN, SMALLEST_WINDOW_BYTES), 2 * latency_s * fastest)


def _tcp_window(room_bytes: float, in_flight_bytes: float) -> int:
    """The largest TCP window within the sum, or a larger one that covers a round trip."""
    wanted = min(room_bytes + in_flight_bytes, LARGEST_WINDOW_BYTES)
    if wanted <= UNSCALED_WINDOW_BYTES:
        return int(wanted)
    window = UNSCALED_WINDOW_BYTES << int(math.log2(wanted / UNSCALED_WINDOW_BYTES))
    return window if window > in_flight_bytes else min(2 * window, LARGEST_WINDOW_BYTES)


def _host(layout: Layout, index: int, window: int) -> list[Command]:
    """Addresses, routes and TCP settings. No metrics of earlier connections are kept."""
    host = layout.hosts[index]
    # A namespace may set another congestion control than the machine's default only by a route.
    tcp = f"window {window}" + (" congctl cubic" if layout.cubic else "")
    settings = {"tcp_slow_start_after_idle": 0, "tcp_no_metrics_save": 1}
    write = " && ".join(
        f"echo {value} > /proc/sys/net/ipv4/{name}" for name, value in settings.items()
    )
    dedicated = (lane.link_bytes_per_s for lane in host.lanes if lane.dedicated)
    gso_bytes = frame_bytes(max([host.link_bytes_per_s, *dedicated]))
    route = f"10.77.0.0/16 dev {INTERFACE} proto kernel scope link src {host.address} {tcp}"
    return [
        ["ip", "netns", "exec", host.namespace, "sh", "-c", write],
        _ip(host.namespace, "link set lo up"),
        _ip(host.namespace, f"link set {INTERFACE} gso_max_size {gso_bytes} addrgenmode none"),
        _ip(host.namespace, f"link set {INTERFACE} up"),
        _ip(host.namespace, f"addr add {host.address}/16 dev {INTERFACE}"),
        _ip(host.namespace, f"route change {route}"),
    ]


def _steered(namespace: str, cpus: int) -> Command:
    """Let each connection's packets wait for one CPU, chosen by hash (RPS), at every device.

    Otherwise they wait for the CPU that forwarded them, and overtake each other. TCP takes that for
    losses: windows shrink at random, and connections of one run stay slower than those of the next.
    """
    mask = f"{(1 << cpus) - 1:x}"
    chunks = [mask[max(0, end - 8) : end] for end in range(len(mask), 0, -8)]
    bits = ",".join(reversed(chunks))
    files = "/sys/class/net/*/queues/rx-*/rps_cpus"
    write = f"for queue in {files}; do echo {bits} > $queue || exit; done"
    return ["ip", "netns", "exec", namespace, "sh", "-c", write]


def _ip(namespace: str, words: str) -> Command:
    return ["ip", "-n", namespace, *words.split()]
