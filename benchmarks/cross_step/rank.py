"""Run one rank: `python -m benchmarks.cross_step.rank CLUSTER.yaml ROUNDS STEPS` under torchrun.

Computation is emulated by sleeping for each layer's time; parameters, gradients, messages and
updates are real. It runs under round-robin scheduling if that is permitted, as the ranks of an
emulated accelerator do.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autotune.cluster import Cluster
from autotune.cluster_file import read_cluster
from autotune.jobs.campaign.generated_models import MODELS, Layer
from autotune.jobs.campaign.train_generated import Parameters
from autotune.strategy_space.builders.cross_step import cross_step_all_reduce
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import Strategy
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.scheduling import take_round_robin

MODEL = MODELS["layers"]
BUCKETS_MB = (1, 2, 5, 25)
WARM_STEPS, SETTLE_STEPS = 4, 2
OURS = "cross-step"


class Emulated(torch.autograd.Function):
    """The identity, with a delay."""

    @staticmethod
    def forward(context: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        context.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(context.backward_s)
        return gradient, None, None


class Timed(Parameters):
    """A layer with a delay."""

    def __init__(self, layer: Layer, passes_s: tuple[float, float]) -> None:
        super().__init__(layer)
        self.passes_s = passes_s

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        timed: Tensor = Emulated.apply(x, *self.passes_s)  # type: ignore[no-untyped-call]
        return timed


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*map(Timed, MODEL.layers, MODEL.passes_s))


@dataclass(frozen=True)
class Contender:
    """One way to train, with its own model and optimizer."""

    module: nn.Module
    step: Callable[[], None]

    @staticmethod
    def of(model: nn.Module, module: nn.Module) -> Contender:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        batch = torch.linspace(1, 2, 4) + dist.get_rank()

        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return Contender(module, step)


def in_ready_order(strategy: Strategy) -> Strategy:
    """Return the same messages, issued when their gradients are ready."""
    choices = [
        replace(c, shards=tuple(replace(shard, priority=0) for shard in c.shards))
        for c in strategy.variables
    ]
    return replace(strategy, variables=tuple(choices))


def setups(cluster: Cluster) -> dict[str, Contender]:
    by_name = {}
    for megabytes in BUCKETS_MB:
        module = build()
        by_name[f"DDP {megabytes:g} MB"] = Contender.of(
            DistributedDataParallel(module, bucket_cap_mb=megabytes), module
        )
    work = replace(MODEL.workload(), update_s=0.0)  # updates are real
    best = cross_step_all_reduce(work, cluster)
    plans: dict[str, Plan] = {
        OURS: plan(best, work, cluster.world_size),
        "cross-step, gradient-ready order": plan(in_ready_order(best), work, cluster.world_size),
        "same plan within the step": plan(
            replace(best, cross_step=False), work, cluster.world_size
        ),
    }
    for name, wanted in plans.items():
        module = build()
        model = PlannedDataParallel(module)
        model.synchronizer.load(replace(wanted, workload_id=model.synchronizer.model_id))
        by_name[name] = Contender.of(model, module)
    return by_name


def block_s(setup: Contender, steps: int) -> float:
    """Return seconds per step of a steady block.

    No barrier ends the settling steps: messages of the last one would arrive during it, unpaid.
    Those that are under way when the block begins stand for those that are when it ends.
    """
    dist.barrier()
    for _ in range(SETTLE_STEPS):
        setup.step()
    began_s = time.perf_counter()
    for _ in range(steps):
        setup.step()
    taken = torch.tensor([(time.perf_counter() - began_s) / steps])
    for parameter in setup.module.parameters():
        parameter.sum()  # wait for it
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def weights(setup: Contender) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in setup.module.parameters()])


def main() -> None:
    take_round_robin()
    cluster, rounds, steps = read_cluster(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sides = setups(cluster)
    for setup in sides.values():
        for _ in range(WARM_STEPS):
            setup.step()
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in order:
            taken[name].append(block_s(sides[name], steps))
    same, ours, theirs = (
        weights(sides[name]) for name in ("same plan within the step", OURS, "DDP 25 MB")
    )
    if dist.get_rank() == 0:
        difference = float(((ours - theirs).abs() / theirs.abs().clamp_min(1e-6)).max())
        print(
            json.dumps(
                {
                    "taken": taken,
                    "identical": torch.equal(ours, same),
                    "largest_difference_to_ddp": difference,
                }
            )
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
