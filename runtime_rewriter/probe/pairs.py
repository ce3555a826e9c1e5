"""Ping-pong between pairs of hosts, and between two devices of each host."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from autotune.recordings.probe import HostPair, LinkCost, ProbedLinks
from runtime_rewriter.probe.groups import first_ranks
from runtime_rewriter.probe.rounds import first_rounds, last_rounds, pair_cost
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.ranks import SynchronizerGroups

LINK_BYTES = tuple(2**power for power in (6, 12, 16, 19, 21, 23))  # 64 B .. 8 MiB
REPEATS = 9
SLOW_REPEATS = 3
SLOW_S = 0.02
"""A message that takes longer is repeated only `SLOW_REPEATS` times."""

Grant = Callable[[float, int, float], float]
Report = Callable[[str], None]


@dataclass(frozen=True)
class HostProbe:
    """What a probe between hosts works with.

    `grant(needed_s, open_points, end)` is rank 0's decision for all, see `collectives`.
    """

    world: SynchronizerGroups
    device: Device
    grant: Grant
    byte_scale: float
    report: Report


class PairProbe(HostProbe):
    """Times the links of the hosts."""

    def probe(self, devices: tuple[int, ...], end: float) -> ProbedLinks:
        """Collective over the world. Hosts for which the time did not suffice are left out."""
        first = first_ranks(devices)
        crowded = [host for host, count in enumerate(devices) if count > 1]
        rounds = first_rounds(len(devices)) if len(devices) > 1 else []
        inside: list[LinkCost | None] = []
        if crowded:
            self.report("links inside the hosts")
            pairs = [(first[host], first[host] + 1) for host in crowded]
            inside = self._round(pairs, len(rounds) + 1, end)
        between: dict[HostPair, LinkCost] = {}
        self._rounds(rounds, first, between, end)
        if between:
            self._rounds(last_rounds(len(devices), between), first, between, end)
        return ProbedLinks(
            tuple((host, cost) for host, cost in zip(crowded, inside, strict=True) if cost),
            tuple(between.items()),
        )

    def _rounds(
        self,
        rounds: list[list[HostPair]],
        first: tuple[int, ...],
        costs: dict[HostPair, LinkCost],
        end: float,
    ) -> None:
        for number, pairs in enumerate(rounds):
            self.report(f"links of the hosts, {number + 1} of {len(rounds)}")
            rank_pairs = [(first[a], first[b]) for a, b in pairs]
            round_costs = self._round(rank_pairs, len(rounds) - number, end)
            costs.update(
                {pair: cost for pair, cost in zip(pairs, round_costs, strict=True) if cost}
            )

    def _round(
        self, pairs: list[tuple[int, int]], open_rounds: int, end: float
    ) -> list[LinkCost | None]:
        """Time all pairs of ranks at once; None if the time sufficed for fewer than two sizes."""
        sizes: list[int] = []
        series: list[list[list[float]]] = []
        expected_s = 0.0
        for size in LINK_BYTES:
            repeats = SLOW_REPEATS if expected_s > SLOW_S else REPEATS
            needed_s = 2 * (repeats + 1) * expected_s
            share_s = self.grant(needed_s, open_rounds, end)
            if share_s <= 0 or (len(sizes) >= 2 and share_s <= needed_s):
                break
            seconds = self._ping_pong(pairs, size, repeats)
            sizes.append(size)
            series.append(seconds)
            next_size = LINK_BYTES[min(len(sizes), len(LINK_BYTES) - 1)]
            expected_s = max(median(row) for row in seconds) * next_size / size
        if len(sizes) < 2:
            return [None] * len(pairs)
        return [pair_cost(sizes, [rows[number] for rows in series]) for number in range(len(pairs))]

    def _ping_pong(
        self, pairs: list[tuple[int, int]], size_bytes: int, repeats: int
    ) -> list[list[float]]:
        """One-way seconds of every repeat, shape (pairs, repeats).

        One more repeat runs first, untimed.
        """
        seconds = torch.zeros(len(pairs), repeats, dtype=torch.float64)
        elements = max(int(size_bytes / self.byte_scale) // 4, 1)
        tensor = torch.zeros(elements, device=self.device.device)
        rank, group = self.world.rank, self.world.first
        number = next((number for number, pair in enumerate(pairs) if rank in pair), None)
        if number is not None:
            leader, follower = pairs[number]
            for repeat in range(-1, repeats):
                start_s = self.device.now_s()
                if rank == leader:
                    dist.send(tensor, group=group, group_dst=follower)
                    dist.recv(tensor, group=group, group_src=follower)
                    if repeat >= 0:
                        seconds[number, repeat] = (self.device.now_s() - start_s) / 2
                else:
                    dist.recv(tensor, group=group, group_src=leader)
                    dist.send(tensor, group=group, group_dst=leader)
        dist.all_reduce(seconds, group=self.world.control)
        rows: list[list[float]] = seconds.tolist()
        return rows
