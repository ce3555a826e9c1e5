"""Ping-pong between pairs of hosts, and between two devices of each host."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autotune.recordings.probe import HostPair, LinkCost, NoCost, ProbedLinks
from runtime_rewriter.probe.groups import first_ranks
from runtime_rewriter.probe.message_sizes import PairTimes, time_sizes
from runtime_rewriter.probe.rounds import first_rounds, last_rounds, pair_cost, shows_bandwidth
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.ranks import SynchronizerGroups

Grant = Callable[[float, int, float], float]
Report = Callable[[str], None]
PairCosts = dict[HostPair, LinkCost | NoCost]


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
        """Collective over the world."""
        first = first_ranks(devices)
        crowded = [host for host, count in enumerate(devices) if count > 1]
        rounds = first_rounds(len(devices)) if len(devices) > 1 else []
        inside: PairCosts = {}
        if crowded:
            self.report("links inside the hosts")
            pairs = [(first[host], first[host] + 1) for host in crowded]
            costs = self._round(pairs, len(rounds) + 1, end)
            inside = {(host, host): cost for host, cost in zip(crowded, costs, strict=True)}
        between = self._rounds(rounds, first, end)
        if known := measured(between):
            between |= self._rounds(last_rounds(len(devices), known), first, end)
        return ProbedLinks(
            inside=tuple((host, cost) for (host, _), cost in measured(inside).items()),
            between=tuple(measured(between).items()),
            missing=tuple(
                (pair, reason)
                for pair, reason in (inside | between).items()
                if isinstance(reason, NoCost)
            ),
        )

    def _rounds(
        self, rounds: list[list[HostPair]], first: tuple[int, ...], end: float
    ) -> PairCosts:
        costs: PairCosts = {}
        for number, pairs in enumerate(rounds):
            self.report(f"links of the hosts, {number + 1} of {len(rounds)}")
            rank_pairs = [(first[a], first[b]) for a, b in pairs]
            round_costs = self._round(rank_pairs, len(rounds) - number, end)
            costs.update(zip(pairs, round_costs, strict=True))
        return costs

    def _round(
        self, pairs: list[tuple[int, int]], open_rounds: int, end: float
    ) -> list[LinkCost | NoCost]:
        """Time all pairs of ranks at once."""
        sizes, series = time_sizes(
            lambda needed_s: self.grant(needed_s, open_rounds, end),
            lambda size, repeats: self._ping_pong(pairs, size, repeats),
        )
        return [link_cost(sizes, [rows[at] for rows in series]) for at in range(len(pairs))]

    def _ping_pong(self, pairs: list[tuple[int, int]], size_bytes: int, repeats: int) -> PairTimes:
        """One-way seconds of every repeat. One more repeat runs first, untimed."""
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
        rows: PairTimes = seconds.tolist()
        return rows


def link_cost(
    sizes_bytes: Sequence[float], repeats_s: Sequence[Sequence[float]]
) -> LinkCost | NoCost:
    """The cost of a link, or the reason why these messages show none."""
    cost = pair_cost(sizes_bytes, repeats_s)
    if cost is None:
        return NoCost.FLAT if shows_bandwidth(sizes_bytes, repeats_s) else NoCost.TIME
    return cost


def measured(costs: PairCosts) -> dict[HostPair, LinkCost]:
    return {pair: cost for pair, cost in costs.items() if isinstance(cost, LinkCost)}
