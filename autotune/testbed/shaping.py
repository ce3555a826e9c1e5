"""The commands that give one device its rate: htb classes with their queues. Pure, like `build`.

htb counts whole Ethernet frames (of every segment of a GSO frame), so it is set higher than the payload's rate by the framing.

What leaves a host waits in a queue for each host that it goes to (for some of them where they are many), and these take turns, as
connections do in the fair queues that are Linux's default and that this kernel need not have. In one queue the acknowledgements of
what a host receives wait behind its own data to others, the longer the wider that connection's window has grown: an all-reduce through
a slow host took 10 % longer after some hundred messages, and went on so. They must not overtake data of their own connection either:
a receiver drops data whose acknowledgement number is more than a window old (RFC 5961, section 5.2), which made a host wait for the
repetition, 0.2 s where it was the last segment of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MTU = 1500
FRAMING = (
    1514 / 1448
)  # Ethernet frame over TCP payload: MTU 1500, IPv4 and TCP headers of 20 bytes, 12 of timestamps
LOOPBACK_MTU = 65536
LOOPBACK_FRAMING = (LOOPBACK_MTU + 14) / (LOOPBACK_MTU - 52)

BURST_S = 0.25e-3
"""htb may send so much at once, at most 64 KiB, which covers late timers. Less costs rate on a busy machine, more favours messages after
a pause."""

LARGEST_FRAME_BYTES = 65536
LARGEST_QUEUE_BYTES = 2**32 - 1  # a bfifo counts in 32 bits
SMALLEST_FRAME_BYTES = 2 * 1514

QUEUE_S = 40e-3
"""Room of a queue, in time."""

SMALLEST_QUEUE_BYTES = 256 * 1024  # room for a GSO frame of four senders at once

ROOT, INTERFACE_CLASS, USUAL, FIRST_QUEUE, FIRST_LANE = (
    0,
    1,
    2,
    3,
    0x20,
)  # minor class ids; USUAL: what has no lane
MOST_QUEUES = 16
"""Of the traffic that has no lane, so that a crowd of hosts does not take a class for each pair; a power of two, for u32's mask."""

Command = list[str]


@dataclass(frozen=True)
class Branch:
    """Traffic from or to one address with a class of its own; `match` is u32's name of the address field."""

    match: str
    address: str
    link_bytes_per_s: float
    added_latency_s: float
    dedicated: bool


@dataclass(frozen=True)
class Shaper:
    """htb on one device. `peers`: addresses that each have a queue of their own; `least_queue_bytes`: room of a queue, or more."""

    namespace: str
    device: str
    framing: float
    peers: Sequence[str] = ()
    least_queue_bytes: int = 0

    def shaped(
        self, link_bytes_per_s: float, branches: Sequence[Branch] = (), delay_s: float = 0.0
    ) -> list[Command]:
        """1:1 has the interface's rate and shares it among 1:2 (no branch matched) and the slower branches.

        A child's guaranteed rate is an equal share, because htb lets children send their guaranteed rates even where the sum
        is above the parent's; up to their ceilings they borrow.
        """
        wire = link_bytes_per_s * self.framing
        share = wire / (1 + sum(not branch.dedicated for branch in branches))
        queues = self._queues()
        default = FIRST_QUEUE if queues else USUAL
        commands = [self._tc(f"qdisc add dev {self.device} root handle 1: htb default {default:x}")]
        commands.append(self._class(ROOT, INTERFACE_CLASS, wire, wire))
        commands.append(self._class(INTERFACE_CLASS, USUAL, share, wire))
        for name in queues:
            commands.append(self._class(USUAL, name, share / len(queues), wire))
        for name in queues or (USUAL,):
            commands.append(self._queue(name, wire, delay_s))
        commands += [self._filter(2, match, name) for name, match in queues.items()]
        for number, branch in enumerate(branches):
            ceiling, name = branch.link_bytes_per_s * self.framing, FIRST_LANE + number
            parent, rate = (
                (ROOT, ceiling) if branch.dedicated else (INTERFACE_CLASS, min(share, ceiling))
            )
            commands.append(self._class(parent, name, rate, ceiling))
            commands.append(self._queue(name, ceiling, branch.added_latency_s))
            commands.append(self._filter(1, f"match ip {branch.match} {branch.address}/32", name))
        return commands

    def _queues(self) -> dict[int, str]:
        """By class id u32's match of the last part of the address where it goes: hosts that agree in its low bits share a queue."""
        low_bits = sorted({int(address.rpartition(".")[2]) % MOST_QUEUES for address in self.peers})
        return {
            FIRST_QUEUE + at: f"match u8 {bits:#x} {MOST_QUEUES - 1:#x} at 19"
            for at, bits in enumerate(low_bits)
        }

    def _class(
        self, parent: int, name: int, rate_bytes_per_s: float, ceiling_bytes_per_s: float
    ) -> Command:
        burst = round(
            min(max(ceiling_bytes_per_s * BURST_S, SMALLEST_FRAME_BYTES), LARGEST_FRAME_BYTES)
        )
        rates = f"rate {round(rate_bytes_per_s * 8)}bit ceil {round(ceiling_bytes_per_s * 8)}bit"
        limits = f"burst {burst}b cburst {burst}b quantum 60000"
        above = f"1:{parent:x}" if parent else "1:"
        return self._tc(
            f"class add dev {self.device} parent {above} classid 1:{name:x} htb {rates} {limits}"
        )

    def _queue(self, parent: int, wire_bytes_per_s: float, delay_s: float) -> Command:
        if delay_s:
            waiting = max(wire_bytes_per_s * (delay_s + QUEUE_S), self.least_queue_bytes)
            packets = 1000 + round(
                waiting / 1514
            )  # netem counts packets; the smallest are whole ones
            kind = f"netem delay {round(delay_s * 1e6)}us limit {packets}"
        else:
            kind = f"bfifo limit {min(max(self.least_queue_bytes, queue_bytes(wire_bytes_per_s)), LARGEST_QUEUE_BYTES)}"
        return self._tc(f"qdisc add dev {self.device} parent 1:{parent:x} {kind}")

    def _filter(self, order: int, match: str, name: int) -> Command:
        return self._tc(
            f"filter add dev {self.device} parent 1: protocol ip prio {order} u32 {match} flowid 1:{name:x}"
        )

    def _tc(self, words: str) -> Command:
        return ["tc", "-n", self.namespace, *words.split()]


def queue_bytes(wire_bytes_per_s: float) -> int:
    """Room of a queue that is served at this rate, of frames."""
    return round(max(wire_bytes_per_s * QUEUE_S, SMALLEST_QUEUE_BYTES))
