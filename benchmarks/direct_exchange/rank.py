"""Time streams of messages as one rank: `rank.py CLUSTER PART ROUNDS`, with torchrun's variables.

Rank 0 prints a JSON object: the setting's name -> seconds of the slowest rank in each round, and
whether every direct exchange gave all ranks the same bits. Settings are interleaved. It runs under
round-robin scheduling if that is permitted, as the ranks of an emulated accelerator do.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from autotune.cluster import Cluster
from autotune.cluster_file import read_cluster
from autotune.strategy_space.builders.servers import least_loaded
from autotune.strategy_space.constraints import exchange_shares, servers_of
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer, VariableStrategy
from autotune.workload import Variable, Workload
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.ranks import SynchronizerGroups
from runtime_rewriter.pytorch.exchange.residuals import Residuals
from runtime_rewriter.pytorch.packing import build_transfers
from runtime_rewriter.scheduling import take_round_robin

KIB, MIB = 2**10, 2**20
STREAM_BYTES = 16 * MIB
DIRECT_MESSAGE_BYTES = 4 * MIB
RING_MESSAGES_BYTES = (16 * MIB, 4 * MIB, MIB, 512 * KIB, 256 * KIB)
PIECES_BYTES = (MIB, 512 * KIB, 256 * KIB, 128 * KIB)
IN_FLIGHT = (1, 2, 4, 8)
SERVED_BYTES = (MIB, 256 * KIB)
SMALL_BYTES = 16 * KIB
TIMEOUT_S = 60.0


def ring_and_direct(cluster: Cluster) -> dict[str, Plan]:
    """Plans of one stream: rings and direct exchanges, each with its sizes and limits."""
    plans = {}
    for size in RING_MESSAGES_BYTES:
        for count in (1, 2):
            ring = Shard(Synchronizer.ALL_REDUCE)
            name = f"ring, {size // KIB} KiB, {count} in flight"
            plans[name] = _plan([ring], size, cluster, count, cross_step=True)
    for size in PIECES_BYTES:
        shard = Shard(
            Synchronizer.DIRECT_EXCHANGE,
            shares=exchange_shares(cluster),
            pieces=DIRECT_MESSAGE_BYTES // size,
        )
        for count in IN_FLIGHT:
            name = f"direct, {size // KIB} KiB, {count} in flight"
            plans[name] = _plan([shard], DIRECT_MESSAGE_BYTES, cluster, count)
    return plans


def servers(cluster: Cluster) -> dict[str, Plan]:
    """Plans of one stream whose messages each have one server: stars and direct exchanges."""
    return _served(cluster, SERVED_BYTES, STREAM_BYTES)


def small(cluster: Cluster) -> dict[str, Plan]:
    """The same with 64 small messages, and rings."""
    plans = _served(cluster, (SMALL_BYTES,), 64 * SMALL_BYTES)
    for count in (1, 2):
        ring = [Shard(Synchronizer.ALL_REDUCE)]
        plans[f"ring, 16 KiB, {count} in flight"] = _plan(
            ring, SMALL_BYTES, cluster, count, cross_step=True, stream_bytes=64 * SMALL_BYTES
        )
    return plans


def _served(cluster: Cluster, sizes: Sequence[int], stream_bytes: int) -> dict[str, Plan]:
    """The servers take turns, as often as their shares are large."""
    owners, loads = servers_of(cluster), [0.0] * cluster.world_size
    plans = {}
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
        for count in (1, 2):
            name = f"star, {size // KIB} KiB, {count} in flight"
            plans[name] = _plan(stars, size, cluster, count, True, stream_bytes)
        for count in IN_FLIGHT[1:]:
            name = f"direct, {size // KIB} KiB, {count} in flight"
            plans[name] = _plan(direct, size, cluster, count, stream_bytes=stream_bytes)
            plans[f"shared {name}"] = _plan(shared, size, cluster, count, stream_bytes=stream_bytes)
    return plans


PARTS = {"ring": ring_and_direct, "servers": servers, "small": small}


def _plan(
    shards: Sequence[Shard],
    message_bytes: int,
    cluster: Cluster,
    in_flight: int,
    cross_step: bool = False,
    stream_bytes: int = STREAM_BYTES,
) -> Plan:
    """Send the stream in messages of one size, message k as shard k says, in turns."""
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


class Stream:
    """The messages of one plan, sent one behind the other as a backward pass would at its end."""

    def __init__(self, planned: Plan, ranks: SynchronizerGroups) -> None:
        self.lanes = Lanes(ranks, Device(torch.device("cpu")))
        self.lanes.limit = planned.limit
        self.lanes.direct_limit = planned.in_flight if planned.direct else None
        parameters = {
            part.variable: nn.Parameter(torch.zeros(part.elements))
            for message in planned.messages
            for part in message.slices
        }
        residuals = Residuals(parameters, ranks.rank, ranks.size)
        self.transfers = build_transfers(planned, parameters, residuals, self.lanes, 1.0)
        self.values = [view for each in self.transfers for _, view in each.views]  # type: ignore[union-attr]

    def seconds(self) -> float:
        """Seconds until the slowest rank has the sums."""
        for view in self.values:
            view.normal_()
        dist.barrier()
        began_s = time.perf_counter()
        for transfer in self.transfers:
            transfer.issue()
        for transfer in self.transfers:
            transfer.wait()
        taken = torch.tensor([time.perf_counter() - began_s])
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)

    def is_same_everywhere(self) -> bool:
        """Whether rank 0's values of the last stream are this rank's, on every rank."""
        same = True
        for view in self.values:
            first = view.clone()
            dist.broadcast(first, 0)
            same &= torch.equal(first, view)
        answers: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(answers, same)
        return all(answers)


def measured(cluster: Cluster, part: str, rounds: int, wanted: Sequence[str]) -> dict[str, object]:
    ranks = SynchronizerGroups.of(None, TIMEOUT_S, TIMEOUT_S)
    plans = {
        name: planned
        for name, planned in PARTS[part](cluster).items()
        if not wanted or name in wanted or name.startswith("ring")
    }
    streams = {name: Stream(planned, ranks) for name, planned in plans.items()}
    taken_s: dict[str, list[float]] = {name: [] for name in streams}
    same = True
    for stream in streams.values():
        stream.seconds()
        same &= stream.is_same_everywhere()
    for number in range(rounds):
        order = list(streams) if number % 2 == 0 else list(streams)[::-1]
        for name in order:
            taken_s[name].append(streams[name].seconds())
    return {"taken_s": taken_s, "same_bits": same}


def main() -> None:
    take_round_robin()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    file, part, rounds, *wanted = sys.argv[1:]
    result = measured(read_cluster(Path(file)), part, int(rounds), wanted)
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
