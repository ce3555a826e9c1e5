"""The registry of hand-made strategies, and those that a search begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autotune.cluster import Cluster
from autotune.plugins import Registry
from autotune.strategy_space.builders import collectives, servers
from autotune.strategy_space.builders.collectives import MIB
from autotune.strategy_space.builders.cross_step import cross_step_all_reduce
from autotune.strategy_space.builders.direct import directly
from autotune.strategy_space.builders.priority import byte_scheduler_like
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy, Synchronizer
from autotune.workload import Workload

Builder = Callable[[Workload, Cluster], Strategy]

BUILDERS: Registry[Builder] = Registry("autotune.builders", "builder")
"""Builders with their usual parameters, for `autotune strategies` and as the search's first plans.

A plugin's entry point names a function of a workload and a cluster that returns a strategy. It
must be pure: equal arguments give equal strategies on every machine.
"""


def _of_workload(name: str, build: Callable[..., Strategy], *arguments: float) -> None:
    BUILDERS.register(name, lambda workload, _: build(workload, *arguments))


def _of_cluster(name: str, build: Callable[..., Strategy], *arguments: float) -> None:
    BUILDERS.register(name, lambda workload, cluster: build(workload, cluster, *arguments))


_of_workload("ddp_25mib", collectives.ddp_default)
_of_workload("ddp_1mib", collectives.ddp_default, MIB)
_of_workload("ddp_5mib", collectives.ddp_default, 5 * MIB)
_of_workload("ddp_100mib", collectives.ddp_default, 100 * MIB)
_of_workload("single_bucket", collectives.single_bucket)
_of_workload("per_variable", collectives.per_variable)
_of_workload("all_reduce_chunks_8", collectives.all_reduce_chunks, 8)
_of_workload("all_reduce_chunks_32", collectives.all_reduce_chunks, 32)
# Horovod's defaults up to version 0.20, and from 0.21 on
_of_workload("horovod_64mib_5ms", collectives.horovod_like, 64 * MIB, 5e-3)
_of_workload("horovod_128mib_1ms", collectives.horovod_like, 128 * MIB, 1e-3)
_of_workload("reduce_scatter_all_gather_25mib", collectives.reduce_scatter_all_gather)
_of_workload("zero2_like", collectives.zero2_like)
_of_workload("partitioned_all_reduce", collectives.partitioned_all_reduce)
_of_workload("random_axis_partitioned_all_reduce", collectives.random_axis_partitioned_all_reduce)
_of_cluster("parameter_server", servers.parameter_server)
_of_cluster("ps_round_robin", servers.ps_round_robin)
_of_cluster("ps_load_balanced", servers.ps_load_balanced)
_of_cluster("partitioned_ps", servers.partitioned_ps)
_of_cluster("uneven_partitioned_ps", servers.uneven_partitioned_ps)
_of_cluster("served_in_pieces_1mib", servers.served_in_pieces, MIB)
_of_cluster("served_in_pieces_256kib", servers.served_in_pieces, MIB // 4)
_of_cluster("served_in_buckets_512kib", servers.served_in_buckets, MIB // 2)
_of_cluster("served_in_buckets_2mib", servers.served_in_buckets, 2 * MIB)
_of_cluster("parallax", servers.parallax)
_of_cluster("byteps_like", servers.byteps_like)
_of_cluster("byteps_across_steps", servers.byteps_across_steps)
_of_cluster("byte_scheduler_like", byte_scheduler_like)
_of_cluster("cross_step_all_reduce", cross_step_all_reduce)


def seed_strategies(
    workload: Workload, cluster: Cluster, space: SearchSpace
) -> Iterator[tuple[str, Strategy]]:
    """Build the distinct hand-made strategies inside `space`, each under its first name.

    Sparse gradients are sent both dense, as far as they may be, and as rows. Servers, and
    reduce-scatters with all-gathers, exchange directly if the space can.
    """
    known: set[Strategy] = set()
    sparse = any(variable.sparse for variable in workload.variables)
    for name, build in BUILDERS.items():
        strategy = build(workload, cluster)
        if Synchronizer.DIRECT_EXCHANGE in space.synchronizers:
            strategy = directly(strategy, workload, cluster)
        variants = {name: with_rows(strategy, workload, every=False)}
        if sparse:
            variants[f"{name}, rows"] = with_rows(strategy, workload)
        for variant_name, variant in variants.items():
            if variant not in known and space.contains(variant, workload, cluster):
                known.add(variant)
                yield variant_name, variant
