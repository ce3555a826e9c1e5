"""Hand-made strategies on direct exchange instead of stars and reduce-scatters.

Over gloo a star takes up to 1.8 times as long (`python -m benchmarks.direct_exchange`). It remains
where ranks cannot send to each other directly: in TensorFlow, and for tensors on a GPU over gloo.
It also remains in worlds above `MAX_RANK_SERVERS`, where a share per rank and message would be most
of the strategy.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.cluster import Cluster
from autotune.strategy_space.constraints import MAX_RANK_SERVERS
from autotune.strategy_space.owners import by_bandwidth
from autotune.strategy_space.plan import Message, plan, slices_of
from autotune.strategy_space.shares import MOST_PIECES, Shares
from autotune.strategy_space.strategy import Shard, SparseHandling, Strategy, Synchronizer
from autotune.workload import Workload

PIECE_BYTES = 512 * 1024
"""Between 256 KiB, the fastest on mixed hosts, and 1 MiB, the fastest on even ones (the same
benchmark)."""
IN_FLIGHT = 4
REPLACED = frozenset({Synchronizer.PARAMETER_SERVER, Synchronizer.REDUCE_SCATTER_ALL_GATHER})


def directly(
    strategy: Strategy, workload: Workload, cluster: Cluster, in_flight: int = IN_FLIGHT
) -> Strategy:
    """Exchange directly what the strategy sends by servers, or reduce-scatter and all-gather.

    A server becomes the single owner of its messages. The others are owned by shares that follow
    the bandwidths. Rows that all ranks gather stay as they are.
    """
    shares = by_bandwidth(cluster)
    shards: dict[tuple[str, int], Shard] = {}
    for message in plan(strategy, workload, cluster.world_size).messages:
        shard = _direct(message, cluster.world_size, shares)
        if shard is not None:
            shards.update({(part.variable, part.start): shard for part in message.slices})
    placed: dict[tuple[int, int], Shard] = {}  # by the ids of both: few of thousands are distinct
    choices = []
    for choice in strategy.variables:
        parts = slices_of(workload.variables[workload.index[choice.variable]], choice)
        replaced = list(choice.shards)
        for number, part in enumerate(parts):
            direct = shards.get((part.variable, part.start))
            if direct is None:
                continue
            key = id(choice.shards[number]), id(direct)
            if key not in placed:
                placed[key] = _placed(choice.shards[number], direct)
            replaced[number] = placed[key]
        choices.append(replace(choice, shards=tuple(replaced)))
    count = max(in_flight, strategy.in_flight) if shards else strategy.in_flight
    return replace(strategy, variables=tuple(choices), in_flight=count)


def _direct(message: Message, world_size: int, shares: Shares | None) -> Shard | None:
    """The message's synchronizer, shares and pieces; None if it stays as it is."""
    if message.synchronizer not in REPLACED or message.sparse is SparseHandling.ALL_GATHER:
        return None
    if message.owner is not None:
        if world_size > MAX_RANK_SERVERS:
            return None
        shares = tuple(float(rank == message.owner) for rank in range(world_size))
    return Shard(Synchronizer.DIRECT_EXCHANGE, shares=shares, pieces=pieces_by_size(message))


def pieces_by_size(message: Message) -> int:
    """Pieces of about `PIECE_BYTES`; one if the compressor or rows need the whole message."""
    rows = message.sparse is not SparseHandling.DENSE
    if rows or message.compressor.error_feedback:
        return 1
    return max(min(-(-message.grad_bytes // PIECE_BYTES), MOST_PIECES), 1)


def _placed(shard: Shard, direct: Shard) -> Shard:
    return replace(
        shard,
        synchronizer=direct.synchronizer,
        placement=None,
        shares=direct.shares,
        pieces=direct.pieces,
    )
