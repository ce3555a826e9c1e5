"""The rivals, each a family of settings; all run as strategies of our runtime but torch's own DDP.

Every family is tuned with as many trials as our own search gets (`benchmarks.outcome.sweeps`). Our
one-shot builder is a family of one: the planned order across the step, without a search. Servers
and ZeRO's reduce-scatters exchange directly, which is faster than gloo's stars and collectives.
Sparse gradients travel as rows, as torch's DDP sends them. Dense gradients would slow every rival.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from autotune.cluster import Cluster
from autotune.strategy_space.builders import collectives, servers
from autotune.strategy_space.builders.collectives import MIB
from autotune.strategy_space.builders.cross_step import cross_step_all_reduce
from autotune.strategy_space.builders.direct import directly
from autotune.strategy_space.builders.priority import byte_scheduler_like
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import (
    MOST_DIRECT_IN_FLIGHT,
    MOST_IN_FLIGHT,
    Strategy,
    VariableStrategy,
)
from autotune.workload import Workload

BUCKET_CAPS_MIB = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0)
"""`bucket_cap_mb` of the sweep; torch accepts fractions."""
FIRST_CAPS_MIB, LATER_CAPS_MIB = (0.25, 1.0, 4.0), (2.0, 8.0)
"""Separate caps of the first bucket and of the others, by `bucket_cap_mb_list`."""
LAST_CAPS_MIB = (0.25, 1.0)
"""Caps at which lists with falling caps end: nothing overlaps the last bucket."""
PIECES_MIB = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
BUCKETS_MIB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 50.0)
CREDITS = tuple(range(1, MOST_IN_FLIGHT + 1))
"""Messages in flight."""
DIRECT_CREDITS = (4, 2, MOST_DIRECT_IN_FLIGHT, 1)
"""Pieces of direct exchanges in flight. A sweep tries every size with the first one first."""
DDP, DDP_DEFAULT = "DDP", "DDP, default"
DDP_SWEPT = "default buckets"  # another name than that of the script's own DDP
BYTE_SCHEDULER, BYTEPS = "ByteScheduler-like", "BytePS-like"
HIERARCHICAL, ZERO2, SERVERS = "hierarchical all-reduce", "ZeRO-2-like", "parameter servers"
ONE_SHOT = "ours without search"
ACROSS = "across steps"

Settings = dict[str, Strategy]
"""Setting -> strategy, in the order in which a sweep tries them; the first is the default."""


def families(
    workload: Workload, cluster: Cluster, across_steps: bool = True
) -> dict[str, Settings]:
    """Return family -> settings with distinct plans.

    Without `across_steps` (the script forbids it) settings that cross the step are left out, and so
    is a family without any other.
    """
    built: dict[str, Settings] = {
        DDP: _ddp(workload),
        BYTE_SCHEDULER: _byte_scheduler(workload, cluster),
        BYTEPS: _byteps(workload, cluster),
        HIERARCHICAL: _hierarchical(workload, cluster),
        ZERO2: _zero2(workload, cluster),
        SERVERS: _servers(workload, cluster),
        ONE_SHOT: {"planned order": cross_step_all_reduce(workload, cluster)},
    }
    named = {
        family: _distinct(settings, workload, cluster.world_size, across_steps)
        for family, settings in built.items()
    }
    return {family: settings for family, settings in named.items() if settings}


def _both(cap_mib: float) -> tuple[int, int]:
    return int(cap_mib * MIB), int(cap_mib * MIB)


def _distinct(
    settings: Mapping[str, Strategy], workload: Workload, ranks: int, across_steps: bool
) -> Settings:
    distinct: dict[Plan, tuple[str, Strategy]] = {}
    for name, strategy in settings.items():
        if strategy.cross_step and not across_steps:
            continue
        enacted = with_rows(strategy, workload)
        distinct.setdefault(plan(enacted, workload, ranks), (name, enacted))
    return dict(distinct.values())


def _ddp(workload: Workload) -> Settings:
    """All bucket sizes that torch 2.13 offers.

    A given `bucket_cap_mb` also limits the first bucket, which is 1 MiB by default
    (`BucketCapacityConfig`). `bucket_cap_mb_list` has a cap for each bucket; the last one repeats.
    """
    settings = {DDP_SWEPT: collectives.ddp_default(workload)}
    for cap in BUCKET_CAPS_MIB:
        settings[f"bucket_cap_mb={cap:g}"] = collectives.ddp_default(workload, *_both(cap))
    rising = [0.25 * 2**number for number in range(8)]
    falling = [[workload.grad_bytes / MIB / 2**number for number in range(1, 8)], rising[::-1]]
    lists = [rising, [1.0, 4.0, 16.0]]
    lists += [
        [*(cap for cap in caps if cap > last), last]
        for caps, last in product(falling, LAST_CAPS_MIB)
    ]
    lists += [list(pair) for pair in product(FIRST_CAPS_MIB, LATER_CAPS_MIB)]
    for caps in lists:
        text = ", ".join(f"{cap:.3g}" for cap in caps)
        limits = [int(float(cap) * MIB) for cap in text.split(", ")]
        settings[f"bucket_cap_mb_list=[{text}]"] = collectives.ddp_capped(workload, limits)
    return settings


def ddp_arguments(setting: str) -> dict[str, object]:
    """Return the arguments of `DistributedDataParallel` that a setting of `DDP` stands for."""
    if setting == DDP_SWEPT:
        return {}
    name, value = setting.split("=", 1)
    return {name: json.loads(value)}


def _byte_scheduler(workload: Workload, cluster: Cluster) -> Settings:
    """Piece size and credit; the default is the system's own."""
    default = byte_scheduler_like(workload, cluster)
    settings = {"its default": default}
    for mib, credit in product(PIECES_MIB, CREDITS):
        cut = byte_scheduler_like(workload, cluster, int(mib * MIB))
        settings[f"{mib:g} MiB, {credit} in flight"] = replace(cut, in_flight=credit)
    return settings


def _byteps(workload: Workload, cluster: Cluster) -> Settings:
    """Piece size and credit, within the step (its optimizer) and across it (CrossBarrier)."""
    default = servers.byteps_like(workload, cluster)
    across = servers.byteps_across_steps(workload, cluster)
    unlimited = MOST_DIRECT_IN_FLIGHT  # its credit is off by default
    settings = {
        "its default": directly(default, workload, cluster, unlimited),
        f"its default, {ACROSS}": directly(across, workload, cluster, unlimited),
    }
    served = {
        f"{mib:g} MiB": servers.byteps_like(workload, cluster, int(mib * MIB)) for mib in PIECES_MIB
    }
    for size, credit, within in _with_credits(served, workload, cluster):
        settings[f"{size}, {credit} in flight"] = within
        settings[f"{size}, {ACROSS}, {credit} in flight"] = replace(within, cross_step=True)
    return settings


def _with_credits(
    settings: Mapping[str, Strategy], workload: Workload, cluster: Cluster
) -> Iterator[tuple[str, int, Strategy]]:
    """Yield each setting, exchanged directly, with each number of pieces in flight."""
    exchanged = {name: directly(strategy, workload, cluster) for name, strategy in settings.items()}
    for credit, (name, strategy) in product(DIRECT_CREDITS, exchanged.items()):
        yield name, credit, replace(strategy, in_flight=credit) if strategy.direct else strategy


def _zero2(workload: Workload, cluster: Cluster) -> Settings:
    scattered = {
        f"{cap:g} MiB": collectives.reduce_scatter_all_gather(workload, *_both(cap))
        for cap in sorted(BUCKETS_MIB, reverse=True)
    }
    return {
        f"{size}, {credit} in flight": strategy
        for size, credit, strategy in _with_credits(scattered, workload, cluster)
    }


def _hierarchical(workload: Workload, cluster: Cluster) -> Settings:
    """DDP's buckets, summed within each host first; differs with several devices per host only."""
    if not 1 < len(cluster.hosts) < cluster.world_size:
        return {}
    return {
        f"{cap:g} MiB": _summed_within_hosts(collectives.ddp_default(workload, *_both(cap)))
        for cap in sorted(BUCKET_CAPS_MIB, reverse=True)
    }


def _summed_within_hosts(strategy: Strategy) -> Strategy:
    def summed(choice: VariableStrategy) -> VariableStrategy:
        shards = tuple(replace(shard, hierarchical=True) for shard in choice.shards)
        return replace(choice, shards=shards)

    return replace(strategy, variables=tuple(map(summed, strategy.variables)))


def _servers(workload: Workload, cluster: Cluster) -> Settings:
    settings = {
        "balanced": servers.ps_load_balanced(workload, cluster),
        "in turn": servers.ps_round_robin(workload, cluster),
    }
    for mib in PIECES_MIB:
        size = int(mib * MIB)
        settings[f"pieces of {mib:g} MiB"] = servers.served_in_pieces(workload, cluster, size)
        settings[f"buckets of {mib:g} MiB"] = servers.served_in_buckets(workload, cluster, size)
    return {
        f"{name}, {credit} in flight": strategy
        for name, credit, strategy in _with_credits(settings, workload, cluster)
    }
