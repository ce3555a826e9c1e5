"""Time streams of messages as one rank: `rank.py CLUSTER PART ROUNDS [NAME...]`, under torchrun.

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
from benchmarks.direct_exchange.settings import Setting, wanted_settings
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.ranks import SynchronizerGroups
from runtime_rewriter.pytorch.exchange.residuals import Residuals
from runtime_rewriter.pytorch.packing import build_transfers
from runtime_rewriter.scheduling import take_round_robin

TIMEOUT_S = 60.0


class Stream:
    """The messages of one setting, sent one after the other as a backward pass would at its end."""

    def __init__(self, setting: Setting, ranks: SynchronizerGroups) -> None:
        planned = setting.plan
        self.lanes = Lanes(ranks, Device(torch.device("cpu")))
        self.lanes.limit = setting.limit
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
    settings = wanted_settings(part, cluster, wanted)
    streams = {name: Stream(setting, ranks) for name, setting in settings.items()}
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
