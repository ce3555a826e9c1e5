"""Strategies of a campaign as (source, strategy): from the builders, and random ones."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.cluster import Cluster
from autotune.rng import generator
from autotune.sampler.random import sample_many
from autotune.strategy_space.builders.registry import seed_strategies
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload

Sourced = tuple[str, Strategy]


def built(workload: Workload, cluster: Cluster, space: SearchSpace) -> list[Sourced]:
    pairs = seed_strategies(workload, cluster, space)
    return [(f"builder:{name}", strategy) for name, strategy in pairs]


def drawn(
    workload: Workload,
    cluster: Cluster,
    spaces: tuple[SearchSpace, SearchSpace],
    count: int,
    seed: int,
) -> list[Sourced]:
    """Return random strategies, half of them from each of the spaces (lossless, lossy)."""
    halves = (("random:lossless", count - count // 2), ("random:lossy", count // 2))
    return [
        (source, strategy)
        for number, (source, size) in enumerate(halves)
        for strategy in sample_many(workload, cluster, spaces[number], size, seed + number)
    ]


def shuffled(strategies: Sequence[Sourced], seed: int, *key: str) -> list[Sourced]:
    order = generator(seed, *key).permutation(len(strategies)).tolist()
    return [strategies[index] for index in order]
