"""All hand-made strategies by name, and those of them that a search begins with."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from autotune.cluster import Cluster
from autotune.strategy_space.builders import collectives, servers
from autotune.strategy_space.builders.collectives import MIB
from autotune.strategy_space.builders.cross_step import cross_step_all_reduce
from autotune.strategy_space.builders.priority import byte_scheduler_like
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload

Builder = Callable[[Workload, Cluster], Strategy]

BUILDERS: MappingProxyType[str, Builder] = MappingProxyType(
    {
        "ddp_25mib": lambda workload, _: collectives.ddp_default(workload),
        "ddp_1mib": lambda workload, _: collectives.ddp_default(workload, bucket_bytes=MIB),
        "ddp_5mib": lambda workload, _: collectives.ddp_default(workload, bucket_bytes=5 * MIB),
        "ddp_100mib": lambda workload, _: collectives.ddp_default(workload, bucket_bytes=100 * MIB),
        "single_bucket": lambda workload, _: collectives.single_bucket(workload),
        "per_variable": lambda workload, _: collectives.per_variable(workload),
        "all_reduce_chunks_8": lambda workload, _: collectives.all_reduce_chunks(workload, 8),
        "all_reduce_chunks_32": lambda workload, _: collectives.all_reduce_chunks(workload, 32),
        "horovod_64mib_5ms": lambda workload, _: collectives.horovod_like(
            workload, 64 * MIB, 5e-3
        ),  # its defaults up to 0.20
        "horovod_128mib_1ms": lambda workload, _: collectives.horovod_like(
            workload, 128 * MIB, 1e-3
        ),  # its defaults from 0.21 on
        "reduce_scatter_all_gather_25mib": lambda workload, _: (
            collectives.reduce_scatter_all_gather(workload)
        ),
        "zero2_like": lambda workload, _: collectives.zero2_like(workload),
        "partitioned_all_reduce": lambda workload, _: collectives.partitioned_all_reduce(workload),
        "random_axis_partitioned_all_reduce": lambda workload, _: (
            collectives.random_axis_partitioned_all_reduce(workload)
        ),
        "parameter_server": servers.parameter_server,
        "ps_round_robin": servers.ps_round_robin,
        "ps_load_balanced": servers.ps_load_balanced,
        "partitioned_ps": servers.partitioned_ps,
        "uneven_partitioned_ps": servers.uneven_partitioned_ps,
        "served_in_pieces_1mib": lambda workload, cluster: servers.served_in_pieces(
            workload, cluster, MIB
        ),
        "served_in_pieces_256kib": lambda workload, cluster: servers.served_in_pieces(
            workload, cluster, MIB // 4
        ),
        "served_in_buckets_512kib": lambda workload, cluster: servers.served_in_buckets(
            workload, cluster, MIB // 2
        ),
        "served_in_buckets_2mib": lambda workload, cluster: servers.served_in_buckets(
            workload, cluster, 2 * MIB
        ),
        "parallax": servers.parallax,
        "byteps_like": servers.byteps_like,
        "byteps_across_steps": servers.byteps_across_steps,
        "byte_scheduler_like": byte_scheduler_like,
        "cross_step_all_reduce": cross_step_all_reduce,
    }
)
"""Name -> builder with its usual parameters."""


def seed_strategies(
    workload: Workload, cluster: Cluster, space: SearchSpace
) -> list[tuple[str, Strategy]]:
    """The hand-made strategies that lie inside `space`, with sparse gradients dense and as rows, each once, under its first name."""
    seeds: dict[Strategy, str] = {}
    sparse = any(variable.sparse for variable in workload.variables)
    for name, build in BUILDERS.items():
        strategy = build(workload, cluster)
        found = (
            {name: strategy, f"{name}, rows": with_rows(strategy, workload)}
            if sparse
            else {name: strategy}
        )
        for own_name, own in found.items():
            if space.contains(own, workload, cluster):
                seeds.setdefault(own, own_name)
    return [(name, strategy) for strategy, name in seeds.items()]
