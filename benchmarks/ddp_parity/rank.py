"""Run one rank: `python -m benchmarks.ddp_parity.rank MODEL PAIRS STEPS` under torchrun."""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autotune.strategy_space.backend import backend_text
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer, VariableStrategy
from autotune.workload import Workload
from benchmarks.profile_overhead.models import resnet
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.ddp import PlannedDataParallel

WARM_STEPS, SETTLE_STEPS = 10, 2
SMALL_LAYERS, SMALL_WIDTH = 500, 32  # a weight and a bias each


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Return the model and a batch for it, the same on every rank."""
    torch.manual_seed(0)
    if name == "resnet":
        return resnet()[0], torch.randn(16, 1, 32, 32)
    return nn.Sequential(
        *(nn.Linear(SMALL_WIDTH, SMALL_WIDTH) for _ in range(SMALL_LAYERS))
    ), torch.randn(64, SMALL_WIDTH)


def stepper(model: nn.Module, batch: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def block_s(step: Callable[[], None], steps: int) -> float:
    """Return the median over the steps of the slower rank's time."""
    for _ in range(SETTLE_STEPS):
        step()
    dist.barrier()
    taken = torch.zeros(steps, dtype=torch.float64)
    for number in range(steps):
        began_s = time.perf_counter()
        step()
        taken[number] = time.perf_counter() - began_s
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken.median())


def buckets_of(model: DistributedDataParallel) -> list[frozenset[str]]:
    """Return the variables in each bucket of torch's own DDP, in the order of sending."""
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    buckets = model.reducer._get_zeros_like_grad_buckets()
    return [
        frozenset(names[id(parameter)] for parameter in bucket.parameters()) for bucket in buckets
    ]


def same_buckets(buckets: list[frozenset[str]], workload: Workload) -> Plan:
    number = {name: position for position, bucket in enumerate(buckets) for name in bucket}
    shards = {
        position: (Shard(Synchronizer.ALL_REDUCE, group=position, priority=position),)
        for position in range(len(buckets))
    }
    choices = tuple(
        VariableStrategy(variable.name, shards[number[variable.name]])
        for variable in workload.variables
    )
    return plan(Strategy(choices), workload, dist.get_world_size())


def by_rule(buckets: list[frozenset[str]], workload: Workload) -> bool:
    """Return whether they are the default buckets for variables in reverse definition order."""
    messages = plan(ddp_default(workload), workload, dist.get_world_size()).messages
    return [frozenset(part.variable for part in message.slices) for message in messages] == buckets


def main() -> None:
    name, pairs, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, batch = build(name)
    theirs, ours = DistributedDataParallel(copy.deepcopy(module)), PlannedDataParallel(module)
    workload = assumed_workload(module)
    ddp, planned = stepper(theirs, batch), stepper(ours, batch)
    for _ in range(WARM_STEPS):  # after its first step DDP rebuilds its buckets
        ddp()
    buckets = buckets_of(theirs)
    same = same_buckets(buckets, workload)
    ours.synchronizer.load(same)
    for _ in range(WARM_STEPS):
        planned()
    ratios, ddp_s = [], []
    for pair in range(pairs):
        if pair % 2:
            mine = block_s(planned, steps)
            their = block_s(ddp, steps)
        else:
            their = block_s(ddp, steps)
            mine = block_s(planned, steps)
        ratios.append(mine / their)
        ddp_s.append(their)
    if dist.get_rank() == 0:
        assert buckets_of(theirs) == buckets
        result = {
            "ratios": ratios,
            "ddp_s": sorted(ddp_s)[len(ddp_s) // 2],
            "variables": len(workload.variables),
        }
        findings = {
            "bucket_bytes": [message.grad_bytes for message in same.messages],
            "buckets_by_rule": by_rule(buckets, workload),
        }
        print(
            json.dumps(
                result
                | findings
                | {"backend": backend_text(same, ours.synchronizer.native is not None)}
            )
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
