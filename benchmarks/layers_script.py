"""A data-parallel script whose model is nothing but variables: `python benchmarks/layers_script.py --model vgg_like`.

For emulated accelerators, which wait for the times of that model's profile (`benchmarks.generated_models`); computed for real it would
take no time.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.generated_models import MODELS
from benchmarks.layered import NAMES, Layer

STEPS = 10**9


class Variables(nn.Module):
    """Reads all of its variables and hands the input on."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        for name, shape in zip(NAMES, layer.shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.01))

    def forward(self, x: Tensor) -> Tensor:
        for variable in self.parameters():
            x = x * (1 + variable.mean())
        return x


class Table(nn.Embedding):
    """Looks up other rows in every step."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(*layer.shapes[0], sparse=True)
        self.looked_up = layer.rows

    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(torch.randint(self.num_embeddings, (self.looked_up,)))
        return x * (1 + 0.01 * rows.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="layers", choices=list(MODELS))
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = nn.Sequential(*(Table(layer) if layer.rows else Variables(layer) for layer in MODELS[options.model]()))
    model = DDP(module)
    torch.manual_seed(1 + int(os.environ["RANK"]))
    tables = [layer.weight for layer in module if isinstance(layer, Table)]
    dense = [variable for layer in module if isinstance(layer, Variables) for variable in layer.parameters()]
    optimizers = [torch.optim.SGD(dense, 0.01, momentum=0.9), *([torch.optim.SGD(tables, 0.01)] if tables else [])]
    batch = torch.linspace(1, 2, 4) + int(os.environ["RANK"])
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


if __name__ == "__main__":
    main()
