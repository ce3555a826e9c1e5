"""Point-to-point messages between a host and several others at once, in both directions.

| symbol | meaning |
|---|---|
| H | hosts, by their first ranks |
| k | peers with which the central host exchanges at once |
| S | bytes of all k messages together |

The central host sends S to its peers, each of which answers with a few bytes; or it asks its peers
with a few bytes, and they send S. A message alone (k = 1) and all hosts at once (k = H - 1) come
first, because they tell the cost of a message and what the host's interface carries in a direct
exchange.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.recordings.probe import HostPair, LinkCost, PeerCost
from runtime_rewriter.probe.groups import first_ranks
from runtime_rewriter.probe.message_sizes import expected_s
from runtime_rewriter.probe.pairs import HostProbe
from runtime_rewriter.probe.rounds import one_way_times, pair_cost, peer_counts, peer_parts

PEER_BYTES = tuple(2**power for power in (10, 14, 17, 19, 21, 22))  # 1 KiB .. 4 MiB
FEWEST_SIZES = 5
"""Two large messages, whose slope is the rate."""
REPEATS = 5
ATTEMPTS = 4
"""Rounds of repeats until larger messages are seen to take longer."""
MOST_HOSTS = 16
"""Central hosts that a probe measures; the others of a large cluster keep assumed costs."""


class PeerProbe(HostProbe):
    """Times the interfaces of the hosts."""

    def probe(
        self, devices: tuple[int, ...], between: Mapping[HostPair, LinkCost], end: float
    ) -> tuple[PeerCost, ...]:
        """Collective over the world. Hosts for which the time did not suffice are left out.

        `between`: costs of pairs of hosts, by which the messages are cut.
        """
        hosts = len(devices)
        first = first_ranks(devices)
        todo = [
            (host, count, outwards)
            for count in peer_counts(hosts)
            for host in range(min(hosts, MOST_HOSTS))
            for outwards in (True, False)
        ]
        costs = []
        for number, (host, count, outwards) in enumerate(todo):
            self.report(f"host {host} {'to' if outwards else 'from'} {count} peers at once")
            parts = peer_parts(host, count, hosts, between)
            peers = {first[peer]: share for peer, share in parts.items()}
            cost = self._cost(first[host], peers, outwards, len(todo) - number, end)
            if cost is not None:
                costs.append(
                    PeerCost(
                        host=host,
                        peers=count,
                        outwards=outwards,
                        bytes_per_s=cost.bytes_per_s,
                        message_s=cost.latency_s / count,
                        relative_error=cost.relative_error,
                        spread=cost.spread,
                    )
                )
        return tuple(costs)

    def _cost(
        self, centre: int, peers: Mapping[int, float], outwards: bool, open_points: int, end: float
    ) -> LinkCost | None:
        """The cost of k messages, with the latency of all k; None if the time did not suffice.

        Where other work has hidden that larger messages take longer, all sizes are repeated.
        """
        seconds: list[list[float]] = []
        for _ in range(ATTEMPTS):
            again = self._all_sizes(centre, peers, outwards, open_points, end)
            if len(again) < FEWEST_SIZES:
                return None
            before = seconds or [[] for _ in again]
            seconds = [[*old, *new] for old, new in zip(before, again, strict=False)]
            cost = pair_cost(PEER_BYTES[: len(seconds)], one_way_times(seconds))
            if cost is not None:
                return cost
        return None

    def _all_sizes(
        self, centre: int, peers: Mapping[int, float], outwards: bool, open_points: int, end: float
    ) -> list[list[float]]:
        """Seconds of every repeat of the sizes for which there is time, smallest first."""
        seconds: list[list[float]] = []
        for number, size in enumerate(PEER_BYTES):
            needed_s = (REPEATS + 1) * expected_s(PEER_BYTES[:number], seconds, size)
            share_s = self.grant(needed_s, open_points, end)
            if share_s <= 0 or (number >= FEWEST_SIZES and share_s <= needed_s):
                break
            seconds.append(self._exchange(centre, peers, size, outwards))
        return seconds

    def _exchange(
        self, centre: int, peers: Mapping[int, float], size_bytes: int, outwards: bool
    ) -> list[float]:
        """Seconds of every repeat at the centre; one more repeat runs first, untimed."""
        seconds = torch.zeros(REPEATS, dtype=torch.float64)
        rank = self.world.rank
        large = {peer: self._part(size_bytes, share) for peer, share in peers.items()}
        small = {peer: torch.zeros(1, device=self.device.device) for peer in peers}
        there, back = (large, small) if outwards else (small, large)
        for repeat in range(-1, REPEATS):
            if rank == centre:
                start_s = self.device.now_s()
                self._send(there)
                self._receive(back)
                if repeat >= 0:
                    seconds[repeat] = self.device.now_s() - start_s
            elif rank in peers:
                self._receive({centre: there[rank]})
                self._send({centre: back[rank]})
        dist.all_reduce(seconds, group=self.world.control)
        row: list[float] = seconds.tolist()
        return row

    def _part(self, size_bytes: int, share: float) -> Tensor:
        elements = max(int(share * size_bytes / self.byte_scale) // 4, 1)
        return torch.zeros(elements, device=self.device.device)

    def _send(self, tensors: Mapping[int, Tensor]) -> None:
        self._run(dist.isend, tensors)

    def _receive(self, tensors: Mapping[int, Tensor]) -> None:
        self._run(dist.irecv, tensors)

    def _run(
        self, operation: Callable[..., dist.Work | None], tensors: Mapping[int, Tensor]
    ) -> None:
        """Start all messages together, as one group of NCCL, and wait for them."""
        group = self.world.first
        ops = [
            dist.P2POp(operation, tensor, group=group, group_peer=peer)
            for peer, tensor in tensors.items()
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
