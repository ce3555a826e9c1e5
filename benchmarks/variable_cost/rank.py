"""Run one rank: `python -m benchmarks.variable_cost.rank LAYERS BLOCKS STEPS` under torchrun."""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer, VariableStrategy
from autotune.workload import Workload
from benchmarks.ddp_parity.rank import stepper
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.ddp import PlannedDataParallel

WIDTH, BATCH = 32, 4
PER_MESSAGE = 60
"""Seven messages for the default number of variables."""
WARM_STEPS, SETTLE_STEPS = 20, 1
BARE, DDP = "no synchronization", "torch's DDP"
WITHIN, ACROSS = "our hooks, within the step", "our hooks, across the step"


def buckets(workload: Workload, crossing: bool) -> Plan:
    """Return a plan of large messages, which torch's own reducer cannot execute."""
    last = len(workload.variables) - 1
    choices = []
    for position, variable in enumerate(workload.variables):
        group = (last - position) // PER_MESSAGE
        shard = (
            Shard(Synchronizer.ALL_REDUCE, group=group, priority=position)
            if crossing
            else Shard(Synchronizer.DIRECT_EXCHANGE, group=group, shares=(0.5, 0.5))
        )
        choices.append(VariableStrategy(variable.name, (shard,)))
    strategy = Strategy(tuple(choices), in_flight=1, cross_step=crossing)
    return plan(strategy, workload, dist.get_world_size())


def planned(module: nn.Module, batch: torch.Tensor, crossing: bool) -> Callable[[], None]:
    """Return a training step of the module by our own hooks."""
    model = PlannedDataParallel(module)
    step = stepper(model, batch)
    for _ in range(2):  # a plan may cross the step once the script's optimizer is known
        step()
    model.synchronizer.load(buckets(assumed_workload(module), crossing))
    for _ in range(2):
        step()
    assert model.synchronizer.native is None
    assert model.synchronizer.cross_step.conditions.defers == crossing
    return step


def main() -> None:
    layers, blocks, steps = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    batch = torch.randn(BATCH, WIDTH)
    sides = {
        BARE: stepper(copy.deepcopy(module), batch),
        DDP: stepper(DistributedDataParallel(copy.deepcopy(module)), batch),
        WITHIN: planned(copy.deepcopy(module), batch, crossing=False),
        ACROSS: planned(copy.deepcopy(module), batch, crossing=True),
    }
    for step in sides.values():
        for _ in range(WARM_STEPS):
            step()
    taken: dict[str, list[float]] = {side: [] for side in sides}
    order = random.Random(0)
    for _ in range(blocks):
        for side in order.sample(list(sides), len(sides)):
            dist.barrier()
            for number in range(SETTLE_STEPS + steps):
                if number == SETTLE_STEPS:
                    began_s = time.thread_time()
                sides[side]()
            taken[side].append((time.thread_time() - began_s) / steps)
    if dist.get_rank() == 0:
        print(json.dumps({"taken": taken, "variables": 2 * layers}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
