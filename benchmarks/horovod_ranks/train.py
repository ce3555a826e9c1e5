"""A Horovod script that trains the parameters of a workload: `train.py WORKLOAD.json`.

It is meant for emulated accelerators, which wait for the workload's times. Every rank touches
other rows of tables in each step.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-calls

from __future__ import annotations

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from autotune.workload import Variable, Workload

STEPS = 10**9


class Part(nn.Module):
    """Variables and parts by their names; its output depends on all of them."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        own = list(self.parameters(recurse=False))
        return x * (1 + torch.stack([parameter.mean() for parameter in own]).sum()) if own else x


class Table(nn.Embedding):
    """Touches other rows in every step."""

    def __init__(self, variable: Variable) -> None:
        rows, width = variable.shape
        super().__init__(rows, width, sparse=True)
        self.touched = round(rows if variable.touched_rows is None else variable.touched_rows)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.randperm(self.num_embeddings)[: self.touched]
        return x * (1 + 0.01 * super().forward(rows).mean())


def module_of(workload: Workload) -> nn.Module:
    """Return a module with the workload's names and shapes, in the order of the forward pass."""
    root = Part()
    for variable in reversed(workload.variables):
        *path, name = variable.name.split(".")
        place: nn.Module = root
        for number, step in enumerate(path):
            if step not in dict(place.named_children()):
                table = variable.sparse and number + 1 == len(path)
                place.add_module(step, Table(variable) if table else Part())
            place = dict(place.named_children())[step]
        if not variable.sparse:
            place.register_parameter(name, nn.Parameter(torch.randn(variable.shape) * 0.01))
    return root


def main() -> None:
    workload = Workload.from_data(json.loads(Path(sys.argv[1]).read_text()))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    hvd.init()
    module = module_of(workload)
    torch.manual_seed(1 + hvd.rank())
    sparse = any(variable.sparse for variable in workload.variables)
    momentum = 0.0 if sparse else 0.9  # momentum would touch every row
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), 1e-3, momentum=momentum),
        named_parameters=module.named_parameters(),
    )
    batch = torch.linspace(1, 2, 4) + hvd.rank()
    for _ in range(STEPS):
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
