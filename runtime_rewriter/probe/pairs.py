"""Ping-pong between pairs of hosts, and between two devices of each host: what `autotune/profiling/fits/host_links.py` asks for."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from autotune.profiling.fits.host_links import (
    Pair,
    PairCost,
    first_rounds,
    last_rounds,
    own_links,
    pair_cost,
)
from runtime_rewriter.probe.groups import firsts
from runtime_rewriter.probe.link import ProbedLink
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.ranks import Ranks

LINK_BYTES = tuple(2**power for power in (6, 12, 16, 19, 21, 23))  # 64 B .. 8 MiB
REPEATS = 9
SLOW_REPEATS = 3
SLOW_S = 0.02
"""A message that takes longer is repeated `SLOW_REPEATS` times only."""

Grant = Callable[[float, int, float], float]
Said = Callable[[str], None]


class PairProbe:
    """`grant(needed_s, open_points, end)` is rank 0's decision for all, see `collectives`."""

    def __init__(self, world: Ranks, device: Device, grant: Grant, byte_scale: float) -> None:
        self._world, self._device, self._grant, self._byte_scale = world, device, grant, byte_scale

    def probe(self, devices: tuple[int, ...], end: float, said: Said) -> tuple[ProbedLink, ...]:
        """Collective over the world. Hosts that the time did not suffice for are left out."""
        first = firsts(devices)
        links = []
        crowded = [host for host, count in enumerate(devices) if count > 1]
        rounds = first_rounds(len(devices)) if len(devices) > 1 else []
        if crowded:
            said("links inside the hosts")
            costs = self._round(
                [(first[host], first[host] + 1) for host in crowded], len(rounds) + 1, end
            )
            links += [
                ProbedLink(host, True, cost)
                for host, cost in zip(crowded, costs, strict=True)
                if cost is not None
            ]
        found: dict[Pair, PairCost] = {}
        self._rounds(rounds, first, found, end, said)
        if found:
            self._rounds(last_rounds(len(devices), found), first, found, end, said)
        for host, (cost, probes) in own_links(len(devices), found).items():
            told = tuple((sum(pair) - host, each) for pair, each in found.items() if host in pair)
            links.append(ProbedLink(host, False, cost, probes, told))
        return tuple(links)

    def _rounds(
        self,
        rounds: list[list[Pair]],
        first: tuple[int, ...],
        found: dict[Pair, PairCost],
        end: float,
        said: Said,
    ) -> None:
        for number, pairs in enumerate(rounds):
            said(f"links of the hosts, {number + 1} of {len(rounds)}")
            costs = self._round([(first[a], first[b]) for a, b in pairs], len(rounds) - number, end)
            found.update(
                {pair: cost for pair, cost in zip(pairs, costs, strict=True) if cost is not None}
            )

    def _round(self, pairs: list[Pair], open_rounds: int, end: float) -> list[PairCost | None]:
        """All pairs of ranks at the same time; None where fewer than two sizes fitted into the time."""
        sizes: list[int] = []
        series: list[list[list[float]]] = []
        expected_s = 0.0
        for size in LINK_BYTES:
            repeats = SLOW_REPEATS if expected_s > SLOW_S else REPEATS
            needed_s = 2 * (repeats + 1) * expected_s
            share_s = self._grant(needed_s, open_rounds, end)
            if share_s <= 0 or (len(sizes) >= 2 and share_s <= needed_s):
                break
            seconds = self._ping_pong(pairs, size, repeats)
            sizes.append(size)
            series.append(seconds)
            expected_s = (
                max(median(row) for row in seconds)
                * LINK_BYTES[min(len(sizes), len(LINK_BYTES) - 1)]
                / size
            )
        if len(sizes) < 2:
            return [None] * len(pairs)
        return [
            pair_cost(sizes, [seconds[number] for seconds in series])
            for number in range(len(pairs))
        ]

    def _ping_pong(self, pairs: list[Pair], size_bytes: int, repeats: int) -> list[list[float]]:
        """One-way seconds of every repeat, shape (pairs, repeats); one more runs first, untimed."""
        seconds = torch.zeros(len(pairs), repeats, dtype=torch.float64)
        tensor = torch.zeros(
            max(int(size_bytes / self._byte_scale) // 4, 1), device=self._device.device
        )
        mine = next((number for number, pair in enumerate(pairs) if self._world.rank in pair), None)
        if mine is not None:
            here, there = pairs[mine]
            for repeat in range(-1, repeats):
                start_s = self._device.now_s()
                if self._world.rank == here:
                    dist.send(tensor, group=self._world.first, group_dst=there)
                    dist.recv(tensor, group=self._world.first, group_src=there)
                else:
                    dist.recv(tensor, group=self._world.first, group_src=here)
                    dist.send(tensor, group=self._world.first, group_dst=here)
                if self._world.rank == here and repeat >= 0:
                    seconds[mine, repeat] = (self._device.now_s() - start_s) / 2
        dist.all_reduce(seconds, group=self._world.control)
        found: list[list[float]] = seconds.tolist()
        return found
