"""A data-parallel script whose model is nothing but the parameters of `benchmarks.cross_step_model`: `python benchmarks/layers_script.py`.

For emulated accelerators, which wait for the times of that model's profile; computed for real it would take no time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.cross_step_model import LAYERS

STEPS = 10**9


class Layer(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(parameters) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.weight.mean())


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = nn.Sequential(*(Layer(parameters) for parameters, _ in LAYERS))
    model = DDP(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    batch = torch.linspace(1, 2, 4) + int(os.environ["RANK"])
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
