"""The commands that give one device its rate: htb classes with their queues. Pure, like `build`.

htb counts whole Ethernet frames (of every segment of a GSO frame), so it is set higher than the payload's rate by the framing.

What leaves a host has two queues: TCP's pure acknowledgements overtake data. The fair queues that are Linux's default let them
overtake other connections' data; this kernel need not have those. In one queue they wait behind the host's own data, the longer the
wider that connection's window has grown, and what the host receives slows down with them: an all-reduce through a slow host took 10 %
longer after some hundred messages, and went on so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MTU = 1500
FRAMING = 1514 / 1448  # Ethernet frame over TCP payload: MTU 1500, IPv4 and TCP headers of 20 bytes, 12 of timestamps
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

ROOT, INTERFACE_CLASS, USUAL, FIRST_LANE = 0, 1, 2, 0x10  # minor class ids; USUAL: what has no lane
DATA, ACKNOWLEDGEMENTS, IDS_OF_A_LANE = 1, 2, 3  # the first two are added to the id of USUAL, or of a lane
ACKNOWLEDGEMENT_SHARE = 0.1
"""Of a class's guaranteed rate; they are at most 66 bytes for a frame of 1514 or two."""
PURE_ACKNOWLEDGEMENT = "match ip protocol 6 0xff match u16 52 0xffff at 2 match u8 16 0xff at 33"
"""u32's match: TCP, nothing but headers of 20 and 32 bytes, of the flags only ACK."""

Command = list[str]


@dataclass(frozen=True)
class Branch:
    """Traffic from or to one address with a class of its own; `match` is u32's name of the address field ("": all other traffic)."""

    match: str
    address: str
    link_bytes_per_s: float
    added_latency_s: float
    dedicated: bool


@dataclass(frozen=True)
class Shaper:
    """htb on one device. `two_queues`: acknowledgements overtake data; `least_queue_bytes`: room of a queue of data, or more."""

    namespace: str
    device: str
    framing: float
    two_queues: bool = False
    least_queue_bytes: int = 0

    def shaped(self, link_bytes_per_s: float, branches: Sequence[Branch] = (), delay_s: float = 0.0) -> list[Command]:
        """1:1 has the interface's rate and shares it among 1:2 (no branch matched) and the slower branches.

        A child's guaranteed rate is an equal share, because htb lets children send their guaranteed rates even where the sum
        is above the parent's; up to their ceilings they borrow.
        """
        wire = link_bytes_per_s * self.framing
        share = wire / (1 + sum(not branch.dedicated for branch in branches))
        default = USUAL + DATA if self.two_queues else USUAL
        commands = [self._tc(f"qdisc add dev {self.device} root handle 1: htb default {default:x}")]
        commands.append(self._class(ROOT, INTERFACE_CLASS, wire, wire))
        commands += self._branch(INTERFACE_CLASS, USUAL, share, Branch("", "", link_bytes_per_s, delay_s, False))
        for number, branch in enumerate(branches):
            ceiling = branch.link_bytes_per_s * self.framing
            parent, rate = (ROOT, ceiling) if branch.dedicated else (INTERFACE_CLASS, min(share, ceiling))
            commands += self._branch(parent, FIRST_LANE + IDS_OF_A_LANE * number, rate, branch)
        return commands

    def _branch(self, parent: int, name: int, rate: float, branch: Branch) -> list[Command]:
        """The class of a branch with its queue, or with its two queues in classes of their own."""
        ceiling = branch.link_bytes_per_s * self.framing
        to = f"match ip {branch.match} {branch.address}/32" if branch.match else ""
        commands = [self._class(parent, name, rate, ceiling)]
        data, acknowledgements = (name + DATA, name + ACKNOWLEDGEMENTS) if self.two_queues else (name, None)
        if acknowledgements is not None:
            commands.append(self._class(name, data, (1 - ACKNOWLEDGEMENT_SHARE) * rate, ceiling, priority=1))
            commands.append(self._class(name, acknowledgements, ACKNOWLEDGEMENT_SHARE * rate, ceiling))
            commands.append(self._queue(acknowledgements, ceiling, branch.added_latency_s))
            commands.append(self._filter(1 if to else 3, f"{to} {PURE_ACKNOWLEDGEMENT}".strip(), acknowledgements))
        commands.append(self._queue(data, ceiling, branch.added_latency_s, self.least_queue_bytes))
        return commands + ([self._filter(2, to, data)] if to else [])

    def _class(self, parent: int, name: int, rate_bytes_per_s: float, ceiling_bytes_per_s: float, priority: int = 0) -> Command:
        burst = round(min(max(ceiling_bytes_per_s * BURST_S, SMALLEST_FRAME_BYTES), LARGEST_FRAME_BYTES))
        rates = f"rate {round(rate_bytes_per_s * 8)}bit ceil {round(ceiling_bytes_per_s * 8)}bit"
        limits = f"burst {burst}b cburst {burst}b quantum 60000 prio {priority}"
        above = f"1:{parent:x}" if parent else "1:"
        return self._tc(f"class add dev {self.device} parent {above} classid 1:{name:x} htb {rates} {limits}")

    def _queue(self, parent: int, wire_bytes_per_s: float, delay_s: float, least_bytes: int = 0) -> Command:
        if delay_s:
            waiting = max(wire_bytes_per_s * (delay_s + QUEUE_S), least_bytes)
            packets = 1000 + round(waiting / 1514)  # netem counts packets; the smallest are whole ones
            kind = f"netem delay {round(delay_s * 1e6)}us limit {packets}"
        else:
            kind = f"bfifo limit {min(max(least_bytes, queue_bytes(wire_bytes_per_s)), LARGEST_QUEUE_BYTES)}"
        return self._tc(f"qdisc add dev {self.device} parent 1:{parent:x} {kind}")

    def _filter(self, order: int, match: str, name: int) -> Command:
        return self._tc(f"filter add dev {self.device} parent 1: protocol ip prio {order} u32 {match} flowid 1:{name:x}")

    def _tc(self, words: str) -> Command:
        return ["tc", "-n", self.namespace, *words.split()]


def queue_bytes(wire_bytes_per_s: float) -> int:
    """Room of a queue that is served at this rate, of frames."""
    return round(max(wire_bytes_per_s * QUEUE_S, SMALLEST_QUEUE_BYTES))
