"""Data-parallel training script of a generated model: `python train_generated.py vgg`.

It is meant for emulated accelerators, which wait for the times of the model's workload. Computed
for real, a step would take no time.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from autotune.jobs.campaign.generated_models import MODELS, GeneratedModel, Layer

STEPS = 10**9


class Parameters(nn.Module):
    """The variables of a layer; its output depends on all of them."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        for name, shape in layer.shapes:
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.01))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + torch.stack([parameter.mean() for parameter in self.parameters()]).sum())


class Table(nn.Embedding):
    """Touches other rows in every step. Its type tells DDP that gradients are sparse."""

    def __init__(self, layer: Layer) -> None:
        ((_, (rows, width)),) = layer.shapes
        super().__init__(rows, width, sparse=True)
        self.touched = layer.touched

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.randperm(self.num_embeddings)[: self.touched]
        return x * (1 + 0.01 * super().forward(rows).mean())


def module_of(model: GeneratedModel) -> nn.Module:
    """Return a module with the names and shapes of the model's workload."""
    return nn.Sequential(
        OrderedDict(
            (layer.name, Table(layer) if layer.touched else Parameters(layer))
            for layer in model.layers
        )
    )


def main() -> None:
    model = MODELS[sys.argv[1]]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = module_of(model)
    rank = int(os.environ["RANK"])
    torch.manual_seed(1 + rank)  # every rank touches other rows
    replica = DDP(module)
    sparse = any(layer.touched for layer in model.layers)
    optimizer = torch.optim.SGD(
        replica.parameters(), 1e-3, momentum=0.0 if sparse else 0.9
    )  # momentum would touch every row
    batch = torch.linspace(1, 2, 4) + rank
    for _ in range(STEPS):
        optimizer.zero_grad()
        replica(batch).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
