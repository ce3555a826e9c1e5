"""Small models, clusters and strategies, and the messages that a strategy sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.cluster import Cluster, Host, PairLink
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Shard, Strategy, VariableStrategy
from autotune.workload import Variable, Workload

FOUR = Cluster.local(4)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def variables(*of: Variable | int | tuple[int, ...]) -> tuple[Variable, ...]:
    """These variables; a shape, or an extent, becomes v0, v1, ... by its position."""
    return tuple(
        x if isinstance(x, Variable) else Variable(f"v{i}", x if isinstance(x, tuple) else (x,))
        for i, x in enumerate(of)
    )


def model(*of: Variable | int | tuple[int, ...], **fields: Any) -> Workload:
    return Workload("m", variables(*of), **fields)


def host(name: str, devices: int = 1, rate: float = 1e9, latency_s: float = 1e-5) -> Host:
    return Host(name, devices, rate, latency_s, 1e10, 1e-6)


def cluster(*rates: float, devices: int = 1, links: tuple[PairLink, ...] = ()) -> Cluster:
    """Hosts a, b, ..., one for each bandwidth of a link (bytes/s)."""
    hosts = tuple(host(LETTERS[i], devices, rate) for i, rate in enumerate(rates))
    return Cluster("c", hosts, links)


def strategy(
    workload: Workload,
    default: Shard,
    choices: Mapping[str, Shard | VariableStrategy] | None = None,
    **settings: Any,
) -> Strategy:
    """Every variable whole with `default`, except the named ones."""
    chosen = {v.name: (choices or {}).get(v.name, default) for v in workload.variables}
    return Strategy(
        tuple(
            VariableStrategy(name, (choice,)) if isinstance(choice, Shard) else choice
            for name, choice in chosen.items()
        ),
        **settings,
    )


def sent(strategy: Strategy, workload: Workload, ranks: int = 4) -> str:
    """The variables of every message in issue order, for example 'v0 v1|v2'."""
    messages = plan(strategy, workload, ranks).messages
    return "|".join(" ".join(part.variable for part in message.slices) for message in messages)


def all_shards(strategy: Strategy) -> list[Shard]:
    return [shard for choice in strategy.variables for shard in choice.shards]
