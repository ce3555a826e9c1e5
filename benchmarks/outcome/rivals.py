"""The rivals, as strategies of our runtime; torch's own DDP runs as the script has it.

Sparse gradients travel as rows, as torch's DDP sends them. Dense gradients would slow every rival.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from autotune.cluster import Cluster
from autotune.strategy_space.builders import collectives, servers
from autotune.strategy_space.builders.collectives import MIB
from autotune.strategy_space.builders.priority import byte_scheduler_like
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload

BUCKET_CAPS_MIB = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0)
"""Sizes of the sweep; torch accepts fractions."""
DDP_DEFAULT = "DDP, default"
DDP_BEST = "DDP, best bucket size"

RIVALS: Mapping[str, Callable[[Workload, Cluster], Strategy]] = MappingProxyType(
    {
        "one message per variable": lambda workload, _: collectives.per_variable(workload),
        "single bucket": lambda workload, _: collectives.single_bucket(workload),
        "PS, round robin": servers.ps_round_robin,
        "PS, load balanced": servers.ps_load_balanced,
        "BytePS-like": servers.byteps_like,
        "BytePS-like, across steps": servers.byteps_across_steps,
        "ByteScheduler-like": byte_scheduler_like,
        "ZeRO-2-like": lambda workload, _: collectives.zero2_like(workload),
    }
)


def rivals(workload: Workload, cluster: Cluster, across_steps: bool = True) -> dict[str, Strategy]:
    """Return name -> strategy; without `across_steps` (the script forbids it) some are left out."""
    strategies = {
        name: with_rows(build(workload, cluster), workload) for name, build in RIVALS.items()
    }
    return {
        name: strategy
        for name, strategy in strategies.items()
        if across_steps or not strategy.cross_step
    }


def bucket_sweep(workload: Workload, world_size: int) -> dict[str, Strategy]:
    """Return name -> DDP's buckets, for its default and every different `bucket_cap_mb`.

    A given `bucket_cap_mb` also limits the first bucket, which is 1 MiB by default (torch 2.13,
    `BucketCapacityConfig`).
    """
    strategies = {DDP_DEFAULT: collectives.ddp_default(workload)}
    for cap in BUCKET_CAPS_MIB:
        limit = int(cap * MIB)
        strategies[f"bucket_cap_mb={cap:g}"] = collectives.ddp_default(workload, limit, limit)
    distinct: dict[str, tuple[str, Strategy]] = {}
    for name, strategy in strategies.items():
        enacted = with_rows(strategy, workload)
        distinct.setdefault(plan(enacted, workload, world_size).id, (name, enacted))
    return dict(distinct.values())
