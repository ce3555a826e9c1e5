"""Settings of one stream of messages: rings, stars and direct exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.cluster import Cluster
from autotune.strategy_space.builders.servers import least_loaded
from autotune.strategy_space.constraints import exchange_shares, servers_of
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import (
    MOST_IN_FLIGHT,
    Shard,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

KIB, MIB = 2**10, 2**20
STREAM_BYTES = 16 * MIB
DIRECT_MESSAGE_BYTES = 4 * MIB
RING_MESSAGES_BYTES = (16 * MIB, 4 * MIB, MIB, 512 * KIB, 256 * KIB)
PIECES_BYTES = (MIB, 512 * KIB, 256 * KIB, 128 * KIB)
IN_FLIGHT = (1, 2, 4, 8)
LIMITS = (None, *IN_FLIGHT)
"""Limits of rings and stars. None: the library decides, as within the step."""
SERVED_BYTES = (MIB, 256 * KIB)
SMALL_BYTES = 16 * KIB
DIRECT = "direct"
RIVALS = ("ring", "star")


@dataclass(frozen=True)
class Setting:
    """A plan, and the most messages in flight on each lane; None lets the library decide.

    Rivals may have a `limit` that no strategy has, so that their sweep is as wide as ours.
    """

    plan: Plan
    limit: int | None


def ring_and_direct(cluster: Cluster) -> dict[str, Setting]:
    """Settings of one stream: rings and direct exchanges, each with its sizes and limits."""
    settings: dict[str, Setting] = {}
    for size in RING_MESSAGES_BYTES:
        settings |= _rival("ring", [Shard(Synchronizer.ALL_REDUCE)], size, cluster, STREAM_BYTES)
    for size in PIECES_BYTES:
        shard = Shard(
            Synchronizer.DIRECT_EXCHANGE,
            shares=exchange_shares(cluster),
            pieces=DIRECT_MESSAGE_BYTES // size,
        )
        for count in IN_FLIGHT:
            name = f"{DIRECT}, {size // KIB} KiB, {count} in flight"
            settings[name] = _direct([shard], DIRECT_MESSAGE_BYTES, cluster, count, STREAM_BYTES)
    return settings


def servers(cluster: Cluster) -> dict[str, Setting]:
    """Settings of one stream whose messages each have one server: stars and direct exchanges."""
    return _served(cluster, SERVED_BYTES, STREAM_BYTES)


def small(cluster: Cluster) -> dict[str, Setting]:
    """The same with 64 small messages, and rings."""
    stream_bytes = 64 * SMALL_BYTES
    ring = [Shard(Synchronizer.ALL_REDUCE)]
    return {
        **_served(cluster, (SMALL_BYTES,), stream_bytes),
        **_rival("ring", ring, SMALL_BYTES, cluster, stream_bytes),
    }


def _served(cluster: Cluster, sizes: Sequence[int], stream_bytes: int) -> dict[str, Setting]:
    """The servers take turns, as often as their shares are large."""
    owners, loads = servers_of(cluster), [0.0] * cluster.world_size
    settings: dict[str, Setting] = {}
    for size in sizes:
        turns = []
        for _ in range(stream_bytes // size):
            place = least_loaded(loads[: len(owners.ranks)], owners.shares, size)
            loads[place] += size
            turns.append(owners.ranks[place])
        stars = [Shard(Synchronizer.PARAMETER_SERVER, placement=rank) for rank in turns]
        ones = [tuple(float(r == rank) for r in range(cluster.world_size)) for rank in turns]
        direct = [Shard(Synchronizer.DIRECT_EXCHANGE, shares=shares) for shares in ones]
        shared = [Shard(Synchronizer.DIRECT_EXCHANGE, shares=exchange_shares(cluster))]
        settings |= _rival("star", stars, size, cluster, stream_bytes)
        for count in IN_FLIGHT[1:]:
            name = f"{DIRECT}, {size // KIB} KiB, {count} in flight"
            settings[name] = _direct(direct, size, cluster, count, stream_bytes)
            settings[f"shared {name}"] = _direct(shared, size, cluster, count, stream_bytes)
    return settings


PARTS: Mapping[str, Callable[[Cluster], dict[str, Setting]]] = {
    "ring": ring_and_direct,
    "servers": servers,
    "small": small,
}


def wanted_settings(part: str, cluster: Cluster, only: Sequence[str]) -> dict[str, Setting]:
    """Return the rivals' settings and the named ones; all if none is named."""
    settings = PARTS[part](cluster)
    return {
        name: setting
        for name, setting in settings.items()
        if not only or name in only or name.startswith(RIVALS)
    }


def only_error(parts: Sequence[str], cluster: Cluster, only: Sequence[str]) -> str | None:
    """Return why these names leave nothing to compare, or None."""
    names = {part: list(PARTS[part](cluster)) for part in parts}
    known = {name for of_part in names.values() for name in of_part}
    if unknown := [name for name in only if name not in known]:
        return (
            f"--only takes names of settings of {', '.join(parts)}, but {unknown[0]!r} is none; "
            f"choose from {'; '.join(sorted(known))}"
        )
    for part in parts:
        left = wanted_settings(part, cluster, only)
        if not any(name.startswith(DIRECT) for name in left):
            return (
                f"each part needs a setting whose name begins with {DIRECT!r}, but --only leaves "
                f"none of {part!r}; name one of it, or leave the part out by --parts"
            )
    return None


def _rival(
    kind: str, shards: Sequence[Shard], message_bytes: int, cluster: Cluster, stream_bytes: int
) -> dict[str, Setting]:
    """Settings of every limit that the stream has enough messages for."""
    settings = {}
    for limit in LIMITS:
        if limit is not None and limit > max(stream_bytes // message_bytes, 1):
            continue
        under_way = "no limit" if limit is None else f"{limit} in flight"
        planned = _plan(
            shards,
            message_bytes,
            cluster,
            in_flight=1 if limit is None else min(limit, MOST_IN_FLIGHT),
            cross_step=limit is not None,
            stream_bytes=stream_bytes,
        )
        settings[f"{kind}, {message_bytes // KIB} KiB, {under_way}"] = Setting(planned, limit)
    return settings


def _direct(
    shards: Sequence[Shard], message_bytes: int, cluster: Cluster, in_flight: int, stream_bytes: int
) -> Setting:
    planned = _plan(
        shards,
        message_bytes,
        cluster,
        in_flight=in_flight,
        cross_step=False,
        stream_bytes=stream_bytes,
    )
    return Setting(planned, planned.limit)


def _plan(
    shards: Sequence[Shard],
    message_bytes: int,
    cluster: Cluster,
    *,
    in_flight: int,
    cross_step: bool,
    stream_bytes: int,
) -> Plan:
    """Plan the stream in messages of one size, message k by shard k, in turns."""
    names = [f"v{number:02d}" for number in range(stream_bytes // message_bytes)]
    workload = Workload("stream", tuple(Variable(n, (message_bytes // 4,)) for n in names))
    strategy = Strategy(
        tuple(
            VariableStrategy(name, (shards[number % len(shards)],))
            for number, name in enumerate(names)
        ),
        cross_step=cross_step,
        in_flight=in_flight,
    )
    return plan(strategy, workload, cluster.world_size)
